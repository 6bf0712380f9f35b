"""How requests and the API server end: clients that leave, signals, a dead engine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time

import httpx
import msgspec
import pytest
from scripted_server import (
    MAX_NUM_SEQS,
    connect,
    error_of,
    events,
    post,
    read_to_the_end,
    running_server,
    scripted_engine,
    wait_until,
)
from starlette.responses import StreamingResponse

from minivllm.config import EngineArgs
from minivllm.data_parallel.processes import RestartPolicy
from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.entrypoints.server.launcher import ApiServer
from minivllm.entrypoints.server.state import ServerSettings, ServerState


@pytest.fixture(scope="module")
def server(smollm2_path):
    with running_server(lambda: scripted_engine(smollm2_path)) as server:
        yield server


@pytest.fixture
def slow(server):
    """The same server, at ten tokens a second."""
    executor = server.engine.scripted
    executor.seconds_per_step = 0.1
    yield server
    executor.seconds_per_step = 0.0
    wait_until(server.is_idle)


# -- clients that say nothing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [[b""], [b"GET /health HT"], [b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"GET /hea"]])
def test_a_client_that_does_not_say_what_it_wants_is_given_up(server, monkeypatch, said):
    monkeypatch.setattr("minivllm.entrypoints.server.connection.HEAD_SECONDS", 0.3)
    with connect(server) as connection:
        for part in said[:-1]:
            connection.sendall(part)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(said[-1])
        with contextlib.suppress(ConnectionResetError):
            assert read_to_the_end(connection) in (b"", b'{"status":"ok"}')


def test_a_million_prompts_are_counted_before_they_are_looked_at(server):
    begin = time.perf_counter()
    message = error_of(server.complete(prompt=["a"] * 200_000), 400)["message"]
    assert message.startswith("prompt is a list, but must be") and "at most 4096 prompts" in message
    assert time.perf_counter() - begin < 5


def test_a_client_that_waits_for_its_answer_is_not_given_up(slow, monkeypatch):
    monkeypatch.setattr("minivllm.entrypoints.server.connection.HEAD_SECONDS", 0.3)
    assert slow.complete(prompt="a", max_tokens=8).status_code == 200


# -- clients that leave --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{"stream": True}, {}, {"prompt": ["a", "b", "c"]}, {"prompt": ["a", "b"], "n": 2, "stream": True}]
)
def test_a_client_that_leaves_frees_everything(slow, fields):
    num_tasks = slow.tasks()
    with connect(slow) as connection:
        connection.sendall(post("/v1/completions", **{"prompt": "a", "max_tokens": 200, **fields}))
        wait_until(lambda: slow.engine.stats.num_running > 0)
    wait_until(slow.is_idle, seconds=2)
    wait_until(lambda: slow.tasks() <= num_tasks, seconds=2)


def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_a_line_in_the_log_and_nothing_else(server, caplog):
    num_tasks = server.tasks()
    with caplog.at_level(logging.INFO, "minivllm.requests"):
        with connect(server) as connection:
            connection.sendall(post("/v1/completions", prompt="a")[:-5])
            wait_until(lambda: server.tasks() > num_tasks)
        wait_until(lambda: server.tasks() <= num_tasks)
    assert [record.fields["status"] for record in caplog.records if record.fields["end"] == "client disconnected"] == [None]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_closed_its_side_gets_its_answer(slow, stream):
    with connect(slow) as connection:
        connection.sendall(post("/v1/completions", prompt="a", max_tokens=5, stream=stream))
        connection.shutdown(socket.SHUT_WR)
        answer = read_to_the_end(connection)
    assert b"HTTP/1.1 200 OK" in answer
    assert b" jumps" in answer if stream else b" The quick brown fox jumps" in answer


@contextlib.contextmanager
def client_that_does_not_read(server, **body):
    """A client that asks for much more than the two ends of its connection can hold."""
    server.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connect(server, connection)
        connection.sendall(post("/v1/completions", **{"prompt": "a", "max_tokens": 200, "n": 4, "logprobs": 20, **body}))
        yield connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read_is_given_up(server, monkeypatch, stream):
    """It would hold its places for ever; and the connection, which waits to be emptied."""
    monkeypatch.setattr("minivllm.entrypoints.server.connection.TAKE_SECONDS", 0.3)
    num_connections = len(server.server.server_state.connections)
    with client_that_does_not_read(server, stream=stream):
        wait_until(lambda: len(server.server.server_state.connections) > num_connections)
        wait_until(server.is_idle)
        wait_until(lambda: len(server.server.server_state.connections) == num_connections)


# -- the end -------------------------------------------------------------------------------------------------------


class StreamReader(threading.Thread):
    """Reads a stream to its end, or the error that came instead."""

    def __init__(self, server, **body):
        super().__init__()
        self.server, self.body, self.chunks = server, {"prompt": "a", "stream": True, **body}, []
        self.start()

    def run(self):
        with (
            httpx.Client(timeout=120) as client,
            client.stream("POST", f"{self.server.url}/v1/completions", json=self.body) as response,
        ):
            self.status = response.status_code
            self.chunks.extend(events(response) if self.status == 200 else [json.loads(response.read())])


def test_the_end_lets_finish_what_runs(smollm2_path):
    with running_server(lambda: scripted_engine(smollm2_path), ServerSettings(shutdown_timeout=10)) as server:
        server.engine.scripted.seconds_per_step = 0.05
        reader = StreamReader(server, max_tokens=20)
        wait_until(lambda: bool(server.engine.stats.num_running))
        server.server.handle_exit(15, None)
        reader.join()
        assert reader.chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert server.server.exit_status == 0


@pytest.mark.parametrize("num_signals,shutdown_timeout", [(1, 0.3), (2, 60)])
def test_what_does_not_end_in_time_or_after_a_second_signal_is_ended_clearly(smollm2_path, num_signals, shutdown_timeout):
    with running_server(lambda: scripted_engine(smollm2_path), ServerSettings(shutdown_timeout=shutdown_timeout)) as server:
        server.engine.scripted.seconds_per_step = 0.1
        reader = StreamReader(server, max_tokens=240)
        wait_until(lambda: bool(server.engine.stats.num_running))
        begin = time.monotonic()
        for _ in range(num_signals):
            server.server.handle_exit(2, None)
            time.sleep(0.3)
        reader.join()
        assert reader.chunks[-1]["error"]["code"] == "shutdown"
        assert time.monotonic() - begin < 5
    assert server.server.exit_status == 0


def test_a_second_signal_ends_who_has_not_sent_its_body_too(smollm2_path, monkeypatch):
    monkeypatch.setattr("minivllm.entrypoints.server.state.LAST_WORD_SECONDS", 0.2)
    with (
        running_server(lambda: scripted_engine(smollm2_path), ServerSettings(shutdown_timeout=60)) as server,
        connect(server) as connection,
    ):
        connection.sendall(post("/v1/completions", prompt="a")[:-5])
        wait_until(lambda: bool(server.server.server_state.tasks))
        begin = time.monotonic()
        for _ in range(2):
            server.server.handle_exit(2, None)
            time.sleep(0.3)
        assert connection.recv(1000).startswith(b"HTTP/1.1 503")
        assert time.monotonic() - begin < 5


def test_the_end_does_not_wait_for_a_client_that_does_not_read(smollm2_path, monkeypatch):
    monkeypatch.setattr("minivllm.entrypoints.server.connection.LAST_WORD_SECONDS", 0.2)
    with (
        running_server(lambda: scripted_engine(smollm2_path), ServerSettings(shutdown_timeout=0)) as server,
        client_that_does_not_read(server, stream=True),
    ):
        wait_until(lambda: server.engine.stats.num_running > 0)
        wait_until(lambda: server.engine.num_unfinished_requests() == 0)  # all is generated, and most of it not sent
        server.server.handle_exit(15, None)
        wait_until(lambda: not server.server.server_state.connections, seconds=4)
        assert server.state.admission.num_sequences == 0


def test_a_third_signal_waits_for_nothing(server, monkeypatch):
    statuses = []
    monkeypatch.setattr("minivllm.entrypoints.server.launcher.os._exit", statuses.append)
    not_running = ApiServer(ServerState(server.engine, ServerSettings()), ("127.0.0.1", 1))
    for _ in range(3):
        assert statuses == []
        not_running.handle_exit(2, None)
    assert statuses == [130]


def test_when_the_engine_dies_every_client_hears_why_and_the_server_ends(smollm2_path):
    with running_server(lambda: scripted_engine(smollm2_path)) as server:
        server.engine.scripted.seconds_per_step = 0.05
        readers = [StreamReader(server, max_tokens=200) for _ in range(8)]
        wait_until(lambda: server.engine.stats.num_running == MAX_NUM_SEQS and server.engine.stats.num_waiting > 0)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.complete, max_tokens=200)
            wait_until(lambda: server.engine.num_unfinished_requests() == 9)
            engine = server.engine
            engine.shutdown()
            assert "was shut down" in error_of(waiting.result(), 503)["message"]
        assert "was shut down" in error_of(server.client.get("/health"), 503)["message"]
        for reader in readers:
            reader.join()
            assert reader.chunks[-1]["error"]["code"] == "engine_dead"
        assert sorted(reader.status for reader in readers) == [200] * MAX_NUM_SEQS + [503] * 4, (
            "who had no token yet gets a status"
        )
        wait_until(lambda: server.server.should_exit)
    assert server.server.exit_status == 1


def restarting_engine(**options):
    """A real engine, which is started again when it dies."""
    args = EngineArgs("smollm2-135m", num_gpu_blocks_override=64, max_num_seqs=MAX_NUM_SEQS, **options)
    return AsyncLLMEngine.from_engine_args(args, restart=True)


def local_replicas(server):
    return server.engine.replicas._launcher.local


def kill(server):
    """Kill the engine's process, and wait until that is known."""
    os.kill(local_replicas(server).process_ids[0], signal.SIGKILL)
    wait_until(lambda: "Another engine is being started" in server.client.get("/health").text)


