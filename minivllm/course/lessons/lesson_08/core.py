"""The checks of lesson 08 for an engine core: a step from the scheduler's decision to new tokens, and a step that fails."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.course.lessons.assembly import CoreOutput
from minivllm.course.lessons.lesson_08.situations import Crowd, expect_list, quiet
from minivllm.course.observations import expect, fail
from minivllm.engine.engine_core import EngineCore
from minivllm.request import EngineCoreRequest, Request, Sequence, SequenceStatus
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler_output import ScheduledSequence, SchedulerOutput

_RAISED = "out of memory"
_LOOKS = {
    "outputs": "what `compute` does with scheduler.update(output, results): for each sequence with a new token, its request's id, the token, and its finish_reason",
    "unfinished requests": "scheduler.update: it appends the tokens, and removes finished sequences",
    "free blocks": "scheduler.update: a finished sequence gives its blocks back",
}
_LOOKS_AT_FAILURE = {
    "outputs": '`fail`: one CoreOutput for each request of the step (scheduled, then preempted, then swapped in), each once: its id, None, "error", and a sentence that says what was raised',
    "unfinished requests": "which requests `fail` ends: only the requests of this step, with scheduler.abort_request",
    "free blocks": "scheduler.abort_request, which frees the blocks",
}


class PackageCore:
    """The package's core with the methods of this lesson's."""

    def __init__(self, core: EngineCore) -> None:
        self.core, self.scheduler = core, core.scheduler

    def add_request(self, request: EngineCoreRequest) -> None:
        """As `MyEngineCore.add_request`, which does not ask whether the id is in use."""
        self.scheduler.add_request(Request(request))

    def abort_request(self, request_id: str) -> None:
        """As `MyEngineCore.abort_request`."""
        self.core.abort_requests([request_id])

    def step(self) -> list[CoreOutput]:
        """As `MyEngineCore.step`."""
        return [
            CoreOutput(output.request_id, new.token_ids[-1] if new.token_ids else None, new.finish_reason, output.error)
            for output in self.core.step().outputs
            for new in output.sequences
        ]


def make_core(cls: Any, crowd: Crowd, **options: Any) -> Any:
    """A learner's core, with a scheduler and a script of its own."""
    manager = BlockSpaceManager(crowd.cache_config.block_size, *crowd.blocks, watermark=crowd.cache_config.watermark)
    return cls(Scheduler(crowd.scheduler_config, manager), crowd.make_script(**options))


def run_core(crowd: Crowd, core: Any) -> Iterator[Any]:
    """Run a core with the crowd's requests, and give the outputs of each step."""
    process = crowd.make_engine().input_processor.process_inputs
    return crowd.run(
        lambda *request: core.add_request(process(*request).core_request), core.step, core.scheduler.has_unfinished_requests
    )


def _observe(outputs: list[CoreOutput]) -> list[Any]:
    return [(output.request_id, output.token_id, output.finish_reason, _shorten(output.error)) for output in outputs]


def _shorten(error: Any) -> Any:
    """An error in comparable form: any sentence will do that says what was raised."""
    return f"… {_RAISED} …" if isinstance(error, str) and _RAISED in error else error


def _compare(cls: Any, crowd: Crowd, looks: dict[str, str], fails_at: frozenset[int] = frozenset()) -> None:
    """Compare a learner's core with the package's, step by step."""
    options = {"fails_at": fails_at, "error": RuntimeError if len(fails_at) % 2 else ArithmeticError}
    core, package = make_core(cls, crowd, **options), PackageCore(crowd.make_engine(**options).core)
    steps = run_core(crowd, core)
    for number, expected in enumerate(run_core(crowd, package), 1):
        said = f"{crowd.describe()} Step {number}{', in which the model raises an error' if number in fails_at else ''}."
        got = next(steps, None)
        expect_list(said, CoreOutput, got)
        expect(said, "outputs", _observe(expected), _observe(got), looks["outputs"])
        theirs, mine = package.scheduler, core.scheduler
        expect(said, "unfinished requests", sorted(theirs.requests), sorted(mine.requests), looks["unfinished requests"])
        free, mine_free = (scheduler.block_manager.get_num_free_gpu_blocks() for scheduler in (theirs, mine))
        expect(said, "free blocks", free, mine_free, looks["free blocks"])


def check_compute(cls: Any) -> None:
    """A step: what was scheduled is computed, the scheduler takes in the results, and every new token is reported."""
    for seed in range(12):
        _compare(cls, Crowd(f"compute {seed}"), _LOOKS)


@quiet
def check_fail(cls: Any) -> None:
    """When the model fails, the requests of that step end with an error, and all others go on."""
    for seed in range(12):
        crowd = Crowd(f"fail {seed}")
        for steps in ({2, 5, 6, 11}, *({number} for number in find_moves(crowd)[:3])):
            _compare(cls, crowd, _LOOKS_AT_FAILURE, frozenset(steps))
    _check_touched(cls)
    crowd = Crowd("interrupt")
    try:
        list(run_core(crowd, make_core(cls, crowd, fails_at={2}, error=KeyboardInterrupt)))
    except KeyboardInterrupt:
        return
    fail(
        "You press Ctrl-C while the model runs.\nExpected: the KeyboardInterrupt comes out of `step`\nGot: nothing was raised\n"
        "Look at what `compute` catches: an Exception, which KeyboardInterrupt is not."
    )


def find_moves(crowd: Crowd) -> list[int]:
    """The steps in which sequences are preempted or swapped in, if none fails."""
    core = crowd.make_engine().core
    trace = core.start_trace()
    list(run_core(crowd, core))
    return [number for number, step in enumerate(trace, 1) if step.preempted or step.swapped_in]


def _check_touched(cls: Any) -> None:
    """A step that touches sequences in all three ways."""
    a, b, c, d = (
        Sequence(number, Request(EngineCoreRequest(name, [1], SamplingParams(), max_num_tokens=9)))
        for number, name in enumerate("abcd")
    )
    scheduled = [ScheduledSequence(a, 1, [0]), ScheduledSequence(c, 1, [1])]
    ended = []

    def abort_request(request_id: str, status: SequenceStatus = SequenceStatus.FINISHED_ABORTED) -> None:
        ended.append((request_id, status.name))

    core = cls(SimpleNamespace(abort_request=abort_request), None)
    outputs = core.fail(SchedulerOutput(scheduled=scheduled, preempted=[b], swapped_in=[c, d]), RuntimeError(_RAISED))
    said = "fail(output, error) for a step in which a and c are scheduled, b is preempted, and c and d are swapped in."
    look = "which requests the step touched: scheduled, preempted, swapped_in, each request once, and the status SequenceStatus.FINISHED_ERROR"
    expect_list(said, CoreOutput, outputs)
    expect(said, "outputs", [(name, None, "error", f"… {_RAISED} …") for name in "acbd"], _observe(outputs), look)
    expect(said, "calls of abort_request", [(name, "FINISHED_ERROR") for name in "abcd"], sorted(ended), look)
