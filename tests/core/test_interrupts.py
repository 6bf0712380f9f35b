"""Ctrl-C in the middle of a step, wherever: the engine goes on, nothing is lost or wrong, and all blocks are free in the end."""

from __future__ import annotations

import contextlib
import sys
from itertools import islice
from pathlib import Path
from traceback import walk_stack

import pytest
from nightly import NIGHTLY
from shadow import expected_tokens, shadow_engine

from minivllm import SamplingParams
from minivllm.core.async_scheduler import AsyncScheduler
from minivllm.core.pipeline_scheduler import PipelineScheduler
from minivllm.core.scheduler import Scheduler

WATCHED = {
    "engine_core.py",
    "core_outputs.py",
    "scheduler.py",
    "async_scheduler.py",
    "pipeline_scheduler.py",
    "block_space_manager.py",
}
UNWATCHED = {"_start_over", "report", "take"}
"""Another Ctrl-C; and the end of a step, after which it is the frontend's."""
PARAMS = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
PROMPTS = {f"r{i}": [3 + i, 4, 5, 6, 7, 8][: 3 + i] for i in range(4)}
WAYS = {
    "one step in flight": {"scheduler_cls": Scheduler},
    "two steps in flight": {"scheduler_cls": AsyncScheduler, "max_concurrent_batches": 2},
    "one step in flight, by AsyncScheduler": {"scheduler_cls": AsyncScheduler},
    "two stages": {"scheduler_cls": PipelineScheduler, "max_concurrent_batches": 2, "pipeline_parallel_size": 2},
}


def interrupt_step(core, number: int) -> list[str]:
    """Let Ctrl-C come in the core's next step, before the line of this number among those of `WATCHED`. The list will have the line, if there is one."""
    count, where, step = 0, [], core.step

    def trace(frame, event, _):
        nonlocal count
        name, *callers = (Path(each.f_code.co_filename).name for each, _ in islice(walk_stack(frame), 4))
        if name not in WATCHED or "shadow.py" in callers or frame.f_code.co_name in UNWATCHED:
            return None
        if event == "line":
            count += 1
            if count == number:
                where.append(f"{name}:{frame.f_lineno}")
                raise KeyboardInterrupt  # which also ends the tracing
        return trace

    def traced_step():
        core.step, before = step, sys.gettrace()
        sys.settrace(trace)
        try:
            return step()
        finally:
            sys.settrace(before)

    core.step = traced_step
    return where


def run_interrupted(options: dict, step: int, number: int) -> bool:
    """Run requests, with Ctrl-C in one step. Returns whether the step has so many lines."""
    engine, executor = shadow_engine(16, num_cpu_blocks=16, preemption_mode="swap", **options)
    engine.start_trace()
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, PARAMS)
    done = {}

    def advance():
        done.update((output.request_id, output) for output in engine.step() if output.finished)

    for _ in range(step):
        advance()
    scheduler = engine.scheduler
    where = interrupt_step(engine.core, number)
    with contextlib.suppress(KeyboardInterrupt):
        advance()
    if engine.scheduler is not scheduler:
        executor.watch(engine.scheduler)
        executor.sampled.clear()  # sequences are numbered anew
    for _ in range(100):
        if engine.has_unfinished_requests():
            advance()
    assert not engine.has_unfinished_requests(), where
    assert done.keys() == PROMPTS.keys(), where
    for name, output in done.items():
        prompt = PROMPTS[name]
        expected = expected_tokens(prompt, PARAMS, 0, 0, len(prompt) + 14)
        assert output.error or output.outputs[0].token_ids == expected, where
    assert engine.block_manager.get_num_free_gpu_blocks() == 16, where
    # And it is as good as new.
    engine.add_request("again", PROMPTS["r0"], PARAMS)
    while engine.has_unfinished_requests():
        advance()
    assert done["again"].outputs[0].token_ids == expected_tokens(PROMPTS["r0"], PARAMS, 0, 0, 17), where
    return bool(where)


@pytest.mark.parametrize("step", [1, 4, 9])
@pytest.mark.parametrize("way", WAYS)
def test_anywhere(way, step, pytestconfig):
    every = 1 if NIGHTLY else 5 if pytestconfig.getoption("--long") else 23
    number = 1
    while run_interrupted(WAYS[way], step, number):
        number += every
    assert number > 100
