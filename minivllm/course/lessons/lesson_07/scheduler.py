"""The checks of lesson 07: a learner's scheduler against the package's own, in the same random situations.

Most checks set up one situation in the learner's class and in `minivllm.core.scheduler.Scheduler`, call the same method on both, and
compare queues, blocks and the resulting step. The methods of earlier stages are replaced by correct ones, so that one mistake fails one
check.
"""

from __future__ import annotations

import random
from bisect import insort
from typing import Any

from minivllm.config import SchedulerConfig
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.course.lessons.lesson_07.situations import (
    STOP_TOKEN,
    Reference,
    Twins,
    describe,
    explain_turn,
    make_request,
    make_scene,
    make_twins,
    names_of,
    picture_of,
    take_blocks,
)
from minivllm.course.observations import expect, require, rounds, seeded
from minivllm.request import Sequence, SequenceStatus
from minivllm.scheduler_output import ScheduledSequence, SchedulerOutput, SequenceOutput

_ROUNDS = 40
"""Random situations per check."""


# -- correct versions of earlier stages, so that one mistake fails one check -----------------------------------------


def correct_fits(self: Any, seq: Sequence, output: SchedulerOutput) -> bool:
    """Whether a prompt stays within the limits of the step and of the cache."""
    tokens = output.num_batched_tokens + seq.num_tokens
    if len(self.running) >= self.config.max_num_seqs or tokens > self.config.max_num_batched_tokens:
        return False
    return bool(self.block_manager.can_allocate(seq, keep_watermark=bool(self.running)))


def correct_admit(self: Any, output: SchedulerOutput) -> None:
    """Admit waiting prompts, in order, while they fit."""
    while self.waiting and self.fits(self.waiting[0], output):
        seq = self.waiting.pop(0)
        self.block_manager.allocate(seq)
        seq.status = SequenceStatus.RUNNING
        insort(self.running, seq, key=lambda other: other.order)
        self.add(output, seq, seq.num_tokens)
        output.num_prefills += 1


def correct_finish(self: Any, seq: Sequence, status: SequenceStatus) -> None:
    """Take a sequence out of its queue and free its blocks."""
    getattr(self, seq.status.value).remove(seq)
    self.block_manager.free(seq)
    seq.status = status
    self.requests.pop(seq.request.request_id, None)


def isolate(cls: type, **methods: Any) -> type:
    """A learner's class with correct methods of earlier stages."""
    return type(cls.__name__, (cls,), methods)


# -- requests come and go --------------------------------------------------------------------------------------------


def check_add_request(cls: type) -> None:
    """`add_request`: one sequence per request, at its place in the waiting queue."""
    looks = {"waiting": "`order`, and where the sequence is inserted"}
    for rng in rounds("add", _ROUNDS):
        policy = rng.choice(("fcfs", "priority"))
        twins = Twins(*(maker(SchedulerConfig(policy=policy), BlockSpaceManager(4, 8)) for maker in (Reference, cls)))
        for number in range(rng.randint(2, 9)):
            priority, arrival, leaves = rng.randint(0, 2), float(rng.randint(0, 3)), rng.random() < 0.3
            twins.said = f"Policy {policy!r}, after adding request {number} with priority {priority} and arrival_time {arrival}."
            for scheduler, _ in twins:
                request = make_request(str(number), 3, 9, priority=priority, arrival=arrival)
                scheduler.add_request(request)
            made = ["one " + type(seq).__name__ for seq in request.sequences]
            expect(twins.said, "request.sequences", ["one Sequence"], made, "request.sequences.append(...)")
            twins.compare(looks, skip=("order",))  # the package's has one number more
            seq = request.sequences[0]
            order = (seq.seq_id,) if policy == "fcfs" else (priority, arrival, seq.seq_id)
            what = f"seq.order, where seq_id is {seq.seq_id}"
            wrong = f"{twins.said}\nExpected {what}: {order}\nGot {what}: {seq.order}\nLook at what `order` is under this policy."
            require(True, seq.order == order, wrong)
            for scheduler, _ in twins:
                if leaves:  # the next must not get the same number
                    del scheduler.requests[str(number)]
        numbers, look = [seq.seq_id for seq in twins.mine.waiting], "where seq_id comes from: len(self.requests) can repeat"
        expect("After requests came and left.", "different values of `seq_id`", len(numbers), len(set(numbers)), look)


