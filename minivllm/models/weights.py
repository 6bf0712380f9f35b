"""Filling a model with the weights of a checkpoint folder, and complaining when they are not its own."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.errors import ModelLoadError
from minivllm.layers.attention import AttentionBackend
from minivllm.layers.linear import Linear, Product
from minivllm.models.base import CausalLM
from minivllm.models.registry import MODELS, read_json


def load_model(config: ModelConfig, dtype: torch.dtype, device: torch.device, backend_cls: type[AttentionBackend]) -> CausalLM:
    """Build the model of a config and load its weights.

    Raises:
        ModelLoadError: The folder has no weights, or they are damaged, or they do not fit the config.
    """
    backend = backend_cls(config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5)
    default_dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device(device):
            model = MODELS[config.architecture](config.hf_config, config.max_model_len, backend)
    except ModelLoadError:
        raise
    except Exception as error:  # whatever a wrong config leads to
        reason = str(error).split("\n")[0]
        raise ModelLoadError(
            f"{config.name} cannot be built from its config.json ({type(error).__name__}: {reason}): the config is wrong, or "
            f"the model is larger than the memory."
        ) from error
    finally:
        torch.set_default_dtype(default_dtype)
    load_weights(model, iterate_weights(config.path), config.name)
    return model.requires_grad_(False).eval()


def pack_weights(model: CausalLM, make_product: Callable[[str, Tensor, Tensor | None], Product]) -> None:
    """Replace the weight of every linear layer by what `make_product(name, weight, bias)` returns, one after the other."""
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            module.pack(partial(make_product, name))
    model.compile_decode()


def iterate_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of all checkpoint files in a folder: safetensors, one or sharded, else pytorch_model.bin."""
    for file in _weight_files(folder):
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as tensors:
                    names = tensors.keys()
                for name in names:
                    # Opened for each tensor, and so closed after it: else the whole file would count as memory in use.
                    with safe_open(file, framework="pt") as tensors:
                        yield name, tensors.get_tensor(name)
            else:
                state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
                if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
                    raise ModelLoadError(f"{file} does not hold named tensors: it is not a checkpoint.")
                yield from state.items()
        except (SafetensorError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ModelLoadError(f"{file} cannot be read ({error}): it is damaged or cut off, download it again.") from error


def _weight_files(folder: Path) -> list[Path]:
    for index_name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / index_name).exists():
            weight_map = read_json(folder / index_name).get("weight_map")
            names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
            if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
                raise ModelLoadError(f"{folder / index_name} has no 'weight_map' that names files beside it: download it again.")
            files = sorted(folder / name for name in names)
            missing = [file.name for file in files if not file.exists()]
            if missing:
                raise ModelLoadError(f"{folder} lacks {', '.join(missing)}, named in its {index_name}: download them.")
            return files
    # Not all *.safetensors at once: an adapter or a second copy may lie beside the model.
    for pattern in ("model.safetensors", "model-*-of-*.safetensors", "*.safetensors", "pytorch_model.bin"):
        if files := sorted(folder.glob(pattern)):
            return files
    raise ModelLoadError(f"{folder} has a config but no weights: it needs .safetensors files or a pytorch_model.bin.")


def load_weights(model: CausalLM, weights: Iterator[tuple[str, Tensor]], model_name: str) -> None:
    """Copy checkpoint tensors into the model's parameters; every part of every parameter must get one.

    Raises:
        ModelLoadError: A tensor is missing, is too many, or has the wrong shape.
    """
    targets = _load_targets(model)
    unloaded = dict(targets)
    for name, tensor in weights:
        if name.startswith("decoder."):  # the OPT checkpoints of 2022
            name = f"model.{name}"
        if name.endswith(model.ignored_weights) or (name == "lm_head.weight" and model.tie_word_embeddings):
            continue
        if name not in targets:
            raise ModelLoadError(f"The weights of {model_name} do not fit its config: the model has no place for {name!r}.")
        target = targets[name]
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.") if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ModelLoadError(f"The weights of {model_name} hold {name} as {kind}, which is not supported: only floats are.")
        if target.shape != tensor.shape:
            raise ModelLoadError(
                f"The weights of {model_name} do not fit its config: {name} has shape {list(tensor.shape)}, "
                f"but the config asks for {list(target.shape)}."
            )
        target.copy_(tensor)
        unloaded.pop(name, None)
    if unloaded:
        names = ", ".join(list(unloaded)[:3]) + (" and others" if len(unloaded) > 3 else "")
        raise ModelLoadError(f"The weights of {model_name} are incomplete: {names} missing ({len(unloaded)} tensors).")


def _load_targets(model: CausalLM) -> dict[str, Tensor]:
    """Checkpoint name to the (part of a) parameter it fills."""
    targets: dict[str, Tensor] = {}
    parts_of: dict[str, list[tuple[str, int]]] = {}
    for name, (fused, index) in model.fused_layers.items():
        parts_of.setdefault(fused, []).append((name, index))
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        path, _, kind = name.rpartition(".")
        layer = path.rpartition(".")[2]
        if layer in parts_of:
            linear = modules[path]
            assert isinstance(linear, Linear)
            for part_name, index in parts_of[layer]:
                targets[f"{path[: -len(layer)]}{part_name}.{kind}"] = linear.part(parameter.data, index)
        else:
            targets[name] = parameter.data
    return targets
