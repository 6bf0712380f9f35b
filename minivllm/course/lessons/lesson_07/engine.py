"""The whole scheduler of a learner, in the simulated engine and in the real one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from minivllm.core.scheduler import Scheduler
from minivllm.course.lessons.lesson_07.situations import count_tokens
from minivllm.course.observations import expect, fail, seeded
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.trace import EngineTrace, StepRecord
from minivllm.sampling_params import SamplingParams
from minivllm.simulation.engine import make_simulated_engine

_MOST_STEPS = 5000

if TYPE_CHECKING:
    from minivllm.entrypoints.llm import LLM


def check_decisions(cls: type, seed: int = 0) -> EngineTrace:
    """The whole scheduler in the simulated engine: the same decisions as the package's, step by step.

    Returns:
        The trace of the learner's scheduler in the last run, in which sequences are swapped.
    """
    trace = None
    swap = {"preemption_mode": "swap", "num_cpu_blocks": 40}
    runs: tuple[dict[str, Any], ...] = (
        {},
        {"num_gpu_blocks": 200, "max_num_seqs": 5},
        {"policy": "priority", "watermark": 0.1, "num_gpu_blocks": 32, "max_num_seqs": 16},
        swap | {"policy": "priority"},
        swap | {"num_gpu_blocks": 32, "max_num_seqs": 16, "watermark": 0.05},
    )
    for number, options in enumerate(runs):
        expected, trace = (run_simulated(maker, f"run {seed} {number}", options) for maker in (Scheduler, cls))
        said = f"Forty requests with {', '.join(f'{name}={value!r}' for name, value in options.items()) or 'FCFS and recompute'}."
        looks = {name: look for name, (_, look) in _OBSERVED.items()}
        compare_steps(said, describe_steps(expected), describe_steps(trace), looks, "what `update` does when a sequence ends")
    assert trace is not None
    return trace


def check_text(llm: LLM) -> list[str]:
    """The whole scheduler in the real engine: the same texts as with the package's.

    Args:
        llm: An `LLM` with the learner's scheduler, and so few blocks that requests must be preempted.

    Returns:
        The texts.
    """
    prompts = [
        "The capital of France is",
        "Once upon a time",
        "Water boils when",
        "My favourite colour is",
        "Ships float because",
    ]
    params = SamplingParams(temperature=0, max_tokens=40)
    engine = llm.llm_engine
    runs = []
    for scheduler in (Scheduler(engine.scheduler_config, engine.block_manager), engine.scheduler):  # the learner's stays in it
        engine.core.scheduler = scheduler
        trace = engine.start_trace()
        runs.append(([output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)], len(trace),
                     sum(len(step.preempted) for step in trace)))  # fmt: skip
    theirs, mine = runs
    if not theirs[-1]:
        raise ValueError("With this many blocks nothing is preempted: create the LLM with a smaller num_gpu_blocks_override.")
    said = f"Five prompts, {llm.llm_engine.block_manager.num_gpu_blocks} blocks."
    for what, expected, got in zip(("the texts", "steps", "preemptions"), theirs, mine, strict=True):
        expect(said, what, expected, got, "check_decisions first; if it passes, at what only the real engine needs")
    return mine[0]


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
            expect(step, name, value, mine.get(name), looks if isinstance(looks, str) else looks[name])
    expect(f"{said} All steps that both took are the same.", "steps", len(expected), len(got), at_the_end)


_OBSERVED: dict[str, tuple[Callable[[StepRecord], Any], str]] = {
    "phase": (lambda step: step.phase, "`fits` and `schedule`: whether any sequence may join"),
    "preempted": (lambda step: [item.request_id for item in step.preempted], "`decode`: which sequence gives way, and when"),
    "swapped_in": (lambda step: [key.request_id for key in step.swapped_in], "`swap_in` and when `schedule` calls it"),
    "batch": (
        lambda step: {f"request {item.request_id}": f"{item.action}, {count_tokens(item.num_tokens)}" for item in step.scheduled},
        "which sequences are in the step, and how many tokens each computes: `admit`, `decode`, `swap_in`",
    ),
    "order of the batch": (lambda step: [item.request_id for item in step.scheduled], "`put`: the queues are sorted by `order`"),
    "waiting, running, swapped": (
        lambda step: {"waiting": step.num_waiting, "running": step.num_running, "swapped": step.num_swapped},
        "the queues that a sequence leaves and enters",
    ),
    "block table": (
        lambda step: {f"request {key.request_id}": list(table) for key, table in step.block_tables.items()},
        "the order in which blocks are freed and taken: `preempt`, `append_slots`, `finish`",
    ),
    "host blocks": (
        lambda step: {f"request {key.request_id}": list(table) for key, table in step.swapped_tables.items()},
        "`preempt`: swap_out",
    ),
    "free blocks": (
        lambda step: step.num_free_blocks,
        "which sequence keeps blocks that it no longer needs: `finish` and `preempt`",
    ),
    "blocks_to_swap_out": (lambda step: step.blocks_to_swap_out, "the pairs that swap_out returns"),
    "blocks_to_swap_in": (lambda step: step.blocks_to_swap_in, "the pairs that swap_in returns"),
    "finished": (lambda step: [item.request_id for item in step.finished], "`update`: which sequence ends, and when"),
    "aborted": (lambda step: step.aborted, "`abort_request`"),
}
"""What is compared in each step, most telling first, and where to look."""


def describe_steps(trace: EngineTrace) -> list[dict[str, Any]]:
    """Everything compared in each step."""
    return [{name: observe(step) for name, (observe, _) in _OBSERVED.items()} for step in trace]


def run_simulated(cls: type, seed: str, options: dict[str, Any]) -> EngineTrace:
    """Run a random workload in a simulated engine with too few blocks. Nobody is preempted for admission: the lesson leaves that out."""
    rng = seeded(seed)
    sizes = {"max_model_len": 120, "max_num_batched_tokens": 160, "num_gpu_blocks": 40, "block_size": 4}
    engine = make_simulated_engine(scheduler=cls, priority_preemption=False, **sizes | options)
    lengths = [(rng.randint(1, 60), rng.randint(1, 50)) for _ in range(40)]

    def add(number: int) -> None:
        prompt_len, output_len = lengths[number]
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        engine.add_request(f"{number}", [number + 1] * prompt_len, params, priority=rng.randint(0, 2))

    look = "what each is waiting for: a place, blocks, or a `schedule` that forgets it"
    return run_forty(engine, add, rng, f"Forty requests with {options or 'FCFS and recompute'}.", look)


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

    def step() -> None:
        try:
            engine.step()
        except NotImplementedError:
            raise
        except caught as error:
            fail(f"{said}\nExpected: a step\nGot: {error!r}\nLook at {look}.")

    trace = engine.start_trace()
    for number in range(40):
        add(number)
        if number % 9 == 8:
            engine.abort_request(f"{rng.randrange(number)}")
        for _ in range(rng.randint(0, 8)):
            step()
    for _ in range(_MOST_STEPS):
        if not engine.has_unfinished_requests():
            return trace
        step()
    unfinished = f"unfinished requests after {_MOST_STEPS:,} further steps"
    fail(f"{said}\nExpected {unfinished}: 0\nGot {unfinished}: {len(engine.scheduler.requests)}\nLook at {look}.")