def check_abort_request(cls: type) -> None:
    """`finish` and `abort_request`: a sequence leaves its queue, and its blocks are freed."""
    for seed in range(_ROUNDS):
        twins = make_twins(cls, f"abort {seed}", running=(1, 4), waiting=(1, 3), swapped=(1, 3))
        rng = seeded(f"aborted {seed}")
        status = rng.choice([(), (SequenceStatus.FINISHED_ABORTED,), (SequenceStatus.FINISHED_ERROR,)])
        for request_id in rng.sample([*sorted(twins.mine.requests), "an unknown id"], 3):
            twins.say(f"Then abort_request({', '.join([repr(request_id), *map(str, status)])}).")
            requests = [scheduler.requests.get(request_id) for scheduler, _ in twins]
            for scheduler, _ in twins:
                scheduler.abort_request(request_id, *status)
            twins.compare({"blocks": "whether its blocks are freed"})
            expected, got = (request and request.sequences[0].status for request in requests)
            expect(twins.said, "seq.status", expected, got, "the status passed to abort_request, and its default")


# -- admission -------------------------------------------------------------------------------------------------------

_LIMITS = {
    "sequences": "the limit of sequences: the ones that joined in this step are already in self.running, so count them once",
    "tokens": "the limit of tokens: output.num_batched_tokens includes the sequences that have already joined",
    "blocks": "the limit of blocks",
    "watermark": "the watermark: it is kept while something is running",
    "no watermark": "the watermark: it is not kept when nothing is running",
}
"""Where to look if `fits` is wrong about a limit."""


def make_limited(cls: type, seed: str, limit: str) -> tuple[Any, SchedulerOutput]:
    """A scheduler whose first waiting sequence just meets a limit, or just misses it; some have joined in the same step."""
    running = (0, 0) if limit == "no watermark" else (1, 4)
    scheduler = make_scene(cls, seed, running=running, waiting=(1, 3), spare=(30, 30), prefill=True)
    manager, seq, slack = scheduler.block_manager, scheduler.waiting[0], seeded(f"slack {seed}").randint(-1, 1)
    joined = [other for other in scheduler.running if other.num_computed_tokens == 0]
    parts = [ScheduledSequence(other, other.num_tokens, manager.get_block_table(other)) for other in joined]
    output = SchedulerOutput(parts, sum(part.num_tokens for part in parts), num_prefills=len(parts))
    places, tokens = len(scheduler.running) + 9, output.num_batched_tokens + seq.num_tokens + 9
    if limit == "sequences":
        places = max(1, len(scheduler.running) + 1 + min(slack, 0))
    elif limit == "tokens":
        tokens = max(len(scheduler.running) + 1, output.num_batched_tokens + seq.num_tokens + slack)
        places = min(places, tokens)
    else:
        manager.watermark_blocks = 2 if "watermark" in limit else 0  # with nothing running, it is not kept
        take_blocks(scheduler, manager.num_blocks_for(seq.num_tokens) + (2 if limit == "watermark" else 0) + slack)
    scheduler.config = SchedulerConfig(max_num_seqs=places, max_num_batched_tokens=max(tokens, places))
    return scheduler, output


def check_fits(cls: type) -> None:
    """`fits`: the limits of sequences, tokens and blocks, each just met and just missed; some have joined in the same step."""
    for seed in range(4 * _ROUNDS):
        limit = list(_LIMITS)[seed % len(_LIMITS)]
        scheduler, output = make_limited(cls, f"fits {seed}", limit)
        expected = correct_fits(scheduler, scheduler.waiting[0], output)
        _check_fits(scheduler, output, "", expected, _LIMITS[limit])


