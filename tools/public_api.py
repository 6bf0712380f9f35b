"""Prints, as JSON, the public API that docs/releases.md promises: what `minivllm` exports, with arguments, the command line, and HTTP.

A test compares it with that of each earlier minor release, tests/project/public_api_*.json. At a release:
    python tools/public_api.py tests/project/public_api_1.1.json
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import minivllm
from minivllm.config import CacheConfig
from minivllm.engine.metrics import Metrics
from minivllm.entrypoints.cli.main import make_parser
from minivllm.entrypoints.openai.chat.protocol import ChatCompletionRequest
from minivllm.entrypoints.openai.completions.protocol import CompletionRequest
from minivllm.entrypoints.openai.responses.protocol import ResponsesRequest
from minivllm.entrypoints.server.api_server import replicas_router, router, tokenize_router
from minivllm.entrypoints.server.tokenize_api import DetokenizeRequest, TokenizeRequest

METHODS = {
    "LLM": ["chat", "generate", "get_default_sampling_params", "get_tokenizer"],
    "LLMEngine": [
        "abort_request", "add_request", "from_engine_args", "get_num_unfinished_requests", "has_unfinished_requests", "shutdown", "step",
    ],
    "AsyncLLMEngine": ["abort", "check_health", "from_engine_args", "generate", "shutdown"],
    "EngineTrace": ["load", "save"],
    "ModelRegistry": ["get_supported_archs", "register_model"],
}  # fmt: skip
FIELDS = ["EngineArgs", "SamplingParams", "StructuredOutputsParams", "RequestOutput", "CompletionOutput"]
REQUESTS = [CompletionRequest, ChatCompletionRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest]
INTERNAL = ["num_threads", "others", "restart"]  # arguments for the server's own use


def public_api() -> dict[str, dict[str, Any]]:
    """Names, and under each its parameters, fields or options: what a caller may rely on of each."""
    api = {name: fields(getattr(minivllm, name)) if name in FIELDS else {} for name in minivllm.__all__}
    for name, methods in METHODS.items():
        api |= {f"{name}.{method}": parameters(getattr(getattr(minivllm, name), method)) for method in methods}
    api |= {f"HTTP {model.__name__}": {name: {} for name in model.model_fields} for model in REQUESTS}
    routes = [route for one in (router, tokenize_router, replicas_router) for route in one.routes]
    api["HTTP"] = {f"{method} {route.path}": {} for route in routes for method in sorted(route.methods)}
    api["metrics"] = {one.name: {} for one in Metrics("", CacheConfig()).registry.collect() if one.name.startswith("minivllm:")}
    return api | dict(commands(make_parser()))


def parameters(function: Any) -> dict[str, Any]:
    """Of each named parameter, its place if it can be given by position, and its default."""
    found, variable = {}, (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for place, (name, one) in enumerate(inspect.signature(function).parameters.items()):
        if name not in ("self", "cls", *INTERNAL) and one.kind not in variable:
            found[name] = {"default": in_words(one.default)}
            if one.kind is not inspect.Parameter.KEYWORD_ONLY:
                found[name]["place"] = place
    return found


def fields(cls: Any) -> dict[str, Any]:
    """Of each field, its default. They are given by name."""
    return {name: {"default": one["default"]} for name, one in parameters(cls).items()}


def commands(parser: argparse.ArgumentParser) -> list[tuple[str, dict[str, Any]]]:
    """A command and all those below it, and of each option the default, how many values it takes, and the values it may have."""
    found, options = [], {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [pair for below in action.choices.values() for pair in commands(below)]
        else:
            choices = sorted(map(str, action.choices)) if action.choices else []
            about = {"default": in_words(action.default), "nargs": str(action.nargs), "choices": choices}
            options |= dict.fromkeys(action.option_strings or [action.dest], about)
    return [(parser.prog, options), *found]


def in_words(default: Any) -> str | None:
    """A default as text; None if there is none, and a value must be given."""
    return None if default is inspect.Parameter.empty else str(default)


def breaks(old: dict[str, dict[str, Any]], new: dict[str, dict[str, Any]]) -> list[str]:
    """What was in a public API and is not kept in a newer one, a sentence each."""
    found = []
    for name, parts in old.items():
        if name not in new:
            found.append(f"{name} is gone.")
            continue
        for part, about in parts.items():
            now = new[name].get(part)
            if now is None:
                found.append(f"{name}: {part} is gone.")
            elif missing := set(about.get("choices", [])) - set(now.get("choices", [])):
                found.append(f"{name}: {part} does not take {', '.join(sorted(missing))} any more.")
            else:
                kept = [key for key in about if key != "choices" and not (key == "default" and about[key] is None)]
                found += [
                    f"{name}: the {key} of {part} was {about[key]}, and is {now.get(key)}."
                    for key in kept
                    if now.get(key) != about[key]
                ]
        added = [
            part
            for part in new[name].keys() - parts.keys()
            if "default" in new[name][part] and new[name][part]["default"] is None
        ]
        found += [f"{name}: {part} is new, and must be given." for part in added]
    return found


if __name__ == "__main__":
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(parts)}" for name, parts in public_api().items())
    Path(sys.argv[1]).write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
