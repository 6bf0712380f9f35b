"""Memory that is taken when it is written to, and given back when it is let go of."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

LARGE_BYTES = 2**22
"""From here on, pages may be large ones, as numpy has it."""
SHARED_BYTES = 2**25
"""A mapping that smaller tensors share."""
LINE_BYTES = 64
"""Of the processor's caches. No two tensors share a line."""


def zero_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in host memory that comes from the operating system, page by page on first use.

    So a cache of gigabytes is there at once, and takes up only what has been written. `torch.zeros` may get memory that was in use
    before: it is cleared then, and all of it is taken again.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(shape, dtype=dtype)
    try:
        pages = _map(num_bytes)
    except OSError as error:
        raise MemoryError(f"The system has no {num_bytes:,} bytes of memory for {list(shape)} of {dtype}.") from error
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class SharedPages:
    """Zeros for tensors that are filled at once and let go of together, like the weights of a model: side by side on large pages.

    A small layer spread over hundreds of 4 KiB pages costs more look-ups of addresses than one on a single page of 2 MiB, and the processor
    fetches ahead only within a page.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages: Callable[[], mmap.mmap | None] = lambda: None  # a weak reference: the tensors keep the memory
        self._used = 0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As `zero_pages` does. Large tensors get pages of their own."""
        count = math.prod(shape)
        num_bytes = -(-count * dtype.itemsize // LINE_BYTES) * LINE_BYTES
        if not 0 < num_bytes < LARGE_BYTES:
            return zero_pages(shape, dtype)
        with self._lock:
            pages = self._pages()
            if pages is None or self._used + num_bytes > SHARED_BYTES:
                try:
                    pages, self._used = _map(SHARED_BYTES), 0
                except OSError:  # so much at once is too much
                    return zero_pages(shape, dtype)
                self._pages = weakref.ref(pages)
            start, self._used = self._used, self._used + num_bytes
        return torch.frombuffer(pages, dtype=dtype, count=count, offset=start).view(shape)


def _map(num_bytes: int) -> mmap.mmap:
    """Memory of this process alone, on large pages if it is large."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}
    pages = mmap.mmap(-1, num_bytes, **private)
    if num_bytes >= LARGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def return_freed_memory() -> None:
    """Give freed memory back to the operating system. glibc keeps what lies between blocks that are in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
