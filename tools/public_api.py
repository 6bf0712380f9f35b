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
    api["LLM"] = parameters(minivllm.LLM.__init__)
    for name, methods in METHODS.items():
        api |= {f"{name}.{method}": parameters(getattr(getattr(minivllm, name), method)) for method in methods}
    for model in REQUESTS:
        of_fields = {name: part(one.is_required(), default=repr(one.default)) for name, one in model.model_fields.items()}
        api[f"HTTP {model.__name__}"] = of_fields
    routes = [route for one in (router, tokenize_router, replicas_router) for route in one.routes]
    api["HTTP"] = {f"{method} {route.path}": {} for route in routes for method in sorted(route.methods)}
    metrics = Metrics("", CacheConfig()).registry.collect()
    api["metrics"] = {one.name: {"type": one.type} for one in metrics if one.name.startswith("minivllm:")}
    return api | dict(commands(make_parser()))


def part(required: bool, **about: Any) -> dict[str, Any]:
    """What is recorded of a parameter, field or option. One that must be given has no default."""
    return {"required": True, **{key: value for key, value in about.items() if key != "default"}} if required else about


def parameters(function: Any) -> dict[str, Any]:
    """Of each parameter, its place if it can be given by position, and its default; and whether the function is to be awaited."""
    kinds = ("iscoroutinefunction", "isasyncgenfunction", "isgeneratorfunction")
    found: dict[str, Any] = {"()": {kind: True for kind in kinds if getattr(inspect, kind)(function)}}
    own = [one for one in inspect.signature(function).parameters.values() if one.name not in ("self", "cls", *INTERNAL)]
    for place, one in enumerate(own):
        is_required = one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        found[one.name] = part(is_required, kind=one.kind.name, default=repr(one.default))
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD):
            found[one.name]["place"] = place
    return found


def fields(cls: Any) -> dict[str, Any]:
    """Of each field, its default. They are given by name."""
    hidden = ("place", "kind")
    return {
        name: {key: value for key, value in about.items() if key not in hidden}
        for name, about in parameters(cls).items()
        if name != "()"
    }


def commands(parser: argparse.ArgumentParser) -> list[tuple[str, dict[str, Any]]]:
    """A command and all those below it, and of each option what it takes."""
    found, options, place = [], {}, 0
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [pair for below in action.choices.values() for pair in commands(below)]
            continue
        about = {"action": type(action).__name__, "nargs": str(action.nargs), "default": repr(action.default)}
        about |= {"type": getattr(action.type, "__name__", "str")}
        if action.choices:
            about["choices"] = sorted(map(str, action.choices))
        if not action.option_strings:
            about["place"], place = place, place + 1
        is_required = action.required and action.nargs not in ("?", "*")
        options |= dict.fromkeys(action.option_strings or [action.dest], part(is_required, **about))
    return [(parser.prog, options), *found]


def breaks(old: dict[str, dict[str, Any]], new: dict[str, dict[str, Any]]) -> list[str]:
    """What was in a public API and is not kept in a newer one, a sentence each."""
    found = []
    for name, parts in old.items():
        if name not in new:
            found.append(f"{name} is gone.")
            continue
        for one, about in parts.items():
            if one not in new[name]:
                found.append(f"{name}: {one} is gone.")
                continue
            now = new[name][one]
            if now.get("choices") and not about.get("choices"):
                found.append(f"{name}: {one} takes only {', '.join(now['choices'])} now.")
            elif now.get("choices") and (missing := set(about["choices"]) - set(now["choices"])):
                found.append(f"{name}: {one} does not take {', '.join(sorted(missing))} any more.")
            if now.get("required") and not about.get("required"):
                found.append(f"{name}: {one} must be given now.")
            keys = about.keys() - {"choices", "required"} - ({"default"} if now.get("required") else set())
            found += [
                f"{name}: the {key} of {one} was {about[key]}, and is {now.get(key)}."
                for key in sorted(keys)
                if now.get(key) != about[key]
            ]
        added = new[name].keys() - parts.keys()
        found += [f"{name}: {one} is new, and must be given." for one in sorted(added) if new[name][one].get("required")]
        if new[name].get("()") != parts.get("()"):
            found.append(f"{name} is called in another way.")
    return found


if __name__ == "__main__":
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(parts)}" for name, parts in public_api().items())
    Path(sys.argv[1]).write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
