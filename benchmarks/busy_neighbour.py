"""What one busy process beside the engine costs: decode speed alone, beside a loop, and beside another engine, against another version, in
turns.

    python benchmarks/busy_neighbour.py --against ../old-checkout --json busy_neighbour.json

Each variant is a process of its own, because OpenMP reads its settings when it is loaded. A sample during which something
else computes is taken again.
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
from pathlib import Path

ROOT = Path(__file__).parents[1]
BATCHES = {1: 48, 16: 32}
"""Sequences at once, and the tokens that each of them generates."""
PROMPT_LEN = 16
LEAST_KEPT, LEAST_ALONE = 0.5, 0.97
"""The project's bars: speed beside the loop relative to this version's own alone, and alone relative to the other version."""
MOST_DISTURBANCE, ATTEMPTS = 0.2, 3
"""How many cores other processes may use during a sample, and how often a sample is taken before a disturbed one counts."""
LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n for _ in range(100_000): pass"


def serve() -> None:
    """The engine's process: reads numbers of sequences and tokens, and answers with decoded tokens per second."""
    from minivllm import EngineArgs, LLMEngine, SamplingParams

    engine = LLMEngine.from_engine_args(EngineArgs("smollm2-135m", max_num_seqs=16, max_model_len=1024, dtype="float32"))
    print("ready", flush=True)
    for number, line in enumerate(sys.stdin):
        num_seqs, output_len = map(int, line.split())
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        for i in range(num_seqs):
            engine.add_request(f"{number}-{i}", [1000 * number + 20 * i + j for j in range(PROMPT_LEN)], params)
        engine.step()  # the prompts
        start = time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
        print(num_seqs * (output_len - 1) / (time.perf_counter() - start), flush=True)


class Variant:
    """An engine in a process of its own, with some version of the package and some environment."""

    def __init__(self, root: Path, environment: dict[str, str]) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=inherited | {"PYTHONPATH": str(root)} | environment,
        )  # fmt: skip
        if self._read() != "ready":
            raise SystemExit(f"The engine of {root} did not start.")

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def measure(self, num_seqs: int, output_len: int) -> float:
        """Decoded tokens per second."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{num_seqs} {output_len}\n")
        self.process.stdin.flush()
        return float(self._read())

    def measure_undisturbed(self, num_seqs: int, output_len: int, loops: list[subprocess.Popen]) -> float:
        """The first sample during which other processes do next to nothing, or else the last."""
        speed = 0.0
        for _ in range(ATTEMPTS):
            others, start = _cpu_seconds(self.process, *loops), time.perf_counter()
            speed = self.measure(num_seqs, output_len)
            if _cpu_seconds(self.process, *loops) - others <= MOST_DISTURBANCE * (time.perf_counter() - start):
                break
        return speed


def _cpu_seconds(*ours: subprocess.Popen) -> float:
    """What all processes but ours have computed since the machine started; 0 where there is no /proc."""
    if not Path("/proc/stat").exists():
        return 0.0
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    total = sum(ticks) - ticks[3] - ticks[4]  # idle, and waiting for a disk
    for process in ours:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        total -= int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[list[subprocess.Popen]]:
    """Single-threaded loops in a session of their own, as another terminal's are."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP], start_new_session=True) for _ in range(count)]
    try:
        time.sleep(0.3)
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure(variants: dict[str, Variant], twins: dict[str, Variant], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Tokens per second of each variant and situation, a round after the other, every second one backwards.

    Those of two engines at once are added up.
    """
    speeds: dict[str, dict[str, list[float]]] = {name: {} for name in variants}
    for variant in (*variants.values(), *twins.values()):
        for num_seqs in BATCHES:
            variant.measure(num_seqs, 4)
    for number in range(rounds):
        for num_seqs, output_len in BATCHES.items():
            for situation, count in (("alone", 0), ("beside", 1)):
                with busy_loops(count) as loops:
                    for name in list(variants)[:: 1 if number % 2 == 0 else -1]:
                        length = 4 if count and name == "before" else output_len  # which may take seconds for a token
                        speed = variants[name].measure_undisturbed(num_seqs, length, loops)
                        speeds[name].setdefault(f"{num_seqs} {situation}", []).append(speed)
            for name, twin in twins.items():
                with ThreadPoolExecutor(2) as pool:
                    both = pool.map(lambda engine: engine.measure(num_seqs, output_len), (variants[name], twin))  # noqa: B023
                    speeds[name].setdefault(f"{num_seqs} two engines", []).append(sum(both))
    return speeds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="a checkout of another version to compare with")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return 0
    from minivllm.bench.report import format_table, report

    started = {"before": (arguments.against, {})} if arguments.against else {}
    started |= {"now": (ROOT, {}), "now, passive": (ROOT, {"OMP_WAIT_POLICY": "passive"})}
    variants = {name: Variant(*what) for name, what in started.items()}
    twins = {"now": Variant(*started["now"])}
    speeds = measure(variants, twins, arguments.rounds)
    medians = {name: {what: statistics.median(of) for what, of in situations.items()} for name, situations in speeds.items()}
    base = medians[next(iter(medians))]
    rows, good = [], True
    for name, median in medians.items():
        for num_seqs in BATCHES:
            alone, beside = median[f"{num_seqs} alone"], median[f"{num_seqs} beside"]
            kept, relative = beside / alone, alone / base[f"{num_seqs} alone"]
            two = median.get(f"{num_seqs} two engines")
            together = ("", "") if two is None else (f"{two:.1f}", f"{two / alone:.2f}")
            rows.append((name, num_seqs, f"{alone:.1f}", f"{beside:.1f}", f"{kept:.2f}", f"{relative:.3f}", *together))
            good &= name != "now" or (kept >= LEAST_KEPT and relative >= LEAST_ALONE)
    table = format_table(("variant", "sequences", "alone", "beside", "kept", "x first, alone", "two engines", "x alone"), rows)
    title = f"Tokens per second beside one busy process; medians of {arguments.rounds} rounds in turns"
    report(title, table, {"tokens_per_second": speeds}, file=arguments.json)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
