"""Filling a model with the weights of a checkpoint folder, and refusing weights that do not fit it."""

from __future__ import annotations

import hashlib
import logging
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from minivllm.config import ModelConfig
from minivllm.errors import ConfigError, ModelLoadError
from minivllm.kernels.pages import return_freed_memory
from minivllm.layers.embedding import VocabParallelEmbedding
from minivllm.layers.linear import Linear
from minivllm.layers.platform import Platform
from minivllm.layers.weights import ROWS_AT_A_TIME, CheckpointTensor
from minivllm.models.base import CausalLM
from minivllm.models.dummy_weights import load_dummy_weights, process_weights
from minivllm.models.registry import ModelRegistry, read_json
from minivllm.models.stages import PPMissingLayer

logger = logging.getLogger(__name__)

TENSORS_PER_OPENING = 4
"""How many tensors are read from a file before it is reopened."""
TENSORS_PER_TRIM = 16
"""Packing leaves free memory in pieces, which are given back after this many tensors."""


def load_model(config: ModelConfig, platform: Platform) -> CausalLM:
    """Build the model of a config and load its weights, or, with the load format "dummy", make random ones.

    Raises:
        ModelLoadError: The folder has no weights, or they are damaged, or they do not fit the config. What a class from outside
            the package raises is passed on as it is.
    """
    model = build_model(config, platform)
    if config.load_format != "dummy" and model.tie_word_embeddings and _has_other_head(config.path):
        logger.warning(
            "%s ties the head to the embedding, but its lm_head.weight differs: it is used, as by transformers.", config.name
        )
        model = build_model(replace(config, hf_config=config.hf_config | {"tie_word_embeddings": False}), platform)
        if model.tie_word_embeddings:
            raise ModelLoadError(
                f"{config.name} has an lm_head.weight that differs from its embedding, but its class ties them: remove one."
            )
    model.requires_grad_(False).eval()
    if config.load_format == "dummy":
        load_dummy_weights(model)
    elif model.load_weights is None:
        load_weights(model, iterate_weights(config.path), config.name)
    else:
        model.load_weights((name, source[:]) for name, source in iterate_weights(config.path))
    return_freed_memory()
    return model


def build_model(config: ModelConfig, platform: Platform) -> CausalLM:
    """The model, without its weights. Raises as `load_model`."""
    model_cls = config.model_cls or ModelRegistry.load_model_cls(config.architecture)
    default_dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(platform.activation_dtype)
        with torch.device(platform.device):
            model: CausalLM = model_cls(config, platform)
            return model
    except (ConfigError, ModelLoadError):
        raise
    except Exception as error:  # whatever a wrong config leads to
        if not model_cls.__module__.startswith("minivllm.models."):
            raise
        reason = str(error).split("\n")[0]
        raise ModelLoadError(
            f"{config.name} cannot be built from its config.json ({type(error).__name__}: {reason}): the config is wrong, or "
            f"the model is larger than the memory."
        ) from error
    finally:
        torch.set_default_dtype(default_dtype)


def _has_other_head(folder: Path) -> bool:
    """Whether a checkpoint has a head whose numbers are not those of the embedding."""
    if all(name != "lm_head.weight" for name, _ in iterate_weights(folder)):
        return False
    ends = ("lm_head.weight", "embed_tokens.weight")
    return len({_digest(source) for name, source in iterate_weights(folder) if name.endswith(ends)}) > 1


def _digest(source: Any) -> bytes:
    """What tells the contents of a checkpoint's matrix from others, read some rows at a time."""
    shape = source.shape if isinstance(source, torch.Tensor) else source.get_shape() if hasattr(source, "get_shape") else ()
    content = hashlib.blake2b(str(list(shape)).encode())
    for start in range(0, shape[0] if shape else 0, ROWS_AT_A_TIME):
        content.update(source[start : start + ROWS_AT_A_TIME].contiguous().view(torch.uint8).numpy())
    return content.digest()


