"""The checks of lesson 07: a learner's scheduler against the package's own, in the same random situations.

Most checks set up one situation in the learner's class and in `minivllm.core.scheduler.Scheduler`, call the same method on both, and
compare queues, blocks and the resulting step. The other methods that it calls are replaced by correct ones, so that one mistake fails
one check.
"""

from __future__ import annotations

import random
from bisect import insort
from typing import TYPE_CHECKING, Any

from minivllm.bench.replay import first_difference
from minivllm.bench.simulation import make_simulated_engine
from minivllm.config import SchedulerConfig
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.course.lessons.lesson_07.situations import (
    STOP_TOKEN,
    compare,
    describe,
    expect,
    make_batch,
    make_request,
    make_scene,
    make_twins,
    names_of,
    picture_of,
    place,
    take_out,
)
from minivllm.engine.trace import EngineTrace
from minivllm.request import Sequence, SequenceStatus
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler_output import SchedulerOutput, SequenceOutput

if TYPE_CHECKING:
    from minivllm.entrypoints.llm import LLM

_ROUNDS = 40
"""Random situations per check."""


# -- the checks, method by method ------------------------------------------------------------------------------------


def check_add_request(cls: type) -> None:
    """`add_request`: one sequence per request, at its place in the waiting queue."""
    for seed in range(_ROUNDS):
        rng = random.Random(f"add {seed}")
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
            compare(said, theirs, mine, {"waiting": "`order`, and where the sequence is inserted", "requests": "self.requests"})
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
        rng = random.Random(f"aborted {seed}")
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
    """`fits`: the limits of sequences, tokens and blocks, each just met and just missed."""
    for seed in range(3 * _ROUNDS):
        rng = random.Random(f"fits {seed}")
        limit = ("sequences", "tokens", "blocks", "watermark", "no watermark")[seed % 5]
        scheduler = make_scene(
            cls, f"fits {seed}", running=(0, 0) if limit == "no watermark" else (1, 4), waiting=(1, 1), spare=(30, 30)
        )
        manager, seq, output = scheduler.block_manager, scheduler.waiting[0], SchedulerOutput()
        slack = rng.randint(-1, 1)
        output.num_batched_tokens = rng.randint(0, 20)
        places, tokens = len(scheduler.running) + 3, output.num_batched_tokens + seq.num_tokens + 3
        if limit == "sequences":
            places = len(scheduler.running) + 1 + min(slack, 0)
        elif limit == "tokens":
            tokens = max(places, output.num_batched_tokens + seq.num_tokens + slack)
        else:
            manager.watermark_blocks = 2 if "watermark" in limit else 0  # with nothing running, it is not kept
            needed = manager.num_blocks_for(seq.num_tokens) + (2 if limit == "watermark" else 0) + slack
            while manager.get_num_free_gpu_blocks() > max(needed, 0):
                manager.gpu_allocator.allocate()
        scheduler.config = SchedulerConfig(max_num_seqs=max(places, 1), max_num_batched_tokens=max(tokens, places, 1))
        expected = _fits(scheduler, seq, output)
        before = picture_of(scheduler)
        got = scheduler.fits(seq, output)
        said = (
            f"{len(scheduler.running)} of {scheduler.config.max_num_seqs} sequences are running. The step has "
            f"{output.num_batched_tokens} of {scheduler.config.max_num_batched_tokens} tokens. "
            f"{manager.get_num_free_gpu_blocks()} blocks of {manager.block_size} tokens are free, and the watermark is "
            f"{manager.watermark_blocks}. The sequence has {seq.num_prompt_tokens} prompt and {seq.num_output_tokens} output tokens."
        )
        look = "the watermark: it is kept only while something is running" if "watermark" in limit else f"the limit of {limit}"
        expect(said, "fits(seq, output)", expected, bool(got), look)
        expect(said, "what fits() changes", "nothing", "nothing" if picture_of(scheduler) == before else "something",
                "what fits() calls: it must not change anything")  # fmt: skip


def check_admit(cls: type) -> None:
    """`admit`: in order, up to the first sequence that does not fit."""
    isolated = _isolate(cls, fits=_fits)
    for seed in range(2 * _ROUNDS):
        mine, theirs = make_twins(isolated, f"admit {seed}", running=(0, 3), waiting=(0, 6), spare=(0, 14), budget=(8, 30))
        said = f"{describe(mine)} Then admit(output)."
        outputs = SchedulerOutput(), SchedulerOutput()
        theirs._admit(outputs[0])
        mine.admit(outputs[1])
        hints = {
            "running": "which sequences are admitted, and that `put` keeps the queue sorted",
            "batch": "the first sequence that does not fit: nothing may overtake it",
            "num_prefills": "output.num_prefills",
        }
        compare(said, theirs, mine, hints, outputs)


