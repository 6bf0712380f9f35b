"""The operations of one implementation, with the checks that its owner asks for, and the implementation for a device."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from minivllm.errors import KernelError
from minivllm.kernels import reference
from minivllm.kernels.checks import Checks, Operation

OLDEST_CAPABILITY = (8, 0)
"""The first compute capability (Ampere) with the shared memory that the tiles of the Triton kernels take."""

BlockPairs = list[tuple[int, int]]
"""(source, destination) block numbers."""


class Ops:
    """The operations of `reference`, `cpu` or `triton`; an operation that the implementation lacks is the reference's.

    Args:
        implementation: The module.
        checks: What each call checks. The engine's own layers check nothing; code around a backend that the user wrote
            checks shapes.
    """

    reshape_and_cache: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    paged_decode_attention: Callable[..., Tensor]  # (Tensor, Tensor, Tensor, Tensor, Tensor, float, int = 0)
    paged_prefill_attention: Callable[..., Tensor]  # (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, int = 0)
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotary_embedding: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    norm_rope_and_cache: Callable[..., Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    unpack_inputs: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    random_uniform: Callable[..., Tensor]  # (Tensor, int, int = 0)
    draw: Callable[..., tuple[Tensor, Tensor]]  # (Tensor, Tensor, Tensor, Tensor | None = None, int = 0)
    filter_thresholds: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    penalize: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    copy_blocks: Callable[[Tensor, Tensor, BlockPairs], None]

    def __init__(self, implementation: ModuleType, checks: Checks = Checks.ALL) -> None:
        for name in Ops.__annotations__:
            operation: Any = getattr(implementation, name, getattr(reference, name))
            setattr(self, name, operation.with_checks(checks) if isinstance(operation, Operation) else operation)


def has_cpu_kernels() -> bool:
    """Whether Numba is installed, and works with this Python and numpy."""
    if importlib.util.find_spec("numba") is None:
        return False
    try:
        from minivllm.kernels import cpu  # noqa: F401
    except ImportError:
        return False
    return True


def load_triton() -> ModuleType:
    """The Triton kernels; on a machine without a GPU, interpreted.

    Triton reads TRITON_INTERPRET when it is imported and when kernels are defined, so it is set for the import alone; from
    then on Triton's own setting holds, which processes started from this one do not inherit.

    Raises:
        KernelError: Triton is not installed, or was imported for compiling where it cannot compile.
    """
    if importlib.util.find_spec("triton") is None:
        raise KernelError("Triton is not installed (it exists for Linux only): use the attention backend 'cpu' or 'torch'.")
    interprets = not torch.cuda.is_available() and "minivllm.kernels.triton" not in sys.modules
    if interprets and "TRITON_INTERPRET" not in os.environ:
        if "triton" in sys.modules:
            raise KernelError(
                "Without a GPU, Triton kernels run interpreted, but another package has imported Triton already and made it "
                "compile: set TRITON_INTERPRET=1 in the environment before Python starts."
            )
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            import triton as library

            from minivllm.kernels import triton

            if hasattr(library, "knobs"):  # since Triton 3.4, which looks at it again when a kernel runs
                library.knobs.runtime.interpret = True
        finally:
            del os.environ["TRITON_INTERPRET"]
    else:
        from minivllm.kernels import triton
    return triton


def load_platform_kernels(device: torch.device) -> ModuleType:
    """The fastest kernels for a device: Triton's on a GPU that is not too old, Numba's on a CPU, or the reference."""
    if device.type == "cuda":
        has_triton = importlib.util.find_spec("triton") and torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY
        return load_triton() if has_triton else reference
    if device.type == "cpu" and has_cpu_kernels():
        from minivllm.kernels import cpu

        cpu.give_notice_of_compilation()
        return cpu
    return reference
