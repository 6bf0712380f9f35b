"""Workers as actors of a Ray cluster: placed, started, watched and ended, for `RayExecutor`.

Mirrors `RayWorkerWrapper` of `vllm/v1/executor/ray_utils.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from minivllm.config import ParallelConfig
from minivllm.distributed.meeting import Meeting
from minivllm.distributed.ray_cluster import (
    Place,
    connect,
    environment_of_actors,
    import_ray,
    interface_of,
    num_cpus_of_node,
    reserve,
    resources_of_worker,
)
from minivllm.distributed.shared_memory import NamedMemory, group_memory_bytes, pipeline_memory_bytes
from minivllm.executor.processes import START_SECONDS
from minivllm.executor.worker_messages import FromWorker, WorkerSetup, decode_from_worker
from minivllm.executor.worker_proc import WorkerProc
from minivllm.executor.worker_sockets import ExecutorSockets, WorkerAddresses, WorkerSockets
from minivllm.executor.workers import CHECK_SECONDS, GRACE_SECONDS, Workers

if TYPE_CHECKING:
    from ray import ObjectRef

START_ACTORS_SECONDS = 300.0
"""How long Ray may take to start the actors' processes in their places."""
LOST_SECONDS = 10.0
"""A worker that has shown no sign of life for so long is lost."""
SharedNames = tuple[str | None, str | None]
"""Names of the memory that a rank shares with its stage, and of that with the same place in other stages; None if those are on several nodes."""


class RayWorker:
    """An actor: one rank."""

    def describe(self) -> tuple[int, int]:
        """Its process id, and a port that nobody listens at."""
        from minivllm.executor.worker_processes import free_port

        return os.getpid(), free_port()

    def open_memory(self, parallel_config: ParallelConfig, names: SharedNames) -> None:
        """Open what this rank shares with others of its node."""
        sizes = (
            group_memory_bytes(parallel_config.tensor_parallel_size),
            pipeline_memory_bytes(parallel_config.pipeline_parallel_size),
        )
        self._memory = [-1 if name is None else NamedMemory(name).open(size) for name, size in zip(names, sizes, strict=True)]

    def unlink_memory(self, names: SharedNames) -> None:
        """Remove the names, once all have opened it."""
        for name in filter(None, names):
            NamedMemory(name).unlink()

    def run(self, setup: WorkerSetup, ip: str, addresses: WorkerAddresses) -> None:
        """Work until the process ends. `ip`: this node's."""
        group_memory, pipeline_memory = self._memory
        meeting = setup.meeting if setup.meeting.is_local else msgspec.structs.replace(setup.meeting, interface=interface_of(ip))
        setup = msgspec.structs.replace(setup, group_memory=group_memory, pipeline_memory=pipeline_memory, meeting=meeting)
        sockets = WorkerSockets(addresses, setup.rank)
        WorkerProc(setup, sockets, sockets.write).run()


