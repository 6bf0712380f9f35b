"""The checks of lesson 08 for a worker: how many blocks fit, start-up in its order, and what comes before the model runs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.course.lessons.lesson_08.situations import make_sequences
from minivllm.course.observations import expect, fail, require, rounds
from minivllm.errors import ConfigError
from minivllm.scheduler_output import ExecuteModelRequest, SequenceOutput

_ROUNDS = 200


def make_memory(rng: random.Random) -> tuple[int, float, int, int, int]:
    """The arguments of `count_blocks`; in one of five cases not one block fits."""
    block = rng.randint(1, 5000)
    total, utilization = rng.randint(100, 10_000) * block, rng.choice((0.5, 0.75, 0.9, 1.0))
    usable = int(total * utilization)
    left = rng.choice(
        (-rng.randint(0, usable), rng.randint(0, block - 1), block, rng.randint(block, usable), rng.randint(block, usable))
    )
    taken = usable - min(left, usable)
    others = rng.randint(0, taken)
    return total, utilization, others, taken - others, block


def check_count_blocks(count_blocks: Any) -> None:
    """The cache gets what the largest step leaves of the engine's share, in whole blocks."""
    for rng in rounds("count", _ROUNDS):
        total, utilization, others, peak, block = make_memory(rng)
        call = f"count_blocks(total_bytes={total}, utilization={utilization}, other_bytes={others}, peak_bytes={peak}, block_bytes={block})"
        expected = (int(total * utilization) - others - peak) // block
        try:
            got, error = count_blocks(total, utilization, others, peak, block), None
        except ConfigError as refusal:
            got, error = None, refusal
        refuses = f"Got a ConfigError: {error}" if error else f"Expected: a ConfigError, because not one block fits\nGot: {got}"
        require(expected < 1, error is not None, f"{call}\n" + (f"Expected: {expected} blocks\n" if error else "") + refuses)
        if error is None:
            look = "what the share is taken of (all memory of the device), what is subtracted, and rounding down"
            expect(call, "blocks", expected, got, look)
            require(True, hasattr(got, "__index__"), f"{call}\nExpected: a whole number (int)\nGot: {got!r}")
        else:
            require(True, len(str(error)) > 10, f"{call}\nExpected: a ConfigError with a sentence that says so\nGot: {error!r}")


