"""The checks of lesson 10 for a scheduler with one budget: one method after another, and then whole workloads."""

from __future__ import annotations

import random
from typing import Any

from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.course.lessons.budget import BudgetScheduler
from minivllm.course.lessons.lesson_07.engine import compare_steps, describe_steps, run_forty
from minivllm.course.lessons.lesson_07.situations import Twins, count_tokens, explain_turn, names_of
from minivllm.course.observations import expect, seeded
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.trace import EngineTrace
from minivllm.request import Sequence
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler_output import SchedulerOutput
from minivllm.simulation.engine import make_simulated_engine

_ROUNDS = 60


class _Reference(BudgetScheduler):
    """The package's decisions under the names of the lesson."""

    schedule_decodes, schedule_chunks, admit = Scheduler._schedule_decodes, Scheduler._schedule_prefill_chunks, Scheduler._admit


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
        self.beginnings = [self._tokens(rng.choice((4, 8, 13, 20))) for _ in range(3)]
        self.number = 0

    def _tokens(self, number: int) -> list[int]:
        return [self.rng.randrange(100) for _ in range(number)]

    def add_to(self, engines: list[LLMEngine], longest: int | None = None) -> None:
        """Add the next request to each engine: one like an earlier one, or a new one that is as long as can be."""
        rng = self.rng
        prompt = rng.choice([*self.beginnings, []]) + self._tokens(rng.choice((0, 1, 3, rng.randint(0, 30))))
        prompt = (prompt[:60] or [5]) if longest is None else self._tokens(longest - rng.randrange(3))
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


def make_twins(cls: Any, seed: str) -> Twins:
    """A learner's scheduler and the reference in the same situation: the package's decisions have brought both there."""
    rng = seeded(seed)
    shape, kind = int(rng.random() * 2**61), rng.randrange(7)  # of a float, the hash would be the seed: another one in a browser
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
    twins = Twins(*(engine.scheduler for engine in engines))
    twins.theirs.__class__, twins.mine.__class__ = _Reference, cls
    return twins


# -- where to look -----------------------------------------------------------------------------------------------------


def _explain_admission(twins: Twins) -> str:
    """Where to look when admission goes wrong: the limit, or the order, that the first wrong newcomer was about."""
    right, wrong = ({part.seq.request.request_id: part.num_tokens for part in output.scheduled} for output in twins.outputs)
    different = (pair for pair in zip(right.items(), wrong.items(), strict=False) if pair[0] != pair[1])
    (name, expected), (other, got) = next(different, (("", 0), ("nobody", 0)))
    if name != other:
        turn = explain_turn(twins, "waiting", list(right), list(wrong), _explain_limits)
        return turn or "what becomes of a newcomer: it leaves self.waiting, and `join` puts it into self.running"
    found = twins.theirs.requests[name].sequences[0].num_computed_tokens
    if found and got > expected:
        return f"cached tokens: {found} tokens of {name!r} were found in the cache, so they are not computed again and take nothing of the budget"
    if got < expected:
        return f"cached tokens: {found} tokens of {name!r} are in the cache at this turn, whatever was found before; and at the budget, all of which it may take"
    return "the budget: a newcomer computes what was not found in the cache, and no more than is left of max_num_batched_tokens"


def _explain_limits(scheduler: Any, output: SchedulerOutput, seq: Sequence) -> str:
    """What keeps a sequence waiting at its turn, or what does not."""
    manager, config, name = scheduler.block_manager, scheduler.config, seq.request.request_id
    cached, keep = manager.find_cached_blocks(seq), bool(scheduler.running)
    places, budget = config.max_num_seqs - len(scheduler.running), config.max_num_batched_tokens - output.num_batched_tokens
    rest = seq.num_tokens - len(cached) * manager.block_size
    needed = f"{name!r} needs {manager.num_blocks_for(seq.num_tokens)} blocks, {len(cached)} of which are in the cache"
    blocks = f"{needed}; {manager.get_num_free_gpu_blocks()} are free, and the watermark is {manager.watermark_blocks}"
    if places <= 0:
        return f"the places: max_num_seqs sequences run when it is the turn of {name!r}"
    if budget <= 0:
        return f"the budget: nothing of max_num_batched_tokens is left when it is the turn of {name!r}"
    if not manager.can_allocate(seq, cached, keep):
        return f"can_allocate, and the watermark, which is kept while something runs: {blocks}"
    if not manager.can_allocate(seq, cached, keep_watermark=True):
        return f"the watermark: nothing runs, so it is not kept; {blocks}"
    if not manager.can_allocate(seq, [], keep):
        return f"cached tokens: pass what find_cached_blocks found on to can_allocate; {blocks}"
    if budget < rest:
        return f"the budget: {count_tokens(budget)} can be computed, and {name!r} may join with a part of the {rest} that it has to compute"
    return f"the loop: it is the turn of {name!r}, places ({places}), budget ({count_tokens(budget)}) and blocks are left, and several may join in a step"


