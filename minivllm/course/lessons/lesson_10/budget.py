"""The checks of lesson 10 for a scheduler with one budget: one method after another, and then whole workloads."""

from __future__ import annotations

import random
from typing import Any

from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.course.lessons.budget import BudgetScheduler
from minivllm.course.lessons.lesson_07.engine import compare_steps, describe_steps, run_forty
from minivllm.course.observations import expect, fail, seeded
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.trace import EngineTrace
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler_output import SchedulerOutput
from minivllm.simulation.engine import make_simulated_engine

_ROUNDS = 60


class _Reference(BudgetScheduler):
    """The package's decisions under the names of the lesson."""

    def schedule_decodes(self, output: SchedulerOutput) -> None:
        self._schedule_decodes(output)

    def schedule_chunks(self, output: SchedulerOutput) -> None:
        self._schedule_prefill_chunks(output)

    def admit(self, output: SchedulerOutput) -> None:
        self._admit(output)


def make_engine(
    scheduler_cls: Any, manager_cls: Any, rng: random.Random, budget: int | None = None, tight: bool = False
) -> LLMEngine:
    """An engine with few blocks (a tight one has just enough for the longest request) and, mostly, a small budget."""
    max_num_seqs = rng.randint(2, 6)
    return make_simulated_engine(
        scheduler=scheduler_cls, block_space_manager_cls=manager_cls, max_model_len=100, block_size=4, num_gpu_blocks=25 if tight else rng.randint(25, 32),
        watermark=0.1 if tight else rng.choice((0.0, 0.1)), enable_prefix_caching=True, enable_chunked_prefill=True, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget or rng.choice((max_num_seqs, max_num_seqs + 1, max_num_seqs + 6, 20, 80)),
    )  # fmt: skip


