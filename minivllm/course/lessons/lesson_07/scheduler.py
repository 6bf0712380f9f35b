"""The checks of lesson 07: a learner's scheduler against the package's own, in the same random situations.

Most checks set up one situation in the learner's class and in `minivllm.core.scheduler.Scheduler`, call the same method on both, and
compare queues, blocks and the resulting step. The other methods that it calls are replaced by correct ones, so that one mistake fails
one check.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minivllm.config import SchedulerConfig
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.course.lessons.lesson_07.situations import (
    STOP_TOKEN,
    Outputs,
    advance,
    compare,
    describe,
    make_batch,
    make_request,
    make_scene,
    make_twins,
    names_of,
    picture_of,
    place,
    take_blocks,
    take_out,
)
from minivllm.course.lessons.lesson_07.stages import correct_fits, isolate_stages
from minivllm.course.observations import Hint, expect, fail, require, rounds, seeded
from minivllm.request import Sequence, SequenceStatus
from minivllm.scheduler_output import ScheduledSequence, SchedulerOutput, SequenceOutput

_ROUNDS = 40
"""Random situations per check."""


# -- the checks, method by method ------------------------------------------------------------------------------------


def check_add_request(cls: type) -> None:
    """`add_request`: one sequence per request, at its place in the waiting queue."""
    for rng in rounds("add", _ROUNDS):
        policy = rng.choice(("fcfs", "priority"))
        mine, theirs = (maker(SchedulerConfig(policy=policy), BlockSpaceManager(4, 8)) for maker in (cls, Scheduler))
        for number in range(rng.randint(2, 9)):
            priority, arrival = rng.randint(0, 2), float(rng.randint(0, 3))
            requests = [make_request(str(number), 3, 9, priority=priority, arrival=arrival) for _ in range(2)]
            mine.add_request(requests[0])
            theirs.add_request(requests[1])
            said = f"Policy {policy!r}, after adding request {number} with priority {priority} and arrival_time {arrival}."
            expect(said, "request.sequences", ["one Sequence"], ["one " + type(s).__name__ for s in requests[0].sequences],
                    "request.sequences.append(...)")  # fmt: skip
            hints = {"waiting": "`order`, and where the sequence is inserted", "requests": "self.requests"}
            compare(said, theirs, mine, hints, skip="order")  # the package's has one number more
            seq = requests[0].sequences[0]
            order = (seq.seq_id,) if policy == "fcfs" else (priority, arrival, seq.seq_id)
            look = "what `order` is under this policy"
            what = f"seq.order, where seq_id is {seq.seq_id}"
            require(True, seq.order == order, f"{said}\nExpected {what}: {order}\nGot {what}: {seq.order}\nLook at {look}.")
            if rng.random() < 0.3:  # one leaves, and the next must not get the same number
                for scheduler in (mine, theirs):
                    request_id = names_of(scheduler.waiting)[-1]
                    take_out(scheduler, request_id)
        orders = [seq.order for seq in mine.waiting]
        expect(f"Policy {policy!r}, after adding all requests.", "different values of `order`", len(orders),
                len(set(orders)), "how `order` distinguishes requests of equal priority and arrival_time")  # fmt: skip
        seq_ids = [seq.seq_id for seq in mine.waiting]
        expect("After requests came and left.", "different values of `seq_id`", len(seq_ids), len(set(seq_ids)),
                "where seq_id comes from: len(self.requests) can repeat")  # fmt: skip


def check_abort_request(cls: type) -> None:
    """`finish` and `abort_request`: a sequence leaves its queue, and its blocks are freed."""
    for seed in range(_ROUNDS):
        mine, theirs = make_twins(cls, f"abort {seed}", running=(1, 4), waiting=(1, 3), swapped=(1, 3))
        rng = seeded(f"aborted {seed}")
        status = rng.choice((SequenceStatus.FINISHED_ABORTED, SequenceStatus.FINISHED_ERROR))
        for request_id in rng.sample([*sorted(mine.requests), "an unknown id"], 3):
            said = f"{describe(mine)} Then abort_request({request_id!r}, {status})."
            everyone = dict(mine.requests)
            theirs_everyone = dict(theirs.requests)
            for scheduler in (mine, theirs):
                scheduler.abort_request(request_id, status)
            compare(said, theirs, mine, {"blocks": "whether its blocks are freed", "requests": "self.requests"})
            if request_id in everyone:
                expected, got = (all_[request_id].sequences[0].status for all_ in (theirs_everyone, everyone))
                expect(said, "seq.status", expected, got, "the status passed to abort_request")
    request = make_request("a", 3, 9)
    scheduler = make_scene(cls, "default")
    place(scheduler, "waiting", Sequence(99, request), (99,))
    scheduler.abort_request("a")
    expect("abort_request('a') without a status.", "seq.status", SequenceStatus.FINISHED_ABORTED,
            request.sequences[0].status, "the default of `status`")  # fmt: skip


def check_fits(cls: type) -> None:
    """`fits`: the limits of sequences, tokens and blocks, each just met and just missed; some have joined in the same step."""
    for seed in range(4 * _ROUNDS):
        rng = seeded(f"fits {seed}")
        limit = ("sequences", "tokens", "blocks", "watermark", "no watermark")[seed % 5]
        running = (0, 0) if limit == "no watermark" else (1, 4)
        scheduler = make_scene(cls, f"fits {seed}", running=running, waiting=(1, 3), spare=(30, 30), prefill=True)
        manager, seq, output = scheduler.block_manager, scheduler.waiting[0], SchedulerOutput()
        newcomers = [other for other in scheduler.running if other.num_computed_tokens == 0]
        for other in newcomers:
            output.scheduled.append(ScheduledSequence(other, other.num_tokens, manager.get_block_table(other)))
            output.num_batched_tokens += other.num_tokens
            output.num_prefills += 1
        slack = rng.randint(-1, 1)
        places, tokens = len(scheduler.running) + 9, output.num_batched_tokens + seq.num_tokens + 9
        if limit == "sequences":
            places = len(scheduler.running) + 1 + min(slack, 0)
        elif limit == "tokens":
            tokens = max(len(scheduler.running) + 1, output.num_batched_tokens + seq.num_tokens + slack)
            places = min(places, tokens)
        else:
            manager.watermark_blocks = 2 if "watermark" in limit else 0  # with nothing running, it is not kept
            take_blocks(scheduler, manager.num_blocks_for(seq.num_tokens) + (2 if limit == "watermark" else 0) + slack)
        scheduler.config = SchedulerConfig(max_num_seqs=max(places, 1), max_num_batched_tokens=max(tokens, places, 1))
        said = (
            f"{len(scheduler.running)} of {scheduler.config.max_num_seqs} sequences are running, and {len(newcomers)} of them have "
            f"joined in this step. The step has {output.num_batched_tokens} of {scheduler.config.max_num_batched_tokens} tokens. "
            f"{manager.get_num_free_gpu_blocks()} blocks of {manager.block_size} tokens are free, and the watermark is "
            f"{manager.watermark_blocks}. The sequence has {seq.num_prompt_tokens} prompt and {seq.num_output_tokens} output tokens."
        )
        look = {
            "watermark": "the watermark: it is kept while something is running",
            "no watermark": "the watermark: it is not kept when nothing is running",
            "sequences": "the limit of sequences: the ones that joined in this step are already in self.running, so count them once",
            "tokens": "the limit of tokens: output.num_batched_tokens includes the sequences that have already joined",
        }.get(limit, f"the limit of {limit}")
        _check_fits(scheduler, seq, output, said, correct_fits(scheduler, seq, output), look)


def check_admit(cls: type) -> None:
    """`admit`: in order, up to the first sequence that does not fit."""
    isolated = isolate_stages(cls, 4)
    for seed in range(2 * _ROUNDS):
        mine, theirs = make_twins(isolated, f"admit {seed}", running=(0, 3), waiting=(0, 6), spare=(0, 14), budget=(8, 30))
        said = f"{describe(mine)} Then admit(output)."
        outputs = SchedulerOutput(), SchedulerOutput()
        theirs._admit(outputs[0])
        mine.admit(outputs[1])
        hints = {
            "running": "which sequences are admitted, and whether `put` keeps the queue sorted",
            "batch": "the first sequence that does not fit: nothing may overtake it",
            "num_prefills": "output.num_prefills",
        }
        compare(said, theirs, mine, hints, outputs)


def check_schedule(cls: type) -> None:
    """`schedule` and `decode`: prefill if any sequence can be admitted, else one token per running sequence."""
    _check_schedule(isolate_stages(cls, 5), "decode", {"running": (0, 5), "waiting": (0, 2), "spare": (8, 20)}, {
        "phase": "which comes first, prefill or decode", "batch": "which sequences are in the step, and how many tokens each computes",
        "blocks": "block_manager.append_slots(seq): the newest token needs a slot",
    }, may_preempt=False)  # fmt: skip


def check_update(cls: type) -> None:
    """`update`: tokens are counted and appended, and finished sequences leave."""
    isolated = isolate_stages(cls, 6)
    for seed in range(_ROUNDS):
        mine, theirs = make_twins(isolated, f"update {seed}", running=(1, 5), waiting=(0, 2), spare=(8, 8), prefill=True)
        rng = seeded(f"updated {seed}")
        tokens = [rng.choice((5, 6, STOP_TOKEN)) for _ in mine.running]
        aborted = mine.running[0].request.request_id if seed % 4 == 0 else None
        said = f"{describe(mine)} Then update(output, results) with new tokens {tokens}"
        said += f"; {aborted!r} was aborted during the step." if aborted else f"; the stop token is {STOP_TOKEN}."
        observations = []
        for scheduler in (theirs, mine):
            output = make_batch(scheduler)
            if aborted:
                seq = scheduler.running[0]
                scheduler.finish(seq, SequenceStatus.FINISHED_ABORTED) if scheduler is mine else theirs.abort_request(aborted)
            everyone = [part.seq for part in output.scheduled]
            advanced = scheduler.update(output, [SequenceOutput([token]) for token in tokens])
            observations.append({
                "token_ids": {seq.request.request_id: seq.token_ids for seq in everyone},
                "num_computed_tokens": {seq.request.request_id: seq.num_computed_tokens for seq in everyone},
                "status": {seq.request.request_id: seq.status.value for seq in everyone},
                "result": {seq.request.request_id: f"result {i}" for seq, i in advanced or ()},
                "returned sequences": [seq.request.request_id for seq, _ in advanced or ()],
            })  # fmt: skip
        for what, look in {
            "token_ids": "the new token, and which sequence gets none because it has already finished (seq.finished)",
            "num_computed_tokens": "num_computed_tokens: it grows by part.num_tokens",
            "status": "`ends`, and `finish` where it gives a status",
            "result": "what update returns: the pairs (sequence, index of its result in `results`)",
            "returned sequences": "what update returns: a pair for each sequence that got a token, in the order of the batch",
        }.items():
            expect(said, what, observations[0][what], observations[1][what], look)
        compare(said, theirs, mine, {"running": "which sequences have finished", "blocks": "what `finish` does"})


def check_recompute(cls: type) -> None:
    """`preempt`, and a `decode` that calls it: the latest sequence gives way and is recomputed later."""
    _check_schedule(isolate_stages(cls, 5), "recompute", {"running": (2, 6), "waiting": (0, 2), "spare": (0, 2)}, {
        "batch": "which sequence has a slot for its newest token; a preempted one computes nothing", "preempted": "which one gives way: the last in self.running, one at a time",
        "waiting": "where a preempted sequence goes, and its status", "blocks": "what preempt frees",
        "computed": "num_computed_tokens: the keys and values are gone", "preemptions": "request.metrics.num_preemptions",
    })  # fmt: skip
    _check_preempt(isolate_stages(cls, 5), "recompute")


def check_swap_out(cls: type) -> None:
    """`preempt` with `preemption_mode="swap"`: to the host if there is room, else recompute."""
    made = isolate_stages(cls, 5)
    scene = {"running": (2, 9), "spare": (0, 1), "mode": "any", "host": (0, 16), "longest_prompt": 3}
    _check_schedule(made, "swap out", scene, {
        "swapped": "config.preemption_mode and can_swap_out", "blocks_to_swap_out": "the pairs that swap_out returns",
        "computed": "num_computed_tokens: swapping out loses nothing",
    })  # fmt: skip
    _check_preempt(made, "swap")


def check_swap_in(cls: type) -> None:
    """`fits`, `swap_in` and `schedule` with swapped-out sequences: which comes back, and which must wait for it."""
    for seed in range(2 * _ROUNDS):
        scheduler = make_scene(
            cls, f"fits, some swapped out {seed}", running=(0, 2), waiting=(1, 2), swapped=(0, 2), spare=(2, 14)
        )
        seq, output = scheduler.waiting[0], SchedulerOutput()
        first = scheduler.swapped[0] if scheduler.swapped else None
        must_wait = first is not None and first.order < seq.order
        look = "the smaller `order` of swapped[0] and the sequence in question, and `super().fits(seq, output)` for the rest"
        said = f"{describe(scheduler)} Then fits(seq, output) for {seq.request.request_id!r}, whose order is {seq.order}" + (
            f", while the order of {first.request.request_id!r}, swapped out, is {first.order}."
            if first
            else ", and nothing is swapped out."
        )
        _check_fits(scheduler, seq, output, said, not must_wait and correct_fits(scheduler, seq, output), look)

    scene = {"running": (0, 3), "waiting": (0, 2), "swapped": (1, 4), "spare": (0, 14), "mode": "any", "host": (0, 16)}
    for seed in range(2 * _ROUNDS):
        _check_coming_back(cls, f"swap in {seed}", scene)
        _check_coming_back(cls, f"few tokens {seed}", scene | {"waiting": (0, 0), "spare": (6, 14), "budget": (1, 6)})
        alone = {"swapped": (1, 3), "spare": (30, 30), "mode": "swap"}
        _check_coming_back(cls, f"nobody runs {seed}", alone, is_tight=True)

    hints = {
        "phase": "`fits`, whether a newcomer may join before swapped-out sequences, and when schedule() calls swap_in: after `decode`, "
        "even if that found nothing to do, and never after a prefill",
        "preempted": "`decode` and `preempt`, as in the earlier stages",
        "batch": "which sequences are in the step: the running ones, then those that come back",
        "swapped_in": "when schedule() calls swap_in: after a decode, and only if no sequence was preempted in this step",
    }
    _check_schedule(cls, "swap in", scene, hints)
    _check_schedule(cls, "swap out and in", scene | {"running": (3, 5), "waiting": (0, 0), "spare": (0, 2)}, hints)


# -- helpers -------------------------------------------------------------------------------------------------------


def _check_preempt(cls: type, mode: str) -> None:
    """`preempt` preempts the sequence it is given, wherever that is in the queue."""
    for seed in range(_ROUNDS):
        mine, theirs = make_twins(cls, f"preempt {mode} {seed}", running=(2, 4), spare=(8, 8), mode=mode, host=(0, 12))
        place = seed % len(mine.running)
        name = mine.running[place].request.request_id
        outputs = SchedulerOutput(), SchedulerOutput()
        said = f"{describe(mine)} Then preempt({name!r}'s sequence, output)."
        theirs._preempt(theirs.running[place], outputs[0])
        mine.preempt(mine.running[place], outputs[1])
        compare(said, theirs, mine, {
            "preempted": "output.preempted", "running": "the sequence passed to `preempt`", "order": "seq.order: a preempted sequence keeps it, "
            "so it comes before all that arrived later", "waiting": "whether it waits now, and at its place", "swapped": "whether it is swapped out "
            "now, and at its place", "computed": "num_computed_tokens: 0 after recompute, unchanged after swap",
        }, outputs)  # fmt: skip


def _check_fits(scheduler: Any, seq: Sequence, output: SchedulerOutput, said: str, expected: bool, look: str) -> None:
    """`fits` gives the right answer, and changes nothing."""
    before = picture_of(scheduler, output)
    got = scheduler.fits(seq, output)
    after = picture_of(scheduler, output)
    expect(said, "fits(seq, output)", expected, bool(got), look)
    for name, value in before.items():
        expect(f"{said} It only asks a question, so nothing may change.", name, value, after[name],
                f"what fits() does to {name}: it must not change anything")  # fmt: skip


def _check_coming_back(cls: type, seed: str, scene: dict[str, Any], *, is_tight: bool = False) -> None:
    """`swap_in` by itself: which sequence comes back and why, what it brings along, and that it decodes.

    Args:
        is_tight: Leave just enough blocks, with a watermark, that the second may come back only if it counts the first as running.
    """
    mine, theirs = make_twins(cls, seed, **scene)
    if is_tight:
        rng = seeded(f"tight {seed}")
        needed = [theirs.block_manager.num_blocks_for(seq.num_tokens) for seq in theirs.swapped]
        watermark, num_left = rng.randint(1, 3), sum(needed[:2]) + rng.randint(0, 4)
        for scheduler in (mine, theirs):
            scheduler.config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, preemption_mode="swap")
            scheduler.block_manager.watermark_blocks = watermark
            take_blocks(scheduler, num_left)
    said = f"{describe(mine)} Then swap_in(output), with no preemption before it."
    outputs = SchedulerOutput(), SchedulerOutput()
    ran_before = bool(theirs.running)
    theirs._swap_in(outputs[0])
    mine.swap_in(outputs[1])
    compare(said, theirs, mine, {
        "phase": lambda: _explain_return(theirs, outputs, ran_before),
        "swapped_in": lambda: _explain_return(theirs, outputs, ran_before),
        "batch": _DECODES,
        "running": "the queue that a sequence goes to when it is back, and its place there",
        "swapped": "the queue that it leaves", "status": "the status of a sequence that is back",
        "computed": "num_computed_tokens: swapping in leaves it as it is", "blocks_to_swap_in": "the pairs that the manager's swap_in returns",
        "blocks": "append_slots after the manager's swap_in: the newest token needs a slot",
    }, outputs)  # fmt: skip


_DECODES = "what a sequence does when it is back: it decodes in the same step, `self.add(output, seq, 1)`"


def _explain_return(theirs: Any, outputs: Outputs, ran_before: bool) -> str:
    """Where to look when the wrong sequences come back: the rule that the first wrong one has broken."""
    right, wrong = (names_of(output.swapped_in) for output in outputs)
    if right == wrong:
        return _DECODES
    number = next(
        (i for i, (one, other) in enumerate(zip(right, wrong, strict=False)) if one != other), min(len(right), len(wrong))
    )
    if number < len(right) and number < len(wrong):
        return f"whose turn it is: {right[number]!r}, the first in self.swapped, and not {wrong[number]!r}"
    if number < len(right) and right[number] in names_of(part.seq for part in outputs[1].scheduled):
        return f"output.swapped_in: {right[number]!r} comes back, so it must be in there"
    if number < len(right):  # it may come, but did not
        watermark = "" if ran_before or number else " Nothing runs, so the watermark is not kept."
        return (
            f"why {right[number]!r} does not come back: it is its turn, a place is free, and so are its blocks.{watermark} "
            f"It computes one token, and the budget of tokens always has room for one token per place"
        )
    if len(set(wrong)) < len(wrong):
        return "how a sequence leaves self.swapped: one came back twice"
    seq, waiting = theirs.swapped.first(), theirs.waiting.first()
    name, manager = seq.request.request_id, theirs.block_manager
    if wrong[number] != name:
        return f"whose turn it is: {name!r}, which cannot come back yet, and nothing overtakes it"
    if waiting is not None and waiting.order < seq.order:
        return f"whose turn it is: {waiting.request.request_id!r} in self.waiting has a smaller `order` than {name!r}"
    if len(theirs.running) >= theirs.config.max_num_seqs:
        return f"max_num_seqs: {len(theirs.running)} sequences run when it is the turn of {name!r}"
    count = len(theirs.running)
    return (
        f"can_swap_in and its keep_watermark when it is the turn of {name!r}: {count} sequence{'s run' if count != 1 else ' runs'} by then"
        f"{', those that came back before it among them' if number else ''}; it needs {manager.num_blocks_for(seq.num_tokens)} blocks, "
        f"{manager.get_num_free_gpu_blocks()} are free, and the watermark is {manager.watermark_blocks}"
    )


def _check_schedule(cls: type, name: str, scene: dict[str, Any], hints: Mapping[str, Hint], *, may_preempt: bool = True) -> None:
    """Let both schedulers schedule three steps in many situations.

    Args:
        may_preempt: Whether this stage handles running out of blocks; if not, only steps with enough blocks are tried.
    """
    for seed in range(2 * _ROUNDS):
        mine, theirs = make_twins(cls, f"{name} {seed}", **scene)
        earlier: list[SchedulerOutput] = []
        for step in ("schedule()", "schedule() again, when that step is done", "schedule() for the third time"):
            said = f"{describe(mine)} Then {step}."
            expected = theirs.schedule()
            if expected.preempted and not may_preempt:
                break
            got = mine.schedule()
            if not isinstance(got, SchedulerOutput):
                fail(f"{said} Expected a SchedulerOutput, but got {got!r}. Look at what schedule returns.")
            is_new = not any(got is output or got.scheduled is output.scheduled for output in earlier)
            new, look = (
                "a new SchedulerOutput",
                "where the SchedulerOutput is made: each step needs its own, with its own lists",
            )
            expect(said, "what schedule() returns", new, new if is_new else "that of an earlier step", look)
            compare(said, theirs, mine, hints, (expected, got))
            earlier.append(got)
            advance(expected)
            advance(got)
