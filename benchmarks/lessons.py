"""How long each lesson takes, and how much memory: `pytest --nbval`, as a learner or a teacher runs it.

Every notebook and solution is run several times: with one thread and with two, with the Triton interpreter asked for and not. All
cells must pass each time, within 60 s and 3 GiB.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from minivllm.bench.machine import describe_machine

ROOT = Path(__file__).parents[1]
MOST_SECONDS, MOST_GIB = 60, 3
WAYS = ((1, False), (2, False), (1, True), (2, True))
"""Threads, and whether TRITON_INTERPRET is set."""


def run(notebook: Path, threads: int, interpret: bool) -> dict:
    """Run a notebook's cells under nbval, and watch the processes that it takes."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    environment.pop("TRITON_INTERPRET", None)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    start, most = time.perf_counter(), 0
    command = [sys.executable, "-m", "pytest", "--nbval", "-q", "-p", "no:cacheprovider", str(notebook)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            most = max(most, _memory(process.pid))
            time.sleep(0.1)
        seconds = time.perf_counter() - start
        if process.returncode:
            log.seek(0)
            print(log.read()[-3000:])
    return {
        "notebook": notebook.relative_to(ROOT).as_posix(), "threads": threads, "interpret": interpret,
        "passed": process.returncode == 0, "seconds": round(seconds, 1), "gib": round(most / 2**30, 2),
    }  # fmt: skip


def _memory(pid: int) -> int:
    """Resident bytes of a process and all below it."""
    total = 0
    try:
        parent = psutil.Process(pid)
        for process in [parent, *parent.children(recursive=True)]:
            total += process.memory_info().rss
    except psutil.Error:
        pass  # one has just ended
    return total


def format_table(runs: list[dict]) -> str:
    """A line for each run."""
    lines = [f"{'notebook':38} {'threads':>7} {'interpreter':>11} {'seconds':>8} {'GiB':>5}"]
    for item in runs:
        interpreter = "asked for" if item["interpret"] else "no"
        failed = "" if item["passed"] else "  FAILED"
        lines.append(
            f"{item['notebook']:38} {item['threads']:7} {interpreter:>11} {item['seconds']:8.1f} {item['gib']:5.2f}{failed}"
        )
    return "\n".join(lines)


def main() -> int:
    """Run all lessons and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    arguments = parser.parse_args()
    notebooks = sorted(ROOT.glob("notebooks/*.ipynb")) + sorted(ROOT.glob("solutions/*.ipynb"))
    runs = []
    for threads, interpret in WAYS:
        for notebook in notebooks:
            runs.append(run(notebook, threads, interpret))
            print(format_table(runs[-1:]).split("\n")[1], flush=True)
    title = f"Lessons and solutions under pytest --nbval; {describe_machine()}"
    text = [title, "", *format_table(runs).split("\n")]
    print("\n" + "\n".join(text))
    if arguments.json:
        command = f"python benchmarks/lessons.py --json {arguments.json}"
        report = {"command": command, "time": datetime.datetime.now().isoformat(timespec="seconds"), "text": text, "runs": runs}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(item["passed"] and item["seconds"] < MOST_SECONDS and item["gib"] < MOST_GIB for item in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
