"""The environment in which a process computes with AMX: its own processor's, or that of `amx_emulator.c`."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import llvmlite.binding
import pytest

from minivllm.kernels.cpu.native.features import request_amx

EMULATED = ("amx-tile", "amx-bf16", "amx-int8")


@functools.cache
def amx_environment() -> dict[str, str]:
    """Variables for a new process; nothing to set where the processor has AMX. Skips the test where neither can be."""
    features = llvmlite.binding.get_host_cpu_features()
    if all(features.get(feature, False) for feature in EMULATED) and request_amx():
        return {}
    if not sys.platform.startswith("linux") or not features.get("avx512vnni", False):
        pytest.skip("AMX can only be emulated on Linux, with AVX-512 VNNI")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs AMX, or a C compiler for its emulator")
    library = Path(tempfile.mkdtemp()) / "amx_emulator.so"
    source = Path(__file__).with_name("amx_emulator.c")
    command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", "-o", str(library), str(source), "-lm", "-ldl"]
    subprocess.run(command, check=True)
    wanted = {name: is_there or name in EMULATED for name, is_there in features.items()}
    return {
        "LD_PRELOAD": str(library),
        # For AMD's processors, LLVM gives tiles other numbers, which it does not do for those with AMX.
        "NUMBA_CPU_NAME": "sapphirerapids",
        "NUMBA_CPU_FEATURES": ",".join(("+" if is_there else "-") + name for name, is_there in wanted.items()),
    }


def run_with_amx(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python *arguments` in that environment and with more variables; what it prints is captured, and shown if it fails."""
    environment = {**os.environ, **amx_environment(), **variables}
    run = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run
