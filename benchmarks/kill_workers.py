"""Kills workers in the midst of their work, and parents of workers, and looks what is left: nothing should be, within two seconds.

    python benchmarks/kill_workers.py --json kill_workers.json

A round starts an engine of two or three ranks in a process of its own, which generates, and kills a random rank at a random moment, by SIGKILL or SIGSTOP; the engine
must tell its caller which rank it was. In the other rounds the engine's process itself is killed, sometimes with a worker stopped. Then there may be no process of that round,
and nothing in /dev/shm or in the folder for temporary files that was not there before. Linux only.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from tqdm.auto import tqdm

from minivllm.bench.report import format_table, report

LIMIT_SECONDS = 2.0
ENGINE = """
import sys
from minivllm import LLM, SamplingParams
llm = LLM("smollm2-135m", tensor_parallel_size=int(sys.argv[1]), num_gpu_blocks_override=300, max_model_len=2048)
print(*llm.llm_engine.executor.process_ids, flush=True)
params = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
try:
    llm.generate(["Once upon a time"] * 2, params, use_tqdm=False)
except Exception as error:
    print(type(error).__name__, error, flush=True)
    sys.stdin.read()
"""


def leftovers() -> set[Path]:
    """What lies where shared memory and temporary files do."""
    return {path for folder in ("/dev/shm", tempfile.gettempdir()) for path in Path(folder).iterdir()}


def are_gone(processes: list[psutil.Process]) -> bool:
    """Whether all of them have ended."""
    return all(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in processes)


def play(rng: random.Random, kill_parent: bool) -> tuple[str, float]:
    """One round: what was wrong, or nothing, and how many seconds it took until everybody knew and nobody was left."""
    size = rng.choice((2, 3))
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, str(size)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    workers = [psutil.Process(int(process)) for process in engine.stdout.readline().split()]
    wrong = "" if len(workers) == size else "it did not start"
    time.sleep(rng.uniform(0.0, 1.0))
    rank, sent = rng.randrange(size), rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
    if kill_parent:
        if sent == signal.SIGSTOP:
            os.kill(workers[rank].pid, sent)
        start = time.monotonic()
        engine.kill()
    else:
        start = time.monotonic()
        os.kill(workers[rank].pid, sent)
        said = engine.stdout.readline()
        words = "was killed by SIGKILL." if sent == signal.SIGKILL else "was stopped (SIGSTOP)."
        if said.strip() != f"EngineDeadError Rank {rank} of {size} (process {workers[rank].pid}) {words}":
            wrong = f"rank {rank} was sent {sent.name}, but the engine said {said!r}"
    while not are_gone(workers) and time.monotonic() - start < 10:
        time.sleep(0.01)
    seconds = time.monotonic() - start
    if not are_gone(workers):
        wrong = "a worker is left"
    elif seconds > LIMIT_SECONDS:
        wrong = wrong or f"it took {seconds:.1f} s"
    engine.kill()
    engine.wait()
    return wrong, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=50, metavar="N", help="rounds that kill a worker (default: 50)")
    parser.add_argument(
        "--parents", type=int, default=20, metavar="N", help="rounds that kill the engine's process (default: 20)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args()
    rng, before = random.Random(arguments.seed), leftovers()
    kinds = {"a worker": [False] * arguments.workers, "the engine's process": [True] * arguments.parents}
    rows, rounds = [], {}
    for kind, plan in kinds.items():
        rounds[kind] = [play(rng, kill_parent) for kill_parent in tqdm(plan, desc=f"killing {kind}", dynamic_ncols=True)]
        seconds, wrong = [each for _, each in rounds[kind]], [text for text, _ in rounds[kind] if text]
        rows.append((kind, len(plan), f"{max(seconds, default=0):.2f} s", len(wrong), wrong[0] if wrong else ""))
    left = sorted(str(path) for path in leftovers() - before)
    table = format_table(("killed", "rounds", "longest until all were gone", "wrong", "the first"), rows)
    table += f"\n\nLeft in /dev/shm and among temporary files: {', '.join(left) or 'nothing'}."
    report("Killing workers and their parents in the midst of work", table, {"rounds": rounds, "left": left}, file=arguments.json)
    return 1 if left or any(text for of_kind in rounds.values() for text, _ in of_kind) else 0


if __name__ == "__main__":
    sys.exit(main())
