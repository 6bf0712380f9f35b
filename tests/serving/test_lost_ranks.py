"""A node with replicas is out of reach, another one gets its ranks, and then it is back: it is told to end, and no request waits for it."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time

import httpx
import psutil
import pytest
from test_two_nodes import running, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.long]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_a_node_that_has_lost_its_ranks_ends_when_it_is_back(tmp_path):
    port, rpc_port = free_port(), free_port()
    command = [
        sys.executable, "-m", "minivllm.entrypoints.cli.main", "serve", "smollm2-135m", "--data-parallel-size", "2",
        "--data-parallel-size-local", "1", "--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(rpc_port),
        "--num-gpu-blocks-override", "256", "--replica-timeout", "5",
    ]  # fmt: skip
    headless = [*command, "--headless", "--data-parallel-start-rank", "1"]
    head_log, first_log, second_log = tmp_path / "head", tmp_path / "first", tmp_path / "second"
    with (
        running([*command, "--port", str(port)], head_log) as head,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http,
        contextlib.ExitStack() as stack,
    ):
        first = stack.enter_context(running(headless, first_log))
        wait_for(head_log, "Replica 1 takes requests.", head)
        parts = [process := psutil.Process(first.pid), *process.children(recursive=True)]
        for part in parts:
            part.send_signal(signal.SIGSTOP)
        wait_for(head_log, "Replica 1 is lost", head)
        stack.enter_context(running(headless, second_log))
        end = time.monotonic() + 120
        while head_log.read_text().count("Replica 1 takes requests.") < 2:
            assert time.monotonic() < end
            time.sleep(0.1)
        for part in parts:
            part.send_signal(signal.SIGCONT)
        assert first.wait(60) == 1
        assert "Another node has got these replicas meanwhile." in first_log.read_text()
        for rank in (0, 1):
            body = {"prompt": "Once upon a time", "max_tokens": 4}
            assert http.post("/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)}).status_code == 200
        assert [item["state"] for item in http.get("/replicas").json()["replicas"]] == ["ready", "ready"]
