"""Prints and saves measurements: a table of text, and JSON with the machine, versions, time and command behind it."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("minivllm", "torch", "numba", "transformers")
"""Packages whose versions are saved with a result."""


def format_table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, left: int = 1) -> str:
    """Rows of cells under their headers; the first `left` columns are flush left, the others flush right."""
    table = [[str(cell) for cell in cells] for cells in (headers, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    row = "  ".join(f"{{:{'<' if i < left else '>'}{width}}}" for i, width in enumerate(widths))
    head, *lines = [row.format(*cells).rstrip() for cells in table]
    return "\n".join([head, "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines])


def quantity(value: float, form: str = ".1f", unit: str = "") -> str:
    """A number with its unit, or a dash if it is not a number.

    >>> quantity(12.345, ".1f", " ms"), quantity(math.nan)
    ('12.3 ms', '–')
    """
    return "–" if math.isnan(value) else f"{value:{form}}{unit}"


def report(title: str, table: str, results: dict[str, Any], *, file: Path | None = None, command: str | None = None) -> None:
    """Print a measurement, and save it with its origin.

    Args:
        title: What was measured, in a line.
        table: The result as text.
        results: The result as plain data.
        file: Where to save both as JSON; None saves nothing.
        command: The command line; that of the running script if None.
    """
    origin = find_origin(command)
    text = f"{title}\n{origin['machine']}\n\n{table}"
    print(f"\n{text}")
    if file is not None:
        file.write_text(to_json(origin | {"text": text.split("\n")} | results), encoding="utf-8")


def find_origin(command: str | None = None) -> dict[str, Any]:
    """Where a measurement comes from: machine, time, command line (that of the running script if None) and versions."""
    command = command or shlex.join(["python", f"{Path(sys.argv[0]).parent.name}/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    if features := os.environ.get("MINIVLLM_CPU_FEATURES"):  # part of the processor was switched off
        command = f"MINIVLLM_CPU_FEATURES={features} {command}"
    return {
        "machine": describe_machine(),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "versions": find_versions(),
    }


def to_json(content: dict[str, Any]) -> str:
    """Indented JSON, with lists of numbers on one line."""
    text = json.dumps(content, indent=2, allow_nan=False)
    return re.sub(r"\[\n[\s\d.eE,+-]+\]", lambda numbers: f"[{' '.join(numbers[0][1:-1].split())}]", text) + "\n"


def find_versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide how fast something is."""
    import importlib.metadata  # not at the top: the playground's first step need not wait for it

    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def describe_machine() -> str:
    """Processor, cores, memory, GPU, versions and date, in a line."""
    import psutil
    import torch  # takes a second, which formatting a table need not wait for

    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{processor_name()}, {os.cpu_count()} cores, {memory:.0f} GiB{gpu}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, {datetime.date.today().isoformat()}"
    )


def processor_name() -> str:
    """The processor as the system names it, with its widest vector instructions on Linux."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    name = next(
        (line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")), platform.machine()
    )
    features = [feature for feature in ("avx2", "avx512f", "avx512_vnni", "amx_bf16") if feature in text]
    return f"{name} ({', '.join(features)})" if features else name
