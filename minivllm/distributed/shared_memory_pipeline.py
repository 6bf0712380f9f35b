"""From a pipeline stage to the next one on the same machine, through shared memory.

Between two neighbours is a pipe: a ring of bytes. The writer counts the bytes that it has written, the reader those it has read, each where the
other can see it. So a stage goes on with its next batch while the next stage is still busy, until the ring is full; what is larger than the ring goes
through it in pieces.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from minivllm.distributed.partition import Stage
from minivllm.distributed.pipeline import PipelineGroup
from minivllm.distributed.shared_memory import group_header_bytes
from minivllm.distributed.shared_memory_group import SECONDS_BETWEEN_CHECKS, flatten, is_alive
from minivllm.errors import DistributedError
from minivllm.kernels.cpu import collectives
from minivllm.kernels.cpu.native.atomics import LINE

TRIES = 50
"""How often a waiting stage looks again at once; then it sleeps, since the stage before takes about as long as this one."""
SLEEP_SECONDS = 5e-5


class _End:
    """An end of a pipe: in a line of words that only this end writes, its count of bytes and its process."""

    def __init__(self, words: np.ndarray, pipe: np.ndarray, line: int, other_line: int) -> None:
        self.pipe, self._words, self._line, self._other_line = pipe, words, line, other_line
        self._address = words.ctypes.data
        self.count = 0
        words[LINE * line + collectives.PID] = os.getpid()

    @property
    def other_count(self) -> int:
        """How far the other end is."""
        return int(collectives.entered(self._address, self._other_line))

    @property
    def other_process(self) -> int:
        """The process of the other end; 0 if it has not begun."""
        return int(self._words[LINE * self._other_line + collectives.PID])

    def advance(self, size: int) -> None:
        """Count bytes, after they have been copied."""
        self.count += size
        collectives.enter(self._address, self._line, self.count, 0)


class SharedMemoryPipeline(PipelineGroup):
    """Stages of one machine on its CPU.

    Args:
        descriptor: From `create_pipeline_memory`, the same memory for all stages; may be closed afterwards.
        stage, ranks: As for `PipelineGroup`.
        timeout: Seconds after which a missing neighbour is an error, even if its process is alive.
    """

    def __init__(self, descriptor: int, stage: Stage, ranks: tuple[int, ...], timeout: float = 300.0) -> None:
        super().__init__(stage, ranks)
        self.timeout = timeout
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        num_pipes = stage.world_size - 1
        header = group_header_bytes(2 * num_pipes)
        words = np.frombuffer(self._memory, np.int64, header // 8)
        pipes = np.frombuffer(self._memory, np.uint8)[header:].reshape(num_pipes, -1)
        self._reader = None if stage.is_first else _End(words, pipes[stage.rank - 1], 2 * stage.rank - 1, 2 * stage.rank - 2)
        self._writer = None if stage.is_last else _End(words, pipes[stage.rank], 2 * stage.rank, 2 * stage.rank + 1)

    def _send_bytes(self, data: bytes) -> None:
        self._write(np.frombuffer(len(data).to_bytes(8, "little") + data, np.uint8))

    def _recv_bytes(self) -> bytes:
        size = np.empty(8, np.uint8)
        self._read(size)
        data = np.empty(int.from_bytes(size.tobytes(), "little"), np.uint8)
        self._read(data)
        return data.tobytes()

    def _send_tensors(self, tensors: list[Tensor]) -> None:
        for x in tensors:
            self._write(flatten(x).view(torch.uint8).numpy())

    def _recv_tensors(self, tensors: list[Tensor]) -> None:
        for x in tensors:
            flat = flatten(x)
            self._read(flat.view(torch.uint8).numpy())
            if flat.data_ptr() != x.data_ptr():
                x.copy_(flat.view_as(x))

    def _write(self, data: np.ndarray) -> None:
        writer = self._writer
        assert writer is not None, "the last stage sends nothing"
        capacity = len(writer.pipe)
        for start, size in self._pieces(writer, len(data), capacity, self.rank + 1):
            offset = writer.count % capacity
            writer.pipe[offset : offset + size] = data[start : start + size]
            writer.advance(size)

    def _read(self, data: np.ndarray) -> None:
        reader = self._reader
        assert reader is not None, "the first stage receives nothing"
        capacity = len(reader.pipe)
        for start, size in self._pieces(reader, len(data), 0, self.rank - 1):
            offset = reader.count % capacity
            data[start : start + size] = reader.pipe[offset : offset + size]
            reader.advance(size)

    def _pieces(self, end: _End, total: int, ahead: int, other: int) -> Iterator[tuple[int, int]]:
        """The parts of `total` bytes that can be copied, each once it can be: where it starts, and its size. This end may be `ahead` bytes ahead of
        the other one.
        """
        start, capacity = 0, len(end.pipe)
        while start < total:
            if end.count == end.other_count + ahead:
                self._wait(end, ahead, other)
            possible = end.other_count + ahead - end.count
            size = min(total - start, possible, capacity - end.count % capacity, max(1, capacity // 4))
            yield start, size
            start += size

    def _wait(self, end: _End, ahead: int, other: int) -> None:
        """Wait until the other end moves, and check from time to time that its process is alive."""
        for _ in range(TRIES):
            time.sleep(0)
            if end.count != end.other_count + ahead:
                return
        last, next_check = time.monotonic() + self.timeout, time.monotonic() + SECONDS_BETWEEN_CHECKS
        while end.count == end.other_count + ahead:
            time.sleep(SLEEP_SECONDS)
            if (now := time.monotonic()) > next_check:
                next_check = now + SECONDS_BETWEEN_CHECKS
                self._check_other(end, ahead, other, is_late=now > last)

    def _check_other(self, end: _End, ahead: int, other: int, is_late: bool) -> None:
        process = end.other_process
        has_ended = bool(process) and not is_alive(process)
        if end.count != end.other_count + ahead:  # it moved before it ended
            return
        if has_ended:
            raise DistributedError(f"{self.name(other)}, process {process}, has ended, and stage {self.rank} waits for it.")
        if is_late:
            raise DistributedError(
                f"{self.name(other)}, process {process or 'not begun'}, did not come within {self.timeout:g} s."
            )
