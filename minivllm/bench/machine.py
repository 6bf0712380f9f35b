"""One line that says what a measurement was made on."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import psutil
import torch


def describe_machine() -> str:
    """Processor, cores, memory, GPU, versions and date."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{processor_name()}, {os.cpu_count()} cores, {memory:.0f} GiB{gpu}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, {datetime.date.today().isoformat()}"
    )


def processor_name() -> str:
    """The processor as the system names it, with the widest vector instructions on Linux."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    name = next(
        (line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")), platform.machine()
    )
    features = [feature for feature in ("avx2", "avx512f", "avx512_vnni", "amx_bf16") if feature in text]
    return f"{name} ({', '.join(features)})" if features else name
