"""A group of ranks, each a process with a part of the model, and the operations that all of them call together.

Mirrors `vllm/distributed/parallel_state.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor


class GroupCoordinator(ABC):
    """The group as one of its ranks sees it.

    Every rank must call the same operations in the same order, with tensors of the same dtype, and of the same shape where nothing else
    is said. An operation returns when all ranks have called it.

    Args:
        rank: This one, from 0 on.
        world_size: How many there are.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace `x` by the sum over all ranks, the same bits on each. Returns `x`.

        A sum of 16-bit floats is rounded once.
        """

    @abstractmethod
    def all_gather_flat(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """The tensors of all ranks, each flat; `sizes` says how many numbers each rank has. For implementations."""

    def all_gather(self, x: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        """The tensors of all ranks side by side, in the order of the ranks.

        Args:
            x: This rank's part.
            dim: Along which they are joined.
            sizes: The length of each rank's part along `dim`; None if all have the same.
        """
        dim %= x.dim()
        sizes = sizes or [x.shape[dim]] * self.world_size
        shapes = [(*x.shape[:dim], size, *x.shape[dim + 1 :]) for size in sizes]
        parts = self.all_gather_flat(x, [torch.Size(shape).numel() for shape in shapes])
        return torch.cat([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], dim)

    def gather(self, x: Tensor, dst: int = 0, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor | None:
        """As `all_gather`, but only rank `dst` gets the result; the others None."""
        gathered = self.all_gather(x, dim, sizes)
        return gathered if self.rank == dst else None

    @abstractmethod
    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        """Replace `x` by that of rank `src`. Returns `x`."""

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self.all_gather(torch.zeros(1))


class SingleRank(GroupCoordinator):
    """A group of one, which has nobody to wait for."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather_flat(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        return [x.reshape(-1)]

    def all_gather(self, x: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        return x

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        return x
