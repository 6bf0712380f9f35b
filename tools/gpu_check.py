"""Checks the engine on a GPU: `make gpu-check`, or some parts of it: `make gpu-check ARGS="tests logits"`. Needs no network and installs nothing.

One after another, because they are timed:

- kernels: against the device's limits (benchmarks/gpu_kernels.py).
- engine: tokens per second against what the card allows, and over HTTP (benchmarks/gpu_engine.py, one round).

Then all at once, on a model of Qwen3-0.6B's sizes with random weights:

- logits: those in bfloat16 must be as close to transformers in float32 as transformers' own are.
- replays: a CUDA graph must give exactly the output of the same step without it.
- tokens: the same eagerly, with graphs, and with two steps in flight.
- draws: random draws, log-probabilities and several continuations, with two steps in flight and with one.
- ranks: two ranks and two stages must give the tokens of one; with NCCL if there are two GPUs, else both on the one GPU over gloo.
- lessons: 05 and 06 and their solutions from top to bottom, their kernels compiled; what they print is saved.
- tests: all kernel tests, with the Triton kernels compiled, and those of transfers: launching a step must not wait for the GPU.

And only if asked for, as they take minutes and the GPU's host often has AMX: amx (benchmarks/amx.py, timed) and amx-tests.

Each part is a process of its own, so that a kernel that breaks the GPU's context takes no other part with it. Results are saved as JSON after
each part, beside those that the file has of other parts.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "benchmarks")]

from gpu_checks import CHECKS, LESSONS, NOT_RUN  # noqa: E402

from minivllm.bench.report import find_origin, to_json  # noqa: E402

TESTS = [
    "tests/kernels/test_kernels.py",
    "tests/kernels/test_rope_and_cache.py",
    "tests/kernels/test_sampling_kernels.py",
    "tests/kernels/test_attention_backends.py",
    "tests/model/test_models.py",
    "tests/model/test_model_input.py",
    "tests/model/test_step_graphs.py",
    "tests/model/test_transfer.py",
    "tests/model/test_swap_stream.py",
    "tests/model/test_token_counts.py",
]
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
NOT_HERE = "not smollm2"
"""The default model comes from a package that may not be installed here."""
TIMED = ("kernels", "engine", "amx")
"""Parts that have the machine for themselves."""
NOT_BY_DEFAULT = ("amx", "amx-tests")
PARTS = ("kernels", "engine", *(name for name in CHECKS if name != "model"), "lessons", "tests", *NOT_BY_DEFAULT)
LONGEST = 300.0
"""Seconds after which a part is stopped; those that are not run by default may take three times as long."""


@dataclass(frozen=True)
class Outcome:
    """How a part ended.

    Attributes:
        passed: None if it could not be run here.
        seconds: How long it took.
        results: What it has measured.
        printed: Its output, unless that was shown while it ran.
    """

    passed: bool | None
    seconds: float
    results: dict
    printed: str


def command_of(name: str, folder: Path, results: Path) -> list[str]:
    """What Python runs for a part or a lesson.

    Args:
        name: The part, the lesson's file, or "model".
        folder: Where the model is.
        results: A file for what it measures, as JSON.
    """
    if name == "kernels":
        return ["benchmarks/gpu_kernels.py", "--out", str(results)]
    if name == "engine":
        return ["benchmarks/gpu_engine.py", "--quick", "--rounds", "1", "--json", str(results)]
    if name == "amx":
        return ["benchmarks/amx.py", "--json", str(results)]
    if name == "tests":
        return [*PYTEST, *_several_processes(), "-k", NOT_HERE, *TESTS]
    if name == "amx-tests":
        return [*PYTEST, "--long", "tests/kernels/test_amx.py"]
    return ["tools/gpu_checks.py", name, "--model", str(folder), "--out", str(results)]


def _several_processes() -> list[str]:
    """For pytest: kernels take longer to compile than to run."""
    try:
        import xdist  # noqa: F401
    except ImportError:
        return []
    return ["-n", str(max(1, min(12, (os.cpu_count() or 1) - 2)))]


RUNNING: set[int] = set()
"""The parts that run, each the leader of a group of processes: its ranks, its server, the processes of its tests."""


def kill(leader: int) -> None:
    """End a group of processes, which might keep the GPU's memory. Nothing happens if it has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def run_part(name: str, folder: Path, alone: bool) -> Outcome:
    """Run a part in a process of its own; one that runs alone shows its output as it comes."""
    with tempfile.TemporaryDirectory() as place:
        results, log = Path(place) / "results.json", Path(place) / "log"
        command = command_of(name, folder, results)
        # minivllm need not be installed
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HYPOTHESIS_PROFILE": "gpu-check", "PYTHONUNBUFFERED": "1"}
        print("$ python", *command, flush=True)
        start, longest = time.monotonic(), LONGEST * (3 if name in NOT_BY_DEFAULT else 1)
        with log.open("wb") as file:
            output = None if alone else file
            process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=environment, stdout=output, stderr=output and subprocess.STDOUT, start_new_session=True
            )  # fmt: skip
            RUNNING.add(process.pid)
            try:
                status = process.wait(longest)
            except subprocess.TimeoutExpired:
                file.write(f"Stopped after {longest:.0f} seconds.\n".encode())
                status = 1
            finally:
                RUNNING.discard(process.pid)
                kill(process.pid)
                process.wait()
        found = json.loads(results.read_text()) if results.exists() else {}
        passed = None if status == NOT_RUN else status == 0
        return Outcome(passed, time.monotonic() - start, found, log.read_text(errors="replace"))


