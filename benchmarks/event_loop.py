"""For how long bodies of a mebibyte hold the server's event loop, while nobody else is served.

    python benchmarks/event_loop.py --json event_loop.json

The server runs in a thread of this process, and its engine core in another process. A task on its loop notes the longest time between two of
its turns while a body is received, checked and answered. All are sent in turns; of each, the median counts.
"""

# ruff: noqa: UP031 - JSON is full of braces

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from tqdm.auto import tqdm

from minivllm.bench.report import format_table, report
from minivllm.config import EngineArgs
from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.entrypoints.server.launcher import ApiServer, bind, freeze_heap
from minivllm.entrypoints.server.state import ServerSettings, ServerState

SIZE = 2**20 - 1000
MOST_MS = 20.0
"""The project's bar."""
FIRST = ("a schema",)
"""Bodies for which nothing may be left to do when they come first."""
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"


def repeat(part: str, separator: str = ",") -> str:
    """As many as a body may have."""
    return separator.join([part] * (SIZE // (len(part) + len(separator))))


def fields(count: int) -> str:
    """So many small fields."""
    return ",".join(f'"{i}":1' for i in range(count))


def make_bodies() -> dict[str, tuple[str, str]]:
    """Path and body, by what is in it."""
    letters = "a" * (SIZE - 100)
    properties = {f"p{i}": {"type": "string", "maxLength": 9} for i in range(1500)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    message = '{"role":"user","content":"%s"}'
    bodies = {
        "an empty prompt": (COMPLETIONS, '{"prompt":"a","max_tokens":1}'),
        "token ids": (COMPLETIONS, '{"prompt":[%s]}' % repeat("1")),
        "lists of one token": (COMPLETIONS, '{"prompt":[%s]}' % repeat("[1]")),
        "empty lists": (COMPLETIONS, '{"prompt":[%s]}' % repeat("[]")),
        "empty texts": (COMPLETIONS, '{"prompt":[%s]}' % repeat('""')),
        "4,000 texts": (COMPLETIONS, '{"prompt":[%s]}' % ",".join(['"%s"' % ("a" * 250)] * 4000)),
        "one text": (COMPLETIONS, '{"prompt":"%s"}' % letters),
        "escaped characters": (COMPLETIONS, '{"prompt":"%s"}' % ("\\u00e9" * (SIZE // 6))),
        "an unknown field of lists": (COMPLETIONS, '{"prompt":"a","x":[%s]}' % repeat("[]")),
        "unknown fields": (COMPLETIONS, '{"prompt":"a",%s}' % fields(90_000)),
        "logit_bias": (COMPLETIONS, '{"prompt":"a","logit_bias":{%s}}' % fields(90_000)),
        "stop strings": (COMPLETIONS, '{"prompt":"a","stop":[%s]}' % repeat('"b"')),
        "stop tokens": (COMPLETIONS, '{"prompt":"a","stop_token_ids":[%s]}' % repeat("1")),
        "allowed tokens": (COMPLETIONS, '{"prompt":"a","max_tokens":1,"allowed_token_ids":[%s]}' % repeat("1234")),
        "16,000 allowed tokens": (
            COMPLETIONS,
            '{"prompt":"a","max_tokens":1,"allowed_token_ids":[%s]}' % ",".join(["1234"] * 16_000),
        ),
        "bad words": (COMPLETIONS, '{"prompt":"a","max_tokens":1,"bad_words":[%s]}' % ",".join(['"%s"' % ("b" * 1000)] * 1000)),
        "deep lists": (COMPLETIONS, '{"prompt":[%s]}' % repeat("[" * 100 + "]" * 100)),
        "a deep list": (COMPLETIONS, '{"prompt":%s}' % ("[" * (SIZE // 2) + "]" * (SIZE // 2))),
        "a schema": (COMPLETIONS, json.dumps({"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": schema}})),
        "a grammar": (
            COMPLETIONS,
            json.dumps({"prompt": "a", "structured_outputs": {"grammar": 'start: "%s"' % letters[:-900]}}),
        ),
        "not JSON": (COMPLETIONS, letters),
        "4,000 messages": (CHAT, '{"messages":[%s]}' % ",".join([message % ("a" * 200)] * 4000)),
        "2,000 messages": (CHAT, '{"messages":[%s]}' % ",".join([message % ("a" * 450)] * 2000)),
        "empty messages": (CHAT, '{"messages":[%s]}' % repeat("{}")),
        "parts of a message": (CHAT, '{"messages":[{"role":"user","content":[%s]}]}' % repeat('{"type":"text","text":""}')),
        "tools": (
            CHAT,
            '{"messages":[%s],"tools":[%s]}' % (message % "a", repeat('{"type":"function","function":{"name":"f"}}')),
        ),
        "a tool of many fields": (
            CHAT,
            '{"messages":[%s],"max_tokens":1,"tools":[{"type":"function","function":{"name":"f","description":"%s"}}]}'
            % (message % "a", letters[:-900]),
        ),
        "messages to responses": (RESPONSES, '{"input":[%s]}' % ",".join([message % ("a" * 450)] * 2000)),
        "a text to tokenize": ("/tokenize", '{"prompt":"%s"}' % ("ab " * (SIZE // 3 - 10))),
        "tokens to detokenize": ("/detokenize", '{"tokens":[%s]}' % repeat("1")),
    }
    assert all(len(body) <= 2**20 for _, body in bodies.values())
    return bodies


class LoopWatch:
    """Takes turns on an event loop, and remembers the longest wait for one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.longest = 0.0
        self._loop, self._last = loop, time.perf_counter()
        loop.call_soon_threadsafe(self._take_turn)

    def _take_turn(self) -> None:
        now = time.perf_counter()
        self.longest, self._last = max(self.longest, now - self._last), now
        self._loop.call_later(0.0005, self._take_turn)

    def measure(self, act: Any) -> float:
        """Milliseconds of the longest wait meanwhile."""
        time.sleep(0.02)
        self.longest = 0.0
        act()
        time.sleep(0.02)
        return 1000 * self.longest


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    engine = AsyncLLMEngine.from_engine_args(EngineArgs(model=arguments.model, num_gpu_blocks_override=512, max_num_seqs=16))
    (listener,) = bind("127.0.0.1", 0)
    freeze_heap()
    server = ApiServer(ServerState(engine, ServerSettings(shutdown_timeout=1)), listener.getsockname())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.05)
    assert engine._loop is not None
    watch = LoopWatch(engine._loop)
    bodies = make_bodies()
    waits: dict[str, list[float]] = {name: [] for name in bodies}
    statuses: dict[str, int] = {}
    headers = {"Content-Type": "application/json"}
    try:
        with httpx.Client(base_url=server.url, timeout=60) as client:

            def send(name: str) -> None:
                path, body = bodies[name]
                statuses[name] = client.post(path, content=body.encode(), headers=headers).status_code

            for i in tqdm(range(arguments.rounds + 1), unit="round"):
                for name in bodies:
                    wait = watch.measure(lambda name=name: send(name))
                    if i or name in FIRST:  # the first round warms up
                        waits[name].append(wait)
    finally:
        server.should_exit = True
        thread.join()
        engine.shutdown()
    medians = {name: statistics.median(values) for name, values in waits.items()}
    rows = [
        [name, path, f"{len(body):,}", statuses[name], f"{medians[name]:.1f} ms", f"{max(waits[name]):.1f} ms"]
        for name, (path, body) in bodies.items()
    ]
    columns = ["body", "to", "bytes", "status", "median", "longest"]
    worst = max(medians, key=lambda name: medians[name])
    title = f"Nobody else is served for at most {medians[worst]:.1f} ms (the bar: {MOST_MS:g} ms): {worst}"
    results = {
        "bodies": {name: {"status": statuses[name], "milliseconds": [round(wait, 2) for wait in waits[name]]} for name in bodies}
    }
    report(title, format_table(columns, rows), results, file=arguments.json)


if __name__ == "__main__":
    main()
