"""A small engine for tests of the live page: real queues, blocks and steps over a model that only takes time, behind a tiny /v1."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig
from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.engine.llm_engine import LLMEngine
from minivllm.entrypoints.dashboard.app import add_dashboard
from minivllm.executor.base import Executor
from minivllm.sampling_params import RequestOutputKind, SamplingParams
from minivllm.scheduler_output import SequenceOutput

MODEL = "a-model-that-waits"
VOCAB_SIZE = 1000


class WaitingExecutor(Executor):
    """Each step takes a while, and gives any tokens."""

    def __init__(self, num_blocks, seconds):
        self.num_blocks, self.seconds = num_blocks, seconds

    def determine_num_available_blocks(self):
        return self.num_blocks, 0

    def initialize_cache(self, num_gpu_blocks, num_cpu_blocks):
        pass

    def execute_model(self, request):
        time.sleep(self.seconds + 1e-5 * sum(seq.num_tokens for seq in request.sequences))
        return [SequenceOutput([7] * seq.num_samples) for seq in request.sequences]


def model_config():
    return ModelConfig(MODEL, Path(), "", {}, 1, 1, 1, 1, VOCAB_SIZE, 2048, ())


def make_engine(num_blocks=128, seconds=0.01, max_num_seqs=16, enable_prefix_caching=False):
    """An `AsyncLLMEngine` in a thread of this process."""
    cache = CacheConfig(enable_prefix_caching=enable_prefix_caching)
    scheduler = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=2048)
    return AsyncLLMEngine.from_engine(
        LLMEngine.from_executor(model_config(), cache, scheduler, WaitingExecutor(num_blocks, seconds))
    )


def make_app(get_engine):
    """The page, and as much of the API as it asks for. Every token is a word; the prompt "wrong" is refused."""
    app = FastAPI()
    add_dashboard(app, get_engine)
    numbers = itertools.count()

    @app.get("/v1/models")
    async def models():
        return {"data": [{"id": MODEL}]}

    @app.post("/tokenize")
    async def tokenize(request: Request):
        body = await request.json()
        return {"tokens": [1 + len(word) for word in body["messages"][0]["content"].split()]}

    @app.post("/v1/completions")
    async def completions(request: Request):
        body = await request.json()
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        return answer(body, prompts, lambda index, text: {"index": index, "text": text})

    @app.post("/v1/chat/completions")
    async def chat(request: Request):
        body = await request.json()
        return answer(body, [body["messages"][0]["content"]], lambda index, text: {"index": index, "delta": {"content": text}})

    def answer(body, prompts, choice):
        if "wrong" in prompts:
            return JSONResponse({"error": {"message": "The prompt is <b>wrong</b>: say something else."}}, 400)
        name = f"cmpl-{next(numbers)}"
        return StreamingResponse(stream(body, prompts, choice, name), media_type="text/event-stream")

    async def stream(body, prompts, choice, name):
        chunks = asyncio.Queue()

        async def generate(index, prompt):
            token_ids = prompt if isinstance(prompt, list) else [1 + len(word) % VOCAB_SIZE for word in prompt.split()]
            params = SamplingParams(max_tokens=body["max_tokens"], output_kind=RequestOutputKind.DELTA)
            async for output in get_engine().generate(token_ids, params, f"{name}-{index}"):
                for part in output.outputs:
                    await chunks.put(choice(index, "word " * len(part.token_ids)) | {"finish_reason": part.finish_reason})

        tasks = [asyncio.create_task(generate(index, prompt)) for index, prompt in enumerate(prompts)]
        try:
            while not all(task.done() for task in tasks) or not chunks.empty():
                try:
                    part = await asyncio.wait_for(chunks.get(), 0.1)
                except asyncio.TimeoutError:
                    continue
                yield f"data: {json.dumps({'id': name, 'choices': [part]})}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            for task in tasks:
                task.cancel()

    return app
