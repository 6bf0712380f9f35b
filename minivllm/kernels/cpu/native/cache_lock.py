"""Numba's cache on disk for processes that compile at once, such as two engines that start on a new machine.

Numba reads a kernel's index, chooses the name of a new file, writes the index, then the file. Two processes that do so at once for
different shapes may choose the same name, so that later one of them loads the machine code of the other.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

from numba.core.caching import IndexDataCacheFile


@functools.cache
def save_one_at_a_time() -> None:
    """From now on, save compiled functions under a lock on their index."""
    with contextlib.suppress(ImportError):  # not on Windows
        import fcntl

        save = IndexDataCacheFile.save

        def save_alone(self: IndexDataCacheFile, key: Any, data: Any) -> None:
            with Path(f"{self._index_path}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                save(self, key, data)

        IndexDataCacheFile.save = save_alone
