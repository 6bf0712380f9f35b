"""Blocks between a GPU and host memory, beside what the GPU computes. Mirrors `vllm/v1/kv_offload/cpu/gpu_worker.py`."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from minivllm.errors import ConfigError
from minivllm.kernels.ops import BlockPairs, Ops

BUFFER_BYTES = 64 * 2**20
"""Of GPU memory, for blocks on their way: a larger swap goes in several pieces."""


class SwapStream:
    """Swaps blocks on a CUDA stream of its own. The host only launches, and never waits.

    Work on one stream is done in the order in which it was launched; what is on two streams is ordered by events alone. Each memory
    is touched by one stream, so that nothing can overtake:

    - The cache on the GPU by the stream that computes. To swap out, it gathers the blocks into a buffer, behind all steps that
      wrote them and ahead of those that will overwrite them. To swap in, it scatters the buffer, behind all steps that read what
      the blocks held before and ahead of those that will read them.
    - The host's memory by the swap stream. A block that comes back has arrived there before, and a block that is used anew was
      read before.

    Only the buffer changes hands, and whoever takes it waits for an event of the other. Swapping out, the GPU computes on while the
    blocks cross over; swapping in, they cross over while it computes earlier steps.

    Args:
        gpu_blocks: The caches on the GPU, `[num_caches, num_blocks, ...]`.
        cpu_blocks: Memory on the host, `[num_blocks, num_caches, ...]`, contiguous: a block crosses over in one piece. Its pages are
            locked, because the GPU reads and writes only such memory by itself. That takes all of it at once, and time, which
            grows with its size.
        ops: Copies blocks on the GPU.

    Raises:
        ConfigError: The system does not let so much memory be locked.
    """

    def __init__(self, gpu_blocks: Tensor, cpu_blocks: Tensor, ops: Ops) -> None:
        self._gpu_blocks, self._cpu_blocks, self._ops = gpu_blocks, cpu_blocks, ops
        self._stream = torch.cuda.Stream(gpu_blocks.device)  # type: ignore[no-untyped-call]
        num_rows = min(len(cpu_blocks), max(1, BUFFER_BYTES // cpu_blocks[0].nbytes))
        self._buffer = gpu_blocks.new_empty((num_rows, *cpu_blocks.shape[1:]))
        self._is_free = torch.cuda.Event()  # type: ignore[no-untyped-call]
        """Happens when what is in the buffer is needed no more. One that was never recorded has happened."""
        self._lock_pages()

    def swap_out(self, pairs: BlockPairs) -> None:
        """Copy (GPU block, host block) pairs."""
        for piece in self._pieces(pairs):
            computing = torch.cuda.current_stream(self._gpu_blocks.device)
            computing.wait_event(self._is_free)
            self._ops.copy_blocks(self._gpu_blocks, self._caches, [(block, row) for row, (block, _) in enumerate(piece)])
            self._stream.wait_stream(computing)
            with torch.cuda.stream(self._stream):
                for row, (_, block) in enumerate(piece):
                    self._cpu_blocks[block].copy_(self._buffer[row], non_blocking=True)
            self._is_free.record(self._stream)

    def swap_in(self, pairs: BlockPairs) -> None:
        """Copy (host block, GPU block) pairs."""
        for piece in self._pieces(pairs):
            computing = torch.cuda.current_stream(self._gpu_blocks.device)
            self._stream.wait_event(self._is_free)
            with torch.cuda.stream(self._stream):
                for row, (block, _) in enumerate(piece):
                    self._buffer[row].copy_(self._cpu_blocks[block], non_blocking=True)
            computing.wait_stream(self._stream)
            self._ops.copy_blocks(self._caches, self._gpu_blocks, [(row, block) for row, (_, block) in enumerate(piece)])
            self._is_free.record(computing)

    def _pieces(self, pairs: BlockPairs) -> Iterator[BlockPairs]:
        """As many pairs at a time as the buffer has rows."""
        num_rows = len(self._buffer)
        return (pairs[first : first + num_rows] for first in range(0, len(pairs), num_rows))

    @property
    def _caches(self) -> Tensor:
        """The buffer as caches: `[num_caches, num_rows, ...]`."""
        return self._buffer.transpose(0, 1)

    def _lock_pages(self) -> None:
        """By `cudaHostRegister`: torch's own pinned memory is rounded up to a power of two."""
        memory = self._cpu_blocks
        with torch.cuda.device(self._gpu_blocks.device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            error = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 1))  # 1: for all GPUs
        if error:
            with contextlib.suppress(RuntimeError):  # CUDA tells its next caller of the error, too
                torch.zeros(1, device=self._gpu_blocks.device)
            raise ConfigError(
                f"The system did not lock {memory.nbytes / 2**30:,.1f} GiB of host memory for swapped blocks (CUDA error {error}): "
                f"lower swap_space, or use preemption_mode='recompute'."
            )
        # The memory is held until it has been unlocked. When the process ends, the system does both.
        weakref.finalize(self, _unlock_pages, memory, self._stream).atexit = False


def _unlock_pages(memory: Tensor, stream: torch.cuda.Stream) -> None:
    stream.synchronize()
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
