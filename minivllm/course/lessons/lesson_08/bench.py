"""A whole engine without a model: a device that only counts, and what runs on it. It starts instantly, and everything is visible."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.course.lessons.lesson_08.inputs import EchoModel
from minivllm.course.lessons.lesson_08.situations import MODEL, Letters
from minivllm.course.lessons.lesson_08.start_up import MadeUpDevice
from minivllm.course.parts import EngineParts
from minivllm.engine.detokenizer import IncrementalDetokenizer
from minivllm.scheduler_output import SchedulerOutput
from minivllm.worker.sampler import Sampler

_MOST_STEPS = 2000


class _BenchSampler(Sampler):
    pass


class _BenchDetokenizer(IncrementalDetokenizer):
    pass


class _BenchManager(BlockSpaceManager):
    pass


class _BenchScheduler(Scheduler):
    """Raises a RuntimeError when polled endlessly by an engine that never learns that all requests have finished."""

    num_steps = 0

    def schedule(self) -> SchedulerOutput:
        self.num_steps += 1
        if self.num_steps > _MOST_STEPS:
            raise RuntimeError("The engine takes step after step and never ends.")
        return super().schedule()


BENCH_PARTS = EngineParts(_BenchSampler, _BenchDetokenizer, EchoModel, _BenchManager, object, _BenchScheduler)


class _Moves:
    """A stand-in for the cache; records which blocks were moved."""

    def __init__(self) -> None:
        self.gpu_cache: list[Any] = []
        self.moved: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name not in ("swap_out", "swap_in", "copy"):
            raise AttributeError(name)
        return lambda pairs: self.moved.append([name, list(pairs)]) if pairs else None


@dataclass
class BenchDevice(MadeUpDevice):
    """A device whose model is an `EchoModel`.

    Attributes:
        block_size: Tokens of a block.
        peak_without_cache: What the largest step takes, weights included.
        moves: The cache, once there is one.
    """

    block_size: int = 4
    peak_without_cache: int = 0
    model: Any = None
    moves: Any = None
    platform: Any = None

    def allocate_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> Any:
        """As `Device.allocate_cache`, but empty."""
        super().allocate_cache(num_gpu_blocks, num_cpu_blocks)
        self.moves = _Moves()
        return self.moves


def make_bench(rng: random.Random) -> tuple[BenchDevice, Any]:
    """A device, and the configuration of an engine for it: few blocks, and some to swap to."""
    scheduler_config = SchedulerConfig(rng.randint(2, 5), 60, preemption_mode="swap")
    block_bytes, weights, per_token, per_seq = 1000, 50_000, 10, 100
    peak = weights + 60 * per_token + scheduler_config.max_num_seqs * per_seq
    total = int((peak + block_bytes * rng.randint(16, 20) + 500) / 0.9) + 1
    device = BenchDevice(total, 0, block_bytes, weights, 9_000, per_token, per_seq, peak_without_cache=peak, model=EchoModel(),
                         platform=SimpleNamespace(device=torch.device("cpu")))  # fmt: skip
    cache_config = CacheConfig(block_size=4, swap_space_bytes=block_bytes * rng.randint(20, 40))
    config = SimpleNamespace(
        model_config=MODEL, cache_config=cache_config, scheduler_config=scheduler_config, load_tokenizer=Letters
    )
    return device, config