def run_parts(parts: list[str], note) -> None:  # noqa: ANN001
    """Run parts: the timed ones alone, and then the others together. Calls `note(name, outcome)` after each."""
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(len(PARTS) + len(LESSONS)) as pool:
        folder = Path(name)
        for part in parts:
            if part in TIMED:
                note(part, run_part(part, folder, alone=True))
        together = [part for part in parts if part not in TIMED and part != "lessons"] + (LESSONS if "lessons" in parts else [])
        if any(part in CHECKS for part in together):
            made = run_part("model", folder, alone=True)
            if not made.passed:
                together = [part for part in together if part not in CHECKS]
                for part in parts:
                    if part in CHECKS:
                        note(part, Outcome(None, 0.0, {}, "The model could not be made.\n"))
        running = {pool.submit(run_part, part, folder, alone=False): part for part in together}
        try:
            for future in concurrent.futures.as_completed(running):
                note(running[future], future.result())
        except BaseException:  # Ctrl-C, say: the pool would wait for all of them
            for leader in [*RUNNING]:
                kill(leader)
            raise


def summarize(result: dict, out: Path, names: list[str]) -> int:
    """Print which of these parts passed, failed and were not run. Returns the status: 0, 1 if one failed, else 2 if one was not run."""
    checks = {name: result["checks"][name] for name in names}
    print()
    for name, check in checks.items():
        word = "not run" if check["passed"] is None else "passed" if check["passed"] else "FAILED"
        print(f"{word:<9}{name:<36}{check['seconds']:>5.0f} s")
    kernels, engine = (result.get(part, {}) if part in names else {} for part in ("kernels", "engine"))
    missed = [kernel["name"] for kernel in kernels.get("kernels", []) if kernel["goal"] and not kernel["met"]]
    missed += [row["name"] for row in engine.get("rows", []) if row["met"] is False]
    print(f"goals missed: {'; '.join(missed) or 'none'}\nwritten to {out.relative_to(ROOT) if out.is_relative_to(ROOT) else out}")
    passed = [check["passed"] for check in checks.values()]
    return 1 if False in passed else NOT_RUN if None in passed else 0


def find_commit() -> str | None:
    """What is checked; None for a copy without git."""
    with contextlib.suppress(OSError):
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() or None
    return None


def main() -> int:
    """0 if all parts were run and passed (a missed speed goal is reported, but not a failure)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)} (default: all but {' and '.join(NOT_BY_DEFAULT)})"
    )
    parser.add_argument("--out", type=Path, help="the JSON file (default: benchmarks/results/gpu_check_DATE.json)")
    args = parser.parse_args()
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}, only {', '.join(PARTS)}.")
    if not torch.cuda.is_available():
        print("There is no CUDA device that torch can use here. Without one, `make test` runs the same kernels interpreted.")
        return 1
    out = args.out or ROOT / f"benchmarks/results/gpu_check_{datetime.date.today().isoformat()}.json"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        earlier = json.loads(out.read_text()) if out.exists() else {}
    except (OSError, ValueError) as error:
        parser.error(f"results cannot be added to {out} ({error}): choose another file with --out.")
    result = earlier | find_origin() | {"checks": earlier.get("checks", {})}
    print(result["machine"], flush=True)
    parts = [part for part in PARTS if part in args.parts or (not args.parts and part not in NOT_BY_DEFAULT)]
    start, noted, commit = time.monotonic(), list[str](), find_commit()

    def note(name: str, outcome: Outcome) -> None:
        """Show and save what is known so far, in case a borrowed machine is taken back."""
        print(f"\n== {name}, {outcome.seconds:.0f} s\n{outcome.printed}", flush=True)
        noted.append(name)
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        result["checks"][name] = {"passed": outcome.passed, "seconds": round(outcome.seconds, 1), "ended": now, "commit": commit}
        result.update({name: outcome.results} if outcome.results else {})
        out.write_text(to_json(result))

    try:
        run_parts(parts, note)
    except KeyboardInterrupt:
        print("\nStopped.")
        summarize(result, out, noted)
        return 1
    status = summarize(result, out, noted)
    print(f"{time.monotonic() - start:.0f} s")
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the parts would go on, and keep the GPU's memory
    sys.exit(main())
