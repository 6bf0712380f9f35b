"""Who owns the server's engine: notices when it dies, and starts another or has the server end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from minivllm.engine.async_llm_engine import AsyncLLMEngine
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
    PAUSE = 1.0
    """Seconds between a failed start and the next; and between a death and `on_end`, so that clients and a look at /health hear why."""

    def __init__(self, start_engine: Callable[[], AsyncLLMEngine], *, restart: bool, on_end: Callable[[], None]) -> None:
        self._start_engine = start_engine
        self._restart = restart
        self._on_end = on_end
        self._engine: AsyncLLMEngine | None = start_engine()
        self._why_none = ""
        self._watch: asyncio.Task | None = None
        self._closed = False

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

    def watch(self) -> None:
        """Begin to watch the engine. Called once, in the event loop."""
        self._watch = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """End the engine, and one that is being started."""
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._engine is not None:
            engine, self._engine, self._why_none = self._engine, None, "The server has ended."
            await asyncio.to_thread(engine.shutdown)

    def close_at_once(self) -> None:
        """End the engine if `close` has not: for who has no event loop any more."""
        self._closed = True
        if self._engine is not None:
            self._engine.shutdown()

    async def _keep(self) -> None:
        while self._engine is not None:
            error = await self._engine.wait_dead()
            logger.error("The engine has died: %s", error)
            if not self._restart:
                break
            self._why_none = f"{error} Another engine is being started: try again in some seconds."
            dead, self._engine = self._engine, None
            await asyncio.to_thread(dead.shutdown)
            self._engine = await self._start_another()
        await asyncio.sleep(self.PAUSE)
        self._on_end()

    async def _start_another(self) -> AsyncLLMEngine | None:
        for attempt in range(1, self.MAX_FAILED_STARTS + 1):
            try:
                engine = await asyncio.to_thread(self._start_unless_closed)
            except Exception as error:  # many kinds: no memory, no file, no process
                logger.error("Start %d of %d of another engine failed: %s", attempt, self.MAX_FAILED_STARTS, error)
                self._why_none = f"The engine has died, and another could not be started: {error}"
                await asyncio.sleep(self.PAUSE)
            else:
                logger.warning("Another engine has been started.")
                return engine
        logger.error("No engine could be started %d times in a row, so the server ends.", self.MAX_FAILED_STARTS)
        return None

    def _start_unless_closed(self) -> AsyncLLMEngine:
        """In a thread, which goes on when the task that waits for it is cancelled."""
        engine = self._start_engine()
        if self._closed:
            engine.shutdown()
        return engine
