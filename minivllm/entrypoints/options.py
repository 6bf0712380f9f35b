"""Options shared by several commands, and checks of their values before any work begins."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from minivllm.config import DTYPES, POLICIES, PREEMPTION_MODES, QUANTIZATIONS, EngineArgs
from minivllm.errors import ConfigError

_CHOICES = {
    "dtype": DTYPES,
    "quantization": QUANTIZATIONS,
    "device": ("auto", "cpu", "cuda"),
    "attention_backend": ("auto", "torch", "cpu", "triton"),
    "scheduling_policy": POLICIES,
    "preemption_mode": PREEMPTION_MODES,
}
_NOT_ON_THE_COMMAND_LINE = {"scheduler_cls", "block_space_manager_cls", "skip_tokenizer_init", "trace"}


def add_command(commands, name: str, run: Callable, summary: str, example: str) -> argparse.ArgumentParser:  # noqa: ANN001
    """Add a subcommand with its summary, description and example."""
    description = summary[0].upper() + summary[1:] + "."
    parser = commands.add_parser(name, help=summary, description=description, epilog=f"Example: {example}")
    parser.set_defaults(run=run)
    return parser


def add_engine_options(parser: argparse.ArgumentParser, leave_out: frozenset[str] | set[str] = frozenset()) -> None:
    """Add an option for each argument of `EngineArgs`, except those left out, with its default and its help."""
    group = parser.add_argument_group("engine")
    for field in fields(EngineArgs):
        if field.name in _NOT_ON_THE_COMMAND_LINE | leave_out:
            continue
        option = "--" + field.name.replace("_", "-")
        help_text = field.metadata["help"].replace("%", "%%")
        if field.type == "bool":
            group.add_argument(option, action="store_true", help=help_text)
            continue
        kind = int if "int" in str(field.type) else float if field.type == "float" else str
        if field.default is not None:
            help_text += " (default: %(default)s)"
        group.add_argument(option, type=kind, default=field.default, choices=_CHOICES.get(field.name), help=help_text)


def add_save_trace_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup, more: str = "") -> None:
    """Add the option that records and saves an engine's trace; `more` is appended to its help."""
    parser.add_argument(
        "--save-trace", type=Path, metavar="FILE",
        help="record every step and request here as JSON, prompt tokens included; "
        f"`minivllm trace show FILE` draws them{more}",
    )  # fmt: skip


def engine_args(arguments: argparse.Namespace) -> dict:
    """The keyword arguments of `LLM` from the command line."""
    return {name: getattr(arguments, name) for name in EngineArgs.names() if hasattr(arguments, name)}


def picture(name: str) -> Path:
    """The type of an argument that names a picture file."""
    path = Path(name)
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise argparse.ArgumentTypeError(f"{name} must end in .png, .pdf or .svg")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise argparse.ArgumentTypeError("drawing needs matplotlib: `pip install matplotlib`") from None
    return path


def check_writable(path: Path | None) -> None:
    """Raise a ConfigError if a file cannot be written, before any work is done."""
    if path is None:
        return
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise ConfigError(f"{path} cannot be written: it must be a file in a folder that exists.")
