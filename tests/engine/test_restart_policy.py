"""When a process that has died is started again."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from minivllm.data_parallel import launcher
from minivllm.data_parallel.launcher import ReplicaLauncher
from minivllm.data_parallel.processes import RestartPolicy


def test_at_once_after_a_long_life_and_after_growing_pauses_after_short_ones():
    policy = RestartPolicy(4)
    assert [policy.next_pause(lived) for lived in (10.0, 9.9, None, 60.0, 0.0, 1.0, 2.0, 3.0)] == [0, 1, 2, 0, 1, 2, 4, None]


def test_pauses_have_a_limit_however_often_it_dies():
    policy = RestartPolicy(sys.maxsize)
    assert [policy.next_pause(None) for _ in range(2000)][4:] == [16.0] + [32.0] * 1995


def test_a_coordinator_that_cannot_be_started_again_is_tried_again_later_and_ends_nothing(monkeypatch):
    clock, starts, refused = SimpleNamespace(now=100.0), [], OSError(24, "Too many open files")

    def start(module, setup, num_threads):
        starts.append(clock.now)
        if len(starts) < 3:
            raise refused
        return SimpleNamespace(poll=lambda: None, kill_if_silent=lambda limit: False)

    monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(launcher, "ChildProcess", start)
    tended = object.__new__(ReplicaLauncher)
    tended._coordinator_policy, tended._setup = RestartPolicy(sys.maxsize), None
    tended._coordinator_due, tended._coordinator_since, tended._patience = None, 0.0, 30
    tended.coordinator = SimpleNamespace(poll=lambda: "was killed by SIGKILL", kill_if_silent=lambda limit: False)
    said = []
    for _ in range(100):
        if end := tended.tend_coordinator():
            said.append(end)
        clock.now += 0.1
    assert said == ["was killed by SIGKILL"] + ["could not be started again (Too many open files)"] * 2
    assert len(starts) == 3 and starts[1] - starts[0] >= 1 and starts[2] - starts[1] >= 2
