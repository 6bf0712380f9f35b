"""Which vector instructions this processor has, as far as the kernels differ by them.

Tests and benchmarks change the choice with an environment variable: `MINIVLLM_CPU_FEATURES=-avx512vnni,+avx512bf16` does without
the one, and takes the other although it is not the fastest here. The names are LLVM's.
"""

from __future__ import annotations

import os

import llvmlite.binding

CHANGES = tuple(sorted(filter(None, os.environ.get("MINIVLLM_CPU_FEATURES", "").split(","))))


def _has(feature: str, fast: bool = True) -> bool:
    wanted = fast and "-" + feature not in CHANGES or "+" + feature in CHANGES
    return wanted and bool(llvmlite.binding.get_host_cpu_features().get(feature, False))


HAS_AVX512 = _has("avx512f")
"""32 vector registers of 16 float32 numbers; a processor without it has half of both, or less."""
HAS_INT8_DOT = HAS_AVX512 and _has("avx512vnni")
"""VPDPBUSD: four products of 8-bit integers for each of 16 sums."""
HAS_BFLOAT16_DOT = HAS_AVX512 and _has("avx512bf16", fast=llvmlite.binding.get_host_cpu_name().startswith("znver"))
"""VDPBF16PS: two products of bfloat16 numbers for each of 16 sums. AMD's processors take one cycle for it. Intel's take two, in which they
do four multiply-adds of float32, so they are faster without (`benchmarks/bfloat16_products.py`)."""
