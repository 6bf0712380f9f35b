"""Collectives by torch.distributed: NCCL between GPUs, gloo between CPUs, on one machine or several; and the choice of a group."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from minivllm.distributed.parallel_state import GroupCoordinator
from minivllm.kernels.ops import has_cpu_kernels


class TorchGroup(GroupCoordinator):
    """Sets up torch.distributed, and groups all of its ranks.

    Args:
        rank, world_size: As for `GroupCoordinator`.
        init_method: Where the ranks meet: `tcp://HOST:PORT` or `file:///PATH`.
        backend: `gloo` or `nccl`.
    """

    def __init__(self, rank: int, world_size: int, init_method: str, backend: str = "gloo") -> None:
        super().__init__(rank, world_size)
        self.backend = backend
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size)

    @property
    def supports_cuda_graphs(self) -> bool:
        return self.backend == "nccl"

    def _all_reduce(self, x: Tensor) -> None:
        whole = self._to_wire(x.float() if x.dtype in (torch.float16, torch.bfloat16) else x)
        dist.all_reduce(whole)
        if whole.data_ptr() != x.data_ptr():
            x.copy_(whole)

    def _gather(self, x: Tensor, sizes: Sequence[int], dst: int | None) -> list[Tensor]:
        padded = self._to_wire(F.pad(x.reshape(-1), (0, max(sizes) - x.numel())))
        parts = [torch.empty_like(padded) for _ in sizes]
        if dst is None:
            dist.all_gather(parts, padded)
        else:
            dist.gather(padded, parts if self.rank == dst else None, dst)
        return [part[:size].to(x.device) for part, size in zip(parts, sizes, strict=True)]

    def _broadcast(self, x: Tensor, src: int) -> None:
        whole = self._to_wire(x)
        dist.broadcast(whole, src)
        if whole.data_ptr() != x.data_ptr():
            x.copy_(whole)

    def _to_wire(self, x: Tensor) -> Tensor:
        """On the device the backend needs: gloo communicates from the host."""
        return x.contiguous() if self.backend == "nccl" else x.cpu().contiguous()


def join_group(rank: int, world_size: int, device: torch.device, memory: int, port: int) -> GroupCoordinator:
    """The group of all ranks: shared memory on a CPU, NCCL if each rank has a GPU of its own, else gloo.

    Args:
        rank, world_size, device: This rank, and its device.
        memory: A file descriptor from `create_group_memory`.
        port: A free port of this machine, at which the ranks meet.
    """
    if device.type == "cpu" and has_cpu_kernels():
        from minivllm.distributed.shared_memory_group import SharedMemoryGroup  # needs Numba

        return SharedMemoryGroup(memory, rank, world_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    has_own_gpu = device.type == "cuda" and torch.cuda.device_count() >= world_size
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return TorchGroup(rank, world_size, f"tcp://127.0.0.1:{port}", "nccl" if has_own_gpu else "gloo")
