"""SKELETON - the interface that the real one will have; see the docstrings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from minivllm.config import CacheConfig, EngineArgs, ModelConfig, SchedulerConfig
from minivllm.engine.llm_engine import Prompt
from minivllm.engine.metrics import EngineStats
from minivllm.engine.tokenizer import Tokenizer
from minivllm.engine.trace import StepRecord
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import SamplingParams


class AsyncLLMEngine:
    """Runs an `LLMEngine` in the background and streams what it generates."""

    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    num_gpu_blocks: int
    tokenizer: Tokenizer | None
    stats: EngineStats
    """What the engine was doing after its latest step."""
    dead_error: Exception | None
    """An `EngineDeadError` with the cause once the engine has failed; None while it lives."""

    @classmethod
    def from_engine_args(cls, args: EngineArgs, *, in_process: bool = False) -> AsyncLLMEngine:
        """Start the engine, in a process of its own or in a thread of this one, and wait until it is ready (seconds: call it in
        a thread from a coroutine). Raises ModelLoadError, ConfigError."""
        raise NotImplementedError

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of a request as they come, the last one with `finished` set. `params.output_kind` says which: CUMULATIVE (all so
        far), DELTA (in each CompletionOutput the new text, token_ids and logprobs alone, and only sequences with something
        new; prompt_logprobs in the first output), FINAL_ONLY. A slow consumer gets several tokens in one output.

        Closing the generator, or cancelling the task that waits for it, aborts the request.

        Raises:
            RequestError: The request cannot be served (raised by the first `anext`, before anything is queued).
            EngineDeadError: The engine has failed, before or meanwhile.
        An output with `error` set is the last one: the model failed in a step of this request.
        """
        raise NotImplementedError
        yield

    async def abort(self, request_id: str) -> None: ...

    def check_health(self) -> None:
        """Raises EngineDeadError if the engine has failed."""

    async def wait_dead(self) -> Exception:
        """Return the EngineDeadError when the engine has failed (it waits for ever while it lives)."""
        raise NotImplementedError

    def num_unfinished_requests(self) -> int: ...

    async def steps(self) -> AsyncGenerator[StepRecord, None]:
        """What the engine does from now on, step by step; a slow consumer misses steps. Closing the generator ends it."""
        raise NotImplementedError
        yield

    def shutdown(self) -> None:
        """End the engine and its process; streams that still run end with an EngineDeadError that says so."""