def iterate_weights(folder: Path) -> Iterator[tuple[str, Any]]:
    """Names and tensors of all checkpoint files in a folder: slices of safetensors, one file or sharded, else the tensors of a
    pytorch_model.bin. A slice is read when it is indexed, and is valid until the next one. If an index says which file has a tensor, others of
    the same name are passed over.
    """
    files, weight_map = _weight_files(folder)
    for file in files:
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as tensors:
                    names = [name for name in tensors.keys() if weight_map.get(name, file.name) == file.name]  # noqa: SIM118
                for i in range(0, len(names), TENSORS_PER_OPENING):
                    # Reopened now and then, so that the memory of the file does not count as in use for longer.
                    with safe_open(file, framework="pt") as tensors:
                        for name in names[i : i + TENSORS_PER_OPENING]:
                            yield name, tensors.get_slice(name)
            else:
                state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
                if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
                    raise ModelLoadError(f"{file} does not hold named tensors: it is not a checkpoint.")
                yield from ((name, tensor) for name, tensor in state.items() if weight_map.get(name, file.name) == file.name)
        except (SafetensorError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ModelLoadError(f"{file} cannot be read ({error}): it is damaged or cut off, download it again.") from error


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The checkpoint's files, and which of them has which tensor, if an index says so."""
    for index_name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if index_name.startswith("pytorch") and any(folder.glob("model*.safetensors")):
            continue  # a download has every index, but of the weights only these
        if (folder / index_name).exists():
            weight_map = read_json(folder / index_name).get("weight_map")
            names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
            if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
                raise ModelLoadError(f"{folder / index_name} has no 'weight_map' that names files beside it: download it again.")
            files = sorted(folder / name for name in names)
            missing = [file.name for file in files if not file.exists()]
            if missing:
                raise ModelLoadError(f"{folder} lacks {', '.join(missing)}, named in its {index_name}: download them.")
            return files, weight_map
    # Not all *.safetensors at once: an adapter or a second copy may lie next to the model.
    for pattern in ("model.safetensors", "model-*-of-*.safetensors", "*.safetensors", "pytorch_model.bin"):
        if files := sorted(folder.glob(pattern)):
            return files, {}
    raise ModelLoadError(f"{folder} has a config but no weights: it needs .safetensors files or a pytorch_model.bin.")


def load_weights(model: CausalLM, weights: Iterator[tuple[str, Any]], model_name: str) -> None:
    """Fill the model's parameters with checkpoint tensors; every part of every parameter must get one. A pipeline stage passes over those of others.

    A linear layer or an embedding is processed as soon as it is complete, so that no more than one exists in two forms at a time. Those with
    packed weights never do.

    Raises:
        ModelLoadError: A tensor is missing, has no place in the model, or has the wrong shape.
    """
    targets, elsewhere = _load_targets(model), _names_elsewhere(model)
    all_names = set(targets)
    num_missing = Counter(layer for layer, *_ in targets.values())
    processed: set[nn.Module] = set()
    for number, (name, source) in enumerate(weights):
        if number % TENSORS_PER_TRIM == 0:
            return_freed_memory()
        if name.startswith("decoder."):  # the OPT checkpoints of 2022
            name = f"model.{name}"
        if name.endswith(model.ignored_weights) or (name == "lm_head.weight" and model.tie_word_embeddings):
            continue
        if name.startswith(elsewhere):
            continue
        if name in all_names and name not in targets:
            raise ModelLoadError(
                f"The files of {model_name} have {name!r} more than once, and no index says which of them counts: remove one."
            )
        if name not in targets:
            raise ModelLoadError(f"The weights of {model_name} do not fit its config: the model has no place for {name!r}.")
        layer, kind, *shard_id = targets.pop(name)
        parameter, tensor = layer.get_parameter(kind), CheckpointTensor(model_name, name, source)
        if isinstance(layer, Linear) and not shard_id and len(layer.out_features) > 1:
            layer.load_fused_weight(parameter, tensor)
        elif isinstance(layer, (Linear, VocabParallelEmbedding)):
            layer.load_weight(parameter, tensor, *shard_id)
        else:
            parameter.data.copy_(tensor.read(tuple(parameter.shape)))
        num_missing[layer] -= 1
        if num_missing[layer] == 0 and isinstance(layer, (Linear, VocabParallelEmbedding)):
            layer.process_weights_after_loading()
            processed.update((layer, getattr(layer, "head", None) or layer))
    if targets:
        names = ", ".join(list(targets)[:3]) + (" and others" if len(targets) > 3 else "")
        raise ModelLoadError(f"The weights of {model_name} are incomplete: {names} missing ({len(targets)} tensors).")
    process_weights(model, processed)


def _names_elsewhere(model: CausalLM) -> tuple[str, ...]:
    """How the names of weights begin that other stages load. What a stage does not know of its own layers, it refuses."""
    return tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, PPMissingLayer))


def _load_targets(model: CausalLM) -> dict[str, tuple[Any, ...]]:
    """Checkpoint name to the layer and the parameter that it fills, and its index if several fill it."""
    targets: dict[str, tuple[Any, ...]] = {}
    shards_of: dict[str, list[tuple[str, int]]] = {}
    for name, (fused, shard_id) in model.fused_layers.items():
        shards_of.setdefault(fused, []).append((name, shard_id))
    for name, _ in model.named_parameters():
        path, _, kind = name.rpartition(".")
        layer_name = path.rpartition(".")[2]
        layer = model.get_submodule(path)
        if layer_name in shards_of:
            for shard_name, shard_id in shards_of[layer_name]:
                targets[f"{path.removesuffix(layer_name)}{shard_name}.{kind}"] = (layer, kind, shard_id)
        else:
            targets[name] = (layer, kind)
    return targets
