"""Two recorded runs at one moment of the engine's clock after another, as the live page's panels draw them."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from typing import Any

from minivllm.bench.trace_summary import time_origin
from minivllm.engine.trace import EngineTrace, RequestRecord, RequestSnapshot
from minivllm.entrypoints.dashboard.step_view import StepView


class Race:
    """Runs side by side.

    Attributes:
        moments: When a step of any of them begins, and when the last one ends: seconds since the first arrival, ascending.
    """

    def __init__(self, traces: tuple[EngineTrace, ...]) -> None:
        self._replays = [Replay(trace) for trace in traces]
        ends = [trace[-1].end - time_origin(trace) for trace in traces if len(trace)]
        self.moments = sorted({*(start for replay in self._replays for start in replay.starts), max(ends, default=0.0)})

    def moment_of(self, step: int | None) -> int | None:
        """The number of the moment at which the runs begin a step, the earlier of them if they differ; None if there is no such step."""
        starts = [replay.starts[step] for replay in self._replays if step is not None and step < len(replay.starts)]
        return self.moments.index(min(starts)) if starts else None

    def look(self, number: int) -> list[dict[str, Any]]:
        """Each run at a moment, by its number: see `Replay.look`."""
        return [replay.look(self.moments[number]) for replay in self._replays]


class Replay:
    """One run. It keeps what it has shown, so that it tells only what is new; to go back, it begins again.

    Attributes:
        starts: When its steps begin, in seconds since the first arrival.
    """

    def __init__(self, trace: EngineTrace) -> None:
        self._origin = time_origin(trace)
        self.starts = [step.start - self._origin for step in trace]
        ordinals = {name: number for number, name in enumerate(trace.requests)}
        self._steps = [
            dataclasses.replace(
                step, request_snapshots=[_snapshot(trace.requests[name], ordinals[name]) for name in step.arrived]
            )
            for step in trace
        ]
        self._begin()

    def _begin(self) -> None:
        self._view, self._num_taken, self._moment = StepView(most_happenings=None), 0, 0.0

    def look(self, moment: float) -> dict[str, Any]:
        """The run at a moment.

        Returns:
            `num_steps` that have begun, of `num_steps_of_run`; `report`, what they have changed since the last look, as in the live page's event "steps", or None;
            `is_new`, whether it tells everything since the beginning; `is_idle`, whether none of them runs.
        """
        is_new = moment < self._moment
        if is_new:
            self._begin()
        num_steps = bisect_right(self.starts, moment)
        for step in self._steps[self._num_taken : num_steps]:
            self._view.take(step)
        self._num_taken, self._moment = num_steps, moment
        is_idle = num_steps == 0 or moment >= self._steps[num_steps - 1].end - self._origin
        counts = {"num_steps": num_steps, "num_steps_of_run": len(self.starts)}
        return counts | {"report": self._view.report(), "is_new": is_new, "is_idle": is_idle}


def _snapshot(request: RequestRecord, ordinal: int) -> RequestSnapshot:
    """A request before its first step: nothing of it is in the cache, and nothing is generated."""
    return RequestSnapshot(
        request_id=request.request_id, ordinal=ordinal, queued_time=request.arrival_time, first_token_time=None,
        num_prompt_tokens=request.num_prompt_tokens, num_cached_tokens=0, progress={0: (0, 0)},
    )  # fmt: skip
