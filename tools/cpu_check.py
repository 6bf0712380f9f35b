"""Measures this machine's processor: `make cpu-check`. Takes an hour or two, and nothing else should run meanwhile.

First the tests of the kernels, then the measurements of docs/benchmarks.md from short to long. Each prints its table, and is stored in
benchmarks/results as NAME_PROCESSOR_DATE.json. Those beside vLLM need its environment: `python tools/setup_vllm.py`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import llvmlite.binding

ROOT = Path(__file__).resolve().parent.parent
VLLM_PYTHON = ".venv-vllm/bin/python"
TESTS = "-m pytest -q -p no:cacheprovider --long tests/kernels tests/model"
PROFILE = "benchmarks/step_profile.py --workload benchmarks/workloads/offline_64.json"
LATENCY = "-m minivllm.entrypoints.cli bench latency --batch-sizes 1 4 16 64 --rounds 2"
ENGINES = "minivllm minivllm-bfloat16 minivllm-int8 minivllm-int8-bfloat16 vllm vllm-bfloat16"
COMPARISON = f"benchmarks/engine_comparison.py --engines {ENGINES} --enable-chunked-prefill --vllm-python {VLLM_PYTHON}"
WITHOUT_AMX = "-amx-tile"
WITHOUT_BFLOAT16 = "-amx-tile,-avx512bf16"
"""MINIVLLM_CPU_FEATURES: what a processor has is refused, to see what others would do."""

MEASUREMENTS: dict[str, tuple[str, str]] = {
    "products": ("benchmarks/bfloat16_products.py", ""),
    "prefill_attention": ("benchmarks/prefill_attention.py", ""),
    "profile_float32": (f"{PROFILE} --dtype float32", ""),
    "profile_bfloat16": (f"{PROFILE} --dtype bfloat16", ""),
    "profile_int8": (f"{PROFILE} --dtype bfloat16 --quantization int8", ""),
    "latency": (LATENCY, ""),
    "latency_bfloat16": (f"{LATENCY} --dtype bfloat16", ""),
    "latency_int8": (f"{LATENCY} --dtype bfloat16 --quantization int8", ""),
    "latency_bfloat16_without_amx": (f"{LATENCY} --dtype bfloat16", WITHOUT_AMX),
    "latency_bfloat16_in_registers": (f"{LATENCY} --dtype bfloat16", WITHOUT_BFLOAT16),
    "memory": ("benchmarks/memory.py", ""),
    "quality": ("benchmarks/quality.py", ""),
    "tokens_in_chunks": ("benchmarks/tokens_in_chunks.py", ""),
    "offline": (f"{COMPARISON} --workload benchmarks/workloads/offline_64.json", ""),
    "mixed_prompts": (f"{COMPARISON} --distribution longtail --num-requests 32 --mean-prompt-len 250 --mean-output-len 64", ""),
    "long_prompts": (f"{COMPARISON} --distribution uniform --num-requests 32 --mean-prompt-len 508 --mean-output-len 64", ""),
    "busy_neighbour": (f"benchmarks/busy_neighbour.py --vllm-python {VLLM_PYTHON}", ""),
}
"""Name, what Python is to run, and MINIVLLM_CPU_FEATURES."""


def run(command: str, features: str = "") -> bool:
    """Runs it in this environment, and says how long it took."""
    print(f"\n$ {f'MINIVLLM_CPU_FEATURES={features} ' if features else ''}python {command}", flush=True)
    start = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    if features:
        environment["MINIVLLM_CPU_FEATURES"] = features
    status = subprocess.call([sys.executable, *shlex.split(command)], cwd=ROOT, env=environment)
    print(f"{time.monotonic() - start:.0f} s, status {status}", flush=True)
    return status == 0


def main() -> int:
    """0 if the tests passed, and all measurements ended well and met their bars, where they have some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=("tests", *MEASUREMENTS), metavar="NAME", help=f"of {', '.join(MEASUREMENTS)}, and tests"
    )
    only = parser.parse_args().only or ["tests", *MEASUREMENTS]
    without_vllm = (
        [] if (ROOT / VLLM_PYTHON).exists() else [name for name in only if VLLM_PYTHON in MEASUREMENTS.get(name, ("",))[0]]
    )
    if without_vllm:
        print(f"Without {', '.join(without_vllm)}: vLLM is not there. `python tools/setup_vllm.py` makes an environment for it.")
    outcomes: dict[str, bool] = {}
    if "tests" in only:
        outcomes["tests"] = run(TESTS)
    ending = f"{llvmlite.binding.get_host_cpu_name()}_{datetime.date.today().isoformat()}.json"
    for name, (command, features) in MEASUREMENTS.items():
        if name in only and name not in without_vllm:
            outcomes[name] = run(f"{command} --json benchmarks/results/{name}_{ending}", features)
    print()
    for name, good in outcomes.items():
        print(f"{'good' if good else 'FAILED, or a bar was missed'}  {name}")
    return 0 if all(outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
