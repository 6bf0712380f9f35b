"""Processes that hang instead of dying: whoever has started them asks for signs of life, and ends those that show none."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from minivllm.data_parallel import launcher
from minivllm.data_parallel.liveness import HOPELESS
from minivllm.entrypoints.server.launcher import ApiServerProcesses
from minivllm.errors import EngineDeadError
from minivllm.executor import processes
from minivllm.executor.processes import START_SECONDS, ChildProcess, LifeSigns

LIMIT = 6.0


class Child:
    """A `ChildProcess` without a process: its signs, and a clock that goes on in steps of a second, in which somebody looks."""

    def __init__(self, monkeypatch):
        self.now, self.status = 100.0, None
        process = SimpleNamespace(poll=lambda: self.status, kill=self.die, stdin=None, wait=lambda *seconds: None)

        def start(module, setup, num_threads, descriptors, gpus, arguments):
            (inherited,) = descriptors
            assert arguments == (str(inherited),)
            self.signs = os.dup(inherited)
            return process

        monkeypatch.setattr(processes, "start_python", start)
        monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.child = ChildProcess("module", None, 1)

    def die(self):
        self.status = -9

    def live(self, seconds, *, shows=True):
        """Seconds pass. Returns how long it was until the process was killed; None if it was not."""
        for passed in range(int(seconds)):
            if shows:
                os.write(self.signs, b".")
            self.now += 1.0
            if self.child.kill_if_silent(LIMIT):
                assert self.status == -9
                return passed + 1
        return None


@pytest.fixture
def child(monkeypatch):
    made = Child(monkeypatch)
    yield made
    os.close(made.signs)


def test_one_that_shows_signs_lives(child):
    assert child.live(1000) is None


def test_one_that_falls_silent_is_killed_once_the_limit_has_passed(child):
    assert child.live(10) is None
    assert child.live(5, shows=False) is None
    assert child.live(10) is None, "it was stopped for a moment"
    assert child.live(100, shows=False) == LIMIT + 1
    child.status = None  # it hangs in a driver
    assert child.live(100, shows=False) is None, "it is said once"


def test_one_that_has_just_been_started_has_longer_for_its_first_sign_but_not_for_good(child):
    assert child.live(1000, shows=False) == START_SECONDS + 1


def test_one_that_has_ended_is_not_killed(child):
    child.status = 1
    assert child.live(1000, shows=False) is None
    assert child.status == 1


def test_nobody_is_blamed_for_the_time_in_which_the_parent_was_stopped_itself(child):
    assert child.live(10) is None
    child.now += 1000.0
    assert child.live(5, shows=False) is None
    assert child.live(10, shows=False) == LIMIT + 1 - 4


@pytest.fixture
def signs(monkeypatch):
    """`LifeSigns` that come often, and where they arrive."""
    ours, theirs = os.pipe()
    monkeypatch.setattr(processes, "SIGN_SECONDS", 0.001)
    monkeypatch.setattr(sys, "argv", ["module", str(theirs)])
    made = LifeSigns()
    yield made, ours
    os.close(ours)


def test_a_process_shows_signs_unless_who_vouches_for_it_has_fallen_silent(signs):
    made, ours = signs
    for _ in range(10):
        assert os.read(ours, 1) == b"."
    made.vouch(0.0)
    os.set_blocking(ours, False)
    with pytest.raises(BlockingIOError):
        for _ in range(1000):
            os.read(ours, 4096)
    os.set_blocking(ours, True)
    made.vouch(60.0)
    assert os.read(ours, 1) == b"."


def test_processes_that_nobody_watches_show_no_signs(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["module"])
    LifeSigns().vouch(1.0)


class Fake:
    """A process that is silent."""

    def __init__(self):
        self.limits, self.is_killed, self.exit_status = [], False, None

    def kill_if_silent(self, limit):
        self.limits.append(limit)
        was_killed, self.is_killed, self.exit_status = self.is_killed, True, -9
        return not was_killed

    def poll(self):
        return "was killed by SIGKILL" if self.is_killed else None


@pytest.fixture
def others():
    """An `ApiServerProcesses` with one process."""
    made = ApiServerProcesses([], None)
    made._timeout, made._processes[1] = 20, Fake()
    return made


@pytest.mark.parametrize(
    ("when", "limit"),
    [
        (lambda others: others.poll(), 20 * HOPELESS),
        (lambda others: others.find_ended(), 20 * HOPELESS),
        (lambda others: others.wait(0.2), 20),
    ],
)
def test_an_api_server_is_asked_while_it_starts_while_it_serves_and_while_it_ends(others, caplog, when, limit):
    process = others._processes[1]
    when(others)
    assert set(process.limits) == {limit}
    assert caplog.text.count("API server 1 shows no sign of life: it is killed.") == 1


def test_a_starting_api_server_has_the_time_to_import_its_modules(others):
    others._timeout = 2
    others.poll()
    assert others._processes[1].limits == [START_SECONDS]


def test_a_coordinator_is_asked_while_it_starts_and_later(caplog):
    made = object.__new__(launcher.ReplicaLauncher)
    made._patience, made._others, made.coordinator = 30, None, Fake()
    parallel = SimpleNamespace(is_on_one_machine=False, data_parallel_rpc_port=1)
    made._config = SimpleNamespace(parallel_config=parallel)
    silent = SimpleNamespace(send=lambda data: None, poll=lambda wait: False)
    with pytest.raises(EngineDeadError, match=r"The coordinator of the replicas was killed by SIGKILL\.$"):
        made.ask(silent, launcher.HelloFrontend(0, "", ""))
    assert "The coordinator of the replicas shows no sign of life: it is killed." in caplog.text
    assert made.coordinator.limits == [30]
    made.coordinator, made._coordinator_due, made._coordinator_since = Fake(), None, 0.0
    made._coordinator_policy = launcher.RestartPolicy(sys.maxsize)
    assert made.tend_coordinator() == "was killed by SIGKILL"
    assert made._coordinator_due is not None
