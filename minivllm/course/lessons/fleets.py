"""Fleets of lesson 15: machines with prices, plans, goals, and samples of traffic that the real scheduler serves on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minivllm.bench.workloads import WorkloadRequest
from minivllm.executor.simulated import CostModel
from minivllm.simulation.engine import ReplicaRun, simulate_replicas

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Machine:
    """A kind of machine that runs one replica.

    Attributes:
        name: What the price list calls it.
        price: In dollars an hour.
        costs: Seconds of a step.
        cache_tokens: Tokens for which its KV cache has room.
        availability: The share of time in which one such machine is up.
    """

    name: str
    price: float
    costs: CostModel
    cache_tokens: int = 65_536
    availability: float = 0.99


@dataclass(frozen=True)
class Plan:
    """How many replicas on which machine, how many sequences each may run at once (`max_num_seqs`), and how many tokens it may compute in a step."""

    machine: Machine
    max_num_seqs: int
    num_replicas: int
    max_num_batched_tokens: int = 1024

    @property
    def price(self) -> float:
        """In dollars an hour."""
        return self.num_replicas * self.machine.price

    def __str__(self) -> str:
        machines = "machine" if self.num_replicas == 1 else "machines"
        return f"{self.num_replicas} {machines} of kind {self.machine.name}, {self.max_num_seqs} seats each: ${self.price:.2f} an hour"


@dataclass(frozen=True)
class FleetGoals:
    """What is promised.

    Attributes:
        ttft, itl: The p99 of all requests' times to first token, and of all inter-token latencies, in seconds at the most.
        availability: The share of time in which enough replicas are up.
    """

    ttft: float
    itl: float
    availability: float = 0.999

    def are_met_by(self, run: ReplicaRun) -> bool:
        """Whether a run kept both times."""
        return run.ttft.p99 <= self.ttft and run.itl.p99 <= self.itl


@dataclass(frozen=True, eq=False)
class Sample:
    """A sample of traffic: some minutes, such as the busiest ones of a day.

    Attributes:
        name: For sentences.
        requests: In the order of their arrival.
        runs: What `run_fleet` has simulated already.
    """

    name: str
    requests: Sequence[WorkloadRequest]
    runs: dict[tuple[CostModel, int, int, int, int, str], ReplicaRun] = field(default_factory=dict, repr=False)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].arrival_time - self.requests[0].arrival_time


def engine_options(plan: Plan, sample: Sample) -> dict[str, Any]:
    """What the simulator wants to know of each replica of a plan; `max_model_len` is what the sample's longest request takes."""
    return {
        "cost_model": plan.machine.costs,
        "max_num_seqs": plan.max_num_seqs,
        "num_gpu_blocks": plan.machine.cache_tokens // BLOCK_SIZE,
        "max_model_len": max(len(request.prompt_token_ids) + request.output_len for request in sample.requests),
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
    }


def run_fleet(plan: Plan, sample: Sample, routing: str = "least-loaded") -> ReplicaRun:
    """Let a fleet serve a sample. The same again costs nothing: results are kept with the sample.

    Raises:
        ConfigError: There is no replica, or a request does not fit into the machine's cache.
    """
    machine = plan.machine
    key = machine.costs, machine.cache_tokens, plan.max_num_seqs, plan.num_replicas, plan.max_num_batched_tokens, routing
    if key not in sample.runs:
        sample.runs[key] = simulate_replicas(sample.requests, plan.num_replicas, routing=routing, **engine_options(plan, sample))
    return sample.runs[key]