class RayWorkers(Workers):
    """The actors of the workers, their placement group, and two threads: one watches them, one receives what they say.

    Args:
        configs: The pickled configs.
        parallel_config: How many workers there are, and how they are grouped and placed.
        device: As in `WorkerConfig`.

    Raises:
        ConfigError: Ray is not installed, there is no cluster, or it has no room.
        EngineDeadError: An actor could not be started.
    """

    inbox: ExecutorSockets
    seconds_until_seen = LOST_SECONDS

    def __init__(self, configs: bytes, parallel_config: ParallelConfig, device: str) -> None:
        super().__init__(parallel_config)
        connect(parallel_config.ray_address)
        self._ray = ray = import_ray()
        resources = resources_of_worker(device)
        self._group, self._places = reserve([resources] * self.world_size, parallel_config.ray_placement_strategy)
        self._actors: list[Any] = []
        self._runs: list[ObjectRef[None]] = []
        self._process_ids: list[int] = []
        try:
            self.inbox = ExecutorSockets(ray.util.get_node_ip_address(), self.world_size)
            self._actors = [self._make_actor(place, resources) for place in self._places]
            self._start(configs, has_gpus="GPU" in resources)
        except ray.exceptions.RayError as error:
            self.fail(f"A worker could not be started: {_first_line(error)}")
        except BaseException:  # Ctrl-C
            self.stop()
            raise
        if self.failure is not None:
            self.stop()
            self.check()
        threading.Thread(target=self._monitor, name="minivllm workers", daemon=True).start()

    @property
    def process_ids(self) -> list[int]:
        return list(self._process_ids)

    @property
    def places(self) -> list[Place]:
        """Where each rank runs."""
        return list(self._places)

    def read(self, timeout: float, handle: Callable[[int, FromWorker], None]) -> None:
        self.check()
        while (answer := self.inbox.peek(timeout)) is not None:
            rank, data = answer
            message = decode_from_worker(data)
            handle(rank, message)
            self.inbox.advance()
            timeout = 0.0

    def _end(self) -> None:
        if self._ray.is_initialized():  # else Ray has ended them
            self._kill()
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.util.remove_placement_group(self._group)
        if hasattr(self, "inbox"):
            self.inbox.close()

    def _make_actor(self, place: Place, resources: dict[str, float]) -> Any:
        num_ranks = Counter(other.node_id for other in self._places)[place.node_id]
        environment = environment_of_actors(max(1, num_cpus_of_node(place.node_id) // num_ranks))
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, place.bundle)
        return (
            self._ray.remote(RayWorker)
            .options(
                num_cpus=resources.get("CPU", 0), num_gpus=resources.get("GPU", 0), scheduling_strategy=strategy, max_restarts=0,
                runtime_env={"env_vars": environment},
            )
            .remote()
        )  # fmt: skip

    def _start(self, configs: bytes, *, has_gpus: bool) -> None:
        found = self._ray.get([actor.describe.remote() for actor in self._actors], timeout=START_ACTORS_SECONDS)
        self._process_ids = [process_id for process_id, _ in found]
        names = self._name_memory()
        parallel_config = self._parallel_config
        self._ray.get([actor.open_memory.remote(parallel_config, own) for actor, own in zip(self._actors, names, strict=True)])
        self._ray.get([actor.unlink_memory.remote(own) for actor, own in zip(self._actors, names, strict=True)])
        is_local = len({place.node_id for place in self._places}) == 1
        host = "127.0.0.1" if is_local else self._places[0].ip
        meeting = Meeting(f"{host}:{found[0][1]}", is_local=is_local, has_own_gpu=has_gpus)
        level = logging.getLogger().getEffectiveLevel()
        for rank, (actor, place) in enumerate(zip(self._actors, self._places, strict=True)):
            setup = WorkerSetup(configs, rank, self.world_size, -1, -1, meeting, level)
            self._runs.append(actor.run.remote(setup, place.ip, self.inbox.addresses))

    def _name_memory(self) -> list[SharedNames]:
        token, tp_size = uuid.uuid4().hex, self._parallel_config.tensor_parallel_size
        ranks, num_stages = range(self.world_size), self._parallel_config.pipeline_parallel_size

        def name(kind: str, members: list[int]) -> str | None:
            nodes = {self._places[rank].node_id for rank in members}
            return f"{token}-{kind}-{members[0]}" if len(nodes) == 1 else None

        stages = [name("stage", [other for other in ranks if other // tp_size == rank // tp_size]) for rank in ranks]
        across = [name("across", [other for other in ranks if other % tp_size == rank % tp_size]) for rank in ranks]
        return list(zip(stages, across if num_stages > 1 else [None] * self.world_size, strict=True))

    def _monitor(self) -> None:
        try:
            while not self._stopping.wait(CHECK_SECONDS):
                if end := self._find_ended():
                    self.fail(end)
                elif (rank := self.inbox.find_silent(LOST_SECONDS if self.are_ready else START_SECONDS)) is not None:
                    self.was_killed |= self.failure is None
                    self.fail(f"{self._name(rank)} shows no sign of life.")
        except Exception as error:
            if self._ray.is_initialized():  # else this process ends
                self.fail(f"The workers cannot be watched any more: {type(error).__name__}: {_first_line(error)}")

    def _find_ended(self) -> str | None:
        ended, _ = self._ray.wait(self._runs, timeout=0)
        return self._describe_end(self._runs.index(ended[0])) if ended else None

    def _kill(self) -> None:
        for actor in self._actors:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)

    def _wait(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            _, running = (
                self._ray.wait(self._runs, num_returns=len(self._runs), timeout=GRACE_SECONDS) if self._runs else ([], [])
            )
            if not running:
                self._ended.set()

    def _name(self, rank: int) -> str:
        return self.name(rank, process=f"{self._process_ids[rank]} on {self._places[rank].ip}")

    def _describe_end(self, rank: int) -> str:
        name, place = self._name(rank), self._places[rank]
        try:
            self._ray.get(self._runs[rank])
        except self._ray.exceptions.RayTaskError as error:
            return f"{name} failed: {_first_line(error.cause)}"
        except self._ray.exceptions.RayError:
            self.was_killed |= self.failure is None
            is_alive = any(node["NodeID"] == place.node_id and node["Alive"] for node in self._ray.nodes())
            return f"{name} was killed." if is_alive else f"{name} was lost with its node."
        return f"{name} has ended."


def _first_line(error: BaseException) -> str:
    return (str(error).strip().split("\n") or [""])[0] or type(error).__name__
