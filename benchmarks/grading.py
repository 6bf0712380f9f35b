"""A class of correct submissions: does everybody get all points, however many are graded at once, and what is gained?

    python benchmarks/grading.py --learners 30 --json grading.json
    python benchmarks/grading.py --learners 8 --busy          # with a busy process beside it

Grades the same solved notebooks with --jobs 1, 2 and 4. The exit status is 1 if a point is missing.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from minivllm.bench.report import format_table, report

ROOT = Path(__file__).parents[1]
LESSONS = tuple(sorted(path.stem for path in (ROOT / "solutions").glob("*.ipynb")))


def hand_in(folder: Path, learners: int) -> None:
    """Solved notebooks of many learners, the lessons in turns."""
    for number in range(learners):
        lesson = LESSONS[number % len(LESSONS)]
        path = folder / f"learner{number:02}" / f"{lesson}.ipynb"
        path.parent.mkdir(parents=True)
        path.write_bytes((ROOT / "solutions" / path.name).read_bytes())


def grade(handed_in: Path, output: Path, jobs: int) -> tuple[float, list[tuple[str, float, float, str]]]:
    """Seconds of a run, and each learner's points, the points available and the reason."""
    command = [sys.executable, "-m", "minivllm.entrypoints.cli.main", "grade", str(handed_in), "--output", str(output)]
    start = time.perf_counter()
    subprocess.run([*command, "--jobs", str(jobs)], check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    with (output / "grades.csv").open(newline="", encoding="utf-8") as file:
        rows = [(row["learner"], float(row["score"]), float(row["max"]), row["reason"]) for row in csv.DictReader(file)]
    return seconds, rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, default=30, help="(default: %(default)s)")
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2, 4], help="(default: %(default)s)")
    parser.add_argument("--busy", action="store_true", help="run a single-threaded loop beside the grader")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args()
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if arguments.busy else None
    results, rows, short = [], [], []
    try:
        with tempfile.TemporaryDirectory() as folder:
            hand_in(Path(folder) / "in", arguments.learners)
            for jobs in arguments.jobs:
                seconds, grades = grade(Path(folder) / "in", Path(folder) / f"out{jobs}", jobs)
                missing = [(learner, reason) for learner, score, most, reason in grades if score < most]
                short += missing
                results.append({"jobs": jobs, "seconds": seconds, "full": len(grades) - len(missing), "short": missing})
                speedup = results[0]["seconds"] / seconds
                rows.append((jobs, f"{seconds:.0f}", f"{speedup:.2f}", f"{len(grades) - len(missing)} of {arguments.learners}"))
    finally:
        if loop is not None:
            loop.kill()
            loop.wait()
    beside = ", beside a busy process" if arguments.busy else ""
    table = format_table(("jobs", "seconds", "x first", "all points"), rows)
    report(
        f"{arguments.learners} correct submissions of {', '.join(LESSONS)}{beside}",
        table,
        {"runs": results},
        file=arguments.json,
    )
    for learner, reason in short:
        print(f"{learner}: {reason}")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