@dataclass
class MadeUpDevice:
    """A device whose memory is only counted: what `assembly.Device` is, without a model.

    Attributes:
        weights, load_extra: What the model takes, and what reading it takes temporarily on top of that.
        per_token, per_seq: What a step takes.
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

    def allocate_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> tuple[str, int, int]:
        """As `Device.allocate_cache`."""
        self._hold(f"allocate_cache({num_gpu_blocks}, {num_cpu_blocks})", num_gpu_blocks * self.block_bytes, 0)
        return ("the cache", num_gpu_blocks, num_cpu_blocks)

    def _hold(self, what: str, num_bytes: int, for_a_moment: int) -> None:
        self.did.append(what)
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes + for_a_moment)


def make_device(rng: random.Random) -> tuple[MadeUpDevice, CacheConfig, SchedulerConfig]:
    """A device on which some blocks fit, and the limits of an engine."""
    max_num_seqs = rng.randint(1, 64)
    limits = SchedulerConfig(max_num_seqs, rng.randint(max_num_seqs, 4096))
    cache = CacheConfig(
        gpu_memory_utilization=rng.choice((0.5, 0.8, 0.9)), swap_space_bytes=rng.choice((0, rng.randint(0, 10**7)))
    )
    weights, per_token, per_seq = rng.randint(10**6, 10**7), rng.randint(1, 2000), rng.randint(1, 20_000)
    step = limits.max_num_batched_tokens * per_token + max_num_seqs * per_seq
    block = rng.randint(1000, 50_000)
    usable = weights + step + block * rng.randint(1, 300) + rng.randint(0, block - 1)
    others = rng.randint(0, 10**6)
    total = int((usable + others) / cache.gpu_memory_utilization) + 1
    return MadeUpDevice(total, others, block, weights, rng.randint(0, 2 * step), per_token, per_seq), cache, limits


def check_start_up(cls: Any) -> None:
    """Load, measure the largest step, give the cache the rest."""
    for device, cache, limits in map(make_device, rounds("start", 60)):
        usable = int(device.total_bytes * cache.gpu_memory_utilization) - device.other_bytes
        largest = limits.max_num_batched_tokens * device.per_token + limits.max_num_seqs * device.per_seq
        expected = ((usable - device.weights - largest) // device.block_bytes, cache.swap_space_bytes // device.block_bytes)
        worker = cls(device, None, cache, limits)
        try:
            got: Any = worker.start_up()
            got = tuple(got) if isinstance(got, list) else got
        except ConfigError as error:
            got = f"a ConfigError ({error})"
        said = (
            f"A device of {device.total_bytes:,} bytes, {device.other_bytes:,} of them held by others, utilization {cache.gpu_memory_utilization}; the model takes "
            f"{device.weights:,} bytes ({device.load_extra:,} more for a moment while it is read), a step {device.per_token:,} for each token and {device.per_seq:,} for each "
            f"sequence; max_num_batched_tokens={limits.max_num_batched_tokens}, max_num_seqs={limits.max_num_seqs}, swap_space_bytes={cache.swap_space_bytes:,}, "
            f"block_bytes={device.block_bytes:,}.\nstart_up did: {', '.join(device.did) or 'nothing'}."
        )
        look = "the order (load, forget the peak of loading, run the largest step, count), the largest step, and swap_space_bytes, which is host memory"
        expect(said, "(num_gpu_blocks, num_cpu_blocks)", expected, got, look)
        wanted = [f"allocate_cache{expected}"]
        expect(
            said,
            "allocations",
            wanted,
            [what for what in device.did if what.startswith("allocate")],
            "allocate_cache, once, with both numbers",
        )
        expect(
            said,
            "worker.cache",
            ("the cache", *expected),
            getattr(worker, "cache", None),
            "self.cache: what allocate_cache returns",
        )


class _Recorder:
    """A stand-in for the cache and the runner; records the calls."""

    def __init__(self) -> None:
        self.did: list[Any] = []
        self.gpu_cache = ["the layers' caches"]

    def __getattr__(self, name: str) -> Any:
        if name not in ("swap_out", "swap_in", "copy"):
            raise AttributeError(name)
        return lambda pairs: self.did.append((name, list(pairs))) if pairs else None

    def execute_model(self, sequences: list[Any], kv_caches: Any) -> list[SequenceOutput]:
        self.did.append(("runner.execute_model", [seq.request.request_id for seq in sequences], kv_caches is self.gpu_cache))
        return [SequenceOutput([len(self.did) + i]) for i in range(len(sequences))]


def make_request(rng: random.Random) -> ExecuteModelRequest:
    """A step with blocks to move; in some there is nothing to compute."""

    def pairs() -> list[tuple[int, int]]:
        return [(rng.randint(0, 9), rng.randint(0, 9)) for _ in range(rng.choice((0, 1, 3)))]

    sequences = [] if rng.random() < 0.3 else make_sequences(rng, block_size=4)
    return ExecuteModelRequest(sequences, pairs(), pairs(), pairs())


def run_worker(cls: Any, request: ExecuteModelRequest) -> tuple[list[Any], Any]:
    """What a worker does with a request, in order, and what it returns."""
    recorder = _Recorder()
    worker = cls(None, recorder, CacheConfig(), SchedulerConfig())
    worker.cache = recorder
    returned = worker.execute_model(request)
    return recorder.did, [list(output.token_ids) for output in returned]


def check_worker(cls: Any) -> None:
    """Blocks are moved before the model runs: out, in, copies."""
    for request in map(make_request, rounds("worker", 60)):
        said = (
            f"A request with {len(request.sequences)} sequences, blocks_to_swap_out={request.blocks_to_swap_out}, "
            f"blocks_to_swap_in={request.blocks_to_swap_in}, blocks_to_copy={request.blocks_to_copy}."
        )
        names = ("swap_out", request.blocks_to_swap_out), ("swap_in", request.blocks_to_swap_in), ("copy", request.blocks_to_copy)
        expected: list[Any] = [(name, pairs) for name, pairs in names if pairs]
        tokens = []
        if request.sequences:
            expected.append(("runner.execute_model", [seq.request.request_id for seq in request.sequences], True))
            tokens = [[len(expected) + i] for i in range(len(request.sequences))]
        did, returned = run_worker(cls, request)
        look = "the order: out first, because blocks that come in may take their place; the runner last, with self.cache.gpu_cache, and only if there are sequences"
        expect(said, "calls (except empty ones)", expected, did, look)
        expect(said, "tokens", tokens, returned, "what execute_model returns: the runner's outputs, or an empty list")
