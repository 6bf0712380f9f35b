"""The checks of lesson 08 for a worker: how many blocks fit, start-up in its order, and what comes before the model runs.

The device has no model: its memory is only counted. A whole engine on it starts instantly, and everything in it is visible.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partialmethod
from types import SimpleNamespace
from typing import Any

import torch

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.course.lessons.lesson_08.inputs import EchoModel
from minivllm.course.lessons.lesson_08.situations import make_sequences
from minivllm.course.observations import expect, fail, rounds
from minivllm.errors import ConfigError
from minivllm.scheduler_output import ExecuteModelRequest, SequenceOutput

_REFUSED = "a ConfigError with a sentence that says that not one block fits"


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


def make_memory(rng: random.Random) -> tuple[int, float, int, int, int]:
    """The arguments of `count_blocks`; in two of five cases not one block fits."""
    block, utilization = rng.randint(1, 5000), rng.choice((0.5, 0.75, 0.9, 1.0))
    total = rng.randint(100, 10_000) * block
    usable = int(total * utilization)
    some = rng.randint(block, usable)
    taken = usable - rng.choice((-rng.randint(0, usable), rng.randint(0, block - 1), block, some, some))
    others = rng.randint(0, taken)
    return total, utilization, others, taken - others, block


def check_count_blocks(count_blocks: Any) -> None:
    """The cache gets what the largest step leaves of the engine's share, in whole blocks."""
    look = "what the share is taken of (all memory of the device), what is subtracted, rounding down, and when a ConfigError is raised"
    for total, utilization, others, peak, block in map(make_memory, rounds("count", 200)):
        said = f"count_blocks(total_bytes={total}, utilization={utilization}, other_bytes={others}, peak_bytes={peak}, block_bytes={block})"
        num_blocks = (int(total * utilization) - others - peak) // block
        try:
            got = count_blocks(total, utilization, others, peak, block)
        except ConfigError as error:
            got = _REFUSED if len(str(error)) > 10 else repr(error)
        is_comparable = isinstance(got, str) or hasattr(got, "__index__")  # 2.0 equals 2, but is no whole number
        expect(said, "blocks", num_blocks if num_blocks > 0 else _REFUSED, got if is_comparable else repr(got), look)


def check_start_up(cls: Any) -> None:
    """Load, measure the largest step, give the cache the rest."""
    look = "the order (load, forget the peak of loading, run the largest step, count), the largest step, and swap_space_bytes, which is host memory"
    for rng in rounds("start", 60):
        max_num_seqs, swap_space = rng.randint(1, 64), rng.choice((0, rng.randint(0, 10**7)))
        limits = SchedulerConfig(max_num_seqs, rng.randint(max_num_seqs, 4096))
        cache = CacheConfig(gpu_memory_utilization=rng.choice((0.5, 0.8, 0.9)), swap_space_bytes=swap_space)
        device = make_device(rng, cache, limits, rng.randint(1, 300))
        expected = device.fitting_blocks(cache, limits)
        worker = cls(device, None, cache, limits)
        try:
            got: Any = worker.start_up()
        except ConfigError as error:
            got = f"a ConfigError ({error})"
        said = f"{device.describe(cache, limits)}\nstart_up did: {', '.join(device.did) or 'nothing'}."
        expect(said, "(num_gpu_blocks, num_cpu_blocks)", expected, tuple(got) if isinstance(got, list) else got, look)
        allocations = [what for what in device.did if what.startswith("allocate")]
        expect(said, "allocations", [f"allocate_cache{expected}"], allocations, "allocate_cache, once, with both numbers")
        expect(said, "worker.cache", device.cache, getattr(worker, "cache", None), "self.cache: what allocate_cache returns")


def make_request(rng: random.Random) -> ExecuteModelRequest:
    """A step with blocks to move; in some there is nothing to compute."""
    sequences = [] if rng.random() < 0.3 else make_sequences(rng, block_size=4)
    moves = [[(rng.randint(0, 9), rng.randint(0, 9)) for _ in range(rng.choice((0, 1, 3)))] for _ in range(3)]
    return ExecuteModelRequest(sequences, *moves)


def check_worker(cls: Any) -> None:
    """Blocks are moved before the model runs: out, in, copies."""
    look = "the order: out first, because blocks that come in may take their place; the runner last, with self.cache.gpu_cache, and only if there are sequences"
    for request in map(make_request, rounds("worker", 60)):
        moves = {name: getattr(request, f"blocks_to_{name}") for name in ("swap_out", "swap_in", "copy")}
        blocks = ", ".join(f"blocks_to_{name}={pairs}" for name, pairs in moves.items())
        said = f"A request with {len(request.sequences)} sequences, {blocks}."
        theirs, mine = Recorder(), Recorder()
        for name, pairs in moves.items():
            getattr(theirs, name)(pairs)
        expected = theirs.execute_model(request.sequences, theirs.gpu_cache) if request.sequences else []
        worker = cls(None, mine, CacheConfig(), SchedulerConfig())
        worker.cache = mine
        got = [list(output.token_ids) for output in worker.execute_model(request)]
        expect(said, "calls (except empty ones)", theirs.did, mine.did, look)
        tokens = [output.token_ids for output in expected]
        expect(said, "tokens", tokens, got, "what execute_model returns: the runner's outputs, or an empty list")