def counted(server, name):
    return server.engine.metrics.count(name)


@pytest.mark.long
@pytest.mark.slow
def test_a_dead_engine_is_replaced_under_a_server_that_goes_on():
    with running_server(restarting_engine) as server:
        server.client.timeout = 120
        whole = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
        expected = server.complete(**whole).json()["choices"][0]["text"]
        readers = [StreamReader(server, prompt="Once", **whole) for _ in range(3)]
        wait_until(lambda: counted(server, "generation_tokens") > 60 + 3 * 5)
        kill(server)
        assert [item["state"] for item in server.client.get("/replicas").json()["replicas"]] == ["starting"]
        assert server.client.get("/v1/models").status_code == 200
        for reader in readers:
            reader.join()
            assert "".join(chunk["choices"][0]["text"] for chunk in reader.chunks if chunk["choices"]) == expected
        assert (counted(server, "num_resumed_requests"), counted(server, "num_lost_requests")) == (3, 0)
        assert counted(server, "generation_tokens") == 4 * 60, "it goes on counting"
        # and how long requests wait is limited
        kill(server)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.complete, max_tokens=1)
            wait_until(lambda: server.engine.replicas.group.table.pending)
            server.engine.replicas.group.failover.timeout = 0.1
            error_of(waiting.result(), 503)
        response = server.complete()
        error_of(response, 503)
        assert int(response.headers["retry-after"]) >= 1
        wait_until(lambda: server.client.get("/health").status_code == 200, 120)
        assert server.complete(max_tokens=1).status_code == 200
        wait_until(server.is_idle)
        assert server.client.get("/replicas").json()["replicas"][0]["deaths"] == 2


