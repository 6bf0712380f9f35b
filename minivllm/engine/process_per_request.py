"""How it is done without an engine that batches: a process for each request, which loads the model, answers and ends.

It has the interface of `AsyncLLMEngine`, so that the same server runs on it: where the journey to continuous batching begins, and
what the benchmark of serving modes compares with.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
import uuid
from collections.abc import AsyncGenerator

from minivllm.config import EngineArgs
from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.engine.core_messages import EngineStats
from minivllm.engine.input_processor import InputProcessor, Prompt
from minivllm.engine.metrics import Metrics
from minivllm.engine.tokenizer import Tokenizer
from minivllm.engine.trace import StepRecord
from minivllm.errors import EngineDeadError
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import SamplingParams


class ProcessPerRequestEngine:
    """Starts an engine for each request, and ends it with the request.

    Args:
        args: As for `AsyncLLMEngine.from_engine_args`.
        max_processes: How many may run at once; the others wait. As many as there are processors if None.

    Raises:
        ModelLoadError: The model cannot be found or used.
    """

    def __init__(self, args: EngineArgs, max_processes: int | None = None) -> None:
        from minivllm.models.hub import resolve_model
        from minivllm.models.registry import load_model_config

        path = resolve_model(args.model)
        self.max_processes = max_processes or os.cpu_count() or 1
        self.args = args
        self.model_config = load_model_config(str(args.model), path, args.max_model_len)
        self.scheduler_config = args.scheduler_config(self.model_config.max_model_len)
        self.tokenizer = None if args.skip_tokenizer_init else Tokenizer(path)
        self.num_gpu_blocks = args.num_gpu_blocks_override or -(-self.model_config.max_model_len // args.block_size)
        self.metrics = Metrics(self.model_config.name)
        self.dead_error: EngineDeadError | None = None
        cache_tokens = self.num_gpu_blocks * args.block_size
        self._input_processor = InputProcessor(self.model_config, self.scheduler_config, self.tokenizer, cache_tokens)
        self._engine_args = dataclasses.replace(args, num_gpu_blocks_override=self.num_gpu_blocks)
        self._places = asyncio.Semaphore(self.max_processes)
        self._engines: dict[str, AsyncLLMEngine | None] = {}
        """The engine of each request that lives; None while it waits for one."""
        self._ended: asyncio.Event = asyncio.Event()

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> ProcessPerRequestEngine:
        """As the constructor, under the name that `AsyncLLMEngine` has for it."""
        return cls(args)

    @property
    def stats(self) -> EngineStats:
        """How many requests run and wait."""
        running = sum(engine is not None for engine in self._engines.values())
        return EngineStats(num_running=running, num_waiting=len(self._engines) - running)
