"""Communication by torch.distributed: NCCL between GPUs, gloo between CPUs, on one machine or several; and the choice of groups."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from minivllm.distributed.meeting import Meeting
from minivllm.distributed.parallel_state import GroupCoordinator, SingleRank
from minivllm.distributed.partition import Stage
from minivllm.distributed.pipeline import PipelineGroup, SingleStage
from minivllm.errors import DistributedError
from minivllm.kernels.ops import has_cpu_kernels
from minivllm.parallel_config import ParallelConfig

TIMEOUT = timedelta(seconds=300)
"""After which a missing rank is an error, even if its process is alive."""
MAX_SENDS = 4
"""Batches that a stage has sent and the next one has not received yet; then it waits."""


class TorchGroup(GroupCoordinator):
    """Some or all ranks of torch.distributed, which is set up.

    Args:
        rank, world_size: As for `GroupCoordinator`.
        backend: `gloo` or `nccl`.
        first_rank: Of torch.distributed, of the first rank of the group; the others follow.
        group: Its process group; None for that of all ranks.
    """

    def __init__(
        self, rank: int, world_size: int, backend: str = "gloo", first_rank: int = 0, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(rank, world_size)
        self.backend, self._first_rank, self._group = backend, first_rank, group

    @property
    def supports_cuda_graphs(self) -> bool:
        return self.backend == "nccl"

    def _all_reduce(self, x: Tensor) -> None:
        whole = self._to_wire(x.float() if x.dtype in (torch.float16, torch.bfloat16) else x)
        with _others_named():
            dist.all_reduce(whole, group=self._group)
        if whole.data_ptr() != x.data_ptr():
            x.copy_(whole)

    def _gather(self, x: Tensor, sizes: Sequence[int], dst: int | None) -> list[Tensor]:
        padded = self._to_wire(F.pad(x.reshape(-1), (0, max(sizes) - x.numel())))
        parts = [torch.empty_like(padded) for _ in sizes]
        with _others_named():
            if dst is None:
                dist.all_gather(parts, padded, group=self._group)
            else:
                dist.gather(padded, parts if self.rank == dst else None, self._first_rank + dst, group=self._group)
        return [part[:size].to(x.device) for part, size in zip(parts, sizes, strict=True)]

    def _broadcast(self, x: Tensor, src: int) -> None:
        whole = self._to_wire(x)
        with _others_named():
            dist.broadcast(whole, self._first_rank + src, group=self._group)
        if whole.data_ptr() != x.data_ptr():
            x.copy_(whole)

    def _to_wire(self, x: Tensor) -> Tensor:
        """On the device the backend needs: gloo communicates from the host."""
        return x.contiguous() if self.backend == "nccl" else x.cpu().contiguous()


@contextlib.contextmanager
def _others_named() -> Iterator[None]:
    """An operation fails because of another rank: say so."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        raise DistributedError(f"Another rank has ended or did not come: {reason}") from error


class TorchPipeline(PipelineGroup):
    """Stages that send by torch.distributed. What is announced goes over gloo, so that a stage knows it before its device does.

    Args:
        stage, ranks, device: As for `PipelineGroup`.
        headers: A gloo group of the pipeline's ranks.
        tensors: An NCCL group of them, or the same one.
    """

    def __init__(
        self, stage: Stage, ranks: tuple[int, ...], device: torch.device, headers: dist.ProcessGroup, tensors: dist.ProcessGroup
    ) -> None:
        super().__init__(stage, ranks, device)
        self._headers, self._tensors = headers, tensors
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()

    def _send_bytes(self, data: bytes) -> None:
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._send(torch.tensor([len(content)]), self._headers)
        self._send(content, self._headers)

    def _recv_bytes(self) -> bytes:
        size = torch.zeros(1, dtype=torch.int64)
        self._recv(size, self._headers)
        content = torch.empty(int(size), dtype=torch.uint8)
        self._recv(content, self._headers)
        return content.numpy().tobytes()

    def _send_tensors(self, tensors: list[Tensor]) -> None:
        while self._sends and self._sends[0][0].is_completed():
            self._sends.popleft()
        for x in tensors:
            if x.numel():
                self._send((x.cpu() if self._tensors is self._headers else x).contiguous(), self._tensors)
        while len(self._sends) > MAX_SENDS * (2 + len(tensors)):
            with self._named(self.rank + 1):
                self._sends.popleft()[0].wait()

    def _recv_tensors(self, tensors: list[Tensor]) -> None:
        for x in tensors:
            if x.numel():
                arrived = x.cpu() if self._tensors is self._headers else x
                self._recv(arrived, self._tensors)
                if arrived is not x:
                    x.copy_(arrived)

    def _send(self, x: Tensor, group: dist.ProcessGroup) -> None:
        with self._named(self.rank + 1):
            work = dist.isend(x, self.ranks[self.rank + 1], group=group)
        assert work is not None
        self._sends.append((work, x))  # `x` must live until it is sent

    def _recv(self, x: Tensor, group: dist.ProcessGroup) -> None:
        with self._named(self.rank - 1):
            work = dist.irecv(x, self.ranks[self.rank - 1], group=group)
            assert work is not None
            work.wait()

    @contextlib.contextmanager
    def _named(self, stage: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).split("\n")[0]
            raise DistributedError(
                f"{self.name(stage)} has ended or did not come, and stage {self.rank} waits for it: {reason}"
            ) from error


