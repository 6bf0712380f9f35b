"""Runs a learner's class in the engine: it must make the same decisions and write the same text as the package's own class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from minivllm.course.observations import expect, fail, require, seeded
from minivllm.engine.trace import StepRecord


class Crowd(NamedTuple):
    """A crowded simulated run: the seed of its requests, how they are preempted, the share of blocks kept from newcomers, and the number of blocks."""

    seed: int
    preemption_mode: str
    watermark: float
    num_gpu_blocks: int
    num_cpu_blocks: int


_CROWDS = (
    Crowd(2, "recompute", 0.15, 20, 0),
    Crowd(2, "swap", 0.15, 24, 40),
    Crowd(4, "swap", 0.25, 20, 24),
    Crowd(2, "swap", 0.1, 20, 6),  # the host is full at times, so some give way by recompute
)
_OBSERVED: dict[str, tuple[Callable[[StepRecord], Any], str]] = {
    "sequence that gives way": (
        lambda step: [_name(lost) for lost in step.preempted],
        "can_append_slots, which decides whether one must, and at can_allocate and can_swap_in, which decide which were admitted before",
    ),
    "block table": (
        lambda step: {_name(key): list(table) for key, table in step.block_tables.items()},
        "allocate, append_slots, fork and swap_in, which make and change tables, and at can_allocate and can_append_slots, which decide which sequences run",
    ),
    "list of blocks to copy": (lambda step: list(map(tuple, step.blocks_to_copy)), "append_slots, which returns them"),
    "list of blocks to swap out": (
        lambda step: list(map(tuple, step.blocks_to_swap_out)),
        "swap_out, which returns them, and at can_swap_out, which decides whether it is called",
    ),
    "list of blocks to swap in": (
        lambda step: list(map(tuple, step.blocks_to_swap_in)),
        "swap_in, which returns them, and at can_swap_in, which decides when it is called",
    ),
    "number of free blocks": (lambda step: step.num_free_blocks, "free, append_slots and swap_out, which release blocks"),
}
"""What is compared in each step, and where to look."""


def _name(continuation: Any) -> str:
    return f"continuation {continuation.index} of request {continuation.request_id}"


def check_block_manager(manager_class: type) -> None:
    """The same tables, copies and swaps as with the package's manager in every step of crowded simulated runs."""
    from minivllm.core.block_space_manager import BlockSpaceManager

    for crowd in _CROWDS:
        wanted, got = (run_simulated(cls, crowd) for cls in (BlockSpaceManager, manager_class))
        for number, (theirs, ours) in enumerate(zip(wanted, got, strict=False), 1):
            said = f"In step {number} of a simulated run, in which requests are preempted by {crowd.preemption_mode}, yours is not the package's manager."
            for what, value in theirs.items():
                expect(said, what, value, ours[what], _OBSERVED[what][1])
        steps = f"The simulated run takes {len(wanted)} steps with the package's manager, but {len(got)} with yours."
        require(len(wanted), len(got), steps)


def check_text(**parts: type) -> None:
    """The real model writes the same text with a learner's classes as with the package's own.

    Samples of one prompt share blocks, and the cache is too small for all requests at once.

    Args:
        **parts: Arguments for `LLM`, such as `block_space_manager_cls` and `scheduler_cls`.
    """
    got, wanted = _write(**parts), _write()  # in this order, because the learner's may raise an error at once
    for theirs, ours in zip(wanted, got, strict=True):
        why = "It has read keys and values of other tokens: a table names the wrong block, or a block was written that others still read"
        require(theirs, ours, f"The real model should write\n  {theirs!r},\nbut wrote\n  {ours!r}.\n{why}.")


def run_simulated(manager_class: type, crowd: Crowd) -> list[dict[str, Any]]:
    """What the manager did in each step of a crowded run."""
    from minivllm.sampling_params import SamplingParams
    from minivllm.simulation.engine import make_simulated_engine

    rng, options = seeded(f"crowd {crowd.seed}"), crowd._asdict()
    del options["seed"]
    engine = make_simulated_engine(block_space_manager_cls=manager_class, block_size=4, max_num_seqs=6, **options)
    for i in range(14):
        params = SamplingParams(n=rng.choice([1, 2, 3, 3]), max_tokens=rng.randrange(2, 24), ignore_eos=True, seed=i)
        engine.add_request(f"{i}", [1 + i] * rng.randrange(1, 20), params)
    for _ in range(2000):
        if not engine.has_unfinished_requests():
            break
        try:
            engine.step()
        except RuntimeError as error:
            if "scheduled nothing" not in str(error):
                raise
            fail(f"A simulated run does not finish: {error} Are blocks lost?")
    else:
        fail("A simulated run does not finish. Are blocks lost?")
    manager, total = engine.block_manager, (crowd.num_gpu_blocks, crowd.num_cpu_blocks)
    free = manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()
    must = f"all {total[0]} device blocks and all {total[1]} host blocks must be free, but {free[0]} and {free[1]} are"
    require(total, free, f"When all requests are finished, {must}.")
    assert engine.trace is not None
    return [{what: observe(step) for what, (observe, _) in _OBSERVED.items()} for step in engine.trace]


def _write(**parts: type) -> list[str]:
    """Generate texts with the real model; samples share blocks, and the cache is too small for all."""
    from minivllm import LLM, SamplingParams

    llm = LLM("smollm2-135m", num_gpu_blocks_override=12, max_model_len=128, max_num_seqs=4, **parts)
    prompts = [
        "The old man had three wishes, and he thought about them for a long time, because he knew that the first one was",
        "Once upon a time, in a house by the sea,",
        "1, 2, 3, 4,",
    ]
    params = [SamplingParams(n=n, temperature=0.8, seed=4, max_tokens=36, ignore_eos=True) for n in (3, 1, 1)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [completion.text for output in outputs for completion in output.outputs]
