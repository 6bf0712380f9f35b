"""Memory that is taken when it is written to, and given back when it is let go of."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys

import torch
from torch import Tensor

LARGE_BYTES = 2**22
"""From here on, pages may be large ones, as numpy has it."""


def zero_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in host memory that comes from the operating system, page by page on first use.

    So a cache of gigabytes is there at once, and takes up only what has been written. `torch.zeros` may get memory that was in use
    before: it is cleared then, and all of it is taken again.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(shape, dtype=dtype)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}
    try:
        pages = mmap.mmap(-1, num_bytes, **private)
    except OSError as error:
        raise MemoryError(f"The system has no {num_bytes:,} bytes of memory for {list(shape)} of {dtype}.") from error
    if num_bytes >= LARGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def return_freed_memory() -> None:
    """Give freed memory back to the operating system. glibc keeps what lies between blocks that are in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
