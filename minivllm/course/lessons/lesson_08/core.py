"""The checks of lesson 08 for an engine core: a step from the scheduler's decision to new tokens, and a step that fails."""

from __future__ import annotations

from typing import Any

from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.course.lessons.assembly import CoreOutput
from minivllm.course.lessons.lesson_08.situations import Crowd, Script, quiet
from minivllm.course.observations import expect, fail, require, show
from minivllm.engine.core_messages import EngineCoreOutput
from minivllm.engine.engine_core import EngineCore
from minivllm.request import EngineCoreRequest, Request, Sequence, SequenceStatus
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler_output import ScheduledSequence, SchedulerOutput

_MOST_STEPS = 600
_LOOKS = {
    "outputs": "what `compute` does with scheduler.update(output, results): for each sequence with a new token, its request's id, the token, and its finish_reason",
    "unfinished requests": "scheduler.update: it appends the tokens, and removes finished sequences",
    "free blocks": "scheduler.update: a finished sequence gives its blocks back",
}


def as_core_outputs(outputs: list[EngineCoreOutput]) -> list[CoreOutput]:
    """The package core's outputs in this lesson's form."""
    return [
        CoreOutput(output.request_id, new.token_ids[-1] if new.token_ids else None, new.finish_reason, output.error)
        for output in outputs
        for new in output.sequences
    ]


def make_cores(cls: Any, crowd: Crowd, fails_at: frozenset[int] = frozenset()) -> tuple[EngineCore, Any]:
    """The package's core and the learner's, each with its own scheduler and script."""
    error = RuntimeError if len(fails_at) % 2 else ArithmeticError
    theirs, mine = (Script(crowd.seed, fails_at, lambda: error("out of memory")) for _ in range(2))
    manager = BlockSpaceManager(crowd.cache_config.block_size, *crowd.blocks, watermark=crowd.cache_config.watermark)
    return crowd.make_engine(theirs).core, cls(Scheduler(crowd.scheduler_config, manager), mine)


def run_core(crowd: Crowd, step: Any, add: Any, has_unfinished: Any) -> Any:
    """Add the crowd's requests as time goes by, and yield each step's number and outputs until all have finished."""
    engine = crowd.make_engine(Script(crowd.seed))  # turns text into requests
    requests = [engine.input_processor.process_inputs(*request).core_request for request in crowd.requests]
    number = 0
    for request, wait in zip(requests, crowd.joins, strict=True):
        for _ in range(wait):
            if has_unfinished():
                number += 1
                yield number, step()
        add(request)
    while has_unfinished() and number < _MOST_STEPS:
        number += 1
        yield number, step()


def _as_observations(said: str, outputs: Any) -> list[tuple[str, Any, Any]]:
    """A learner's outputs in comparable form."""
    if not isinstance(outputs, list) or not all(isinstance(output, CoreOutput) for output in outputs):
        fail(f"{said}\nExpected: a list of CoreOutput\nGot: {show(outputs)}")
    return [(output.request_id, output.token_id, output.finish_reason) for output in outputs]


def _observe_step(said: str, outputs: Any, scheduler: Scheduler) -> dict[str, Any]:
    """What is compared in a step."""
    return {
        "outputs": _as_observations(said, outputs),
        "unfinished requests": sorted(scheduler.requests),
        "free blocks": scheduler.block_manager.get_num_free_gpu_blocks(),
    }


def _compare(cls: Any, crowd: Crowd, fails_at: frozenset[int], looks: dict[str, str]) -> None:
    theirs, mine = make_cores(cls, crowd, fails_at)
    wanted = run_core(crowd, theirs.step, theirs.add_request, theirs.has_unfinished_requests)
    got = run_core(crowd, mine.step, mine.add_request, mine.scheduler.has_unfinished_requests)
    for number, package in wanted:
        said = f"{crowd.describe()} Step {number}{', in which the model raises an error' if number in fails_at else ''}."
        expected = _observe_step(said, as_core_outputs(package.outputs), theirs.scheduler)
        _, outputs = next(got, (0, None))
        observations = _observe_step(said, outputs, mine.scheduler)
        for name, value in expected.items():
            expect(said, name, value, observations[name], looks[name])
        if number in fails_at:
            for output in outputs:
                says_so = isinstance(output.error, str) and "out of memory" in output.error
                wanted_error = (
                    f"{said}\nExpected error: a sentence that says what was raised, “out of memory”\nGot error: {output.error!r}"
                )
                require(True, says_so, wanted_error)


