"""From a model folder to a model: which architecture, what shape, and which class computes it.

`ModelRegistry` mirrors `vllm/model_executor/models/registry.py`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from minivllm.config import ModelConfig, ParallelConfig
from minivllm.errors import ConfigError, ModelLoadError, RequestError
from minivllm.layers.rotary import context_lengths
from minivllm.models.base import CausalLM, declares
from minivllm.models.gemma3 import Gemma3ForCausalLM
from minivllm.models.llama import LlamaForCausalLM
from minivllm.models.mistral import MistralForCausalLM
from minivllm.models.opt import OPTForCausalLM
from minivllm.models.phi3 import Phi3ForCausalLM
from minivllm.models.qwen2 import Qwen2ForCausalLM
from minivllm.models.qwen3 import Qwen3ForCausalLM
from minivllm.models.smollm3 import SmolLM3ForCausalLM
from minivllm.sampling_params import SamplingParams

MODELS: dict[str, type[CausalLM] | str] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "SmolLM3ForCausalLM": SmolLM3ForCausalLM,
    "OPTForCausalLM": OPTForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
}
"""Architecture in config.json to the class that computes it, or to "module:Class"."""


class ModelRegistry:
    """Which class computes which architecture. Classes of your own are registered as in vLLM.

    Example:
        >>> from minivllm import LLM, ModelRegistry
        >>> ModelRegistry.register_model("LlamaForCausalLM", "minivllm.models.llama:LlamaForCausalLM")
        >>> llm = LLM("smollm2-135m")  # its config.json names LlamaForCausalLM
    """

    @staticmethod
    def register_model(model_arch: str, model_cls: type[CausalLM] | str) -> None:
        """Let a class compute all models of an architecture that are loaded from now on, in place of the one before, if any.

        Args:
            model_arch: The architecture, as `architectures` in config.json names it.
            model_cls: A `CausalLM` subclass, or "module:Class", which is imported when a model needs it. For an engine core in
                another process the class must be in a module that this process can import too.

        Raises:
            ConfigError: The class lacks something that a model must have; the message names it.
        """
        if not isinstance(model_arch, str) or not model_arch.isidentifier():
            raise ConfigError(
                f"model_arch must be an architecture as config.json names it, such as 'LlamaForCausalLM', not {model_arch!r}."
            )
        if isinstance(model_cls, str):
            if not re.fullmatch(r"\w+(\.\w+)*:\w+", model_cls):
                raise ConfigError(f"model_cls must be a CausalLM subclass or a string 'module:Class', not {model_cls!r}.")
        else:
            _check_model_class(model_cls)
        MODELS[model_arch] = model_cls

    @staticmethod
    def get_supported_archs() -> list[str]:
        """The architectures that can be loaded."""
        return list(MODELS)

    @staticmethod
    def load_model_cls(model_arch: str) -> type[CausalLM]:
        """The class of a supported architecture, imported now if it was registered as "module:Class".

        Raises:
            ModelLoadError: It cannot be imported.
            ConfigError: It lacks something that a model must have.
        """
        registered = MODELS[model_arch]
        if not isinstance(registered, str):
            return registered
        module_name, _, class_name = registered.partition(":")
        try:
            model_cls = getattr(importlib.import_module(module_name), class_name)
        except (ImportError, AttributeError) as error:
            raise ModelLoadError(f"{registered!r}, registered for {model_arch}, cannot be imported: {error}.") from error
        _check_model_class(model_cls)
        return model_cls


def _check_model_class(model_cls: Any) -> None:
    """Raise a ConfigError that names what a class lacks of a model."""
    if not isinstance(model_cls, type) or not issubclass(model_cls, CausalLM):
        raise ConfigError(f"model_cls must be a subclass of minivllm.models.base.CausalLM, not {model_cls!r}.")
    for name, arguments in _CALLS.items():
        method = getattr(model_cls, name)
        if name != "__init__" and method is getattr(CausalLM, name):
            raise ConfigError(f"{model_cls.__name__} has no method {name}({', '.join(arguments)}), which a model must have.")
        if not _takes(method, arguments):
            takes, given = f"{model_cls.__name__}.{name} takes {inspect.signature(method)}", ", ".join(arguments)
            raise ConfigError(f"{takes}, but is called with {given}.")


def _takes(method: Callable[..., Any], arguments: tuple[str, ...]) -> bool:
    """Whether a method of a class can be called with these arguments."""
    try:
        inspect.signature(method).bind("self", *arguments)
    except TypeError:
        return False
    return True


_CALLS = {
    "__init__": ("config", "platform"),
    "forward": ("input_ids", "positions", "kv_caches", "metadata"),
    "compute_logits": ("hidden",),
}
"""How the engine calls a model."""


def load_model_config(name: str, path: Path, max_model_len: int | None = None) -> ModelConfig:
    """Read a folder's config.json.

    Args:
        name: The name that the user gave, for messages.
        path: The folder.
        max_model_len: A smaller context than the model was trained for, if wanted; a larger one than by default, with "longrope".

    Raises:
        ModelLoadError: The config is missing or damaged, or describes a model that is not supported.
    """
    config = read_json(path / "config.json")
    architecture = _supported_architecture(name, config)
    model_cls = ModelRegistry.load_model_cls(architecture)
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise ModelLoadError(f"{name} is quantized with {method!r}, which is not supported: use an unquantized or GGUF version.")
    size = partial(_read_size, path / "config.json", config)
    num_heads = size("num_attention_heads", 2**12)
    num_kv_heads = size("num_key_value_heads", 2**12, default=num_heads)
    head_dim = size("head_dim", 2**12, default=size("hidden_size", 2**18) // num_heads)
    size("max_position_embeddings", 2**24)
    default_len, limit = context_lengths(config)
    size("intermediate_size", 2**20, default=1)
    if not isinstance(config.get("rms_norm_eps") or 1.0, (int, float)):
        raise ModelLoadError(f"{path / 'config.json'} has rms_norm_eps = {config['rms_norm_eps']!r}, but it must be a number.")
    if num_heads % num_kv_heads != 0:
        raise ModelLoadError(f"{name} has {num_heads} query heads for {num_kv_heads} KV heads, but needs a multiple of them.")
    if max_model_len is not None and max_model_len > limit:
        raise ModelLoadError(f"max_model_len is {max_model_len}, but {name} was trained for {limit} tokens: lower it.")
    return ModelConfig(
        name=name,
        path=path,
        architecture=architecture,
        hf_config=config,
        num_layers=size("num_hidden_layers", 1000),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=size("vocab_size", 2**24),
        max_model_len=max_model_len or default_len,
        eos_token_ids=_eos_token_ids(path, config),
        model_cls=model_cls,
    )


def check_can_be_split(config: ModelConfig, parallel_config: ParallelConfig) -> None:
    """Raise a ConfigError if a model cannot be divided among that many ranks and stages."""
    if parallel_config.tensor_parallel_size > 1:
        _check_ranks(config, parallel_config.tensor_parallel_size)
    if parallel_config.pipeline_parallel_size > 1 or parallel_config.layer_partition:
        _check_stages(config, parallel_config)


def _check_ranks(config: ModelConfig, tensor_parallel_size: int) -> None:
    """Each rank needs at least one query head."""
    model_cls = config.model_cls or ModelRegistry.load_model_cls(config.architecture)
    if not declares(model_cls, "supports_tensor_parallel"):
        raise ConfigError(
            f"tensor_parallel_size is {tensor_parallel_size}, but {model_cls.__name__} does not say that it can be sharded: use layers that know "
            "their rank, take None for the logits of all ranks but the first, and set supports_tensor_parallel = True."
        )
    if tensor_parallel_size > config.num_heads:
        raise ConfigError(
            f"tensor_parallel_size is {tensor_parallel_size}, but {config.name} has {config.num_heads} query heads, and each rank needs "
            f"one: use at most {config.num_heads}."
        )
    hf_config = config.hf_config
    width = hf_config.get("intermediate_size") or hf_config.get("ffn_dim") or tensor_parallel_size
    if tensor_parallel_size > min(width, config.vocab_size):
        raise ConfigError(
            f"tensor_parallel_size is {tensor_parallel_size}, but the MLP of {config.name} has {width} channels and its vocabulary "
            f"{config.vocab_size} tokens: use at most {min(width, config.vocab_size)}."
        )


def _check_stages(config: ModelConfig, parallel_config: ParallelConfig) -> None:
    """Each stage needs at least one layer."""
    stages, partition = parallel_config.pipeline_parallel_size, parallel_config.layer_partition
    model_cls = config.model_cls or ModelRegistry.load_model_cls(config.architecture)
    if stages > 1 and not declares(model_cls, "supports_pipeline_parallel"):
        raise ConfigError(
            f"pipeline_parallel_size is {stages}, but {model_cls.__name__} does not say that it can be divided into stages: let forward take and "
            "return IntermediateTensors, and set supports_pipeline_parallel = True."
        )
    if stages > 1 and not (
        model_cls.intermediate_names and _takes(model_cls.forward, (*_CALLS["forward"], "intermediate_tensors"))
    ):
        raise ConfigError(
            f"{model_cls.__name__} has supports_pipeline_parallel = True, but its forward does not take intermediate_tensors, or it has no "
            "intermediate_names: see minivllm.models.base.CausalLM."
        )
    if stages > config.num_layers:
        layers = "1 layer" if config.num_layers == 1 else f"{config.num_layers} layers"
        raise ConfigError(
            f"pipeline_parallel_size is {stages}, but {config.name} has {layers}, and each stage needs one: use at most {config.num_layers}."
        )
    if partition is not None and sum(partition) != config.num_layers:
        raise ConfigError(
            f"pp_layer_partition is {parallel_config.pp_layer_partition!r}, which adds up to {sum(partition)} layers, but {config.name} has "
            f"{config.num_layers}."
        )


def _read_size(file: Path, config: dict[str, Any], name: str, high: int, default: int | None = None) -> int:
    """A whole number from 1 to `high`; a ModelLoadError if it is missing and has no default, or is anything else."""
    value = default if config.get(name) is None else config[name]
    if value is None:
        raise ModelLoadError(f"{file} has no {name!r}: it is not the config of a language model.")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise ModelLoadError(f"{file} has {name} = {value!r}, but it must be a whole number from 1 to {high}.")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelLoadError: The file is missing or is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ModelLoadError(f"{path.parent} has no {path.name} that can be read: give a folder that holds a model.") from None
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON ({error}): download it again.") from None
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object: download it again.")
    return content


def _supported_architecture(name: str, config: dict[str, Any]) -> str:
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        architectures = [architectures]
    for architecture in architectures:
        if isinstance(architecture, str) and architecture in MODELS:
            return architecture
    found = ", ".join(map(repr, architectures)) or f"model_type {config.get('model_type')!r}"
    raise ModelLoadError(f"{name} is a {found} model, which is not supported: supported are {', '.join(MODELS)}.")


def load_sampling_defaults(path: Path) -> dict[str, Any]:
    """The parameters that a folder's generation_config.json recommends, by the names of `SamplingParams`; those that vLLM takes from there.

    Raises:
        ModelLoadError: The file is damaged, or a value is out of range.
    """
    file = path / "generation_config.json"
    content = read_json(file) if file.exists() else {}
    defaults = {ours: value for theirs, ours in _SAMPLING_DEFAULTS.items() if (value := content.get(theirs)) is not None}
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise ModelLoadError(
            f"{file} cannot be used: {error} Correct it, or set generation_config='vllm' to ignore it."
        ) from None
    return defaults


_SAMPLING_DEFAULTS = {
    name: name
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
} | {"max_new_tokens": "max_tokens"}


def _eos_token_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """End-of-sequence tokens of generation_config.json and config.json; either may hold one or a list."""
    found: set[int] = set()
    sources = [config]
    if (path / "generation_config.json").exists():
        sources.append(read_json(path / "generation_config.json"))
    for source in sources:
        value = source.get("eos_token_id")
        token_ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) for token_id in token_ids):
            raise ModelLoadError(f"{path} has eos_token_id = {value!r}, but it must be a token id or a list of them.")
        found.update(token_ids)
    return tuple(sorted(found))
