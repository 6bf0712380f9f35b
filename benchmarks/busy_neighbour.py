"""What a busy process next to the engine costs: its speed alone, next to a loop, and next to another engine; also for another version and for vLLM.

    python benchmarks/busy_neighbour.py --vllm-python .venv-vllm/bin/python --json busy_neighbour.json
    python benchmarks/busy_neighbour.py --against ../old-checkout

Each engine is a process of its own, and all take turns. A sample during which something else computes is repeated. With vLLM a round takes about seven
minutes: next to the loop, it generates a few tokens per second.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:  # the process of another version runs this file, too
    from engine_process import EngineProcess

ROOT = Path(__file__).parents[1]
BATCHES = {1: 48, 16: 32}
"""Sequences at once, and the tokens that each of them generates."""
PROMPT_LEN = 16
LEAST_KEPT, LEAST_ALONE, LEAST_TOGETHER = 0.7, 0.97, 0.8
"""The project's bars: speed next to the loop relative to alone, alone relative to the other version, and of two engines together relative
to one."""
MOST_DISTURBANCE, ATTEMPTS = 0.2, 3
"""How many cores other processes may use during a sample, and how often a sample is taken before a disturbed one counts."""
LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n for _ in range(100_000): pass"


def serve(dtype: str) -> None:
    """The engine's process: reads a number of sequences and of tokens, and answers with the seconds they take."""
    from minivllm import EngineArgs, LLMEngine, SamplingParams

    engine = LLMEngine.from_engine_args(EngineArgs("smollm2-135m", max_num_seqs=16, max_model_len=1024, dtype=dtype))
    print("ready", flush=True)
    for number, line in enumerate(sys.stdin):
        num_seqs, output_len = map(int, line.split())
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        start = time.perf_counter()
        for i, prompt in enumerate(make_prompts(number, num_seqs)):
            engine.add_request(f"{number}-{i}", prompt, params)
        while engine.has_unfinished_requests():
            engine.step()
        print(time.perf_counter() - start, flush=True)


def make_prompts(number: int, num_seqs: int) -> list[list[int]]:
    """Prompts of `PROMPT_LEN` tokens, different for each sample."""
    first = 1000 * (number % 48)  # there are 49,152 tokens
    return [[first + 20 * i + j for j in range(PROMPT_LEN)] for i in range(num_seqs)]


