"""Memory that processes of one machine share."""

from __future__ import annotations

import os
import tempfile


def create_shared_memory(num_bytes: int) -> int:
    """Zeros, as a file descriptor for processes to inherit and map.

    The memory has no name, so nothing is left of it when they have all ended, however they did.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("minivllm")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor
