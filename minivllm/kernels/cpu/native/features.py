"""Which vector instructions this processor has, of those that the kernels care about. Importing this asks Linux for AMX.

Tests and benchmarks change the choice with an environment variable: `MINIVLLM_CPU_FEATURES=-avx512vnni,+avx512bf16` does without
the one, and takes the other although it is not the fastest here. The names are LLVM's. (What LLVM itself makes of the loops does not change.)
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys

import llvmlite.binding
import numba

from minivllm.errors import ConfigError

KNOWN = ("avx512f", "avx512vnni", "avx512bf16", "amx-tile")
CHANGES = tuple(sorted(filter(None, os.environ.get("MINIVLLM_CPU_FEATURES", "").split(","))))
if unknown := [change for change in CHANGES if change[0] not in "+-" or change[1:] not in KNOWN]:
    raise ConfigError(
        f"MINIVLLM_CPU_FEATURES has {unknown[0]!r}, but must be + or - before one of {', '.join(KNOWN)}, with commas between."
    )


if numba.config.CPU_FEATURES is None:
    _compiled_for = {name for name, is_there in llvmlite.binding.get_host_cpu_features().items() if is_there}
else:  # NUMBA_CPU_FEATURES, as in "+avx2,-avx512f"
    _compiled_for = {feature[1:] for feature in numba.config.CPU_FEATURES.split(",") if feature.startswith("+")}


def _has(feature: str, by_default: bool = True) -> bool:
    wanted = "+" + feature in CHANGES or (by_default and "-" + feature not in CHANGES)
    return wanted and feature in _compiled_for


def request_amx() -> bool:
    """Ask Linux to let this process use AMX. It refuses if a thread's alternate signal stack is too small for its registers."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    arch_prctl, request_permission, tile_data = (ctypes.c_long(number) for number in (158, 0x1023, 18))
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


HAS_AVX512 = _has("avx512f")
"""32 vector registers of 16 float32 numbers; a processor without it has half of both, or less."""
HAS_INT8_DOT = HAS_AVX512 and _has("avx512vnni")
"""VPDPBUSD: four products of 8-bit integers for each of 16 sums."""
HAS_BFLOAT16_DOT = HAS_AVX512 and _has("avx512bf16", by_default=llvmlite.binding.get_host_cpu_name().startswith("znver"))
"""VDPBF16PS: two products of bfloat16 numbers for each of 16 sums. AMD's processors take one cycle for it. Intel's take two, in which they
do four multiply-adds of float32, so they are faster without."""
_HAS_AMX = HAS_AVX512 and _has("amx-tile") and request_amx()
HAS_BFLOAT16_AMX = _HAS_AMX and "amx-bf16" in _compiled_for
"""TDPBF16PS: see `amx`."""
HAS_INT8_AMX = _HAS_AMX and HAS_INT8_DOT and "amx-int8" in _compiled_for
"""TDPBUSD: see `amx`."""
USED = (HAS_AVX512, HAS_INT8_DOT, HAS_BFLOAT16_DOT, HAS_BFLOAT16_AMX, HAS_INT8_AMX)
"""All of it, which compiled kernels depend on."""
