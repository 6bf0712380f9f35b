"""Options that several commands share, and what is done with their values before work begins."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import MISSING, fields
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
_NOT_ON_THE_COMMAND_LINE = {"model", "scheduler_cls", "block_space_manager_cls", "skip_tokenizer_init", "trace"}


def add_command(commands, name: str, run: Callable, summary: str, example: str) -> argparse.ArgumentParser:  # noqa: ANN001
    """A subcommand with its summary, description and example."""
    description = summary[0].upper() + summary[1:] + "."
    parser = commands.add_parser(name, help=summary, description=description, epilog=f"Example: {example}")
    parser.set_defaults(run=run)
    return parser


def add_engine_options(parser: argparse.ArgumentParser, leave_out: frozenset[str] | set[str] = frozenset()) -> None:
    """The options that are arguments of `EngineArgs`, but for those left out, with its defaults and its own words."""
    group = parser.add_argument_group("engine")
    group.add_argument("--model", default=EngineArgs.model, help=f"{EngineArgs.help_for('model')} (default: %(default)s)")
    for field in fields(EngineArgs):
        if field.name in _NOT_ON_THE_COMMAND_LINE | leave_out:
            continue
        option = "--" + field.name.replace("_", "-")
        help_text = EngineArgs.help_for(field.name).replace("%", "%%")
        assert field.default is not MISSING
        if field.type == "bool":
            group.add_argument(option, action="store_true", help=help_text)
            continue
        kind = int if "int" in str(field.type) else float if field.type == "float" else str
        if field.default is not None:
            help_text += " (default: %(default)s)"
        group.add_argument(option, type=kind, default=field.default, choices=_CHOICES.get(field.name), help=help_text)


def add_save_trace_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup, more: str = "") -> None:
    """The option that has an engine's trace recorded and saved, with what a command has to add to its help."""
    parser.add_argument(
        "--save-trace", type=Path, metavar="FILE",
        help="record every step and request, and write them here as JSON, the tokens of the prompts included; "
        f"`minivllm trace show FILE` draws them{more}",
    )  # fmt: skip


def engine_args(arguments: argparse.Namespace) -> dict:
    """The keyword arguments for `LLM` that were given on the command line."""
    return {name: getattr(arguments, name) for name in EngineArgs.names() if hasattr(arguments, name)}


def picture(name: str) -> Path:
    """A file name with an ending that a picture can have."""
    path = Path(name)
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise argparse.ArgumentTypeError(f"{name} must end in .png, .pdf or .svg")
    return path


def check_writable(path: Path | None) -> None:
    """Find out beforehand whether a file can be written."""
    if path is None:
        return
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise ConfigError(f"{path} cannot be written: it must be a file in a folder that exists.")
