"""The processes that a server has started."""

from __future__ import annotations

import contextlib

import psutil


def children(served, module):
    """Those of a running `minivllm serve` (with the attribute `process`) that run a module."""
    found = []
    for child in psutil.Process(served.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            found += [child] if any(module in part for part in child.cmdline()) else []
    return found
