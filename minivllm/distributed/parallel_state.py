"""A group of ranks, each a process with a part of the model, and their collective operations.

Mirrors `vllm/distributed/parallel_state.py`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor


class Communicator:
    """What a rank exchanges with others, and how long it takes.

    Args:
        rank: This one, counted from 0.
        world_size: The number of ranks.

    Attributes:
        spans: Start and end of each operation since `take_timing`, in seconds of `time.perf_counter`.
        num_bytes: Bytes this rank contributed to them.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.spans: list[tuple[float, float]] = []
        self.num_bytes = 0

    def take_timing(self) -> tuple[list[tuple[float, float]], int]:
        """Return `spans` and `num_bytes`, and reset them."""
        taken = self.spans, self.num_bytes
        self.spans, self.num_bytes = [], 0
        return taken

    def _note(self, start: float, *tensors: Tensor) -> None:
        self.spans.append((start, time.perf_counter()))
        self.num_bytes += sum(x.nbytes for x in tensors)


class GroupCoordinator(Communicator, ABC):
    """The group as one of its ranks sees it.

    Every rank must call the same operations in the same order, with tensors of the same dtype, and the same shape unless noted. An
    operation returns when all ranks have called it. See `Communicator` for the arguments and attributes.
    """

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace `x` by the sum over all ranks, bitwise equal on each; 16-bit floats are rounded once. Returns `x`."""
        start = time.perf_counter()
        self._all_reduce(x)
        self._note(start, x)
        return x

    def all_gather(self, x: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        """Concatenate the tensors of all ranks along `dim`, in rank order. `sizes` are their lengths along it; None if they are equal."""
        gathered = self._join(x, dim, sizes, None)
        assert gathered is not None
        return gathered

    def gather(self, x: Tensor, dst: int = 0, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor | None:
        """As `all_gather`, but only rank `dst` gets the result; the others get None."""
        return self._join(x, dim, sizes, dst)

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        """Replace `x` by that of rank `src`. Returns `x`."""
        start = time.perf_counter()
        self._broadcast(x, src)
        self._note(start, x)
        return x

    @property
    def supports_cuda_graphs(self) -> bool:
        """Whether its operations can be captured: none of them waits on the host."""
        return False

    @abstractmethod
    def _all_reduce(self, x: Tensor) -> None: ...

    def _join(self, x: Tensor, dim: int, sizes: Sequence[int] | None, dst: int | None) -> Tensor | None:
        dim %= x.dim()
        sizes = sizes or [x.shape[dim]] * self.world_size
        shapes = [(*x.shape[:dim], size, *x.shape[dim + 1 :]) for size in sizes]
        start = time.perf_counter()
        parts = self._gather(x, [torch.Size(shape).numel() for shape in shapes], dst)
        self._note(start, x)
        if dst is not None and dst != self.rank:
            return None
        return torch.cat([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], dim)

    @abstractmethod
    def _gather(self, x: Tensor, sizes: Sequence[int], dst: int | None) -> list[Tensor]:
        """The flat tensors of all ranks, of these sizes; only rank `dst` needs them, or all if None."""

    @abstractmethod
    def _broadcast(self, x: Tensor, src: int) -> None: ...


class SingleRank(GroupCoordinator):
    """A group of one."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        return x

    def gather(self, x: Tensor, dst: int = 0, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor | None:
        return x

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        return x

    @property
    def supports_cuda_graphs(self) -> bool:
        return True

    def _all_reduce(self, x: Tensor) -> None: ...

    def _gather(self, x: Tensor, sizes: Sequence[int], dst: int | None) -> list[Tensor]:
        return [x.reshape(-1)]

    def _broadcast(self, x: Tensor, src: int) -> None: ...