class Chats:
    """Requests that begin like earlier ones: a few system prompts, continued conversations, and some new ones.

    Args:
        rng: Where they come from.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.beginnings = [[rng.randrange(100) for _ in range(rng.choice((4, 8, 13, 20)))] for _ in range(3)]
        self.number = 0

    def add_to(self, engines: list[LLMEngine], longest: int | None = None) -> None:
        """Add the next request to each engine: one like an earlier one, or a new one that is as long as can be."""
        rng = self.rng
        prompt = rng.choice([*self.beginnings, []]) + [
            rng.randrange(100) for _ in range(rng.choice((0, 1, 3, rng.randint(0, 30))))
        ]
        prompt = prompt[:60] or [5]
        if longest is not None:
            prompt = [rng.randrange(100) for _ in range(longest - rng.randrange(3))]
        params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 40 if longest is None else 1), ignore_eos=True, seed=0)
        if rng.random() < 0.4:
            self.beginnings.append(prompt)
        for engine in engines:
            engine.add_request(f"{self.number}", list(prompt), params)
        self.number += 1


_DECISIONS = {name: value for name, value in vars(Scheduler).items() if not name.startswith("__")}
"""The package's methods, used to set up the past, whatever the learner's are called."""


def _is_telling(scheduler: Any, kind: int) -> bool:
    """Whether a situation is one of a kind that needs care."""
    running, waiting = scheduler.running, list(scheduler.waiting)
    if kind == 0:  # a preempted one is halfway through its recompute
        return any(seq.num_output_tokens and seq.num_uncomputed_tokens > 1 for seq in running)
    if kind == 1:  # blocks run out, though requests wait
        manager = scheduler.block_manager
        return bool(waiting) and sum(len(seq.token_ids) % 4 == 1 for seq in running) > manager.get_num_free_gpu_blocks()
    if kind == 2:  # a preempted one waits
        return any(seq.request.metrics.num_preemptions for seq in waiting)
    if kind == 6:  # one preempted in the middle of its prompt waits
        return any(seq.request.metrics.num_preemptions and not seq.num_output_tokens for seq in waiting)
    if kind == 3:  # nothing runs
        return not running
    seats = scheduler.config.max_num_seqs - len(running)  # there is room for two newcomers at once
    return not waiting and seats > 1 and scheduler.block_manager.get_num_free_gpu_blocks() > 9


def make_twins(cls: Any, seed: str) -> tuple[Any, Any]:
    """A learner's scheduler and the reference in the same situation: the package's decisions have brought both there."""
    rng = seeded(seed)
    shape, kind = rng.random(), rng.randrange(7)
    engines = []
    for base in (_Reference, cls):
        past = type("Past", (base,), _DECISIONS)
        engines.append(make_engine(past, BlockSpaceManager, random.Random(shape), 80 if kind in (4, 5) else None, kind == 3))
    chats = Chats(rng)
    for number in range(80):
        if rng.random() < 0.3 and chats.number < 40:
            chats.add_to(engines)
        for engine in engines:
            engine.step()
        if number > rng.randint(0, 40) and _is_telling(engines[0].scheduler, kind):
            break
    for longest in {3: [98], 4: [12, 9], 5: [10, 10, 10]}.get(kind, []):
        chats.add_to(engines, longest)
    for _ in range(rng.randint(0, 3)):
        chats.add_to(engines)
    theirs, mine = (engine.scheduler for engine in engines)
    theirs.__class__, mine.__class__ = _Reference, cls
    return theirs, mine


def describe(scheduler: Any) -> str:
    """A situation in words."""
    config, manager = scheduler.config, scheduler.block_manager
    running = ", ".join(
        f"{seq.request.request_id} ({seq.num_tokens} tokens, {seq.num_uncomputed_tokens} to compute)" for seq in scheduler.running
    )
    first = list(scheduler.waiting)[:3]
    more = f" and {len(scheduler.waiting) - 3} more" if len(scheduler.waiting) > 3 else ""
    waiting = ", ".join(
        f"{seq.request.request_id} ({seq.num_tokens} tokens, {len(manager.find_cached_blocks(seq)) * manager.block_size} of them in the cache"
        f"{', preempted before' if seq.request.metrics.num_preemptions else ''})"
        for seq in first
    )
    return (
        f"running: {running or 'nobody'}; waiting: {waiting or 'nobody'}{more}. max_num_seqs={config.max_num_seqs}, max_num_batched_tokens={config.max_num_batched_tokens}; "
        f"{manager.get_num_free_gpu_blocks()} of {manager.num_gpu_blocks} blocks are free, watermark {manager.watermark_blocks}."
    )


def picture_of(scheduler: Any, output: SchedulerOutput) -> dict[str, Any]:
    """The observable state of a scheduler and the step being built."""
    everybody = [*scheduler.running, *scheduler.waiting]
    manager = scheduler.block_manager
    return {
        "tokens to compute": {part.seq.request.request_id: part.num_tokens for part in output.scheduled},
        "order of the batch": [part.seq.request.request_id for part in output.scheduled],
        "preempted": [seq.request.request_id for seq in output.preempted],
        "num_batched_tokens": output.num_batched_tokens,
        "num_prefills": output.num_prefills,
        "running": [seq.request.request_id for seq in scheduler.running],
        "waiting": [seq.request.request_id for seq in scheduler.waiting],
        "num_computed_tokens": {seq.request.request_id: seq.num_computed_tokens for seq in everybody},
        "num_cached_tokens": {seq.request.request_id: seq.request.metrics.num_cached_tokens for seq in everybody},
        "status": {seq.request.request_id: seq.status.value for seq in everybody},
        "block tables": {number: list(table) for number, table in sorted(manager.block_tables.items())},
        "tables in the batch": {part.seq.request.request_id: list(part.block_table) for part in output.scheduled},
        "free blocks": manager.get_num_free_gpu_blocks(),
    }


_LOOK = {
    "tokens to compute": "how many tokens each sequence computes: num_uncomputed_tokens, what was found in the cache, and what is left of the budget (output.num_batched_tokens says how much is taken)",
    "order of the batch": "the order in which sequences are added",
    "preempted": "make_room_for: for which sequence it is called, and in which order",
    "num_prefills": "what counts as a prefill: each prompt, or chunk of one",
    "num_computed_tokens": "num_computed_tokens: what was found when it was admitted; 0 for a sequence that was not",
    "num_cached_tokens": "metrics.num_cached_tokens: only of requests that are admitted for the first time",
    "free blocks": "which blocks are taken, and whether a failed attempt keeps any",
    "tables in the batch": "append_slots before add: the table is passed on as it is at that moment",
}


def compare(said: str, theirs: Any, mine: Any, outputs: tuple[SchedulerOutput, SchedulerOutput]) -> None:
    """Raise an AssertionError about the first difference."""
    expected, got = picture_of(theirs, outputs[0]), picture_of(mine, outputs[1])
    for name, value in expected.items():
        expect(said, name, value, got[name], _LOOK.get(name, f"what changes {name}"))


def check_continuing(cls: Any) -> None:
    """Decodes and chunks, in random situations."""
    for number in range(2 * _ROUNDS):
        theirs, mine = make_twins(cls, f"continuing {number}")
        if number % 3 == 0:  # several in the middle of their prompts
            for scheduler in (theirs, mine):
                for seq in scheduler.running[1:]:
                    seq.num_computed_tokens = max(0, seq.num_computed_tokens - 2)
        said = describe(theirs)
        outputs = SchedulerOutput(), SchedulerOutput()
        for scheduler, output in zip((theirs, mine), outputs, strict=True):
            scheduler.schedule_decodes(output)
        compare(f"After schedule_decodes(output). Before: {said}", theirs, mine, outputs)
        limit = theirs.config.max_num_batched_tokens
        taken = max(outputs[0].num_batched_tokens, seeded(f"taken {number}").choice((0, 0, limit - 2, limit)))
        for scheduler, output in zip((theirs, mine), outputs, strict=True):
            output.num_batched_tokens = taken
            scheduler.schedule_chunks(output)
        compare(f"After schedule_chunks(output), with {taken} tokens given away before. At first: {said}", theirs, mine, outputs)


def check_admit(cls: Any) -> None:
    """Newcomers, and the whole step, in random situations."""
    for number in range(3 * _ROUNDS):
        theirs, mine = make_twins(cls, f"admit {number}")
        said = ""
        if number % 3 == 0 and theirs.running:
            _try_in_vain(theirs)
            _try_in_vain(mine)
            said = " admit was called once before, when no block could be had; since then all free blocks were handed out to others and came back."
        said = describe(theirs) + said
        outputs = SchedulerOutput(), SchedulerOutput()
        limit = theirs.config.max_num_batched_tokens
        for output in outputs:  # as if others had taken a part of the budget
            output.num_batched_tokens = seeded(f"taken {number}").choice((0, 0, limit // 2, limit - 1, limit))
        said = f"admit(output), {outputs[0].num_batched_tokens} tokens are given away already. Before: {said}"
        for scheduler, output in zip((theirs, mine), outputs, strict=True):
            scheduler.admit(output)
        compare(said, theirs, mine, outputs)
    for number in range(_ROUNDS):
        theirs, mine = make_twins(cls, f"schedule {number}")
        said = f"schedule(). Before: {describe(theirs)}"
        outputs = Scheduler.schedule(theirs), cls.schedule(mine)
        if not isinstance(outputs[1], SchedulerOutput):
            fail(f"{said}\nExpected: a SchedulerOutput\nGot: {outputs[1]!r}\nLook at what schedule returns.")
        compare(said, theirs, mine, outputs)
    _check_nobody_joins_after_a_preemption(cls)


def _try_in_vain(scheduler: Any) -> None:
    """Have `admit` fail for lack of blocks, and then lose what the free blocks hold."""
    manager = scheduler.block_manager
    pool, watermark = manager.gpu_allocator, manager.watermark_blocks
    manager.watermark_blocks = 10**6
    scheduler.admit(SchedulerOutput())
    manager.watermark_blocks = watermark
    held = [pool.allocate() for _ in range(pool.num_free)]
    for block in held:
        pool.release(block)


def _check_nobody_joins_after_a_preemption(cls: Any) -> None:
    def preempt(self: Any, output: SchedulerOutput) -> None:
        output.preempted.append(None)  # type: ignore[arg-type]

    made_up = type(cls.__name__, (cls,), {"schedule_decodes": preempt})
    for number in range(_ROUNDS):
        _, mine = make_twins(made_up, f"after {number}")
        before = [seq.request.request_id for seq in mine.waiting]
        said = f"A step in which schedule_decodes has preempted a sequence. Before: {describe(mine)}"
        made_up.schedule(mine)
        after = [seq.request.request_id for seq in mine.waiting]
        expect(said, "waiting", before, after, "when admit is called: not in a step with a preemption (output.preempted)")


def run_chats(scheduler_cls: Any, manager_cls: Any, seed: str) -> EngineTrace:
    """A random workload of chats in a simulated engine."""
    rng = seeded(seed)
    engine, chats = make_engine(scheduler_cls, manager_cls, rng), Chats(rng)
    look = "what each waits for (a place, budget, or blocks), and at what the methods return"
    errors = (RuntimeError, AttributeError, TypeError, KeyError, IndexError)
    return run_forty(engine, lambda number: chats.add_to([engine]), rng, "Forty requests of chats.", look, errors)


def steps_of(trace: EngineTrace) -> list[dict[str, Any]]:
    """A run's decisions, step by step."""
    return [record | {"cached": sorted(step.cached_blocks)} for record, step in zip(describe_steps(trace), trace, strict=True)]


def check_decisions(scheduler_cls: Any, manager_cls: Any) -> None:
    """The same steps as the package's scheduler and manager, alone and together."""
    for number, classes in enumerate(
        ((scheduler_cls, BlockSpaceManager), (Scheduler, manager_cls), (scheduler_cls, manager_cls), (scheduler_cls, manager_cls))
    ):
        seed = f"chats {number}"
        expected, got = run_chats(Scheduler, BlockSpaceManager, seed), run_chats(*classes, seed)
        said = f"Forty requests of chats, with {' and '.join(cls.__name__ for cls in classes)}."
        look = "the checks above, and what happens between two steps: freeing, evicting, matching"
        compare_steps(said, steps_of(expected), steps_of(got), look, "when a request ends")
        found = ({name: request.num_cached_tokens for name, request in trace.requests.items()} for trace in (expected, got))
        expect(f"{said} All steps are the same.", "num_cached_tokens", *found, "request.metrics.num_cached_tokens")