def _check_fits(scheduler: Any, output: SchedulerOutput, more: str, expected: bool, look: str) -> None:
    """`fits` gives the right answer for the first waiting sequence, and changes nothing."""
    seq = scheduler.waiting[0]
    said = f"{describe(scheduler, output)}{more} Then fits(seq, output) for {seq.request.request_id!r}."
    before, got, after = picture_of(scheduler, output), scheduler.fits(seq, output), picture_of(scheduler, output)
    expect(said, "fits(seq, output)", expected, bool(got), look)
    for name, value in before.items():
        look = f"what fits() does to {name}: it must not change anything"
        expect(f"{said} It only asks a question, so nothing may change.", name, value, after[name], look)


def _explain_admission(twins: Twins) -> str:
    """Where to look when not the right sequences are admitted, or with other numbers of tokens."""
    right, wrong = (names_of(part.seq for part in output.scheduled) for output in twins.outputs)

    def explain(scheduler: Any, output: SchedulerOutput, seq: Sequence) -> str:
        may = "may" if correct_fits(scheduler, seq, output) else "may not"
        return f"the loop: it is the turn of {seq.request.request_id!r}, and `fits` says that it {may} join"

    wrong_tokens = "how many tokens each computes: all that it has, its output too"
    return explain_turn(twins, "waiting", right, wrong, explain) or wrong_tokens


def check_admit(cls: type) -> None:
    """`admit`: in order, up to the first sequence that does not fit."""
    looks = dict.fromkeys(("phase", "batch", "order of the batch"), _explain_admission)
    isolated = isolate(cls, fits=correct_fits)
    for seed in range(2 * _ROUNDS):
        twins = make_twins(isolated, f"admit {seed}", running=(0, 3), waiting=(0, 6), spare=(0, 14), budget=(8, 30))
        twins.call("admit")
        twins.compare(looks)


# -- steps and their results -----------------------------------------------------------------------------------------


def check_schedule(cls: type) -> None:
    """`schedule` and `decode`: prefill if any sequence can be admitted, else one token per running sequence."""
    looks = {"phase": "which comes first, prefill or decode"}
    scene = {"running": (0, 5), "waiting": (0, 2), "spare": (30, 40)}  # enough blocks for three steps
    _check_schedule(isolate(cls, fits=correct_fits, admit=correct_admit), "decode", scene, looks)


def _check_schedule(cls: type, name: str, scene: dict[str, Any], looks: dict[str, Any]) -> None:
    """Let both schedulers schedule three steps in many situations."""
    new, look = "a new SchedulerOutput", "where the SchedulerOutput is made: each step needs its own, with its own lists"
    for seed in range(2 * _ROUNDS):
        twins, earlier = make_twins(cls, f"{name} {seed}", **scene), list[SchedulerOutput]()
        for call in ("schedule()", "schedule() again, when that step is done", "schedule() for the third time"):
            twins.schedule(call)
            got = twins.outputs[1]
            is_new = not any(got is output or got.scheduled is output.scheduled for output in earlier)
            expect(twins.said, "what schedule() returns", new, new if is_new else "that of an earlier step", look)
            twins.compare(looks)
            earlier.append(got)
            for output in twins.outputs:  # everything scheduled is computed, and each gets a token that ends nothing
                for part in output.scheduled:
                    part.seq.num_computed_tokens += part.num_tokens
                    part.seq.token_ids.append(1)


_UPDATED = {
    "token_ids": "the new token, and which sequence gets none because it has already finished (seq.finished)",
    "num_computed_tokens": "num_computed_tokens: it grows by part.num_tokens",
    "status": "`ends`, and `finish` where it gives a status",
    "result": "what update returns: the pairs (sequence, index of its result in `results`)",
    "returned sequences": "what update returns: a pair for each sequence that got a token, in the order of the batch",
}


def _update(scheduler: Any, tokens: list[int], aborted: bool) -> dict[str, Any]:
    """Let all running sequences compute what they can, and give each a token. What has become of them."""
    manager, sequences, parts = scheduler.block_manager, list(scheduler.running), []
    for seq in sequences:
        if seq.num_uncomputed_tokens == 1:
            manager.append_slots(seq)
        parts.append(ScheduledSequence(seq, seq.num_uncomputed_tokens, manager.get_block_table(seq)))
    if aborted:
        scheduler.finish(sequences[0], SequenceStatus.FINISHED_ABORTED)
    advanced = scheduler.update(SchedulerOutput(parts), [SequenceOutput([token]) for token in tokens]) or ()
    return {
        "token_ids": {seq.request.request_id: seq.token_ids for seq in sequences},
        "num_computed_tokens": {seq.request.request_id: seq.num_computed_tokens for seq in sequences},
        "status": {seq.request.request_id: seq.status.value for seq in sequences},
        "result": {seq.request.request_id: f"result {i}" for seq, i in advanced},
        "returned sequences": names_of(seq for seq, _ in advanced),
    }