def check_schedule(cls: type) -> None:
    """`schedule` and `decode`: prefill if any sequence can be admitted, else one token per running sequence."""
    _check_schedule(_isolate(cls, fits=_fits, admit=_admit), "decode", {"running": (0, 5), "waiting": (0, 2), "spare": (8, 20)}, {
        "phase": "which comes first, prefill or decode", "batch": "how many tokens each sequence gets",
        "blocks": "block_manager.append_slots(seq): the newest token needs a slot",
    })  # fmt: skip


def check_update(cls: type) -> None:
    """`update`: tokens are counted and appended, and finished sequences leave."""
    isolated = _isolate(cls, finish=_finish)
    for seed in range(_ROUNDS):
        mine, theirs = make_twins(isolated, f"update {seed}", running=(1, 5), waiting=(0, 2), spare=(8, 8), prefill=True)
        rng = random.Random(f"updated {seed}")
        tokens = [rng.choice((5, 6, STOP_TOKEN)) for _ in mine.running]
        aborted = mine.running[0].request.request_id if seed % 4 == 0 else None
        said = f"{describe(mine)} Then update(output, results) with new tokens {tokens}"
        said += f"; {aborted!r} was aborted during the step." if aborted else f"; the stop token is {STOP_TOKEN}."
        got = []
        for scheduler in (mine, theirs):
            output = make_batch(scheduler)
            if aborted:
                seq = scheduler.running[0]
                scheduler.finish(seq, SequenceStatus.FINISHED_ABORTED) if scheduler is mine else theirs.abort_request(aborted)
            everyone = [part.seq for part in output.scheduled]
            advanced = scheduler.update(output, [SequenceOutput([token]) for token in tokens])
            got.append(([(s.request.request_id, i) for s, i in advanced or ()],
                        {s.request.request_id: (s.token_ids, s.num_computed_tokens, s.status.value) for s in everyone}))  # fmt: skip
        for what, expected, came, look in (
            (
                "tokens, computed tokens and status of each sequence",
                got[1][1],
                got[0][1],
                "num_computed_tokens, token_ids, and `ends`",
            ),
            ("what update returns", got[1][0], got[0][0], "the pairs (sequence, index of its result)"),
        ):
            expect(said, what, expected, came, look)
        compare(said, theirs, mine, {"running": "which sequences have finished", "blocks": "what `finish` does"})


def check_recompute(cls: type) -> None:
    """`preempt`, and a `decode` that calls it: the latest sequence gives way and is recomputed later."""
    _check_schedule(_isolate(cls, fits=_fits, admit=_admit), "recompute", {"running": (2, 6), "waiting": (0, 2), "spare": (0, 2)}, {
        "batch": "which sequences have a slot for their next token", "preempted": "which gives way: the last in self.running, one at a time",
        "waiting": "where a preempted sequence goes, and its status", "blocks": "what preempt frees",
        "computed": "num_computed_tokens: the keys and values are gone", "preemptions": "request.metrics.num_preemptions",
    })  # fmt: skip
    _check_preempt(_isolate(cls, fits=_fits, admit=_admit), "recompute")


def check_swap_out(cls: type) -> None:
    """`preempt` with `preemption_mode="swap"`: to the host if there is room, else recompute."""
    made = _isolate(cls, fits=_fits, admit=_admit)
    scene = {"running": (2, 9), "spare": (0, 1), "mode": "any", "host": (0, 16), "longest_prompt": 3}
    _check_schedule(made, "swap out", scene, {
        "swapped": "config.preemption_mode and can_swap_out", "blocks_to_swap_out": "the pairs that swap_out returns",
        "computed": "num_computed_tokens: swapping out loses nothing",
    })  # fmt: skip
    _check_preempt(made, "swap")


def check_swap_in(cls: type) -> None:
    """`swap_in`, and the order between waiting and swapped-out sequences."""
    hints = {
        "running": "which may enter: max_num_seqs, blocks, and the smaller `order` of waiting[0] and swapped[0]",
        "swapped": "which may return, and in which order",
        "swapped_in": "which may return, and whether this step preempted a sequence",
        "blocks_to_swap_in": "the pairs that swap_in returns",
        "batch": "that a sequence that returns decodes in the same step",
        "blocks": "append_slots after swap_in",
    }
    scene = {"running": (0, 3), "waiting": (0, 2), "swapped": (1, 4), "spare": (0, 14), "mode": "any", "host": (0, 16)}
    _check_schedule(cls, "swap in", scene, hints)
    _check_schedule(cls, "swap out and in", scene | {"running": (3, 5), "waiting": (0, 0), "spare": (0, 2)}, hints)
    for seed in range(_ROUNDS):
        mine, theirs = make_twins(cls, f"alone {seed}", swapped=(1, 1), spare=(8, 8), mode="swap")
        for scheduler in (mine, theirs):
            scheduler.block_manager.watermark_blocks = scheduler.block_manager.num_gpu_blocks
        said = f"{describe(mine)} Then schedule()."
        outputs = theirs.schedule(), mine.schedule()
        compare(said, theirs, mine, {"running": "can_swap_in: with nothing running, the watermark is not kept"}, outputs)


