"""How many processes share the work: workers of a model, stages, and replicas. `config.EngineArgs` has the same names with their help.

Mirrors `vllm/config/parallel.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.config_checks import check_at_least, check_choice
from minivllm.errors import ConfigError

EXECUTOR_BACKENDS = ("uni", "mp", "ray")
REPLICA_BACKENDS = ("mp", "ray")
PLACEMENT_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
ROUTINGS = ("least-loaded", "prefix-aware", "round-robin")


@dataclass(frozen=True)
class ParallelConfig:
    """Workers per replica, replicas, and where they run; see `EngineArgs`."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pp_layer_partition: str | None = None
    distributed_executor_backend: str | None = None
    ray_address: str | None = None
    ray_placement_strategy: str = "PACK"
    data_parallel_size: int = 1
    data_parallel_backend: str = "mp"
    data_parallel_size_local: int | None = None
    data_parallel_start_rank: int = 0
    data_parallel_address: str = "127.0.0.1"
    data_parallel_rpc_port: int = 29550
    data_parallel_key_file: str | None = None
    data_parallel_routing: str = "least-loaded"
    replica_timeout: int = 10
    failover_timeout: int = 60
    max_replica_deaths: int = 5

    def __post_init__(self) -> None:
        check_at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        check_at_least("pipeline_parallel_size", self.pipeline_parallel_size, 1)
        self._check_partition()
        check_at_least("replica_timeout", self.replica_timeout, 2)
        check_at_least("failover_timeout", self.failover_timeout, 0)
        check_at_least("max_replica_deaths", self.max_replica_deaths, 1)
        check_at_least("data_parallel_size", self.data_parallel_size, 1)
        check_at_least("data_parallel_start_rank", self.data_parallel_start_rank, 0)
        check_at_least("data_parallel_rpc_port", self.data_parallel_rpc_port, 1)
        if self.data_parallel_size > 65_535 or self.data_parallel_rpc_port > 65_535:
            raise ConfigError("data_parallel_size and data_parallel_rpc_port must be at most 65535.")
        check_choice("data_parallel_backend", self.data_parallel_backend, REPLICA_BACKENDS)
        self._check_backend()
        if self.data_parallel_size_local is not None:
            check_at_least("data_parallel_size_local", self.data_parallel_size_local, 0)
        if self.data_parallel_start_rank + len(self.local_ranks) > self.data_parallel_size:
            raise ConfigError(
                f"There are replicas {self.local_ranks.start} to {self.local_ranks.stop - 1} on this machine, but data_parallel_size is "
                f"{self.data_parallel_size}: raise it, or lower data_parallel_start_rank or data_parallel_size_local."
            )
        check_choice("data_parallel_routing", self.data_parallel_routing, ROUTINGS)
        check_choice("ray_placement_strategy", self.ray_placement_strategy, PLACEMENT_STRATEGIES)
        if self.distributed_executor_backend is not None:
            check_choice("distributed_executor_backend", self.distributed_executor_backend, EXECUTOR_BACKENDS)
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if self.distributed_executor_backend == "uni" and getattr(self, name) > 1:
                raise ConfigError(
                    f"distributed_executor_backend is 'uni', one worker in the engine's process, but {name} is "
                    f"{getattr(self, name)}: use 'mp' or 'ray', or leave it out."
                )

    def _check_backend(self) -> None:
        """Refuse options for replicas elsewhere that are started by hand, where Ray starts them."""
        for name in ("data_parallel_size_local", "data_parallel_start_rank", "data_parallel_key_file"):
            if self.data_parallel_backend == "ray" and getattr(self, name) != getattr(ParallelConfig, name):
                raise ConfigError(
                    f"data_parallel_backend is 'ray', which starts the replicas on all nodes of the cluster: leave {name} out."
                )

    def _check_partition(self) -> None:
        if self.pp_layer_partition is None:
            return
        stages, parts = self.pipeline_parallel_size, str(self.pp_layer_partition).split(",")
        if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            raise ConfigError(
                f"pp_layer_partition is {self.pp_layer_partition!r}, but must be the number of layers of each stage, such as '12,18'."
            )
        if len(parts) != stages:
            raise ConfigError(
                f"pp_layer_partition is {self.pp_layer_partition!r}, for {len(parts)} stage{'s' * (len(parts) > 1)}, but "
                f"pipeline_parallel_size is {stages}: give one number of layers for each stage."
            )

    @property
    def layer_partition(self) -> tuple[int, ...] | None:
        """The number of layers of each stage; None if they are divided evenly."""
        return None if self.pp_layer_partition is None else tuple(map(int, str(self.pp_layer_partition).split(",")))

    @property
    def world_size(self) -> int:
        """Workers of a replica: of each stage as many as are tensor-parallel."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def local_ranks(self) -> range:
        """The replicas that this command starts: on this machine, or on a Ray cluster."""
        num_others = self.data_parallel_start_rank
        size = self.data_parallel_size - num_others if self.data_parallel_size_local is None else self.data_parallel_size_local
        return range(num_others, num_others + max(0, size))

    @property
    def has_replicas(self) -> bool:
        """Whether requests are routed to replicas, here or elsewhere."""
        return self.data_parallel_size > 1 or not self.is_on_one_machine or self.data_parallel_backend == "ray"

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all replicas are started by one command, on its machine unless that is a Ray cluster."""
        return len(self.local_ranks) == self.data_parallel_size

    @property
    def uses_processes(self) -> bool:
        """Whether workers run in processes of their own."""
        return self.world_size > 1 or self.distributed_executor_backend in ("mp", "ray")
