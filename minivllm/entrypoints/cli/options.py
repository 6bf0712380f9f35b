"""Options shared by several commands, and checks of their values before any work begins."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from minivllm.config import (
    DTYPES,
    EXECUTOR_BACKENDS,
    GENERATION_CONFIGS,
    LOAD_FORMATS,
    PLACEMENT_STRATEGIES,
    POLICIES,
    PREEMPTION_MODES,
    QUANTIZATIONS,
    REPLICA_BACKENDS,
    ROUTINGS,
    EngineArgs,
)
from minivllm.errors import ConfigError

_CHOICES = {
    "generation_config": GENERATION_CONFIGS,
    "load_format": LOAD_FORMATS,
    "dtype": DTYPES,
    "quantization": QUANTIZATIONS,
    "device": ("auto", "cpu", "cuda"),
    "attention_backend": ("auto", "torch", "cpu", "triton"),
    "scheduling_policy": POLICIES,
    "preemption_mode": PREEMPTION_MODES,
    "distributed_executor_backend": EXECUTOR_BACKENDS,
    "ray_placement_strategy": PLACEMENT_STRATEGIES,
    "data_parallel_backend": REPLICA_BACKENDS,
    "data_parallel_routing": ROUTINGS,
}
_NOT_ON_THE_COMMAND_LINE = {
    "scheduler_cls",
    "block_space_manager_cls",
    "sampler_cls",
    "detokenizer_cls",
    "skip_tokenizer_init",
    "trace",
}


def add_command(commands, name: str, run: Callable, summary: str, example: str) -> argparse.ArgumentParser:  # noqa: ANN001
    """Add a subcommand with its summary, description and example."""
    description = summary[0].upper() + summary[1:] + "."
    parser = commands.add_parser(name, help=summary, description=description, epilog=f"Example: {example}")
    parser.set_defaults(run=run)
    return parser


def add_option(group: argparse._ActionsContainer, name: str, default: Any, help: str, **more: Any) -> None:
    """Add an option whose type follows from its default.

    Args:
        group: The parser, or one of its groups.
        name: Its name, and after a space the placeholder for its value: "--duration SECONDS".
        default: The value if it is not given, which the help shows. True and False make a switch, a list takes several values, and
            a type, or another function of a string, stands for an option without default.
        help: What it does.
        more: Further arguments of `add_argument`, such as `choices`.
    """
    name, _, placeholder = name.partition(" ")
    if placeholder:
        more["metavar"] = placeholder
    if default is False:
        more["action"] = "store_true"
    elif callable(default):
        more["type"] = default
    else:
        help += " (default: %(default)s)"
        more["default"] = default
        if default is True:
            more["action"] = argparse.BooleanOptionalAction
        elif isinstance(default, list):
            more |= {"type": type(default[0]), "nargs": "+"}
        else:
            more["type"] = type(default)
    group.add_argument(name, help=help, **more)


def add_engine_options(parser: argparse.ArgumentParser, leave_out: str = "", **defaults: Any) -> None:
    """Add an option for each argument of `EngineArgs`, except `leave_out`, with its default or another one, and its help."""
    assert defaults.keys() <= set(EngineArgs.names())
    group = parser.add_argument_group("engine")
    for field in fields(EngineArgs):
        if field.name in _NOT_ON_THE_COMMAND_LINE or field.name == leave_out:
            continue
        default = defaults.get(field.name, field.default)
        if default is None and "bool" in str(field.type):
            group.add_argument(
                _option(field.name), action=argparse.BooleanOptionalAction, help=field.metadata["help"].replace("%", "%%")
            )
            continue
        if default is None:
            default = int if "int" in str(field.type) else str
        choices = {"choices": _CHOICES[field.name]} if field.name in _CHOICES else {}
        add_option(group, _option(field.name), default, field.metadata["help"].replace("%", "%%"), **choices)


def _option(name: str) -> str:
    """The command line's spelling of an argument."""
    return "--" + name.replace("_", "-")


def add_save_trace_option(group: argparse._ActionsContainer, more: str = "") -> None:
    """Add the option that records and saves an engine's trace; `more` is appended to its help."""
    words = "record every step and request here as JSON, prompt tokens included; `minivllm trace show FILE` draws them"
    add_option(group, "--save-trace FILE", Path, words + more)


def add_goal_options(group: argparse._ActionsContainer) -> None:
    """Add an option for each of the `Goals` of a request."""
    for name, words in {"ttft": "its first token", "tpot": "each further token on average", "e2e": "its last token"}.items():
        add_option(group, f"--{name}-goal MS", float, f"a request counts for goodput if {words} took at most MS milliseconds")


def options_for(cls: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that have the names of a dataclass's fields, as its keyword arguments."""
    return {field.name: getattr(arguments, field.name) for field in fields(cls) if hasattr(arguments, field.name)}


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
    if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
        raise ConfigError(f"{path} cannot be written: it must be a file in a folder that exists.")
