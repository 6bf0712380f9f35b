"""The last check of lesson 11: the real model, real sockets, the official client and a load generator."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from minivllm import LLM, SamplingParams
from minivllm.bench.openai_client import OpenAIClient
from minivllm.bench.serve import Load, measure_serving
from minivllm.bench.summary import ServedRequest
from minivllm.bench.workloads import generate_requests
from minivllm.course.lessons.lesson_11.situations import SECONDS
from minivllm.course.lessons.streaming import parts_of, serve
from minivllm.course.observations import expect

OPTIONS: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 256, "num_gpu_blocks_override": 128}
_PROMPTS = (
    "The capital of France is",
    "Once upon a time",
    "1, 2, 3, 4,",
    "Water boils at",
    "My favourite colour is",
    "Ships float because",
    "In 1969,",
    "Dear Sir,",
)
_CHAT = [{"role": "user", "content": "Name a colour."}]
_GREEDY = SamplingParams(temperature=0, max_tokens=16)


class LazyApp:
    """The learner's app, made in the server's event loop, to which its engine belongs."""

    def __init__(self, make_app: Any, engine_cls: Any, core: Any, frontend: Any) -> None:
        self._make, self._core = lambda engine: make_app(engine, frontend), core
        self._engine_cls, self.engine, self._app = engine_cls, None, None
        self.unwritten: list[NotImplementedError] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """As of an ASGI app."""
        if self._app is None:
            self.engine = self._engine_cls(self._core)
            self._app = self._make(self.engine)
        if scope["type"] == "lifespan":
            return
        try:
            await self._app(scope, receive, send)
        except NotImplementedError as error:
            self.unwritten.append(error)
            raise

    def close(self) -> None:
        """End the engine's thread."""
        if self.engine is not None:
            self.engine.inbox.put(None)
            self.engine.thread.join(SECONDS)


def check_server(make_app: Any, engine_cls: Any) -> list[str]:
    """Eight clients, streamed and whole, a chat, twelve requests of the load generator, and three clients that hang up.

    Returns:
        What they got, for people.
    """
    llm = LLM("smollm2-135m", **OPTIONS)
    texts = [output.outputs[0].text for output in llm.generate(list(_PROMPTS), _GREEDY, use_tqdm=False)]
    core, frontend = parts_of(llm.llm_engine)
    count_free = core.core.block_manager.get_num_free_gpu_blocks
    num_blocks, app, said = count_free(), LazyApp(make_app, engine_cls, core, frontend), "All clients have left."
    with serve(app) as address:
        try:
            lines = [*_talk(address, texts), _measure(address)]
            _hang_up(address)
            _wait_until(lambda: not app.engine.streams)
            look = "generate's `finally`, which aborts"
            expect(said, "requests that still have a stream", [], sorted(app.engine.streams), look)
            _wait_until(lambda: count_free() == num_blocks)
            expect(said, "free blocks", num_blocks, count_free(), look)
        except Exception:
            if app.unwritten:
                raise app.unwritten[0] from None
            raise
        finally:
            app.close()
    return lines


def _talk(address: str, texts: list[str]) -> list[str]:
    from openai import OpenAI

    with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as client, ThreadPoolExecutor(8) as pool:
        model = client.models.list().data[0].id

        def complete(number: int) -> str:
            options = {"model": model, "prompt": _PROMPTS[number], "max_tokens": 16, "temperature": 0}
            if number % 2:
                return client.completions.create(**options).choices[0].text  # type: ignore[call-overload, no-any-return]
            with client.completions.create(**options, stream=True) as events:  # type: ignore[call-overload]
                return "".join(event.choices[0].text for event in events if event.choices)

        got = list(pool.map(complete, range(len(_PROMPTS))))
        for prompt, wanted, text in zip(_PROMPTS, texts, got, strict=True):
            expect(f"{prompt!r}, by the openai client.", "text", wanted, text, "the check of the app, which serves a script")
        chat: Any = {"model": model, "messages": _CHAT, "max_tokens": 12, "temperature": 0}
        whole = client.chat.completions.create(**chat).choices[0].message.content
        with client.chat.completions.create(**chat, stream=True) as events:
            streamed = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
        expect("A chat, streamed and whole.", "streamed text", whole, streamed, "chat_events")
    return [f"{prompt!r} → {text!r}" for prompt, text in zip(_PROMPTS[:3], got, strict=False)] + [f"a chat: {whole!r}"]


def _measure(address: str) -> str:
    requests = generate_requests(12, mean_prompt_len=16, mean_output_len=8, max_len=64, seed=1)

    async def measure() -> list[ServedRequest]:
        async with OpenAIClient(address) as client:
            results, _ = await measure_serving(client, "smollm2-135m", requests, Load(concurrency=6), use_tqdm=False)
            return results

    results = _in_thread(measure)
    said, errors = "Twelve requests of the load generator, six at a time.", [result.error for result in results if result.error]
    expect(said, "errors", [], errors, "usage, [DONE]")
    return f"{len(results)} requests of the load generator, none failed"


def _hang_up(address: str) -> None:
    from openai import OpenAI

    with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as client:
        for prompt in _PROMPTS[:3]:
            events = client.completions.create(
                model="", prompt=prompt, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
            )
            next(iter(events))
            events.close()


def _in_thread(work: Any) -> Any:
    """A coroutine's result; a notebook already runs an event loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(work())).result()


def _wait_until(condition: Any) -> None:
    pause = threading.Event()
    for _ in range(int(SECONDS / 0.02)):
        if condition():
            return
        pause.wait(0.02)
