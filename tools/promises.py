"""Prints, as JSON, the names that releases keep (docs/releases.md): what `minivllm` exports, with arguments, and the command line.

A test compares them with those of the last release: tests/project/promises.json. At a release, store them anew:
    python tools/promises.py > tests/project/promises.json
"""

from __future__ import annotations

import argparse
import inspect
import json
from typing import Any

import minivllm
from minivllm.entrypoints.cli.main import make_parser

METHODS = {
    "LLM": ["chat", "generate", "get_default_sampling_params", "get_tokenizer"],
    "LLMEngine": [
        "abort_request", "add_request", "from_engine_args", "get_num_unfinished_requests", "has_unfinished_requests", "shutdown", "step",
    ],
    "AsyncLLMEngine": ["abort", "check_health", "from_engine_args", "generate", "shutdown"],
    "EngineTrace": ["load", "save"],
    "ModelRegistry": ["get_supported_archs", "register_model"],
}  # fmt: skip
FIELDS = ["EngineArgs", "SamplingParams", "StructuredOutputsParams", "RequestOutput", "CompletionOutput", "EngineTrace"]


def promises() -> dict[str, list[str]]:
    """Names, and the arguments of each: "LLM.generate" and its parameters, "EngineArgs" and its fields, "minivllm serve" and its options."""
    found = dict(commands(make_parser()))
    for name in minivllm.__all__:
        item = getattr(minivllm, name)
        found[name] = arguments(item) if name in FIELDS else []
        found |= {f"{name}.{method}": arguments(getattr(item, method)) for method in METHODS.get(name, [])}
    return {name: sorted(values) for name, values in sorted(found.items())}


def arguments(item: Any) -> list[str]:
    """The names of a function's parameters, but for `self` and the likes of `**kwargs`."""
    hidden = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name for name, one in inspect.signature(item).parameters.items() if name not in ("self", "cls") and one.kind not in hidden
    ]


def commands(parser: argparse.ArgumentParser) -> list[tuple[str, list[str]]]:
    """A command and all those below it, each with its options."""
    found, options = [], []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [pair for below in action.choices.values() for pair in commands(below)]
        else:
            options += action.option_strings or [action.dest]
    return [(parser.prog, options), *found]


if __name__ == "__main__":
    print(json.dumps(promises(), indent=1))