@pytest.mark.slow
def test_an_engine_that_cannot_be_started_again_ends_the_server(monkeypatch):
    monkeypatch.setattr(RestartPolicy, "FIRST_PAUSE_SECONDS", 0.05)
    with running_server(lambda: restarting_engine(max_replica_deaths=3)) as server:
        local = local_replicas(server)
        local._setup = msgspec.structs.replace(local._setup, config=b"no configuration")
        kill(server)
        wait_until(lambda: server.server.should_exit, 120)
        assert "The engine has ended: UnpicklingError" in str(server.engine.dead_error)
    assert server.server.exit_status == 1


def test_an_engine_that_cannot_be_watched_ends_the_server(smollm2_path, caplog):
    async def fail():
        raise RuntimeError("nobody foresaw this")

    def start_engine():
        engine = scripted_engine(smollm2_path)
        engine.wait_dead = fail
        return engine

    with running_server(start_engine) as server:
        wait_until(lambda: server.server.should_exit)
    assert server.server.exit_status == 1
    assert "nobody foresaw this" in caplog.text


def test_who_only_watches_is_not_waited_for(smollm2_path):
    async def for_ever():
        while True:
            yield b"data: news\n\n"
            await asyncio.sleep(0.05)

    with running_server(lambda: scripted_engine(smollm2_path), ServerSettings(shutdown_timeout=60)) as server:
        server.server.config.app.add_api_route("/watch", lambda: StreamingResponse(for_ever(), media_type="text/event-stream"))
        with server.client.stream("GET", "/watch") as response:
            lines = response.iter_lines()
            next(lines)
            begin = time.monotonic()
            server.server.handle_exit(15, None)
            assert set(lines) <= {"data: news", ""}, "it ends as a response should"
        assert time.monotonic() - begin < 5
