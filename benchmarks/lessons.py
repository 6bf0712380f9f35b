"""How much time and memory each lesson takes under `pytest --nbval`.

Every notebook and solution runs with one thread and with two, with the Triton interpreter and without. All cells must pass each time,
within 60 s and 3 GiB.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from minivllm.bench.report import format_table, report

ROOT = Path(__file__).parents[1]
MOST_SECONDS, MOST_GIB = 60, 3
WAYS = ((1, False), (2, False), (1, True), (2, True))
"""Threads, and whether TRITON_INTERPRET is set."""


def run(notebook: Path, threads: int, interpret: bool) -> dict:
    """Run a notebook's cells under nbval and measure its processes."""
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
    """Resident bytes of a process and its descendants."""
    total = 0
    try:
        parent = psutil.Process(pid)
        for process in [parent, *parent.children(recursive=True)]:
            total += process.memory_info().rss
    except psutil.Error:
        pass  # one has just exited
    return total


def format_runs(runs: list[dict]) -> str:
    """A line for each run."""
    headers = ("notebook", "threads", "interpreter", "seconds", "GiB", "")
    rows = [
        (
            item["notebook"],
            item["threads"],
            "asked for" if item["interpret"] else "no",
            f"{item['seconds']:.1f}",
            f"{item['gib']:.2f}",
            "" if item["passed"] else "FAILED",
        )
        for item in runs
    ]
    return format_table(headers, rows)


def main() -> int:
    """Run all lessons; the status is 1 if one failed or took too much."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    arguments = parser.parse_args()
    notebooks = sorted(ROOT.glob("notebooks/*.ipynb")) + sorted(ROOT.glob("solutions/*.ipynb"))
    runs = []
    for threads, interpret in WAYS:
        for notebook in notebooks:
            runs.append(run(notebook, threads, interpret))
            print(format_runs(runs[-1:]).split("\n")[-1], flush=True)
    report("Lessons and solutions under pytest --nbval", format_runs(runs), {"runs": runs}, file=arguments.json)
    return 0 if all(item["passed"] and item["seconds"] < MOST_SECONDS and item["gib"] < MOST_GIB for item in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
