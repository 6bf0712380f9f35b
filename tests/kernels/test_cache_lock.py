"""Processes that compile at once lose nothing of each other's."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("fcntl")
pytest.importorskip("numba")

SAVE = """
import sys
from numba.core.caching import IndexDataCacheFile
import minivllm.kernels.cpu
file = IndexDataCacheFile(sys.argv[1], "kernel", "stamp")
print("ready", flush=True)
sys.stdin.read(1)
for number in range(100):
    file.save((sys.argv[2], number), f"{sys.argv[2]} {number}")
"""


@pytest.mark.slow
def test_two_processes_that_save_at_once_keep_all_of_both(tmp_path):
    from numba.core.caching import IndexDataCacheFile

    names = ("one", "two")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [subprocess.Popen([sys.executable, "-c", SAVE, tmp_path, name], **pipes) for name in names]
    assert [process.stdout.readline() for process in processes] == [b"ready\n"] * 2
    for process in processes:
        process.stdin.write(b"x")
        process.stdin.close()
    assert [process.wait(60) for process in processes] == [0, 0]
    file = IndexDataCacheFile(str(tmp_path), "kernel", "stamp")
    assert all(file.load((name, number)) == f"{name} {number}" for name in names for number in range(100))