def find_moves(crowd: Crowd) -> list[int]:
    """The steps in which sequences are preempted or swapped in, if none fails."""
    core, _ = make_cores(lambda *parts: None, crowd)
    trace = core.start_trace()
    for _ in run_core(crowd, core.step, core.add_request, core.has_unfinished_requests):
        pass
    return [number for number, step in enumerate(trace, 1) if step.preempted or step.swapped_in]


def check_compute(cls: Any) -> None:
    """A step: what was scheduled is computed, the scheduler takes in the results, and every new token is reported."""
    for seed in range(12):
        _compare(cls, Crowd(f"compute {seed}"), frozenset(), _LOOKS)


def check_fail(cls: Any) -> None:
    """When the model fails, the requests of that step end with an error, and all others go on."""
    looks = {
        "outputs": '`fail`: one CoreOutput for each request of the step (scheduled, then preempted, then swapped in), each once: its id, None, "error"',
        "unfinished requests": "which requests `fail` ends: only the requests of this step, with scheduler.abort_request",
        "free blocks": "scheduler.abort_request, which frees the blocks",
    }
    for seed in range(12):
        crowd = Crowd(f"fail {seed}")
        with quiet():
            _compare(cls, crowd, frozenset({2, 5, 6, 11}), looks)
            for number in find_moves(crowd)[:3]:
                _compare(cls, crowd, frozenset({number}), looks)
    _check_touched(cls)
    crowd = Crowd("interrupt")
    _, core = make_cores(cls, crowd)
    core.worker.fails_at, core.worker.error = frozenset({2}), KeyboardInterrupt
    try:
        for _ in run_core(crowd, core.step, core.add_request, core.scheduler.has_unfinished_requests):
            pass
    except KeyboardInterrupt:
        return
    fail(
        "You press Ctrl-C while the model runs.\nExpected: the KeyboardInterrupt comes out of `step`\nGot: nothing was raised\n"
        "Look at what `compute` catches: an Exception, which KeyboardInterrupt is not."
    )


class _Ends:
    """A stand-in for the scheduler; records which requests are ended, and how."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, str]] = []

    def abort_request(self, request_id: str, status: SequenceStatus = SequenceStatus.FINISHED_ABORTED) -> None:
        """As `Scheduler.abort_request`."""
        self.ended.append((request_id, status.name))


def make_touched() -> SchedulerOutput:
    """A step that touches sequences in all three ways."""
    a, b, c, d = (
        Sequence(number, Request(EngineCoreRequest(name, [1], SamplingParams(), max_num_tokens=9)))
        for number, name in enumerate(("a", "b", "c", "d"))
    )
    return SchedulerOutput(
        scheduled=[ScheduledSequence(a, 1, [0]), ScheduledSequence(c, 1, [1])], preempted=[b], swapped_in=[c, d]
    )


def _check_touched(cls: Any) -> None:
    said, scheduler = (
        "fail(output, error) for a step in which a and c are scheduled, b is preempted, and c and d are swapped in.",
        _Ends(),
    )
    outputs = _as_observations("fail(output, error)", cls(scheduler, None).fail(make_touched(), RuntimeError("out of memory")))
    look = "which requests the step touched: scheduled, preempted, swapped_in, each request once, and the status SequenceStatus.FINISHED_ERROR"
    expect(said, "outputs", [(name, None, "error") for name in ("a", "c", "b", "d")], outputs, look)
    expect(said, "calls of abort_request", sorted((name, "FINISHED_ERROR") for name in "abcd"), sorted(scheduler.ended), look)
