"""Observes a learner's scheduler from outside: random situations, and everything visible afterwards.

See `lesson_04.observe`. As in the checks, methods of earlier stages are replaced by correct ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from minivllm.config import SchedulerConfig
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.course.lessons.lesson_07.engine import describe_steps, run_simulated
from minivllm.course.lessons.lesson_07.situations import (
    STOP_TOKEN,
    advance,
    make_batch,
    make_request,
    make_scene,
    names_of,
    picture_of,
    take_blocks,
)
from minivllm.course.lessons.lesson_07.stages import isolate_stages
from minivllm.request import SequenceStatus
from minivllm.scheduler_output import SchedulerOutput, SequenceOutput

_ROUNDS = 30
_Observe = Callable[[type, random.Random], list[Any]]


def _observe_add_request(cls: type, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(_ROUNDS):
        policy = rng.choice(("fcfs", "priority"))
        scheduler = cls(SchedulerConfig(policy=policy), BlockSpaceManager(4, 8))
        for number in range(rng.randint(2, 9)):
            priority, arrival = rng.randint(0, 2), float(rng.randint(0, 3))
            request = make_request(str(number), 3, 9, priority=priority, arrival=arrival)
            scheduler.add_request(request)
            picture = picture_of(scheduler)
            del picture["order"]  # numbers may begin anywhere
            seq = request.sequences[0]
            order = (seq.seq_id,) if policy == "fcfs" else (priority, arrival, seq.seq_id)
            observations.append([picture, len(request.sequences), seq.order == order])
        observations.append(len({seq.seq_id for seq in scheduler.waiting}))
    return observations


def _observe_abort_request(cls: type, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(_ROUNDS):
        scheduler = make_scene(cls, str(rng.random()), running=(1, 4), waiting=(1, 3), swapped=(1, 3))
        everyone = dict(scheduler.requests)
        status = rng.choice((SequenceStatus.FINISHED_ABORTED, SequenceStatus.FINISHED_ERROR))
        for request_id in rng.sample([*sorted(everyone), "an unknown id"], 3):
            scheduler.abort_request(request_id, status)
            observations.append([picture_of(scheduler), [request.sequences[0].status.value for request in everyone.values()]])
    return observations


def _observe_fits(cls: type, rng: random.Random, swapped: tuple[int, int] = (0, 0)) -> list[Any]:
    observations: list[Any] = []
    for _ in range(4 * _ROUNDS):
        scheduler = make_scene(
            cls, str(rng.random()), running=(0, 4), waiting=(1, 3), swapped=swapped, spare=(30, 30), prefill=swapped == (0, 0)
        )
        take_blocks(scheduler, rng.randint(0, 8))
        seq, output = scheduler.waiting[0], SchedulerOutput(num_batched_tokens=rng.randint(0, 20))
        places = len(scheduler.running) + rng.randint(0, 2)
        tokens = output.num_batched_tokens + seq.num_tokens + rng.randint(-1, 3)
        scheduler.config = SchedulerConfig(max_num_seqs=max(places, 1), max_num_batched_tokens=max(tokens, places, 1))
        observations.append([bool(scheduler.fits(seq, output)), picture_of(scheduler, output)])
    return observations


def _observe_admit(cls: type, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(2 * _ROUNDS):
        scheduler = make_scene(cls, str(rng.random()), running=(0, 3), waiting=(0, 6), spare=(0, 14), budget=(8, 30))
        output = SchedulerOutput()
        scheduler.admit(output)
        observations.append(picture_of(scheduler, output))
    return observations


def _observe_update(cls: type, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(_ROUNDS):
        scheduler = make_scene(cls, str(rng.random()), running=(1, 5), waiting=(0, 2), spare=(8, 8), prefill=True)
        output = make_batch(scheduler)
        everyone = [part.seq for part in output.scheduled]
        results = [SequenceOutput([rng.choice((5, 6, STOP_TOKEN))]) for _ in everyone]
        if rng.random() < 0.3:
            scheduler.finish(everyone[0], SequenceStatus.FINISHED_ABORTED)
        advanced = [[seq.request.request_id, place] for seq, place in scheduler.update(output, results) or ()]
        states = [[list(seq.token_ids), seq.num_computed_tokens, seq.status.value] for seq in everyone]
        observations.append([advanced, states, picture_of(scheduler)])
    return observations


def _observe_preempt(mode: str) -> _Observe:
    def observe(cls: type, rng: random.Random) -> list[Any]:
        observations: list[Any] = []
        for _ in range(_ROUNDS):
            scheduler = make_scene(cls, str(rng.random()), running=(2, 4), spare=(8, 8), mode=mode, host=(0, 12))
            output = SchedulerOutput()
            scheduler.preempt(rng.choice(scheduler.running), output)
            observations.append(picture_of(scheduler, output))
        return observations

    return observe


def _observe_schedule(scene: dict[str, Any], *, may_preempt: bool = True) -> _Observe:
    def observe(cls: type, rng: random.Random) -> list[Any]:
        observations: list[Any] = []
        for _ in range(2 * _ROUNDS):
            scheduler = make_scene(cls, str(rng.random()), **scene)
            for _ in range(3):
                if not may_preempt and scheduler.block_manager.get_num_free_gpu_blocks() < len(scheduler.running):
                    break
                output = scheduler.schedule()
                observations.append(picture_of(scheduler, output))
                advance(output)
        return observations

    return observe


def _observe_swap_in(cls: type, rng: random.Random) -> list[Any]:
    observations = _observe_fits(cls, rng, swapped=(0, 2))
    scene = {"running": (0, 3), "waiting": (0, 2), "swapped": (1, 4), "spare": (0, 14), "mode": "any", "host": (0, 16)}
    for _ in range(2 * _ROUNDS):
        scheduler = make_scene(cls, str(rng.random()), **scene)
        output = SchedulerOutput()
        scheduler.swap_in(output)
        observations.append([names_of(output.swapped_in), picture_of(scheduler, output)])
    return observations + _observe_schedule(scene)(cls, rng)


def _observe_decisions(cls: type, rng: random.Random) -> list[Any]:
    swap = {"preemption_mode": "swap", "num_cpu_blocks": 40, "num_gpu_blocks": 32, "max_num_seqs": 16}
    observations: list[Any] = []
    for options in ({}, swap | {"policy": "priority", "watermark": 0.05}):
        observations += describe_steps(run_simulated(cls, str(rng.random()), options))
    return observations


def _on_stage(stage: int, *observers: _Observe) -> _Observe:
    """Observe a class whose earlier stages are replaced by correct methods."""

    def observe(cls: type, rng: random.Random) -> list[Any]:
        isolated = isolate_stages(cls, stage)
        return [observation for observer in observers for observation in observer(isolated, rng)]

    return observe


_DECODE = {"running": (0, 5), "waiting": (0, 2), "spare": (8, 20)}
_RECOMPUTE = {"running": (2, 6), "waiting": (0, 2), "spare": (0, 2)}
_SWAP_OUT = {"running": (2, 9), "spare": (0, 1), "mode": "any", "host": (0, 16), "longest_prompt": 3}

OBSERVERS: Mapping[str, tuple[str, _Observe]] = {
    "check-1": ("Arrivals", _observe_add_request),
    "check-2": ("Departures", _observe_abort_request),
    "check-3": ("Limits", _observe_fits),
    "check-4": ("Admission", _on_stage(4, _observe_admit)),
    "check-5": ("PrefillOrDecode", _on_stage(5, _observe_schedule(_DECODE, may_preempt=False))),
    "check-6": ("Progress", _on_stage(6, _observe_update)),
    "check-7": ("Recompute", _on_stage(7, _observe_schedule(_RECOMPUTE), _observe_preempt("recompute"))),
    "check-8": ("SwapOut", _on_stage(8, _observe_schedule(_SWAP_OUT), _observe_preempt("swap"))),
    "check-9": ("SwapIn", _observe_swap_in),
    "check-10": ("MyScheduler", _observe_decisions),
    "check-11": ("MyScheduler", _observe_decisions),
}
"""For each check, the class it tests, and how to observe it."""
