"""A device without a model, whose memory is only counted, and a whole engine on it: it starts instantly, and everything is visible."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partialmethod
from types import SimpleNamespace
from typing import Any

import torch

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.course.lessons.lesson_08.inputs import EchoModel
from minivllm.course.lessons.lesson_08.situations import MODEL, Letters
from minivllm.course.observations import fail
from minivllm.course.parts import EngineParts
from minivllm.engine.detokenizer import IncrementalDetokenizer
from minivllm.scheduler_output import SchedulerOutput, SequenceOutput
from minivllm.worker.sampler import Sampler

_MOST_STEPS = 2000


class BenchScheduler(Scheduler):
    """Raises a RuntimeError when polled endlessly by an engine that never learns that all requests have finished."""

    num_steps = 0

    def schedule(self) -> SchedulerOutput:
        """As `Scheduler.schedule`."""
        self.num_steps += 1
        if self.num_steps > _MOST_STEPS:
            raise RuntimeError("The engine takes step after step and never ends.")
        return super().schedule()


def _rename(cls: type) -> type:
    """A class of the package by another name: that shows where it is used."""
    return type(f"Bench{cls.__name__}", (cls,), {})


BENCH_PARTS = EngineParts(
    _rename(Sampler), _rename(IncrementalDetokenizer), EchoModel, _rename(BlockSpaceManager), object, BenchScheduler
)


@dataclass
class Recorder:
    """A stand-in for a cache and a runner. Records the calls, except moves of no block."""

    size: tuple[int, int] = (0, 0)
    gpu_cache: list[Any] = field(default_factory=lambda: ["the layers' caches"], repr=False)
    did: list[Any] = field(default_factory=list, repr=False)

    def _move(self, how: str, pairs: list[tuple[int, int]]) -> None:
        if pairs:
            self.did.append((how, list(pairs)))

    swap_out = partialmethod(_move, "swap_out")
    swap_in = partialmethod(_move, "swap_in")
    copy = partialmethod(_move, "copy")

    def execute_model(self, sequences: list[Any], kv_caches: Any) -> list[SequenceOutput]:
        """As a runner's: each sequence gets a token of its own."""
        self.did.append(("runner.execute_model", [seq.request.request_id for seq in sequences], kv_caches is self.gpu_cache))
        return [SequenceOutput([len(self.did) + i]) for i in range(len(sequences))]


@dataclass
class MadeUpDevice:
    """A device whose memory is only counted: what `assembly.Device` is, without a model.

    Attributes:
        weights, load_extra: What the model takes, and what reading it takes temporarily on top of that.
        per_token, per_seq: What a step takes.
        did: The calls.
    """

    total_bytes: int
    other_bytes: int
    block_bytes: int
    weights: int
    load_extra: int
    per_token: int
    per_seq: int
    used_bytes: int = 0
    peak_bytes: int = 0
    did: list[str] = field(default_factory=list)
    model: EchoModel = field(default_factory=EchoModel)
    cache: Recorder | None = None
    block_size = 4
    platform = SimpleNamespace(device=torch.device("cpu"))

    def load_model(self) -> None:
        """As `Device.load_model`."""
        if "load_model" in self.did:
            fail("The model was loaded twice.")
        self._hold("load_model", self.weights, self.load_extra)

    def reset_peak(self) -> None:
        """As `Device.reset_peak`."""
        self.did.append("reset_peak")
        self.peak_bytes = self.used_bytes

    def profile_run(self, num_tokens: int, num_seqs: int) -> None:
        """As `Device.profile_run`."""
        if "load_model" not in self.did:
            fail("profile_run was called before load_model: there is no model to run yet.")
        self._hold(f"profile_run({num_tokens}, {num_seqs})", 0, num_tokens * self.per_token + num_seqs * self.per_seq)

    def allocate_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> Recorder:
        """As `Device.allocate_cache`, but empty."""
        self._hold(f"allocate_cache({num_gpu_blocks}, {num_cpu_blocks})", num_gpu_blocks * self.block_bytes, 0)
        self.cache = Recorder((num_gpu_blocks, num_cpu_blocks))
        return self.cache

    def _hold(self, what: str, num_bytes: int, for_a_moment: int) -> None:
        self.did.append(what)
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes + for_a_moment)

    def fitting_blocks(self, cache: CacheConfig, limits: SchedulerConfig) -> tuple[int, int]:
        """How many blocks fit, on the device and in the swap space."""
        usable = int(self.total_bytes * cache.gpu_memory_utilization) - self.other_bytes
        largest_step = limits.max_num_batched_tokens * self.per_token + limits.max_num_seqs * self.per_seq
        return (usable - self.weights - largest_step) // self.block_bytes, cache.swap_space_bytes // self.block_bytes

    def describe(self, cache: CacheConfig, limits: SchedulerConfig) -> str:
        """The device and the limits of an engine on it, in words."""
        return (
            f"A device of {self.total_bytes:,} bytes, {self.other_bytes:,} of them held by others, utilization {cache.gpu_memory_utilization}; the model takes "
            f"{self.weights:,} bytes ({self.load_extra:,} more for a moment while it is read), a step {self.per_token:,} for each token and {self.per_seq:,} for each "
            f"sequence; max_num_batched_tokens={limits.max_num_batched_tokens}, max_num_seqs={limits.max_num_seqs}, swap_space_bytes={cache.swap_space_bytes:,}, "
            f"block_bytes={self.block_bytes:,}."
        )


def make_device(rng: random.Random, cache: CacheConfig, limits: SchedulerConfig, num_blocks: int) -> MadeUpDevice:
    """A device on which this many blocks fit."""
    weights, block = rng.randint(10**6, 10**7), rng.randint(1000, 50_000)
    per_token, per_seq = rng.randint(1, 2000), rng.randint(1, 20_000)
    step = limits.max_num_batched_tokens * per_token + limits.max_num_seqs * per_seq
    others, rest = rng.randint(0, 10**6), rng.randint(0, block - 1)
    total = int((weights + step + block * num_blocks + rest + others) / cache.gpu_memory_utilization) + 1
    return MadeUpDevice(total, others, block, weights, rng.randint(0, 2 * step), per_token, per_seq)


def make_bench(rng: random.Random) -> tuple[MadeUpDevice, Any]:
    """A device, and the configuration of an engine for it: few blocks, and some to swap to."""
    limits = SchedulerConfig(rng.randint(2, 5), 60, preemption_mode="swap")
    cache = CacheConfig(block_size=MadeUpDevice.block_size, swap_space_bytes=10**6)
    device = make_device(rng, cache, limits, rng.randint(16, 20))
    config = SimpleNamespace(model_config=MODEL, cache_config=cache, scheduler_config=limits, load_tokenizer=Letters)
    return device, config
