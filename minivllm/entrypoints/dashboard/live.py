"""The stream behind the live page: Server-Sent Events made of the engine's steps.

    engine   once: the model and the fixed limits
    steps    at most ten a second: `StepView.report` of the steps since the last event
    idle     no requests: queue lengths and blocks in use, all 0 if nothing leaks
    busy     requests, but no step has finished for a while: the same numbers
    dead     last: why the engine failed

A comment every few seconds keeps a silent connection open. Each page has its own stream, and a task that collects steps in bounded
buffers: a page that does not read holds nobody up.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.entrypoints.dashboard.step_view import StepView
from minivllm.errors import EngineDeadError

EVENT_PAUSE = 0.1
"""Minimum seconds between events."""
SILENT_AFTER = 0.3
"""Seconds without a step until `idle` or `busy` is sent."""
HEARTBEAT_PAUSE = 5.0
"""Seconds of silence until a comment is sent."""
_COUNTS = ("num_running", "num_waiting", "num_swapped", "num_used_blocks")
"""Fields of the scheduler's statistics in the events `idle` and `busy`."""


async def live_events(engine: AsyncLLMEngine) -> AsyncGenerator[bytes, None]:
    """A page's events, until the engine is dead or the generator is closed."""
    yield _event("engine", describe_engine(engine))
    view, news = StepView(is_midway=engine.num_unfinished_requests() > 0), asyncio.Event()
    watcher = asyncio.create_task(_watch(engine, view, news))
    now = asyncio.get_running_loop().time
    said, last_said = b"", now()
    try:
        while not watcher.done():
            try:
                await asyncio.wait_for(news.wait(), SILENT_AFTER)
            except asyncio.TimeoutError:
                name = "busy" if engine.num_unfinished_requests() else "idle"
                if name == "idle":
                    view.forget_sequences()
                if (silence := _event(name, {count: getattr(engine.stats, count) for count in _COUNTS})) != said:
                    yield silence
                    said, last_said = silence, now()
                elif now() - last_said > HEARTBEAT_PAUSE:
                    yield b": still here\n\n"
                    last_said = now()
                continue
            news.clear()
            if report := view.report():
                yield _event("steps", report)
                said, last_said = b"", now()
                await asyncio.sleep(EVENT_PAUSE)
        if report := view.report():  # perhaps the step in which it died
            yield _event("steps", report)
        yield _event("dead", {"message": _why_it_ended(watcher)})
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


def describe_engine(engine: AsyncLLMEngine) -> dict[str, Any]:
    """An engine's fixed settings: its model, and the fields of its `SchedulerConfig` and `CacheConfig`."""
    model = {"model": engine.model_config.name, "max_model_len": engine.model_config.max_model_len}
    sizes = {"num_gpu_blocks": engine.num_gpu_blocks}
    return model | sizes | dataclasses.asdict(engine.scheduler_config) | dataclasses.asdict(engine.cache_config)


async def _watch(engine: AsyncLLMEngine, view: StepView, news: asyncio.Event) -> None:
    """Collect steps until the engine is dead."""
    try:
        async with contextlib.aclosing(engine.steps()) as steps:
            async for step in steps:
                view.take(step)
                news.set()
    finally:
        news.set()


def _why_it_ended(watcher: asyncio.Task[None]) -> str:
    try:
        watcher.result()
    except EngineDeadError as error:
        return str(error)
    return "The engine has shut down."


def _event(name: str, content: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(content) + b"\n\n"
