"""The stream behind the live page: Server-Sent Events made of the engine's steps.

    engine     once: the model and the fixed limits
    replicas   if there are several, whenever something has changed: their queues, blocks and rates
    steps      at most ten a second: `StepView.report` of the steps since the last event; of one replica, if there are several
    idle       no requests: queue lengths and blocks in use, all 0 if nothing leaks
    busy       requests, but no step has finished for a while: the same numbers
    dead       last: why the engine failed

A comment every few seconds keeps a silent connection open. Each page has its own stream, and a task that collects steps in bounded
buffers: a page that does not read delays no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.engine.core_messages import SchedulerStats
from minivllm.entrypoints.dashboard.step_view import StepView
from minivllm.entrypoints.openai.protocol import sse
from minivllm.errors import EngineDeadError

COUNTS = ("num_running", "num_waiting", "num_swapped", "num_used_blocks")
"""Fields of the scheduler's statistics that the page shows."""
EVENT_PAUSE = 0.1
"""Minimum seconds between events."""
SILENT_AFTER = 0.3
"""Seconds without a step until `idle` or `busy` is sent."""
HEARTBEAT_PAUSE = 5.0
"""Seconds of silence until a comment is sent."""


async def live_events(engine: AsyncLLMEngine, replica: int = 0, *, may_kill: bool = False) -> AsyncGenerator[bytes, None]:
    """A page's events about the steps of one replica, until the engine is dead or the generator is closed."""
    more = {"num_engines": engine.num_engines, "replica": replica, "may_kill": may_kill and engine.num_engines > 1}
    yield sse(describe_engine(engine, replica) | more, "engine")
    views = _Views(engine, replica)
    view, news, replicas = views.steps, views.news, b""
    watcher = asyncio.create_task(views.follow())
    now = asyncio.get_running_loop().time
    sent, last_sent = b"", now()
    try:
        while not watcher.done():
            if engine.num_engines > 1 and (event := sse(views.report_replicas(), "replicas")) != replicas:
                yield event
                replicas = event
            try:
                await asyncio.wait_for(news.wait(), SILENT_AFTER)
            except asyncio.TimeoutError:
                name = "busy" if views.is_busy else "idle"
                if name == "idle":
                    view.forget_sequences()
                if (silence := sse({count: getattr(views.stats, count) for count in COUNTS}, name)) != sent:
                    yield silence
                    sent, last_sent = silence, now()
                elif now() - last_sent > HEARTBEAT_PAUSE:
                    yield b": still here\n\n"
                    last_sent = now()
                continue
            news.clear()
            if report := view.report():
                yield sse(report, "steps")
                sent, last_sent = b"", now()
            await asyncio.sleep(EVENT_PAUSE)
        if report := view.report():  # perhaps the step in which it died
            yield sse(report, "steps")
        yield sse({"message": _why_it_ended(watcher)}, "dead")
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


def describe_engine(engine: AsyncLLMEngine, replica: int = 0) -> dict[str, Any]:
    """An engine's fixed settings: its model, and the fields of its `SchedulerConfig` and `CacheConfig`."""
    model = {"model": engine.model_config.name, "max_model_len": engine.model_config.max_model_len}
    sizes = {"num_gpu_blocks": engine.replicas.statuses()[replica].num_gpu_blocks or engine.num_gpu_blocks}
    return model | sizes | dataclasses.asdict(engine.scheduler_config) | dataclasses.asdict(engine.cache_config)


class _Views:
    """What one page shows: a replica's steps, and all replicas at a glance."""

    def __init__(self, engine: AsyncLLMEngine, replica: int) -> None:
        self._engine, self._replica = engine, replica
        self.steps = StepView()
        self.news = asyncio.Event()
        """Set when the replica has made a step."""

    @property
    def stats(self) -> SchedulerStats:
        """The state of the replica's scheduler."""
        return self._engine.stats_by_engine.get(self._replica, SchedulerStats())

    @property
    def is_busy(self) -> bool:
        """Whether the replica has requests."""
        if self._engine.num_engines == 1 and self._engine.num_unfinished_requests():
            return True  # perhaps it has not seen them yet
        return self.stats.num_running + self.stats.num_waiting + self.stats.num_swapped > 0

    async def follow(self) -> None:
        """Collect steps until the engine is dead."""
        try:
            async with contextlib.aclosing(self._engine.steps_of_all()) as steps:
                async for rank, step in steps:
                    if rank == self._replica:
                        self.steps.take(step)
                        self.news.set()
        finally:
            self.news.set()

    def report_replicas(self) -> dict[str, Any]:
        """All replicas at a glance: queues, blocks and rates; how many requests were resumed on another replica, and were lost."""
        engine, replicas = self._engine, []
        for status in engine.replicas.statuses():
            stats = engine.stats_by_engine.get(status.rank, SchedulerStats())
            replicas.append(
                {"rank": status.rank, "state": status.state, "num_gpu_blocks": status.num_gpu_blocks}
                | {count: getattr(stats, count) for count in COUNTS}
                | {"tokens_per_second": engine.tokens_per_second(status.rank)}
            )
        resumed, lost = engine.metrics.count("num_resumed_requests"), engine.metrics.count("num_lost_requests")
        return {"replicas": replicas, "streams_resumed": resumed, "streams_lost": lost}


def _why_it_ended(watcher: asyncio.Task[None]) -> str:
    try:
        watcher.result()
    except EngineDeadError as error:
        return str(error)
    return "The engine has shut down."
