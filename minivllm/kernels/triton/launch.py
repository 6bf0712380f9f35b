"""Whether kernels are compiled or interpreted, and what all launches have in common."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from minivllm.errors import KernelError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
MAX_GROUP = 128

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether the kernels of this process are interpreted: as the environment says when they are defined."""


def check_launch(x: Tensor, head_dim: int = 1, group: int = 1) -> None:
    """Raise a KernelError unless the kernels take this device, dtype, head size and number of query heads per KV head."""
    if x.dtype not in DTYPES:
        raise KernelError(f"The tensors have dtype {x.dtype}, but the Triton kernels take float32, float16 and bfloat16.")
    if x.device.type != "cuda" and not INTERPRETED:
        raise KernelError(
            f"The tensors are on {x.device}, but Triton's kernels were compiled for the GPU: to run them interpreted on the "
            f"CPU, set TRITON_INTERPRET=1 in the environment before Python starts."
        )
    if head_dim > MAX_HEAD_DIM:
        raise KernelError(f"The heads have {head_dim} channels, but the Triton kernels take at most {MAX_HEAD_DIM}.")
    if group > MAX_GROUP:
        raise KernelError(f"{group} query heads share a KV head, but the Triton kernels take at most {MAX_GROUP}.")


def needs_float32(dtype: torch.dtype) -> bool:
    """Whether matrices are multiplied in float32: those that are float32, and bfloat16 in the interpreter, which would
    multiply its bit patterns."""
    return dtype == torch.float32 or (INTERPRETED and dtype == torch.bfloat16)


def on_device(x: Tensor) -> AbstractContextManager:
    """Triton launches on the current device, which must be the tensors'."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()
