"""The server's log, when nobody reads it or nothing more can be written."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from scripted_server import wait_until

from minivllm.entrypoints.server.request_log import JsonFormatter, QueuedLog, say

LINE = "x" * 1000


class Stream:
    """What a handler needs of a stream."""

    def __init__(self, file: int) -> None:
        self.fileno = lambda: file


@pytest.fixture
def logger():
    logger = logging.Logger("a test")
    yield logger
    for handler in logger.handlers:
        handler.close()


def log_to(logger, stream, capacity=50):
    handler = QueuedLog(stream, capacity)
    handler.setFormatter(JsonFormatter())
    logger.addHandler(handler)


def test_lines_come_in_order_and_the_last_ones_are_waited_for(logger, tmp_path):
    path = tmp_path / "log"
    with path.open("w") as file:
        log_to(logger, file, 1000)
        for number in range(500):
            logger.info("line %d", number)
        logger.handlers[0].close()
    assert [json.loads(line)["message"] for line in path.read_text().splitlines()] == [f"line {number}" for number in range(500)]


def test_a_pipe_that_nobody_reads_stops_nobody_and_what_is_missing_is_counted(logger):
    reader, writer = os.pipe()
    log_to(logger, Stream(writer))
    for number in range(1000):  # it would wait for ever
        logger.info("%s %d", LINE, number)
    lines: list[dict] = []

    def read():
        with os.fdopen(reader) as pipe:
            lines.extend(json.loads(line) for line in pipe)

    thread = threading.Thread(target=read)
    thread.start()

    def number_accounted_for():
        dropped = [int(line["message"].split()[0]) for line in lines if line["logger"] == "minivllm.log"]
        return sum(dropped) + len(lines) - len(dropped)

    wait_until(lambda: any("dropped" in line["message"] for line in lines) and number_accounted_for() == 1000)
    logger.info("the last one")  # now that there is room for it
    wait_until(lambda: lines[-1]["message"] == "the last one")
    assert number_accounted_for() == 1001
    os.close(writer)
    os.close(logger.handlers[0]._write.args[0])
    thread.join()


def test_what_is_dropped_while_the_log_closes_is_counted_and_delays_nothing(logger):
    """`logging.shutdown` holds the handler's lock meanwhile."""
    reader, writer = os.pipe()
    log_to(logger, Stream(writer))
    for number in range(1000):
        logger.info("%s %d", LINE, number)
    handler, lines = logger.handlers[0], []

    def read():
        time.sleep(0.2)
        with os.fdopen(reader) as pipe:
            lines.extend(json.loads(line) for line in pipe)

    thread = threading.Thread(target=read)
    thread.start()
    handler.acquire()
    handler.close()
    handler.release()
    os.close(writer)
    os.close(handler._write.args[0])
    thread.join()
    dropped = [int(line["message"].split()[0]) for line in lines if line["logger"] == "minivllm.log"]
    assert dropped and sum(dropped) + len(lines) - len(dropped) == 1000


def test_a_message_that_cannot_be_written_is_told_and_raises_nothing(logger):
    stream = io.StringIO()
    log_to(logger, stream)
    logger.info("%d lines", "many")
    wait_until(lambda: "could not be written" in stream.getvalue())
    assert "TypeError" in stream.getvalue()


def test_a_sentence_does_not_wait_for_a_full_pipe(monkeypatch):
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    monkeypatch.setattr(sys, "stderr", Stream(writer))
    for number in range(1000):
        say(f"sentence {number}")
    assert os.read(reader, 100).startswith(b"sentence 0\n")
    os.close(reader)
    os.close(writer)


def test_a_full_disk_stops_nobody(logger):
    with Path("/dev/full").open("w") as full:
        log_to(logger, full)
        for _ in range(200):
            logger.info(LINE)
        wait_until(lambda: logger.handlers[0]._num_dropped == 200)


def test_a_stream_without_a_file(logger):
    stream = io.StringIO()
    log_to(logger, stream)
    logger.warning("hello")
    wait_until(lambda: "hello" in stream.getvalue())


def end(server):
    server.terminate()
    assert server.wait(30) == 0


@contextlib.contextmanager
def serve(smollm2_path, port, stderr):
    options = ["--port", str(port), "--log-level", "debug", "--num-gpu-blocks-override", "64", "--served-model-name", "fox"]
    command = [sys.executable, "-m", "minivllm.entrypoints.cli.main", "serve", str(smollm2_path), *options]
    with subprocess.Popen(command, stderr=stderr, text=True) as server:
        try:
            yield server
        finally:
            server.kill()


def use(client):
    for _ in range(100):  # each writes a line
        assert client.get("/health").status_code == 200
    answer = client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2, "model": "fox"})
    assert (answer.status_code, answer.json()["model"]) == (200, "fox")


@pytest.mark.long
def test_a_server_whose_log_nobody_reads_serves_and_ends(smollm2_path):
    with serve(smollm2_path, 0, subprocess.PIPE) as server:
        fcntl.fcntl(server.stderr, fcntl.F_SETPIPE_SZ, 4096)
        while "minivllm serves" not in (line := server.stderr.readline()):
            assert line, "it ended"
        url = line.split(" at ")[1].split(" ")[0]
        with httpx.Client(base_url=url, timeout=60) as client:
            use(client)
            card = client.get("/v1/models").json()["data"][0]
            assert (card["id"], card["max_model_len"]) == ("fox", 64 * 16 + 1)
        end(server)


@pytest.mark.parametrize("kind", ["a full disk", "a file that is removed"])
@pytest.mark.long
def test_a_server_whose_log_is_lost_starts_serves_and_ends(smollm2_path, tmp_path, kind):
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with (
        Path("/dev/full").open("w") if kind == "a full disk" else log.open("w") as stderr,
        serve(smollm2_path, port, stderr) as server,
    ):
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            wait_until(lambda: is_up(client, server), 60)
            log.unlink(missing_ok=True)
            use(client)
        end(server)


def is_up(client, server):
    assert server.poll() is None, "it ended"
    try:
        return client.get("/health").status_code == 200
    except httpx.ConnectError:
        return False
