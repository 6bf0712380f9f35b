"""The tests of what AMX computes, again in a process that has it, or an emulator of it: tests/support/amx.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from amx import amx_environment, run_with_amx

TESTS = Path(__file__).parents[1]
pytest.importorskip("numba")
pytestmark = pytest.mark.skipif("NUMBA_CPU_FEATURES" in os.environ, reason="is in such a process already")


def test_the_processor_has_it_or_pretends():
    run = run_with_amx("-c", "from minivllm.kernels import cpu; print(cpu.HAS_BFLOAT16_AMX, cpu.HAS_INT8_AMX)")
    assert run.stdout.split() == ["True", "True"]


def test_it_can_be_refused():
    code = "from minivllm.kernels import cpu; print(cpu.HAS_BFLOAT16_AMX, cpu.HAS_INT8_AMX, cpu.HAS_INT8_DOT)"
    run = run_with_amx("-c", code, MINIVLLM_CPU_FEATURES="-amx-tile")
    assert run.stdout.split() == ["False", "False", "True"]


@pytest.mark.long
def test_linux_may_refuse_what_it_granted_before(tmp_path):
    """What was compiled for the one process must not run in the other."""
    script = str(TESTS / "support" / "other_processors.py")
    for refuses in ({}, {"AMX_EMULATOR_REFUSES": "1"}):
        run = run_with_amx(script, "products", NUMBA_CACHE_DIR=str(tmp_path), **refuses)
        if amx_environment():  # a real processor is not refused
            assert ("'HAS_BFLOAT16_AMX': True" in run.stdout) is not bool(refuses)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "file, names, at_least",
    [
        ("kernels/test_cpu_kernels.py", "packed or product or bfloat16 or nan or prefill", 20),
        ("kernels/test_kernels.py", "cpu and (prefill or nan)", 4),
        ("model/test_quantization.py", "bits_of_exact_sums or row_does_not_depend_on_its_batch", 3),
        ("model/test_compiled_llama.py", "tokens_and_logprobs or chunks_of_prompts", 6),
    ],
)
def test_what_is_tested_without_it_is_true_with_it(file, names, at_least):
    run = run_with_amx("-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / file), "-k", names, "--durations=5")
    print(run.stdout)
    passed = next(
        word for word, what in zip(run.stdout.split(), run.stdout.split()[1:], strict=False) if what.startswith("passed")
    )
    assert int(passed) >= at_least
