"""Memory shared by processes of one machine."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from pathlib import Path

LINE_BYTES = 128
"""Each process writes to cache lines of its own: sharing them would slow down the others' reads. Processors fetch two lines of 64 bytes at
a time."""
BUFFER_BYTES = 2**21
"""Size of a rank's buffer, through which larger tensors go in pieces."""

PIPE_BYTES = 2**24
"""How much a pipeline stage can send before the next one reads it: several batches of a decode step."""


def create_shared_memory(num_bytes: int) -> int:
    """Zeros, as a file descriptor for processes to inherit and map.

    The memory has no name, so it disappears with the last of these processes.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("minivllm")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return keep_off_standard_streams(descriptor)


def keep_off_standard_streams(descriptor: int) -> int:
    """The same file, under a number above 2. If a standard stream is closed, the next opened file takes its number, and a child process
    would print into it."""
    if descriptor > 2:
        return descriptor
    higher = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return higher


class NamedMemory:
    """Memory that processes of one machine share which do not inherit from each other: whoever comes first makes it.

    Once all have opened it, one should `unlink` it, so that it disappears with the last of these processes.

    Args:
        name: A new one, such as a UUID.
    """

    def __init__(self, name: str) -> None:
        folder = Path("/dev/shm")
        self._path = (folder if folder.is_dir() else Path(tempfile.gettempdir())) / f"minivllm-{name}"

    def open(self, num_bytes: int) -> int:
        """Zeros, or what others have written, as a file descriptor."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, num_bytes)
        return keep_off_standard_streams(descriptor)

    def unlink(self) -> None:
        """Remove the name. Safe to call again."""
        self._path.unlink(missing_ok=True)


def create_group_memory(world_size: int, buffer_bytes: int = BUFFER_BYTES) -> int:
    """Memory for a `SharedMemoryGroup`, as a file descriptor for its processes to inherit."""
    return create_shared_memory(group_memory_bytes(world_size, buffer_bytes))


def create_pipeline_memory(num_stages: int, pipe_bytes: int = PIPE_BYTES) -> int:
    """Memory for a `SharedMemoryPipeline`, as a file descriptor for its processes to inherit."""
    return create_shared_memory(pipeline_memory_bytes(num_stages, pipe_bytes))


def group_memory_bytes(world_size: int, buffer_bytes: int = BUFFER_BYTES) -> int:
    """Size of the memory of a `SharedMemoryGroup`."""
    return group_header_bytes(world_size) + 2 * world_size * buffer_bytes


def pipeline_memory_bytes(num_stages: int, pipe_bytes: int = PIPE_BYTES) -> int:
    """Size of the memory of a `SharedMemoryPipeline`: a pipe between each two neighbours."""
    num_pipes = num_stages - 1
    return group_header_bytes(2 * num_pipes) + num_pipes * pipe_bytes


def group_header_bytes(world_size: int) -> int:
    """Size of the part before the buffers: a line for each rank, or each end of a pipe, in whole pages."""
    return -(-LINE_BYTES * world_size // mmap.PAGESIZE) * mmap.PAGESIZE
