"""Collectives by torch.distributed: NCCL between GPUs, gloo between CPUs, of one machine or several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from minivllm.distributed.parallel_state import GroupCoordinator


class TorchGroup(GroupCoordinator):
    """All ranks of torch.distributed, which this sets up.

    Args:
        rank, world_size: As for `GroupCoordinator`.
        init_method: Where the ranks meet: `tcp://HOST:PORT` or `file:///PATH`.
        backend: `gloo` or `nccl`.
    """

    def __init__(self, rank: int, world_size: int, init_method: str, backend: str = "gloo") -> None:
        super().__init__(rank, world_size)
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size)

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.dtype in (torch.float16, torch.bfloat16):
            total = x.float()
            dist.all_reduce(total)
            return x.copy_(total)
        whole = x.contiguous()
        dist.all_reduce(whole)
        return x if whole.data_ptr() == x.data_ptr() else x.copy_(whole)

    def all_gather_flat(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        padded = x.new_zeros(max(sizes))
        padded[: x.numel()] = x.reshape(-1)
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        whole = x.contiguous()
        dist.broadcast(whole, src)
        return x if whole.data_ptr() == x.data_ptr() else x.copy_(whole)

    def shutdown(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()
