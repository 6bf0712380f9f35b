"""`minivllm replicas restart` and `scale` against a server whose replicas change between any two of their questions: they wait."""

from __future__ import annotations

from types import SimpleNamespace

import httpx
import pytest

from minivllm.entrypoints.cli import main as cli
from minivllm.entrypoints.cli import replicas as command

SECONDS = {"starting": 0.8, "draining": 0.4, "unreachable": 0.6}


class Server:
    """Two replicas by rank: their states, processes, and until when the states last; a clock, and the answers to `httpx.Client.request`."""

    def __init__(self, monkeypatch, *states):
        self.now, self.states, self.processes = 0.0, list(states), list(range(len(states)))
        self.until = [SECONDS.get(state, 0.0) for state in states]
        self.restarted, self.deaths_after = [], {}
        monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        monkeypatch.setattr(httpx.Client, "request", lambda client, method, path, **options: self.answer(method, path, options))

    def sleep(self, seconds):
        self.now += seconds
        for rank, state in enumerate(self.states):
            if state in SECONDS and self.now >= self.until[rank]:
                self.become(rank, "starting" if state == "draining" else "ready")

    def become(self, rank, state):
        self.states[rank], self.until[rank] = state, self.now + SECONDS.get(state, 0.0)
        self.processes[rank] += 10 * (state == "starting")

    def answer(self, method, path, options):
        if method == "GET":
            content = [
                {"rank": rank, "state": state, "process_id": self.processes[rank]} for rank, state in enumerate(self.states)
            ]
            return httpx.Response(200, json={"replicas": content, "size": len(self.states)})
        if path == "/replicas/scale":
            size = options["json"]["size"]
            if size > 8:
                return httpx.Response(400, json={"error": {"message": f"size is {size}, but must be at most 8."}})
            for rank in range(len(self.states), size):
                self.states.append("")
                self.processes.append(rank), self.until.append(0.0)
                self.become(rank, "starting")
            del self.states[size:]
            return httpx.Response(202, json={"status": "scaling"})
        rank = int(path.split("/")[2])
        if self.deaths_after.pop(rank, None):  # the last look at it was too long ago
            self.become(rank, "starting")
        if self.states[rank] != "ready":
            return httpx.Response(409, json={"error": {"message": f"Replica {rank} is {self.states[rank]}."}})
        assert all(state not in SECONDS for state in self.states), "the others take its requests"
        self.restarted.append(rank)
        self.become(rank, "draining")
        return httpx.Response(202, json={"status": "restarting"})


@pytest.mark.parametrize("state", list(SECONDS))
@pytest.mark.parametrize("rank", [0, 1])
def test_it_waits_for_a_replica_that_is_on_its_way(monkeypatch, state, rank):
    server = Server(monkeypatch, *(state if other == rank else "ready" for other in range(2)))
    assert cli.main(["replicas", "restart", "--rolling"]) == 0
    assert server.restarted == [0, 1]


def test_one_that_dies_just_before_it_is_told_is_waited_for_and_restarted(monkeypatch):
    server = Server(monkeypatch, "ready", "ready")
    server.deaths_after = {1: True}
    assert cli.main(["replicas", "restart", "1"]) == 0
    assert server.restarted == [1]


@pytest.mark.parametrize("state", ["given up", "gone"])
def test_rolling_leaves_out_one_that_is_not_there_and_says_so(monkeypatch, capsys, state):
    server = Server(monkeypatch, state, "ready")
    assert cli.main(["replicas", "restart", "--rolling"]) == 0
    assert server.restarted == [1]
    assert f"Replica 0 is {state}: there is nothing to restart." in capsys.readouterr().err
    assert cli.main(["replicas", "restart", "0"]) == 2, "who names it wants to know"
    assert f"Replica 0 is {state}." in capsys.readouterr().err


def test_one_that_does_not_become_ready_in_time_is_an_error_that_names_it(monkeypatch, capsys):
    monkeypatch.setitem(SECONDS, "starting", 1000.0)
    Server(monkeypatch, "ready", "starting")
    assert cli.main(["replicas", "restart", "--rolling", "--timeout", "5"]) == 2
    assert "Replicas [1] are not ready after 5 seconds: replica 0 was left alone." in capsys.readouterr().err


def test_scale_waits_until_all_are_ready_and_shows_what_happens(monkeypatch, capsys):
    server = Server(monkeypatch, "ready", "ready")
    assert cli.main(["replicas", "scale", "3"]) == 0
    assert server.states == ["ready"] * 3
    assert capsys.readouterr().err.splitlines()[:2] == ["Replica 2 is starting.", "Replica 2 is ready."]
    assert cli.main(["replicas", "scale", "1"]) == 0
    assert "There is 1 replica," in capsys.readouterr().err


@pytest.mark.parametrize(("given", "words"), [("9", "size is 9, but must be at most 8."), ("two", "invalid int value: 'two'")])
def test_scale_to_a_number_that_cannot_be(monkeypatch, capsys, given, words):
    Server(monkeypatch, "ready")
    try:
        status = cli.main(["replicas", "scale", given])
    except SystemExit as end:
        status = end.code
    assert status == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize(("state", "words"), [("given up", "Replicas [1] died too often"), ("starting", "replica 1 is starting")])
def test_scale_says_which_replica_does_not_come(monkeypatch, capsys, state, words):
    monkeypatch.setitem(SECONDS, "starting", 1000.0)
    Server(monkeypatch, "ready", state)
    assert cli.main(["replicas", "scale", "2", "--timeout", "5"]) == 2
    assert words in capsys.readouterr().err
