"""Peak memory of loading the default model and generating with it, in copies of its float32 weights.

    python benchmarks/memory.py --json memory.json

Each way runs in a process of its own. Counted is by how much the resident memory was larger at its peak than before the model was
loaded, when torch and transformers were imported; what is used of the KV cache is in it. Linux only: it keeps the peak.
"""

from __future__ import annotations

import argparse
import datetime
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
    """A number that Linux keeps of this process: VmRSS or VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def measure(way: str) -> None:
    """In a process of its own: print the bytes taken, and the bytes of the weights."""
    from transformers import AutoTokenizer

    from minivllm.models.hub import resolve_model

    AutoTokenizer.from_pretrained(resolve_model("smollm2-135m"))  # imports much of what it needs only now
    from minivllm import LLM, SamplingParams

    before = kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
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
    from minivllm.bench.machine import describe_machine

    results = {}
    for way in WAYS:
        runs = [
            subprocess.run([sys.executable, __file__, "--way", way], check=True, capture_output=True, text=True)
            for _ in range(ROUNDS)
        ]
        results[way] = sorted((json.loads(run.stdout.splitlines()[-1]) for run in runs), key=lambda run: run["taken"])
    text = [
        f"Peak memory of loading and generating, medians of {ROUNDS}; {describe_machine()}",
        "",
        f"{'way':<12}{'peak':>10}{'copies of the float32 weights':>32}",
    ]
    for way, runs in results.items():
        result = runs[ROUNDS // 2]
        text.append(f"{way:<12}{result['taken'] / 1e6:>7.0f} MB{result['taken'] / result['weights']:>32.2f}")
    print("\n".join(text))
    if arguments.json:
        command = f"python benchmarks/memory.py --json {arguments.json}"
        report = {"time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "command": command}
        arguments.json.write_text(json.dumps(report | {"text": text, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
