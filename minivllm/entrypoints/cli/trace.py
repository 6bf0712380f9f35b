"""`minivllm trace show FILE` draws a saved trace, `minivllm trace diff FILE FILE` compares two, `minivllm trace --to chrome FILE` exports one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from minivllm.bench.report import quantity
from minivllm.bench.trace_diff import diff_traces, to_page
from minivllm.bench.trace_summary import summarize_trace
from minivllm.engine.trace import EngineTrace
from minivllm.entrypoints.cli.options import add_command, add_option, check_writable
from minivllm.errors import ConfigError

_COMMANDS = ("show", "export", "diff")


def add_trace_commands(commands) -> None:  # noqa: ANN001
    """Register the commands."""
    summary = "draw all figures of a saved trace and print its numbers"
    show = add_command(commands, "show", run_trace_show, summary, "minivllm trace show trace.json")
    add_option(show, "--output FOLDER", Path, "where the figures go (default: out/NAME)")
    add_option(show, "--step N", int, "step of the block map (default: the one with the most blocks in use)")
    export = add_command(
        commands, "export", run_trace_export, "write a saved trace for https://ui.perfetto.dev",
        "minivllm trace export trace.json, or minivllm trace --to chrome trace.json",
    )  # fmt: skip
    add_option(export, "--to", "chrome", "format", choices=("chrome",))
    add_option(export, "--output FILE", Path, "where it goes (default: next to the trace, as NAME.chrome.json)")
    summary = "compare two saved traces of the same requests: numbers, and the first step that differs"
    diff = add_command(commands, "diff", run_trace_diff, summary, "minivllm trace diff a.json b.json --html diff.html")
    diff.add_argument("files", type=Path, nargs=2, metavar="FILE", help="a file that --save-trace wrote")
    add_option(diff, "--html FILE", Path, "also write them as a page, with the requests of both as bars")
    for command in (show, export):
        command.add_argument("file", type=Path, metavar="FILE", help="a file that --save-trace wrote")


def with_trace_command(argv: Sequence[str]) -> list[str]:
    """Insert the command that was left out after `minivllm trace`: "export" with --to, else "show"."""
    words = list(argv)
    if words[:1] == ["trace"] and len(words) > 1 and words[1] not in (*_COMMANDS, "-h", "--help"):
        words.insert(1, "export" if any(word.split("=")[0] == "--to" for word in words) else "show")
    return words


def run_trace_diff(arguments: argparse.Namespace) -> int:
    """Print how two traces differ, and write it as a page if asked."""
    if arguments.html is not None:
        for file in arguments.files:
            if arguments.html.exists() and file.exists() and arguments.html.samefile(file):
                raise ConfigError(f"{arguments.html} is one of the traces: name another file with --html.")
        check_writable(arguments.html)
    first, second = (_load(file) for file in arguments.files)
    names = (_name(arguments.files[0]), _name(arguments.files[1]))
    diff = diff_traces(names if names[0] != names[1] else (str(arguments.files[0]), str(arguments.files[1])), (first, second))
    print(diff)
    if arguments.html is not None:
        page = to_page(diff, f"{diff.names[0]} and {diff.names[1]}")
        arguments.html.write_text(page, encoding="utf-8", errors="replace")  # a file's name may be no text
        print(f"\nAs a page: {arguments.html}")
    return 0


def run_trace_show(arguments: argparse.Namespace) -> int:
    """Draw every figure of a trace into a folder, and print its numbers."""
    trace = _load(arguments.file)
    step = max(range(len(trace)), key=lambda number: -trace[number].num_free_blocks) if arguments.step is None else arguments.step
    if not 0 <= step < len(trace):
        raise ConfigError(f"--step is {step}, but the trace has the steps 0 to {len(trace) - 1}.")
    name = _name(arguments.file)
    folder = Path("out") / name if arguments.output is None else arguments.output
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file, but the figures need a folder: name another with --output.")
    try:
        from minivllm.viz.batches import draw_batches
        from minivllm.viz.block_map import draw_block_map
        from minivllm.viz.cache_use import draw_cache_use
        from minivllm.viz.curves import draw_curves
        from minivllm.viz.latency import draw_latencies
        from minivllm.viz.timeline import draw_requests
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise ConfigError("Figures need matplotlib: `pip install matplotlib`.") from None
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{name}: {trace.config.model}, {trace.config.scheduler}\n\n{format_summary(trace)}\n\nFigures")
    figures = {
        "requests": lambda: draw_requests(trace),
        "batches": lambda: draw_batches(trace),
        "curves": lambda: draw_curves(trace),
        "latencies": lambda: draw_latencies({name: trace}),
        "cache_use": lambda: draw_cache_use(trace),
        f"block_map_{step}": lambda: draw_block_map(trace, step),
    }
    for figure, draw in figures.items():
        path = folder / f"{figure}.png"
        draw().savefig(path, dpi=150)
        print(f"  {path}")
    return 0


def run_trace_export(arguments: argparse.Namespace) -> int:
    """Write a trace for Perfetto."""
    from minivllm.viz.chrome import to_chrome

    trace = _load(arguments.file)
    path = arguments.output
    if path is None:
        path = arguments.file.with_name(f"{_name(arguments.file)}.chrome.json")
    if path.exists() and path.samefile(arguments.file):
        raise ConfigError(f"{path} is the trace itself: name another file with --output.")
    check_writable(path)
    content = to_chrome(trace)
    path.write_text(json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n", encoding="utf-8")
    print(f"{path}: {len(content['traceEvents'])} events. Open it at https://ui.perfetto.dev or chrome://tracing.")
    return 0


def format_summary(trace: EngineTrace) -> str:
    """A trace summarized as text: counts, throughput and latency percentiles.

    Time is from the first arrival to the end of the last step, idle time included. Cache use is averaged over the time of the steps.
    """
    run = summarize_trace(trace)
    left_out = run.num_requests - run.completed
    rows = {
        "requests": f"{run.num_requests}" + (f" ({left_out} unfinished, aborted or failed)" if left_out else ""),
        "steps": f"{run.num_steps}",
        "tokens": f"{run.prompt_tokens} of prompts, {run.output_tokens} generated",
        "time": f"{run.seconds:.3f} s",
        "speed": f"{run.output_tokens_per_second:.1f} generated tokens/s",
        "preemptions": f"{run.num_preemptions}",
        "mean cache use": f"{run.mean_cache_use:.1%}",
    }
    waits = {"TTFT": run.ttft, "ITL": run.itl, "latency": run.latency}
    lines = [f"{name:<16}{value}" for name, value in rows.items()]
    lines += ["", f"{'':<16}{'p50':>12}{'p95':>12}{'p99':>12}"]
    for name, times in waits.items():
        cells = (quantity(time * 1e3, ".1f", " ms") for time in (times.p50, times.p95, times.p99))
        lines.append(f"{name:<16}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def _load(path: Path) -> EngineTrace:
    trace = EngineTrace.load(path)
    if not len(trace):
        raise ConfigError(f"{path} has no steps: there is nothing to show.")
    return trace


def _name(path: Path) -> str:
    """A file's name without its extensions."""
    return path.name.removesuffix(".json").removesuffix(".trace") or "trace"