def check_update(cls: type) -> None:
    """`update`: tokens are counted and appended, and finished sequences leave."""
    isolated = isolate(cls, finish=correct_finish)
    for seed in range(_ROUNDS):
        twins = make_twins(isolated, f"update {seed}", running=(1, 5), waiting=(0, 2), spare=(8, 8), prefill=True)
        rng, aborted = seeded(f"updated {seed}"), seed % 4 == 0
        tokens = [rng.choice((5, 6, STOP_TOKEN)) for _ in twins.mine.running]
        event = (
            f"{names_of(twins.mine.running)[0]!r} was aborted during the step" if aborted else f"the stop token is {STOP_TOKEN}"
        )
        twins.say(f"Then update(output, results) with new tokens {tokens}; {event}.")
        expected, got = (_update(scheduler, tokens, aborted) for scheduler, _ in twins)
        for what, look in _UPDATED.items():
            expect(twins.said, what, expected[what], got[what], look)
        twins.compare({"running": "which sequences have finished", "blocks": "what `finish` does"})


# -- preemption ------------------------------------------------------------------------------------------------------


def _check_preempt(cls: type, mode: str) -> None:
    """`preempt` preempts the sequence it is given, wherever that is in the queue."""
    for seed in range(_ROUNDS):
        twins = make_twins(cls, f"preempt {mode} {seed}", running=(2, 4), spare=(8, 8), mode=mode, host=(0, 12))
        place = seed % len(twins.mine.running)
        twins.say(f"Then preempt({names_of(twins.mine.running)[place]!r}'s sequence, output).")
        for scheduler, output in twins:
            scheduler.preempt(scheduler.running[place], output)
        twins.compare({"running": "the sequence passed to `preempt`"})


def check_recompute(cls: type) -> None:
    """`preempt`, and a `decode` that calls it: the latest sequence gives way and is recomputed later."""
    looks = {
        "batch": "which sequence has a slot for its newest token; a preempted one computes nothing",
        "waiting": "where a preempted sequence goes, at its place, and its status",
        "blocks": "what preempt frees",
    }
    isolated = isolate(cls, fits=correct_fits, admit=correct_admit)
    _check_schedule(isolated, "recompute", {"running": (2, 6), "waiting": (0, 2), "spare": (0, 4)}, looks)
    _check_preempt(isolated, "recompute")


def check_swap_out(cls: type) -> None:
    """`preempt` with `preemption_mode="swap"`: to the host if there is room, else recompute."""
    isolated = isolate(cls, fits=correct_fits, admit=correct_admit)
    scene = {"running": (2, 9), "spare": (0, 4), "mode": "any", "host": (0, 16), "longest_prompt": 3}
    _check_schedule(isolated, "swap out", scene, {"swapped": "config.preemption_mode and can_swap_out"})
    _check_preempt(isolated, "swap")


# -- back from the host ----------------------------------------------------------------------------------------------

_DECODES = "what a sequence does when it is back: it decodes in the same step, `self.add(output, seq, 1)`"


