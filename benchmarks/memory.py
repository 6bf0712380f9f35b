"""Peak memory of loading the default model and generating with it, in copies of its float32 weights.

    python benchmarks/memory.py --json memory.json

Each way runs in a process of its own. Its memory is the peak of resident memory minus what it was before the model was loaded, with torch
and transformers imported; the used part of the KV cache is included. Linux only, which tracks the peak.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

WAYS = {
    "packed": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "low_memory": {"low_memory": True},
}
ROUNDS = 3
CACHE_BYTES = 64 * 2**20


def kilobytes(name: str) -> int:
    """VmRSS or VmHWM of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def measure(way: str) -> None:
    """In a process of its own: print the bytes taken, and the bytes of the weights."""
    from transformers import AutoTokenizer

    from minivllm.models.hub import resolve_model

    AutoTokenizer.from_pretrained(resolve_model("smollm2-135m"))  # whose imports come late
    from minivllm import LLM, SamplingParams

    before = kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    llm = LLM("smollm2-135m", max_num_seqs=16, kv_cache_memory_bytes=CACHE_BYTES, max_model_len=1024, **WAYS[way])
    llm.generate(["The capital of France is"] * 16, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    weights = llm.llm_engine.model_config.path / "model.safetensors"
    print(json.dumps({"taken": (kilobytes("VmHWM") - before) * 1024, "weights": weights.stat().st_size}))


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
    rows = [(way, f"{run['taken'] / 1e6:.0f} MB", f"{run['taken'] / run['weights']:.2f}") for way, run in medians.items()]
    table = format_table(("way", "peak", "copies of the float32 weights"), rows)
    title = f"Peak memory of loading and generating, medians of {ROUNDS}"
    report(title, table, {"results": results}, file=arguments.json)


if __name__ == "__main__":
    main()
