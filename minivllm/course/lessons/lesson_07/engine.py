"""The whole scheduler of a learner, in the simulated engine and in the real one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from minivllm.core.scheduler import Scheduler
from minivllm.course.lessons.lesson_07.situations import count_tokens
from minivllm.course.observations import expect, fail, seeded
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.trace import EngineTrace, SequenceKey
from minivllm.sampling_params import SamplingParams
from minivllm.simulation.engine import make_simulated_engine

if TYPE_CHECKING:
    from minivllm.entrypoints.llm import LLM

_MOST_STEPS = 5000
_SWAP = {"preemption_mode": "swap", "num_cpu_blocks": 40}
RUNS: tuple[dict[str, Any], ...] = (
    {},
    {"num_gpu_blocks": 200, "max_num_seqs": 5},
    {"policy": "priority", "watermark": 0.1, "num_gpu_blocks": 32, "max_num_seqs": 16},
    {**_SWAP, "policy": "priority"},
    {**_SWAP, "num_gpu_blocks": 32, "max_num_seqs": 16, "watermark": 0.05},
)
"""Engines, most of which have too few blocks."""
PROMPTS = ("The capital of France is", "Once upon a time", "Water boils when", "My favourite colour is", "Ships float because")
_LOOKS = {
    "phase": "`fits` and `schedule`: whether any sequence may join",
    "preempted": "`decode`: which sequence gives way, and when",
    "swapped_in": "`swap_in` and when `schedule` calls it",
    "batch": "which sequences are in the step, and how many tokens each computes: `admit`, `decode`, `swap_in`",
    "order of the batch": "`put`: the queues are sorted by `order`",
    "waiting, running, swapped": "the queues that a sequence leaves and enters",
    "block table": "the order in which blocks are freed and taken: `preempt`, `append_slots`, `finish`",
    "host blocks": "`preempt`: swap_out",
    "free blocks": "which sequence keeps blocks that it no longer needs: `finish` and `preempt`",
    "blocks_to_swap_out": "the pairs that swap_out returns",
    "blocks_to_swap_in": "the pairs that swap_in returns",
    "finished": "`update`: which sequence ends, and when",
    "aborted": "`abort_request`",
}


def check_decisions(cls: type, seed: int = 0) -> EngineTrace:
    """The whole scheduler in the simulated engine: the same decisions as the package's, step by step.

    Returns:
        The trace of the learner's scheduler in the last run, in which sequences are swapped.
    """
    for number, options in enumerate(RUNS):
        said = f"Forty requests with {', '.join(f'{name}={value!r}' for name, value in options.items()) or 'FCFS and recompute'}."
        expected, got = (run_simulated(maker, f"run {seed} {number}", options, said) for maker in (Scheduler, cls))
        compare_steps(said, describe_steps(expected), describe_steps(got), _LOOKS, "what `update` does when a sequence ends")
    return got


def check_text(llm: LLM) -> list[str]:
    """The whole scheduler in the real engine: the same texts as with the package's.

    Args:
        llm: An `LLM` with the learner's scheduler, and so few blocks that requests must be preempted.

    Returns:
        The texts.
    """
    engine, runs = llm.llm_engine, []
    for scheduler in (Scheduler(engine.scheduler_config, engine.block_manager), engine.scheduler):  # the learner's stays in it
        engine.core.scheduler = scheduler
        trace = engine.start_trace()
        outputs = llm.generate(list(PROMPTS), SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
        texts, preemptions = [output.outputs[0].text for output in outputs], sum(len(step.preempted) for step in trace)
        runs.append({"the texts": texts, "steps": len(trace), "preemptions": preemptions})
    if not runs[0]["preemptions"]:
        raise ValueError("With this many blocks nothing is preempted: create the LLM with a smaller num_gpu_blocks_override.")
    said = f"Five prompts, {engine.block_manager.num_gpu_blocks} blocks."
    for what, expected in runs[0].items():
        expect(said, what, expected, runs[1][what], "check_decisions first; if it passes, at what only the real engine needs")
    return texts


def compare_steps(
    said: str, expected: list[dict[str, Any]], got: list[dict[str, Any]], looks: str | Mapping[str, str], at_the_end: str
) -> None:
    """Raise an AssertionError about the first step in which the learner's run differs from the package's, if there is one.

    Args:
        said: The situation.
        expected, got: Of each step, what is compared: see `describe_steps`.
        looks: Where to look, for all that is compared or for each.
        at_the_end: Where to look if one run has more steps.
    """
    for number, (theirs, mine) in enumerate(zip(expected, got, strict=False)):
        step = f"{said} Step {number}, a {theirs['phase']} step with the package's scheduler, is the first that differs."
        for name, value in theirs.items():
            expect(step, name, value, mine[name], looks if isinstance(looks, str) else looks[name])
    expect(f"{said} All steps that both took are the same.", "steps", len(expected), len(got), at_the_end)


def describe_steps(trace: EngineTrace) -> list[dict[str, Any]]:
    """What is compared in each step, most telling first."""

    def by_request(tables: Mapping[SequenceKey, tuple[int, ...]]) -> dict[str, list[int]]:
        return {f"request {key.request_id}": list(table) for key, table in tables.items()}

    return [
        {
            "phase": step.phase,
            "preempted": [item.request_id for item in step.preempted],
            "swapped_in": [item.request_id for item in step.swapped_in],
            "batch": {f"request {item.request_id}": f"{item.action}, {count_tokens(item.num_tokens)}" for item in step.scheduled},
            "order of the batch": [item.request_id for item in step.scheduled],
            "waiting, running, swapped": [step.num_waiting, step.num_running, step.num_swapped],
            "block table": by_request(step.block_tables),
            "host blocks": by_request(step.swapped_tables),
            "free blocks": step.num_free_blocks,
            "blocks_to_swap_out": step.blocks_to_swap_out,
            "blocks_to_swap_in": step.blocks_to_swap_in,
            "finished": [item.request_id for item in step.finished],
            "aborted": step.aborted,
        }
        for step in trace
    ]


def run_simulated(cls: type, seed: str, options: dict[str, Any], said: str) -> EngineTrace:
    """Run a random workload in a simulated engine with too few blocks. Nobody is preempted for admission: the lesson leaves that out."""
    rng, defaults = seeded(seed), {"num_gpu_blocks": 40, "block_size": 4, "max_model_len": 120, "max_num_batched_tokens": 160}
    engine = make_simulated_engine(scheduler=cls, priority_preemption=False, **defaults | options)
    lengths = [(rng.randint(1, 60), rng.randint(1, 50)) for _ in range(40)]

    def add(number: int) -> None:
        prompt_len, output_len = lengths[number]
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        engine.add_request(f"{number}", [number + 1] * prompt_len, params, priority=rng.randint(0, 2))

    return run_forty(engine, add, rng, said, "what each is waiting for: a place, blocks, or a `schedule` that forgets it")


def run_forty(
    engine: LLMEngine,
    add: Callable[[int], None],
    rng: random.Random,
    said: str,
    look: str,
    caught: tuple[type[Exception], ...] = (),
) -> EngineTrace:
    """Add forty requests while the engine runs, abort a few, and run it to the end.

    Args:
        engine: Simulated.
        add: Adds the request of a number, which is its id.
        rng: Says when.
        said: The situation.
        look: Where to look if a step raises one of the errors in `caught`, or the engine never ends.
    """
    trace = engine.start_trace()
    try:
        for number in range(40):
            add(number)
            if number % 9 == 8:
                engine.abort_request(f"{rng.randrange(number)}")
            for _ in range(rng.randint(0, 8)):
                engine.step()
        for _ in range(_MOST_STEPS):
            if not engine.has_unfinished_requests():
                return trace
            engine.step()
    except NotImplementedError:
        raise
    except caught as error:
        fail(f"{said}\nExpected: a step\nGot: {error!r}\nLook at {look}.")
    unfinished = f"unfinished requests after {_MOST_STEPS:,} further steps"
    fail(f"{said}\nExpected {unfinished}: 0\nGot {unfinished}: {len(engine.scheduler.requests)}\nLook at {look}.")