class Variant:
    """This engine in a process of its own, in some version of the package."""

    def __init__(self, root: Path, dtype: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", dtype], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=inherited | {"PYTHONPATH": str(root)},
        )  # fmt: skip
        self.pid = self.process.pid
        if self._read() != "ready":
            raise SystemExit(f"The engine of {root} did not start.")

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def measure(self, num_seqs: int, output_len: int) -> float:
        """Tokens per second, prompts included."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{num_seqs} {output_len}\n")
        self.process.stdin.flush()
        return num_seqs * output_len / float(self._read())


class Peer:
    """vLLM, stopped while others have their turn: its threads would spin."""

    def __init__(self, engine: EngineProcess) -> None:
        self.engine, self.pid = engine, engine.pid
        self.number = 0
        engine.load()

    def measure(self, num_seqs: int, output_len: int) -> float:
        """Tokens per second, prompts included."""
        from minivllm.bench.workloads import WorkloadRequest

        self.number += 1
        requests = [WorkloadRequest(prompt, output_len) for prompt in make_prompts(self.number, num_seqs)]
        return num_seqs * output_len / self.engine.run(requests).seconds


def measure_undisturbed(variant: Variant | Peer, num_seqs: int, output_len: int, loops: list[subprocess.Popen]) -> float:
    """The first sample during which other processes do next to nothing, or else the last."""
    speed, pids = 0.0, [variant.pid, *(loop.pid for loop in loops)]
    for _ in range(ATTEMPTS):
        others, start = _cpu_seconds(pids), time.perf_counter()
        speed = variant.measure(num_seqs, output_len)
        if _cpu_seconds(pids) - others <= MOST_DISTURBANCE * (time.perf_counter() - start):
            break
    return speed


def _cpu_seconds(ours: list[int]) -> float:
    """What all processes but ours have computed since the machine started; 0 where there is no /proc."""
    if not Path("/proc/stat").exists():
        return 0.0
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    total = sum(ticks) - ticks[3] - ticks[4]  # idle, and waiting for a disk
    for pid in ours:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total -= int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[list[subprocess.Popen]]:
    """Single-threaded loops in a session of their own, as in another terminal."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP], start_new_session=True) for _ in range(count)]
    try:
        time.sleep(0.3)
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure(variants: dict[str, Variant | Peer], twins: dict[str, Variant], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Tokens per second of each variant and situation, round after round, every second one backwards.

    The speeds of two engines at once are added up.
    """
    speeds: dict[str, dict[str, list[float]]] = {name: {} for name in variants}
    for variant in (*variants.values(), *twins.values()):
        for num_seqs in BATCHES:
            variant.measure(num_seqs, 4)
    for number in tqdm(range(rounds), "Rounds"):
        for num_seqs, output_len in BATCHES.items():
            for situation, count in (("alone", 0), ("beside", 1)):
                with busy_loops(count) as loops:
                    for name in list(variants)[:: 1 if number % 2 == 0 else -1]:
                        speed = measure_undisturbed(variants[name], num_seqs, output_len, loops)
                        speeds[name].setdefault(f"{num_seqs} {situation}", []).append(speed)
            for name, twin in twins.items():
                with ThreadPoolExecutor(2) as pool:
                    both = pool.map(lambda engine: engine.measure(num_seqs, output_len), (variants[name], twin))  # noqa: B023
                    speeds[name].setdefault(f"{num_seqs} two engines", []).append(sum(both))
    return speeds


def compare(speeds: dict[str, dict[str, list[float]]]) -> tuple[list[tuple], list[str]]:
    """The rows of the table, and the bars that this version misses. Another version comes before it."""
    medians = {name: {what: statistics.median(of) for what, of in situations.items()} for name, situations in speeds.items()}
    base = medians[next(iter(medians))]
    rows, missed = [], []
    for name, median in medians.items():
        for num_seqs in BATCHES:
            alone, beside = median[f"{num_seqs} alone"], median[f"{num_seqs} beside"]
            kept, relative = beside / alone, alone / base[f"{num_seqs} alone"]
            two = median.get(f"{num_seqs} two engines")
            together = ("", "") if two is None else (f"{two:.1f}", f"{two / alone:.2f}")
            rows.append((name, num_seqs, f"{alone:.1f}", f"{beside:.1f}", f"{kept:.2f}", f"{relative:.3f}", *together))
            if two is not None:
                bars = (
                    ("kept", kept, LEAST_KEPT),
                    ("x first, alone", relative, LEAST_ALONE),
                    ("two engines", two / alone, LEAST_TOGETHER),
                )
                missed += [f"{name}, {num_seqs}: {what} {ratio:.2f} of {bar}" for what, ratio, bar in bars if ratio < bar]
    return rows, missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="a checkout of another version to compare with")
    parser.add_argument("--vllm-python", metavar="PATH", help="the Python of an environment with vLLM, to compare with it")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--serve", metavar="DTYPE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return 0
    from engine_comparison import make_specs
    from engine_process import find_versions, start_all

    from minivllm.bench.report import format_table, report
    from minivllm.bench.workloads import WorkloadRequest
    from minivllm.models.hub import resolve_model
    from minivllm.models.registry import load_model_config

    specs = []
    if arguments.vllm_python:
        longest = [WorkloadRequest([0] * PROMPT_LEN, max(BATCHES.values()))]
        config = load_model_config("smollm2-135m", resolve_model("smollm2-135m"))
        specs = make_specs(["vllm", "vllm-bfloat16"], config, {"max_num_seqs": 16}, longest, vllm_python=arguments.vllm_python)
        find_versions(specs[0])
        specs += [replace(spec, name=f"{spec.name}-passive", environment={"OMP_WAIT_POLICY": "passive"}) for spec in specs]
    with start_all(specs) as peers:
        started = {"before": (arguments.against, "float32")} if arguments.against else {}
        started |= {"now": (ROOT, "float32"), "now, bfloat16": (ROOT, "bfloat16")}
        variants: dict[str, Variant | Peer] = {name: Variant(*what) for name, what in started.items()}
        variants |= {spec.name.replace("-", ", "): Peer(peer) for spec, peer in zip(specs, peers, strict=True)}
        twins = {name: Variant(*started[name]) for name in ("now", "now, bfloat16")}
        speeds = measure(variants, twins, arguments.rounds)
    rows, missed = compare(speeds)
    table = format_table(("variant", "sequences", "alone", "beside", "kept", "x first, alone", "two engines", "x alone"), rows)
    title = f"Tokens per second beside one busy process; medians of {arguments.rounds} rounds in turns"
    report(title, table, {"tokens_per_second": speeds}, file=arguments.json)
    for bar in missed:
        print(f"Bar missed: {bar}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
