"""From a model folder to a model: which architecture, what shape, and which class computes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from minivllm.config import ModelConfig
from minivllm.errors import ModelLoadError
from minivllm.models.llama import LlamaForCausalLM
from minivllm.models.opt import OPTForCausalLM
from minivllm.models.qwen3 import Qwen3ForCausalLM

MODELS: dict[str, type[nn.Module]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "OPTForCausalLM": OPTForCausalLM,
}
"""Architecture, as config.json names it, to the class that computes it."""


def load_model_config(name: str, path: Path, max_model_len: int | None = None) -> ModelConfig:
    """Read a folder's config.json.

    Args:
        name: What the user called the model, for messages.
        path: The folder.
        max_model_len: A smaller context than the model was trained for, if wanted.

    Raises:
        ModelLoadError: The config is missing or damaged, or describes a model that is not supported.
    """
    config = read_json(path / "config.json")
    architecture = _supported_architecture(name, config)
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unknown")
        raise ModelLoadError(
            f"{name} is quantized with {method!r}, which is not supported: use an unquantized or a GGUF version."
        )
    try:
        num_heads = config["num_attention_heads"]
        num_kv_heads = config.get("num_key_value_heads") or num_heads
        head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
        limit = config["max_position_embeddings"]
        num_layers, vocab_size = config["num_hidden_layers"], config["vocab_size"]
    except KeyError as error:
        raise ModelLoadError(
            f"{path / 'config.json'} has no {error.args[0]!r}: it is not the config of a language model."
        ) from None
    if num_heads % num_kv_heads != 0:
        raise ModelLoadError(
            f"{name} has {num_heads} query heads for {num_kv_heads} KV heads: the one must be a multiple of the other."
        )
    if max_model_len is not None and max_model_len > limit:
        raise ModelLoadError(f"max_model_len is {max_model_len}, but {name} was trained for {limit} tokens: lower it.")
    return ModelConfig(
        name=name,
        path=path,
        architecture=architecture,
        hf_config=config,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_model_len=max_model_len or limit,
        eos_token_ids=_eos_token_ids(path, config),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelLoadError: The file is missing or is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path.parent} has no {path.name}: point to a folder that holds a model.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path} is not valid JSON ({error}): download it again.") from None
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object: download it again.")
    return content


def _supported_architecture(name: str, config: dict[str, Any]) -> str:
    architectures = config.get("architectures") or []
    for architecture in architectures:
        if architecture in MODELS:
            return architecture
    found = ", ".join(map(repr, architectures)) or f"model_type {config.get('model_type')!r}"
    raise ModelLoadError(f"{name} is a {found} model, which is not supported: supported are {', '.join(MODELS)}.")


def _eos_token_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """End-of-sequence tokens of generation_config.json and config.json; either may hold one or a list."""
    found: set[int] = set()
    sources = [config]
    if (path / "generation_config.json").exists():
        sources.append(read_json(path / "generation_config.json"))
    for source in sources:
        value = source.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(found))
