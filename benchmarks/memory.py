"""What it takes to load the default model and to generate with it: memory, in copies of its weights, and seconds.

    python benchmarks/memory.py --json memory.json

Each way runs in a process of its own. Its memory is the peak of resident memory minus what it was before the model was loaded, with torch,
transformers and Numba imported; the used part of the KV cache is included. Linux only, which tracks the peak. Seconds are timed for `LLM(...)` and
for the first answer of one token, which may have to load compiled kernels from disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

WAYS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int8, bfloat16": {"quantization": "int8", "dtype": "bfloat16"},
}
BYTES_PER_WEIGHT = {"float32": 4, "bfloat16": 2, "int8": 1, "int8, bfloat16": 1}
ROUNDS = 3
CACHE_BYTES = 64 * 2**20


def kilobytes(name: str, process: int | str = "self") -> int:
    """VmRSS or VmHWM of a process."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def measure(way: str) -> None:
    """In a process of its own: print the bytes taken, and the bytes of the weights."""
    from transformers import AutoTokenizer

    from minivllm.models.hub import resolve_model

    AutoTokenizer.from_pretrained(resolve_model("smollm2-135m"))  # whose imports come late
    import minivllm.kernels.cpu  # noqa: F401
    from minivllm import LLM, SamplingParams

    before = kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    times = [time.perf_counter()]
    llm = LLM("smollm2-135m", max_num_seqs=16, kv_cache_memory_bytes=CACHE_BYTES, max_model_len=1024, **WAYS[way])
    times.append(time.perf_counter())
    llm.generate(["Hi"], SamplingParams(max_tokens=1), use_tqdm=False)
    times.append(time.perf_counter())
    llm.generate(["The capital of France is"] * 16, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    weights = (llm.llm_engine.model_config.path / "model.safetensors").stat().st_size * BYTES_PER_WEIGHT[way] // 4
    ready, first = (end - start for start, end in pairwise(times))
    print(json.dumps({"taken": (kilobytes("VmHWM") - before) * 1024, "weights": weights, "ready": ready, "first": first}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args()
    if arguments.way:
        return measure(arguments.way)
    from minivllm.bench.report import format_table, report

    results = {}
    for way in WAYS:
        runs = [
            subprocess.run([sys.executable, __file__, "--way", way], check=True, capture_output=True, text=True)
            for _ in range(ROUNDS)
        ]
        results[way] = sorted((json.loads(run.stdout.splitlines()[-1]) for run in runs), key=lambda run: run["taken"])
    medians = {way: runs[ROUNDS // 2] for way, runs in results.items()}
    rows = []
    for way, run in medians.items():
        seconds = (f"{statistics.median(each[phase] for each in results[way]):.1f} s" for phase in ("ready", "first"))
        rows.append((way, f"{run['taken'] / 1e6:.0f} MB", f"{run['taken'] / run['weights']:.2f}", *seconds))
    table = format_table(("way", "peak", "copies of its weights", "LLM(...)", "first answer"), rows)
    title = f"Loading and generating, medians of {ROUNDS}"
    report(title, table, {"results": results}, file=arguments.json)


if __name__ == "__main__":
    main()
