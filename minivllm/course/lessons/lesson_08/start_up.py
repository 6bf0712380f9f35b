"""The checks of lesson 08 for a worker: how many blocks fit, start-up in its order, and what comes before the model runs."""

from __future__ import annotations

import random
from typing import Any

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.course.lessons.lesson_08.bench import Recorder, make_device
from minivllm.course.lessons.lesson_08.situations import make_sequences
from minivllm.course.observations import expect, rounds
from minivllm.errors import ConfigError
from minivllm.scheduler_output import ExecuteModelRequest

_REFUSED = "a ConfigError with a sentence that says that not one block fits"


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
