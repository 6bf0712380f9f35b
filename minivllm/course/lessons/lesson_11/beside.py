"""The learner's server beside the package's own: `minivllm bench serve` asks both, in turns."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from minivllm import LLM
from minivllm.bench.report import format_table
from minivllm.course.lessons.lesson_11.server import OPTIONS, LazyApp
from minivllm.course.lessons.streaming import parts_of, serve

_LOAD = ("--num-requests", "24", "--concurrency", "8", "--mean-prompt-len", "16", "--mean-output-len", "24", "--warmup", "2")
_ROUNDS = 2
_SERVE = """
import os, signal, sys, threading

def end_with_parent():
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=end_with_parent, daemon=True).start()
from minivllm.entrypoints.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""`minivllm serve`, which ends when this process does, however that ends."""
_LATENCIES = (("ttft_ms", "p50"), ("itl_ms", "p50"), ("itl_ms", "p99"))


def compare_servers(make_app: Any, engine_cls: Any) -> str:
    """A table of both servers: medians of two rounds of the same 24 requests, eight at a time."""
    results: dict[str, list[dict[str, Any]]] = {"yours": [], "the package's": []}
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(server()) for server in (partial(_learners, make_app, engine_cls), _packages)]
        for _ in range(_ROUNDS):
            for runs, address in zip(results.values(), addresses, strict=True):
                runs.append(_bench(address, _LOAD))
    headers = ("server", "completed", "tokens/s", "first token (median)", "between tokens (median)", "p99")
    return format_table(headers, [(name, *_columns(runs)) for name, runs in results.items()], left=1)


def _columns(runs: list[dict[str, Any]]) -> list[str]:
    completed, tokens = sum(run["completed"] for run in runs), median(run["output_tokens_per_second"] for run in runs)
    return [
        f"{completed} of {sum(run['num_requests'] for run in runs)}",
        f"{tokens:.0f}",
        *[f"{median(run[name][part] for run in runs):.1f} ms" for name, part in _LATENCIES],
    ]


@contextlib.contextmanager
def _learners(make_app: Any, engine_cls: Any) -> Iterator[str]:
    """The address of a server that has answered once."""
    core, frontend = parts_of(LLM("smollm2-135m", **OPTIONS).llm_engine)
    app = LazyApp(make_app, engine_cls, core, frontend)
    with serve(app) as address:
        try:
            _bench(address, ("--num-requests", "1"))
            yield address
        except RuntimeError:
            if app.unwritten:
                raise app.unwritten[0] from None
            raise
        finally:
            app.close()


@contextlib.contextmanager
def _packages() -> Iterator[str]:
    options = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-c", _SERVE, "serve", "smollm2-135m", "--port", "0", *options]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdin is not None and server.stdout is not None
    try:
        lines: list[str] = []
        while not (found := re.search(r"serves .* at (http://\S+)", lines[-1] if lines else "")):
            lines.append(server.stdout.readline())
            if not lines[-1]:
                raise RuntimeError(f"minivllm serve has ended: {''.join(lines[-3:])}")
        yield found[1]
    finally:
        server.stdin.close()
        server.wait()


def _bench(address: str, load: tuple[str, ...]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, "-m", "minivllm.entrypoints.cli.main", "bench", "serve", "--base-url", address, *load]
        done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError((done.stderr.strip() or done.stdout.strip()).splitlines()[-1])
        return json.loads(file.read_text())["result"]