def _explain_return(twins: Twins) -> str:
    """Where to look when not the right sequences come back: the rule that the first wrong one has broken."""
    right, wrong = (names_of(output.swapped_in) for output in twins.outputs)
    batches = [names_of(part.seq for part in output.scheduled) for output in twins.outputs]
    if right != wrong and batches[0] == batches[1]:
        return "output.swapped_in: those that come back must be in there, too"

    def explain(scheduler: Any, output: SchedulerOutput, seq: Sequence) -> str:
        name, first, count = seq.request.request_id, next(iter(scheduler.waiting), None), len(scheduler.running)
        if first is not None and first.order < seq.order:
            return f"whose turn it is: {first.request.request_id!r} in self.waiting has a smaller `order` than {name!r}"
        if count >= scheduler.config.max_num_seqs:
            return f"max_num_seqs: {count} sequences run when it is the turn of {name!r}"
        manager, among = scheduler.block_manager, ", those that came back before it among them" if output.swapped_in else ""
        if manager.can_swap_in(seq, keep_watermark=count > 0):
            watermark = "" if count else " Nothing runs, so the watermark is not kept."
            tokens = "It computes one token, and the budget of tokens always has room for one token per place"
            return f"why {name!r} does not come back: it is its turn, a place is free, and so are its blocks.{watermark} {tokens}"
        blocks = f"{manager.num_blocks_for(seq.num_tokens)} blocks, {manager.get_num_free_gpu_blocks()} are free, and the watermark is {manager.watermark_blocks}"
        run = f"{count} sequence{'s run' if count != 1 else ' runs'} by then{among}"
        return f"can_swap_in and its keep_watermark when it is the turn of {name!r}: {run}; it needs {blocks}"

    return explain_turn(twins, "swapped", right, wrong, explain) or _DECODES


_BACK = {
    "phase": _explain_return,
    "swapped_in": _explain_return,
    "batch": _DECODES,
    "running": "the queue that a sequence goes to when it is back, and its place there",
    "blocks": "append_slots after the manager's swap_in: the newest token needs a slot",
}
_SWAP_IN = {
    "phase": "`fits`, whether a newcomer may join before swapped-out sequences, and when schedule() calls swap_in: after `decode`, even if that found nothing to do, and never after a prefill",
    "batch": "which sequences are in the step: the running ones, then those that come back",
    "swapped_in": "when schedule() calls swap_in: after a decode, and only if no sequence was preempted in this step",
}


def _tighten(twins: Twins, rng: random.Random) -> None:
    """Leave just enough blocks, with a watermark, that the second may come back only if it counts the first as running."""
    needed = [twins.theirs.block_manager.num_blocks_for(seq.num_tokens) for seq in twins.theirs.swapped]
    watermark, num_left = rng.randint(1, 3), sum(needed[:2]) + rng.randint(0, 4)
    for scheduler, _ in twins:
        scheduler.config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, preemption_mode="swap")
        scheduler.block_manager.watermark_blocks = watermark
        take_blocks(scheduler, num_left)


def check_swap_in(cls: type) -> None:
    """`fits`, `swap_in` and `schedule` with swapped-out sequences: which comes back, and which must wait for it."""
    look = "the smaller `order` of swapped[0] and the sequence in question, and `super().fits(seq, output)` for the rest"
    for seed in range(2 * _ROUNDS):
        limits = {"running": (0, 2), "waiting": (1, 2), "swapped": (0, 2), "spare": (2, 14)}
        scheduler = make_scene(cls, f"fits, some swapped out {seed}", **limits)
        orders = {seq.request.request_id: seq.order for seq in (scheduler.waiting[0], *scheduler.swapped[:1])}
        expected = min(orders.values()) == scheduler.waiting[0].order and correct_fits(
            scheduler, scheduler.waiting[0], SchedulerOutput()
        )
        _check_fits(scheduler, SchedulerOutput(), f" Their `order`: {orders}.", expected, look)
    scene = {"running": (0, 3), "waiting": (0, 2), "swapped": (1, 4), "spare": (0, 14), "mode": "any", "host": (0, 16)}
    few_tokens = scene | {"waiting": (0, 0), "spare": (6, 14), "budget": (1, 6)}
    nobody_runs = {"swapped": (1, 3), "spare": (30, 30), "mode": "swap"}
    for seed in range(2 * _ROUNDS):
        for name, options in {"swap in": scene, "few tokens": few_tokens, "nobody runs": nobody_runs}.items():
            twins = make_twins(cls, f"{name} {seed}", **options)
            if options is nobody_runs:
                _tighten(twins, seeded(f"tight {seed}"))
            twins.call("swap_in")
            twins.compare(_BACK)
    _check_schedule(cls, "swap in", scene, _SWAP_IN)
    _check_schedule(cls, "swap out and in", scene | {"running": (3, 5), "waiting": (0, 0), "spare": (0, 4)}, _SWAP_IN)
