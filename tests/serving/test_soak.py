"""The soak of benchmarks/soak.py: what it calls a leak, and its short version against the real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import soak

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "soak.py"


class Health:
    seconds = [0.001] * 10
    failures = 0


def judge(*, tally=None, health=Health, after=None, memory=None, same_processes=True, survivors=0) -> list[str]:
    """The names of the checks that are missed, of a run that is good but for what is given."""
    good = soak.Tally()
    good.counts.update({"accepted": 9, "completed": 6, "left": 3, "too many": 1, "bad refused": 5})
    before = soak.Footprint(tasks=5, file_descriptors=30, sequences=0, cache_use=0.0)
    checks = soak.judge(
        tally or good,
        health,
        before,
        after or before,
        memory or {"API server": [100] * 20, "engine": [500] * 20},
        same_processes,
        survivors,
    )
    assert soak.format_checks(checks, good)
    return [check.name for check in checks if not check.good]


def test_a_run_after_which_all_is_as_before_is_good():
    assert judge() == []


@pytest.mark.parametrize(
    "left,name",
    [
        ({"tasks": 6}, "tasks"),
        ({"file_descriptors": 31}, "file descriptors"),
        ({"sequences": 1}, "sequences left"),
        ({"cache_use": 0.01}, "KV cache left in use"),
    ],
)
def test_what_is_left_is_a_leak(left, name):
    footprint = {"tasks": 5, "file_descriptors": 30, "sequences": 0, "cache_use": 0.0} | left
    assert judge(after=soak.Footprint(**footprint)) == [name]


def test_memory_may_grow_while_the_server_warms_up_but_not_after():
    warming_up = [100, 150, 190, 195, 199, 200, 200] + [200] * 13
    leaking = [200 + 2 * i for i in range(20)]
    assert judge(memory={"API server": warming_up, "engine": warming_up}) == []
    assert judge(memory={"API server": warming_up, "engine": leaking}) == ["memory of the engine"]


def test_the_warm_up_lasts_while_memory_grows():
    touching = [100 + 20 * i for i in range(10)]
    assert not soak.is_still(touching[:3])
    assert not soak.is_still(touching)
    assert not soak.is_still([*touching, *[280] * (soak.STILL_SECONDS - 1)])
    assert soak.is_still([*touching, *[280] * soak.STILL_SECONDS])


@pytest.mark.parametrize(
    "kind,name",
    [
        ("hung", "accepted requests that hung"),
        ("broken", "answers that broke"),
        ("bad taken", "bad requests not refused"),
    ],
)
def test_a_surprise_is_a_failure(kind, name):
    tally = soak.Tally()
    tally.counts.update({"left": 3, "too many": 1})
    tally.surprise(kind, "why")
    assert judge(tally=tally) == [name]


def test_an_ill_or_new_server_is_a_failure():
    class Ill(Health):
        failures = 1

    assert judge(health=Ill) == ["/health not true"]
    assert judge(same_processes=False) == ["processes afterwards"]
    assert judge(survivors=1) == ["processes after SIGKILL of the first"]


def test_users_who_were_too_kind_show_nothing():
    assert judge(tally=soak.Tally()) == ["refused in bursts", "left in mid-stream"]


@pytest.mark.slow
@pytest.mark.long
def test_thirty_seconds_of_rough_users(tmp_path):
    report = tmp_path / "soak.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), "--streams", "12", "--seconds", "30", "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(report.read_text())["counts"]
    assert counts["accepted"] >= 24 and counts["completed"] and counts["left"] and counts["bad refused"] > 20
