"""Who owns the server's engine: notices when it dies, and starts another or has the server end."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.engine.metrics import Metrics
from minivllm.errors import EngineDeadError

logger = logging.getLogger(__name__)


class EngineKeeper:
    """Owns the engine.

    Args:
        start_engine: Starts an engine and returns it when it is ready; it runs in a thread, and takes seconds.
        restart: Start another engine when one has died.
        on_end: Called when there will be no engine any more.

    Raises:
        ModelLoadError, ConfigError: The first engine cannot be started.
    """

    MAX_FAILED_STARTS = 3
    """So many in a row, and no further engine is tried."""
    SHORT_LIFE = 10.0
    """Seconds: the start of another engine that dies sooner has failed, too."""
    PAUSE = 1.0
    """Seconds between a failed start and the next; and between a death and `on_end`, so that clients and a look at /health hear why."""

    def __init__(self, start_engine: Callable[[], AsyncLLMEngine], *, restart: bool, on_end: Callable[[], None]) -> None:
        self._start_engine = start_engine
        self._restart = restart
        self._on_end = on_end
        self._engine: AsyncLLMEngine | None = start_engine()
        self._metrics: Metrics = self._engine.metrics
        """Of the engine that was there last."""
        self._why_none = ""
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-start")
        self._watch: asyncio.Task | None = None

    @property
    def engine(self) -> AsyncLLMEngine:
        """The engine, which lives as far as is known.

        Raises:
            EngineDeadError: There is none now; the text says why.
        """
        if self._engine is None:
            raise EngineDeadError(self._why_none)
        self._engine.check_health()
        return self._engine

    @property
    def metrics(self) -> Metrics:
        """The server's metrics, which outlive an engine: the next one goes on counting where the last one stopped."""
        return self._metrics if self._engine is None else self._engine.metrics

    def watch(self) -> None:
        """Begin to watch the engine. Called once, in the event loop."""
        self._watch = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """End the engine, and one that is being started."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        self._starter.shutdown(wait=False)
        if self._engine is not None:
            await asyncio.to_thread(self._take_engine("The server has ended.").shutdown)

    def close_at_once(self) -> None:
        """End the engine if `close` has not: for who has no event loop any more."""
        self._starter.shutdown(wait=False)
        if self._engine is not None:
            self._engine.shutdown()

    def _take_engine(self, why: str) -> AsyncLLMEngine:
        """Have no engine from now on, for a reason that is told to whom it concerns. Returns the one there was."""
        assert self._engine is not None
        engine = self._engine
        self._metrics = engine.metrics
        self._engine, self._why_none = None, why
        return engine

    async def _keep(self) -> None:
        try:
            await self._replace_the_dead()
        except Exception:
            logger.exception("The engine is not watched any more, so the server ends.")
        await asyncio.sleep(self.PAUSE)
        self._on_end()

    async def _replace_the_dead(self) -> None:
        """Returns when there will be no engine any more."""
        failed_starts, started = 0, -math.inf
        while self._engine is not None:
            error = await self._engine.wait_dead()
            logger.error("The engine has died: %s", error)
            if not self._restart:
                return
            dead = self._take_engine(f"{error} Another engine is being started: try again in some seconds.")
            await asyncio.to_thread(dead.shutdown)
            failed_starts = failed_starts + 1 if time.monotonic() - started < self.SHORT_LIFE else 0
            self._engine = await self._start_another(failed_starts)
            started = time.monotonic()

    async def _start_another(self, failed_starts: int) -> AsyncLLMEngine | None:
        """Another engine, or None when too many starts in a row have failed; so many have already."""
        while failed_starts < self.MAX_FAILED_STARTS:
            if failed_starts:
                await asyncio.sleep(self.PAUSE)
            try:
                engine = await self._started()
            except Exception as error:  # many kinds: no memory, no file, no process
                failed_starts += 1
                logger.error("Start %d of %d of another engine failed: %s", failed_starts, self.MAX_FAILED_STARTS, error)
                self._why_none = f"The engine has died, and another could not be started: {error}"
            else:
                engine.metrics = self._metrics
                logger.warning("Another engine has been started.")
                return engine
        logger.error("%d starts of an engine in a row have failed, so the server ends.", self.MAX_FAILED_STARTS)
        return None

    async def _started(self) -> AsyncLLMEngine:
        """An engine from a thread, which goes on when the task that waits for it is cancelled."""
        starting = self._starter.submit(self._start_engine)
        try:
            return await asyncio.wrap_future(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_end_undelivered)
            raise


def _end_undelivered(starting: Future[AsyncLLMEngine]) -> None:
    """End an engine that nobody waits for any more, as soon as it is there."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().shutdown()
