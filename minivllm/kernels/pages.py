"""Memory that is taken when it is written to, and given back when it is let go of."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys

import torch
from torch import Tensor


def zero_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in host memory that comes from the operating system, page by page on first use.

    So a cache of gigabytes is there at once, and takes up only what has been written. `torch.zeros` may get memory that was in use
    before: it is cleared then, and all of it is taken again.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(shape, dtype=dtype)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}
    return torch.frombuffer(mmap.mmap(-1, num_bytes, **private), dtype=dtype).view(shape)


def return_freed_memory() -> None:
    """Give freed memory back to the operating system. glibc keeps what lies between blocks that are in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
