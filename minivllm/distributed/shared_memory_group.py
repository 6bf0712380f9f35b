"""Collectives between processes of one machine, through shared memory: microseconds where sockets take hundreds.

An operation takes four steps. A rank copies its numbers into its buffer, announces that it has entered the operation, waits until all
others have, and reads their buffers. Ranks need not announce that they have finished reading: each alternates between two buffers, and a
rank that has entered the next operation has left the previous one. `kernels.cpu.collectives` has the waiting and the sums.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Sequence

import numpy as np
import psutil
import torch
from torch import Tensor

from minivllm.distributed.parallel_state import GroupCoordinator
from minivllm.distributed.shared_memory import LINE_BYTES, group_header_bytes
from minivllm.errors import DistributedError
from minivllm.kernels.cpu import collectives
from minivllm.kernels.cpu.native.atomics import LINE
from minivllm.kernels.cpu.native.thread_pool import waiting

assert 8 * LINE == LINE_BYTES
YIELDS = 200
"""How often a waiting rank yields its core before it checks that the others are alive."""
SECONDS_BETWEEN_CHECKS = 0.2
KINDS = ("all_reduce", "gather", "broadcast")


class SharedMemoryGroup(GroupCoordinator):
    """Ranks of one machine on its CPU.

    Args:
        descriptor: From `create_group_memory`, the same memory for all ranks; may be closed afterwards.
        rank, world_size: As for `GroupCoordinator`.
        timeout: Seconds after which a missing rank is an error, even if its process is alive.
    """

    def __init__(self, descriptor: int, rank: int, world_size: int, timeout: float = 300.0) -> None:
        super().__init__(rank, world_size)
        self.timeout = timeout
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        header = group_header_bytes(world_size)
        self._words = np.frombuffer(self._memory, np.int64, header // 8)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)[header:].view(2, world_size, -1)
        self._capacity = self._bytes.shape[2]
        self._buffer_addresses = [half.data_ptr() for half in self._bytes]
        self._address, self._number = self._words.ctypes.data, 0
        self._spins, self._yield = waiting()
        self._words[LINE * rank + collectives.PID] = os.getpid()

    def _all_reduce(self, x: Tensor) -> None:
        if x.dtype == torch.float32 and x.is_contiguous() and x.nbytes <= self._capacity:
            self._sum_floats(x.data_ptr(), x.numel())  # the usual case
            return
        flat = flatten(x)
        for piece in self._pieces(flat):
            if x.dtype == torch.float32:
                self._sum_floats(piece.data_ptr(), piece.numel())
            else:
                total = torch.zeros(piece.shape, dtype=torch.float32 if x.is_floating_point() else x.dtype)
                for part in self._exchange("all_reduce", piece, [piece.numel()] * self.world_size):
                    total += part
                piece.copy_(total)
        if flat.data_ptr() != x.data_ptr():
            x.copy_(flat.view_as(x))

    def _gather(self, x: Tensor, sizes: Sequence[int], dst: int | None) -> list[Tensor]:
        flat, capacity = flatten(x), self._capacity // x.itemsize
        is_reading = dst in (None, self.rank)
        parts = [x.new_empty(size if is_reading else 0) for size in sizes]
        for start in range(0, max(sizes), capacity):
            lengths = [min(max(size - start, 0), capacity) for size in sizes]
            pieces = self._exchange("gather", flat[start : start + capacity], lengths)
            for part, piece in zip(parts, pieces, strict=True) if is_reading else ():
                part[start : start + len(piece)] = piece
        return parts

    def _broadcast(self, x: Tensor, src: int) -> None:
        flat = flatten(x)
        for piece in self._pieces(flat):
            lengths = [piece.numel() if rank == src else 0 for rank in range(self.world_size)]
            pieces = list(self._exchange("broadcast", piece[: lengths[self.rank]], lengths))
            piece.copy_(pieces[src])
        if flat.data_ptr() != x.data_ptr():
            x.copy_(flat.view_as(x))

    def _sum_floats(self, x: int, size: int) -> None:
        """Sum float32 numbers at an address."""
        what = self._begin("all_reduce", 4 * size)
        buffers = self._buffer_addresses[self._number & 1]
        status = collectives.all_reduce(
            self._address, buffers, self._capacity, self.rank, self.world_size, self._number, what, x, size, self._spins, YIELDS,
            self._yield,
        )  # fmt: skip
        if status != collectives.FINISHED:
            self._wait(what, status)
            collectives.add_buffers(buffers, self._capacity, self.world_size, x, size)

    def _exchange(self, kind: str, x: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Publish `x`, and return the ranks' tensors: views of their buffers, valid until the operation after the next."""
        what, buffers = self._begin(kind, sum(sizes) * x.itemsize), self._buffers()
        buffers[self.rank][: x.nbytes] = x.view(torch.uint8)
        collectives.enter(self._address, self.rank, self._number, what)
        self._wait(what, collectives.WAITING)
        return (buffer[: size * x.itemsize].view(x.dtype) for buffer, size in zip(buffers, sizes, strict=True))

    def _pieces(self, x: Tensor) -> Sequence[Tensor]:
        """A flat tensor in pieces that fit a buffer."""
        return torch.split(x, self._capacity // x.itemsize)

    def _begin(self, kind: str, num_bytes: int) -> int:
        self._number += 1
        return KINDS.index(kind) + len(KINDS) * num_bytes

    def _buffers(self) -> Tensor:
        return self._bytes[self._number & 1]

    def _wait(self, what: int, status: int) -> None:
        """Wait for the others, and check from time to time that they are alive."""
        end, next_check = time.monotonic() + self.timeout, time.monotonic() + SECONDS_BETWEEN_CHECKS
        while status == collectives.WAITING:
            status = collectives.wait(self._address, self.world_size, self._number, what, self._spins, YIELDS, self._yield)
            if status == collectives.WAITING and (now := time.monotonic()) > next_check:
                next_check = now + SECONDS_BETWEEN_CHECKS
                self._check_others(is_late=now > end)
        if status == collectives.DIFFERENT:
            raise DistributedError(f"The ranks do not call the same operation: {self._describe_calls()}.")

    def _check_others(self, is_late: bool) -> None:
        for rank in range(self.world_size):
            if self._words[LINE * rank + collectives.NUMBER] >= self._number:
                continue
            process = int(self._words[LINE * rank + collectives.PID])
            if process and not is_alive(process):
                raise DistributedError(f"Rank {rank} (process {process}) has ended, and rank {self.rank} waits for it.")
            if is_late:
                raise DistributedError(f"Rank {rank} (process {process or 'not begun'}) did not come within {self.timeout:g} s.")

    def _describe_calls(self) -> str:
        calls = (int(self._words[LINE * rank + collectives.CALLS + (self._number & 1)]) for rank in range(self.world_size))
        said = (f"rank {rank} {KINDS[call % len(KINDS)]} of {call // len(KINDS):,} bytes" for rank, call in enumerate(calls))
        return ", ".join(said)


def flatten(x: Tensor) -> Tensor:
    """`x` as one contiguous row, a view if possible; of stride 1 even if it has one element."""
    return x.reshape(-1).contiguous().as_strided((x.numel(),), (1,))


def is_alive(process: int) -> bool:
    """Whether a process runs, or is stopped."""
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