def join_groups(
    rank: int, parallel_config: ParallelConfig, device: torch.device, group_memory: int, pipeline_memory: int, meeting: Meeting
) -> tuple[GroupCoordinator, PipelineGroup]:
    """The tensor-parallel group and the pipeline group of a rank, which is stage * tensor_parallel_size + its rank in the former. On CPUs, shared
    memory where all ranks of a group are on one machine; NCCL if each rank has a GPU of its own; else gloo.

    Args:
        rank: Among all ranks of the model.
        parallel_config: How many there are, and which stage has which layers.
        device: This rank's.
        group_memory: A file descriptor from `create_group_memory`, the same one for the ranks of a stage; -1 if they are on several machines.
        pipeline_memory: A file descriptor from `create_pipeline_memory`, the same one for the ranks with the same place in their stages; -1 if they are
            on several machines, or there is one stage.
        meeting: Where all ranks meet.
    """
    tp_size, pp_size = parallel_config.tensor_parallel_size, parallel_config.pipeline_parallel_size
    stage, tp_rank = Stage(rank // tp_size, pp_size, parallel_config.layer_partition), rank % tp_size
    ranks = tuple(range(tp_rank, parallel_config.world_size, tp_size))
    shares_memory = device.type == "cpu" and has_cpu_kernels()
    group: GroupCoordinator = SingleRank()
    pipeline: PipelineGroup = SingleStage()
    if not (shares_memory and meeting.is_local):
        if device.type == "cuda":
            torch.cuda.set_device(device)
        has_own_gpu = meeting.has_own_gpu
        if has_own_gpu is None:
            has_own_gpu = torch.cuda.device_count() >= parallel_config.world_size
        backend = "nccl" if device.type == "cuda" and has_own_gpu else "gloo"
        group, pipeline = _join_torch_groups(stage, ranks, device, rank, tp_size, meeting, backend)
    if shares_memory:
        from minivllm.distributed.shared_memory_group import SharedMemoryGroup  # these need Numba
        from minivllm.distributed.shared_memory_pipeline import SharedMemoryPipeline

        if group_memory >= 0:
            group = SharedMemoryGroup(group_memory, tp_rank, tp_size)
        if pipeline_memory >= 0:
            pipeline = SharedMemoryPipeline(pipeline_memory, stage, ranks)
    return group, pipeline


def _join_torch_groups(
    stage: Stage, ranks: tuple[int, ...], device: torch.device, rank: int, tp_size: int, meeting: Meeting, backend: str
) -> tuple[GroupCoordinator, PipelineGroup]:
    if meeting.is_local or meeting.interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", meeting.interface or ("lo0" if sys.platform == "darwin" else "lo"))
    world_size = tp_size * stage.world_size
    dist.init_process_group(backend, f"tcp://{meeting.address}", timeout=TIMEOUT, rank=rank, world_size=world_size)
    if stage.world_size == 1:
        return TorchGroup(rank, world_size, backend), SingleStage()
    # Each rank takes part in making all groups, in the same order.
    in_stages = [dist.new_group(range(first, first + tp_size), TIMEOUT, backend) for first in range(0, world_size, tp_size)]
    across = [range(place, world_size, tp_size) for place in range(tp_size)]
    headers = [dist.new_group(places, TIMEOUT, "gloo") for places in across]
    tensors = headers if backend == "gloo" else [dist.new_group(places, TIMEOUT, backend) for places in across]
    tp_rank = rank % tp_size
    pipeline = TorchPipeline(stage, ranks, device, headers[tp_rank], tensors[tp_rank])
    group = TorchGroup(tp_rank, tp_size, backend, stage.rank * tp_size, in_stages[stage.rank]) if tp_size > 1 else SingleRank()
    return group, pipeline
