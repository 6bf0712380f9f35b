"""Memory that the host has left, how much of it a KV cache gets, and the peak memory of a piece of work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")

CPU_CACHE_LIMIT = 4 * 2**30
"""The default limit of the cache on a CPU, in bytes: a laptop runs other programs, too."""


def available_cpu_memory() -> int:
    """Bytes that this process can still allocate: on the machine, or in its container if that allows less."""
    available: int = psutil.virtual_memory().available
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2, or no limit ("max")
        return available
    return min(available, max(0, limit - used))


def useful_cache_bytes(max_num_seqs: int, max_model_len: int, block_size: int, block_bytes: int) -> int:
    """Bytes of the blocks that all sequences together can fill. More would be useless."""
    return max_num_seqs * -(-max_model_len // block_size) * block_bytes


def cpu_cache_bytes(available: int, fraction: float, needed: int, useful: int, num_ranks: int = 1) -> int:
    """Bytes that the cache of a rank gets on a CPU; not positive if there is no room.

    Args:
        available: Bytes that all ranks together can still allocate, with the weights loaded.
        fraction: How much of them to use (`gpu_memory_utilization`).
        needed: Bytes that the largest step of a rank takes besides.
        useful: `useful_cache_bytes`.
        num_ranks: The ranks that share the memory.
    """
    return min(int(available * fraction) // num_ranks - needed, CPU_CACHE_LIMIT // num_ranks, useful)


def measure_peak_memory(work: Callable[[], None]) -> int:
    """Do the work; the bytes by which the process grew at its peak.

    Linux keeps the peak resident size and lets a process reset it. Elsewhere, and where that is not allowed, only the
    growth that remains after the work can be measured.
    """
    before: int = psutil.Process().memory_info().rss
    try:
        Path("/proc/self/clear_refs").write_text("5")
        can_reset = True
    except OSError:
        can_reset = False
    work()
    after: int = psutil.Process().memory_info().rss
    if can_reset:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                after = max(after, int(line.split()[1]) * 1024)
    return max(0, after - before)
