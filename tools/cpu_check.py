"""Takes the main measurements of this machine's processor: `make cpu-check`. It takes an hour or two, in which nothing else should run.

First the tests of the kernels, then the measurements, from short to long. Each prints its table, and is stored in
benchmarks/results as NAME_PROCESSOR_DATE.json. Comparisons with vLLM need its environment: `python tools/setup_vllm.py`.
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
RESULTS = "benchmarks/results"
VLLM_PYTHON = ".venv-vllm/bin/python"
TESTS = "-m pytest -q -p no:cacheprovider --long tests/kernels tests/model"
PROFILE = "benchmarks/step_profile.py --workload benchmarks/workloads/offline_64.json"
LATENCY = "-m minivllm.entrypoints.cli.main bench latency --batch-sizes 1 4 16 64 --rounds 2"
ENGINES = "minivllm minivllm-bfloat16 minivllm-int8 minivllm-int8-bfloat16 vllm vllm-bfloat16"
COMPARISON = f"benchmarks/engine_comparison.py --engines {ENGINES} --enable-chunked-prefill --vllm-python {VLLM_PYTHON}"
MEASUREMENTS: dict[str, tuple[str, str]] = {
    "prefill_attention": ("benchmarks/prefill_attention.py", ""),
    "profile_float32": (f"{PROFILE} --dtype float32", ""),
    "profile_bfloat16": (f"{PROFILE} --dtype bfloat16", ""),
    "profile_int8": (f"{PROFILE} --dtype bfloat16 --quantization int8", ""),
    "latency": (LATENCY, ""),
    "latency_bfloat16": (f"{LATENCY} --dtype bfloat16", ""),
    "latency_int8": (f"{LATENCY} --dtype bfloat16 --quantization int8", ""),
    "latency_vdpbf16ps": (f"{LATENCY} --dtype bfloat16", "-amx-tile,+avx512bf16"),
    "latency_in_registers": (f"{LATENCY} --dtype bfloat16", "-amx-tile,-avx512bf16"),
    "memory": ("benchmarks/memory.py", ""),
    "quality": ("benchmarks/quality.py", ""),
    "offline": (f"{COMPARISON} --workload benchmarks/workloads/offline_64.json", ""),
    "mixed_prompts": (f"{COMPARISON} --distribution longtail --num-requests 32 --mean-prompt-len 250 --mean-output-len 64", ""),
    "long_prompts": (f"{COMPARISON} --distribution uniform --num-requests 32 --mean-prompt-len 508 --mean-output-len 64", ""),
    "busy_neighbour": (f"benchmarks/busy_neighbour.py --vllm-python {VLLM_PYTHON}", ""),
}
"""By name: the Python command, and MINIVLLM_CPU_FEATURES, to measure VDPBF16PS, or products in registers, in place of AMX."""


def run(command: str, features: str = "") -> str:
    """Runs it in this environment. Returns how it ended."""
    print(f"\n$ {f'MINIVLLM_CPU_FEATURES={features} ' if features else ''}python {command}", flush=True)
    start = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | ({"MINIVLLM_CPU_FEATURES": features} if features else {})
    process = subprocess.Popen([sys.executable, *shlex.split(command)], cwd=ROOT, env=environment)
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.wait()  # it was told, too, and ends the engines that it has started
        raise
    print(f"{time.monotonic() - start:.0f} s", flush=True)
    return "good" if status == 0 else f"failed, or missed a bar: status {status}"


def find_free_name(name: str) -> str:
    """A file for the result; earlier ones are kept."""
    ending = f"{llvmlite.binding.get_host_cpu_name()}_{datetime.date.today().isoformat()}"
    names = (f"{RESULTS}/{name}_{ending}{suffix}.json" for suffix in ("", *"bcdefghijklmnopqrstuvwxyz"))
    return next(file for file in names if not (ROOT / file).exists())


def main() -> int:
    """0 if the tests passed and all measurements were taken and met their bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("tests", *MEASUREMENTS)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}")
    only = parser.parse_args().only
    if os.environ.get("MINIVLLM_CPU_FEATURES"):
        parser.error("MINIVLLM_CPU_FEATURES is set, and would change what is measured. Unset it first.")
    outcomes: dict[str, str] = {}
    if not (ROOT / VLLM_PYTHON).exists():
        outcomes = {name: "not run: vLLM is not there" for name, (command, _) in MEASUREMENTS.items() if VLLM_PYTHON in command}
    if outcomes.keys() & set(only):
        print("vLLM is not there, so nothing is compared with it. `python tools/setup_vllm.py` makes an environment for it.")
    try:
        if "tests" in only:
            outcomes["tests"] = run(TESTS)
        for name, (command, features) in MEASUREMENTS.items():
            if name in only and name not in outcomes:
                outcomes[name] = run(f"{command} --json {find_free_name(name)}", features)
    except KeyboardInterrupt:
        print("\nStopped.")
    print()
    for name in only:
        print(f"{name:20}  {outcomes.get(name, 'not run')}")
    return 0 if all(outcomes.get(name) == "good" for name in only) else 1


if __name__ == "__main__":
    sys.exit(main())