def check_decisions(cls: type, seed: int = 0) -> EngineTrace:
    """The whole scheduler in the simulated engine: the same decisions as the package's, step by step.

    Returns:
        The trace of the learner's scheduler in the last run, in which sequences are swapped.
    """
    trace = None
    for number, options in enumerate((
        {}, {"num_gpu_blocks": 200, "max_num_seqs": 5}, {"policy": "priority"}, {"preemption_mode": "swap", "policy": "priority"},
        {"preemption_mode": "swap", "num_cpu_blocks": 40},
    )):  # fmt: skip
        expected, trace = (_run(maker, f"run {seed} {number}", options) for maker in (Scheduler, cls))
        difference = first_difference(expected, trace)
        assert difference is None, (
            f"With {options or 'FCFS and recompute'}, the two schedulers differ at {difference}. Recorded is the package's Scheduler, "
            f"replayed is yours. Look at the method that decides this, or draw that step of both."
        )
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
        compare(said, theirs, mine, {"running": "the sequence passed to `preempt`"}, outputs)


def _check_schedule(cls: type, name: str, scene: dict[str, Any], hints: dict[str, str]) -> None:
    """Let both schedulers schedule one step in many situations."""
    for seed in range(2 * _ROUNDS):
        mine, theirs = make_twins(cls, f"{name} {seed}", **scene)
        said = f"{describe(mine)} Then schedule()."
        outputs = theirs.schedule(), mine.schedule()
        assert isinstance(outputs[1], SchedulerOutput), f"{said} Expected a SchedulerOutput, but got {outputs[1]!r}."
        compare(said, theirs, mine, hints, outputs)


def _run(cls: type, seed: str, options: dict[str, Any]) -> EngineTrace:
    """Run a random workload in a simulated engine with too few blocks."""
    rng = random.Random(seed)
    engine = make_simulated_engine(
        scheduler=cls, max_model_len=120, max_num_batched_tokens=160, **{"num_gpu_blocks": 40, "block_size": 4, **options}
    )
    trace = engine.start_trace()
    lengths = [(rng.randint(1, 60), rng.randint(1, 50)) for _ in range(40)]
    for number, (prompt_len, output_len) in enumerate(lengths):
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        engine.add_request(f"{number}", [number + 1] * prompt_len, params, priority=rng.randint(0, 2))
        if number % 9 == 8:
            engine.abort_request(f"{rng.randrange(number)}")
        for _ in range(rng.randint(0, 8)):
            engine.step()
    for _ in range(5000):
        if not engine.has_unfinished_requests():
            return trace
        engine.step()
    raise AssertionError(f"With {options}, {len(engine.scheduler.requests)} requests never finish. Look at what each waits for.")


# -- correct methods, in place of a learner's ------------------------------------------------------------------------


def _isolate(cls: type, **methods: Any) -> type:
    """The class with some of its methods replaced by correct ones."""
    return type(cls.__name__, (cls,), methods)


def _fits(self: Any, seq: Sequence, output: SchedulerOutput) -> bool:
    tokens = output.num_batched_tokens + seq.num_tokens
    if len(self.running) >= self.config.max_num_seqs or tokens > self.config.max_num_batched_tokens:
        return False
    return self.block_manager.can_allocate(seq, keep_watermark=bool(self.running))


def _admit(self: Any, output: SchedulerOutput) -> None:
    while self.waiting and self.fits(self.waiting[0], output):
        seq = self.waiting.pop(0)
        self.block_manager.allocate(seq)
        seq.status = SequenceStatus.RUNNING
        insort(self.running, seq, key=lambda other: other.order)
        self.add(output, seq, seq.num_tokens)
        output.num_prefills += 1


def _finish(self: Any, seq: Sequence, status: SequenceStatus) -> None:
    getattr(self, seq.status.value).remove(seq)
    self.block_manager.free(seq)
    seq.status = status
    self.requests.pop(seq.request.request_id, None)