_LOOKS = {
    "batch": "how many tokens each computes: num_uncomputed_tokens, and what is left of the budget (output.num_batched_tokens says how much is taken)",
    "order of the batch": "the order in which sequences are added",
    "preempted": "make_room_for: for which sequence it is called, and in which order",
}
_ADMIT = dict.fromkeys(("batch", "order of the batch", "running", "waiting"), _explain_admission) | {
    "num_computed_tokens": "num_computed_tokens: what was found when it was admitted; 0 for a sequence that was not",
    "num_cached_tokens": "metrics.num_cached_tokens: only of requests that are admitted for the first time",
    "blocks": "cached tokens: the found blocks are passed on to allocate",
    "free blocks": "which blocks are taken, and whether a failed attempt keeps any",
}
_VAIN = " admit was called once before, when no block could be had; since then all free blocks were handed out to others and came back."
_ORDER = "what schedule calls, and in which order: decodes, then chunks, and newcomers last"
_SCHEDULE = _ADMIT | dict.fromkeys(("batch", "order of the batch", "preempted", "running", "waiting"), _ORDER)


# -- the checks ------------------------------------------------------------------------------------------------------


def check_continuing(cls: Any) -> None:
    """Decodes and chunks, in random situations."""
    for number in range(2 * _ROUNDS):
        twins = make_twins(cls, f"continuing {number}")
        for scheduler, _ in twins:
            for seq in scheduler.running[1:] if number % 3 == 0 else []:  # several in the middle of their prompts
                seq.num_computed_tokens = max(0, seq.num_computed_tokens - 2)
        twins.call("schedule_decodes")
        twins.compare(_LOOKS, skip=("phase",))
        limit = twins.theirs.config.max_num_batched_tokens
        _give_away(twins, max(twins.outputs[0].num_batched_tokens, seeded(f"taken {number}").choice((0, 0, limit - 2, limit))))
        twins.call("schedule_chunks")
        twins.compare(_LOOKS, skip=("phase",))


def check_admit(cls: Any) -> None:
    """Newcomers, and the whole step, in random situations."""
    for number in range(3 * _ROUNDS):
        twins = make_twins(cls, f"admit {number}")
        in_vain = number % 3 == 0 and bool(twins.theirs.running)
        if in_vain:
            _try_in_vain(twins)
        limit = twins.theirs.config.max_num_batched_tokens
        _give_away(twins, seeded(f"taken {number}").choice((0, 0, limit // 2, limit - 1, limit)))
        twins.call("admit")
        twins.said += (
            " admit was called once before, when no block could be had; since then all free blocks were handed out to others and came back."
            * in_vain
        )
        twins.compare(_ADMIT, skip=("phase",))
    for number in range(_ROUNDS):
        twins = make_twins(cls, f"schedule {number}")
        twins.schedule()
        twins.compare(_SCHEDULE, skip=("phase",))
    _check_after_a_preemption(cls)


def _check_after_a_preemption(cls: Any) -> None:
    """Nobody joins in a step with a preemption."""
    for number in range(_ROUNDS):
        twins = make_twins(cls, f"after {number}")
        twins.say("Then a schedule() whose schedule_decodes has preempted a sequence.")
        twins.mine.schedule_decodes = lambda output: output.preempted.append(None)
        before, _ = names_of(twins.mine.waiting), twins.mine.schedule()
        look = "when admit is called: not in a step with a preemption (output.preempted)"
        expect(twins.said, "waiting", before, names_of(twins.mine.waiting), look)


def _give_away(twins: Twins, num_tokens: int) -> None:
    """A part of the budget is taken, as if by others."""
    for _, output in twins:
        output.num_batched_tokens = num_tokens


def _try_in_vain(twins: Twins) -> None:
    """Have `admit` fail for lack of blocks, and then lose what the free blocks hold."""
    managers = [scheduler.block_manager for scheduler, _ in twins]
    watermark = managers[0].watermark_blocks
    for manager in managers:
        manager.watermark_blocks = 10**6
    twins.call("admit")
    twins.compare(_ADMIT, skip=("phase",))
    for manager in managers:
        manager.watermark_blocks = watermark
        for block in [manager.gpu_allocator.allocate() for _ in range(manager.get_num_free_gpu_blocks())]:
            manager.gpu_allocator.release(block)


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
    both, look = (scheduler_cls, manager_cls), "the checks above, and what happens between two steps: freeing, evicting, matching"
    for number, classes in enumerate(((scheduler_cls, BlockSpaceManager), (Scheduler, manager_cls), both, both)):
        expected, got = (run_chats(*pair, f"chats {number}") for pair in ((Scheduler, BlockSpaceManager), classes))
        said = f"Forty requests of chats, with {' and '.join(cls.__name__ for cls in classes)}."
        compare_steps(said, steps_of(expected), steps_of(got), look, "when a request ends")
        found = ({name: request.num_cached_tokens for name, request in trace.requests.items()} for trace in (expected, got))
        expect(f"{said} All steps are the same.", "num_cached_tokens", *found, "request.metrics.num_cached_tokens")
