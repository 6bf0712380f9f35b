"""RoPE types: how a model that was trained with short texts is stretched to longer ones.

Each type changes the angles that a position adds, and some also how long the rotated vectors are. `rotary.py` makes the tables.
The settings are those of config.json. Mirrors `vllm/model_executor/layers/rotary_embedding` and `modeling_rope_utils.py` of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minivllm.errors import ModelLoadError

MAX_FACTOR = 1e6
"""No model is stretched further than that: a larger number is damage."""


def scaled_frequencies(dim: int, max_position: int, parameters: dict[str, Any]) -> tuple[Tensor, float]:
    """What the tables are made of.

    Args:
        dim: Channels that are rotated.
        max_position: `max_model_len`. What depends on a text's length in transformers ("dynamic", "longrope") depends on this here, as in
            vLLM: keys are rotated once, when they are written to the cache, so all texts must have the same angles.
        parameters: Of `rope_parameters`.

    Returns:
        Angle per position of each channel pair, `[dim / 2]`, float32; and what cos and sin are multiplied by.

    Raises:
        ModelLoadError: The type is unknown, or a setting is missing or damaged; the message names it.
    """
    if per_layer := [name for name, value in parameters.items() if isinstance(value, dict)]:
        raise ModelLoadError(
            f"config.json has RoPE settings for some layers alone ({', '.join(per_layer)}), which is not supported."
        )
    rope_type = str(parameters["rope_type"])
    if rope_type not in _TYPES:
        raise ModelLoadError(f"RoPE type {rope_type!r} is not supported: supported are {', '.join(map(repr, _TYPES))}.")
    return _TYPES[rope_type](dim, max_position, parameters)


def number(
    parameters: dict[str, Any], name: str, default: float | None = None, low: float = 0.0, high: float = MAX_FACTOR
) -> float:
    """A setting above `low` and up to `high`; a ModelLoadError if it is missing and has no default, or is anything else."""
    value = parameters.get(name, default)
    if value is None:
        raise ModelLoadError(f"The RoPE settings in config.json lack {name!r}, which type {parameters['rope_type']!r} needs.")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value <= high:
        raise ModelLoadError(
            f"The RoPE settings in config.json have {name} = {value!r}, but it must be a number above {low:g} and up to {high:g}."
        )
    return value


def original_length(parameters: dict[str, Any]) -> float:
    """How many positions the model was trained with before it was stretched."""
    name = "original_max_position_embeddings"
    return number(parameters, name, parameters.get("max_position_embeddings"), low=1, high=2**24)


def _wavelengths(dim: int, parameters: dict[str, Any], stretch: float = 1.0) -> Tensor:
    """Positions per radian of each channel pair: powers of the base, `rope_theta`, which `stretch` multiplies."""
    base = number(parameters, "rope_theta", low=1, high=1e15) * stretch
    powers: Tensor = base ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    return powers


def _default(dim: int, max_position: int, parameters: dict[str, Any]) -> tuple[Tensor, float]:
    """Su et al., 2021 (arXiv:2104.09864)."""
    return 1.0 / _wavelengths(dim, parameters), 1.0


def _linear(dim: int, max_position: int, parameters: dict[str, Any]) -> tuple[Tensor, float]:
    """Positions are divided by `factor`. Chen et al., 2023 (arXiv:2306.15595)."""
    return 1.0 / _wavelengths(dim, parameters) / number(parameters, "factor"), 1.0


def _dynamic(dim: int, max_position: int, parameters: dict[str, Any]) -> tuple[Tensor, float]:
    """The base grows, so that the lowest frequency falls most ("NTK-aware"): what transformers does with a text of `max_model_len` tokens.

    With `max_model_len` up to `max_position_embeddings`, nothing changes.
    """
    factor, trained = number(parameters, "factor"), number(parameters, "max_position_embeddings", high=2**24)
    stretch = factor * max(max_position, trained) / trained - (factor - 1)
    return 1.0 / _wavelengths(dim, parameters, stretch ** (dim / max(dim - 2, 1))), 1.0


def _yarn(dim: int, max_position: int, parameters: dict[str, Any]) -> tuple[Tensor, float]:
    """Pairs that turn often within the original length are kept, those that turn seldom are divided by `factor`, those between are
    interpolated; and attention is sharpened. Peng et al., 2023 (arXiv:2309.00071).
    """
    factor, base, length = (
        number(parameters, "factor"),
        number(parameters, "rope_theta", low=1, high=1e15),
        original_length(parameters),
    )
    fast, slow = number(parameters, "beta_fast", 32), number(parameters, "beta_slow", 1)
    # The pair, as a fraction, that turns so many times.
    first, last = (dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow))
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last += 0.001 * (first == last)
    divided = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - first) / (last - first)).clamp(0, 1)
    wavelengths = _wavelengths(dim, parameters)
    frequencies = 1.0 / (factor * wavelengths) * divided + 1.0 / wavelengths * (1 - divided)

    def sharpening(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    default = sharpening(1.0)
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        default = sharpening(number(parameters, "mscale")) / sharpening(number(parameters, "mscale_all_dim"))
    return frequencies, number(parameters, "attention_factor", default)


def _llama3(dim: int, max_position: int, parameters: dict[str, Any]) -> tuple[Tensor, float]:
    """Low frequencies are divided by `factor`, high ones kept, those between interpolated (Llama 3.1)."""
    frequencies, factor = 1.0 / _wavelengths(dim, parameters), number(parameters, "factor")
    low = number(parameters, "low_freq_factor")
    high = number(parameters, "high_freq_factor", low=low)
    turns = original_length(parameters) * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / factor, 1.0


def _longrope(dim: int, max_position: int, parameters: dict[str, Any]) -> tuple[Tensor, float]:
    """Each pair has a divisor of its own, found by search, from one of two lists: `long_factor` if `max_model_len` exceeds the original
    length, and otherwise `short_factor`. Ding et al., 2024 (arXiv:2402.13753).
    """
    length = original_length(parameters)
    factors = {name: _factors(parameters, name, dim // 2) for name in ("short_factor", "long_factor")}
    divisors = factors["long_factor" if max_position > length else "short_factor"]
    factor = number(parameters, "factor", parameters.get("max_position_embeddings", length) / length)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
    return 1.0 / (divisors * _wavelengths(dim, parameters)), number(parameters, "attention_factor", default)


def _factors(parameters: dict[str, Any], name: str, num_pairs: int) -> Tensor:
    """A list of divisors, `[num_pairs]`."""
    values = parameters.get(name)
    if not isinstance(values, list) or len(values) != num_pairs:
        found = "is missing" if values is None else f"has {len(values)}" if isinstance(values, list) else f"is {values!r}"
        raise ModelLoadError(
            f"{name} in the RoPE settings of config.json {found}, but type 'longrope' needs a list of {num_pairs} numbers, one for each pair."
        )
    checked = [number(parameters | {f"{name}[{i}]": value}, f"{name}[{i}]") for i, value in enumerate(values)]
    return torch.tensor(checked, dtype=torch.float32, device="cpu")


_TYPES: dict[str, Callable[[int, int, dict[str, Any]], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
