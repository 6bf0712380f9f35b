"""The Triton kernels compile for a GPU, which the interpreter cannot tell: see compile_triton_kernels.py."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton for this system")
def test_every_kernel_compiles_for_a_gpu(tmp_path):
    """Attention on the matrix units (wgmma) of a Hopper GPU, nothing beyond its shared memory; and the kernels of lesson 06."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{SUPPORT}", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(SUPPORT / "compile_triton_kernels.py")]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    for kernel in (
        "_decode",
        "_combine",
        "_prefill",
        "_reshape_and_cache",
        "_copy_blocks",
        "_rms_norm",
        "_rotary",
        "_silu_and_mul",
        "_norm_rope_and_cache",
        "_random_uniform",
        "_race",
        "_find_winner",
        "_filter_thresholds",
        "_penalize",
        "_unpack_inputs",
        "write_kernel",
        "prefill_kernel",
    ):
        assert kernel in result.stdout
    prefill = [line for line in result.stdout.splitlines() if line.startswith("_prefill") and "bfloat16" in line]
    assert prefill and all(line.endswith("wgmma") for line in prefill)
