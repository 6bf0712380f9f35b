"""A server without a model, for tests: everything is real but the tokens, which are always the same sentence.

The scheduler, the engine's thread, the tokenizer, uvicorn and its sockets are the real ones. The executor gives the tokens of
`SENTENCE` over and over, after as many seconds as a test wants, with log-probabilities that are easy to check.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from pydantic import TypeAdapter

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig
from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.tokenizer import Tokenizer
from minivllm.entrypoints.openai.errors import ErrorResponse
from minivllm.entrypoints.server.launcher import ApiServer, bind
from minivllm.entrypoints.server.state import ServerSettings, ServerState
from minivllm.executor.base import Executor
from minivllm.outputs import Logprob
from minivllm.scheduler_output import ExecuteModelRequest, SequenceData, SequenceOutput

SENTENCE = " The quick brown fox jumps over the lazy dog."
MODEL = "scripted"
MAX_MODEL_LEN = 256
MAX_NUM_SEQS = 4
NUM_BLOCKS = 128


class ScriptedExecutor(Executor):
    """Says `SENTENCE`; each of n continuations begins a token later than the one before. A token's log-probability is minus a tenth
    of its place in the sequence."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.script = tokenizer.encode(SENTENCE)
        self.seconds_per_step = 0.0
        self.failure: Exception | None = None

    def determine_num_available_blocks(self) -> tuple[int, int]:
        return NUM_BLOCKS, 0

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        pass

    def execute_model(self, request: ExecuteModelRequest) -> list[SequenceOutput]:
        time.sleep(self.seconds_per_step)
        if self.failure is not None:
            raise self.failure
        return [self._speak(seq) for seq in request.sequences]

    def _speak(self, seq: SequenceData) -> SequenceOutput:
        params, end = seq.request.sampling_params, seq.num_computed_tokens + seq.num_tokens
        result = SequenceOutput()
        for index in range(seq.index, seq.index + seq.num_samples):
            result.token_ids.append(self.script[(seq.num_output_tokens + index) % len(self.script)])
        if seq.num_samples and params.logprobs is not None:
            result.logprobs = [candidates(t, end, params.logprobs) for t in result.token_ids]
        if params.prompt_logprobs is not None and not seq.num_output_tokens:
            prompt = seq.request.prompt_token_ids
            positions = range(max(1, seq.num_computed_tokens), end)
            result.prompt_logprobs = {p: candidates(prompt[p], p, params.prompt_logprobs) for p in positions}
        return result


def candidates(token_id: int, place: int, num_logprobs: int) -> dict[int, Logprob]:
    """The chosen token is the second most likely one, so it is not among the top 1."""
    entry = {token_id: Logprob(-place / 10, 2)}
    for rank in [1, *range(3, 50)][: max(0, num_logprobs - 1) or num_logprobs]:
        entry[token_id + rank] = Logprob(-place / 10 + (0.05 if rank == 1 else -rank), rank)
    return entry


def scripted_configs(smollm2_path: Path) -> tuple[ModelConfig, CacheConfig, SchedulerConfig]:
    model = ModelConfig(MODEL, smollm2_path, "none", {}, 1, 1, 1, 8, 49152, MAX_MODEL_LEN, (2,))
    return model, CacheConfig(block_size=8), SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=1024)


def scripted_engine(smollm2_path: Path) -> AsyncLLMEngine:
    """An engine whose `scripted` attribute is its executor."""
    tokenizer = Tokenizer(smollm2_path)
    executor = ScriptedExecutor(tokenizer)
    engine = AsyncLLMEngine.from_engine(LLMEngine.from_executor(*scripted_configs(smollm2_path), executor, tokenizer))
    engine.scripted = executor
    return engine


@dataclass
class RunningServer:
    """A server in a thread, and a client of it."""

    url: str
    client: httpx.Client
    state: ServerState
    server: ApiServer

    @property
    def engine(self) -> AsyncLLMEngine:
        return self.state.engine

    def complete(self, **body) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": "Once", **body})

    def chat(self, **body) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], **body})

    def is_idle(self) -> bool:
        """Whether nothing is left of any request: no place taken, no stream, no sequence, no block."""
        stats = self.engine.stats
        left = (self.state.admission.num_sequences, self.engine.num_unfinished_requests(), stats.num_running, stats.num_waiting)
        return left == (0, 0, 0, 0) and stats.num_used_blocks == 0

    def tasks(self) -> int:
        """How many tasks the server's event loop has."""
        return asyncio.run_coroutine_threadsafe(_count_tasks(), self.engine._outputs._loop).result()


async def _count_tasks() -> int:
    return len(asyncio.all_tasks())


@contextlib.contextmanager
def running_server(start_engine: Callable[[], AsyncLLMEngine], settings: ServerSettings | None = None) -> Iterator[RunningServer]:
    """Serve in a thread for as long as the block lasts."""
    settings = settings or ServerSettings(shutdown_timeout=1)
    (listener,) = bind("127.0.0.1", 0)
    engine = start_engine()
    state = ServerState(engine, settings)
    server = ApiServer(state, listener.getsockname())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    wait_until(lambda: server.started)
    with httpx.Client(base_url=server.url, timeout=20) as client:
        try:
            yield RunningServer(server.url, client, state, server)
        finally:
            server.should_exit = True
            thread.join(timeout=20)
            engine.shutdown()
    assert not thread.is_alive(), "the server did not end"


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something that should come soon."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"nothing came within {seconds} seconds"
        time.sleep(0.01)


def events(response: httpx.Response) -> Iterator[dict]:
    """The JSON of a stream's events as they come, up to [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    for line in filter(None, response.iter_lines()):
        assert line.startswith("data: ")
        if line == "data: [DONE]":
            return
        yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")


def check_shape(shape: type, value: dict) -> None:
    """Whether an answer is what the API says of it."""
    TypeAdapter(shape).validate_python(value, strict=True)
    assert value.keys() <= shape.__annotations__.keys() | {"prompt_logprobs"}


def error_of(response: httpx.Response, status: int) -> dict:
    """The error of an answer that must be one."""
    assert response.status_code == status, response.text
    check_shape(ErrorResponse, response.json())
    return response.json()["error"]


def connect(server: RunningServer, connection: socket.socket | None = None) -> socket.socket:
    """A bare connection, for what no client of HTTP would do."""
    connection = connection or socket.socket()
    host, port = server.url.removeprefix("http://").split(":")
    connection.settimeout(10)
    connection.connect((host, int(port)))
    return connection


def post(path: str, **body) -> bytes:
    """A request as it is sent."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def read_to_the_end(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection. Raises TimeoutError if it does not."""
    received = b""
    with contextlib.suppress(ConnectionError):  # it hung up on what it had not read
        while more := connection.recv(65536):
            received += more
    return received
