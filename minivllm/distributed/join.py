"""The choice of a group for the ranks of one machine."""

from __future__ import annotations

import os
import sys

import torch

from minivllm.distributed.parallel_state import GroupCoordinator
from minivllm.distributed.torch_group import TorchGroup
from minivllm.kernels.ops import has_cpu_kernels


def join_group(rank: int, world_size: int, device: torch.device, memory: int, port: int) -> GroupCoordinator:
    """The group of all ranks: shared memory on a CPU, NCCL if each rank has a GPU of its own, else gloo.

    Args:
        rank, world_size: As for the group.
        device: This rank's.
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
