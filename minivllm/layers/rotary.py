"""Rotary position embedding: positions as rotations of pairs of query and key channels.

Su et al., 2021 (arXiv:2104.09864), in the half-split layout that Llama checkpoints use. Mirrors
`vllm/model_executor/layers/rotary_embedding`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minivllm.errors import ModelLoadError
from minivllm.kernels.ops import Ops
from minivllm.layers.rope_scaling import number, original_length, scaled_frequencies


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by angles that grow with the position.

    Args:
        head_dim: Channels of a head. The first `partial_rotary_factor` of them are rotated, all by default: channel i of these is paired with
            channel i + half of their number.
        max_position: The tables have positions 0 .. max_position - 1. "dynamic" and "longrope" are stretched to this length, and not to that
            of each text: see `scaled_frequencies`.
        rope_parameters: What the function below returns. `rope_theta` is the base; `rope_type` says how a model is stretched to longer texts.
        ops: The operations of the platform.

    Attributes:
        cos, sin: `[max_position, rotated channels / 2]`, float32.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_position: int, rope_parameters: dict[str, Any], ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        dim = int(head_dim * number(rope_parameters, "partial_rotary_factor", 1.0, high=1.0))
        if dim < 2 or dim % 2:
            raise ModelLoadError(f"config.json rotates {dim} channels of each head of {head_dim}, but they must be pairs.")
        frequencies, scale = scaled_frequencies(dim, max_position, rope_parameters)
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32, device="cpu"), frequencies)
        device = torch.get_default_device()
        self.register_buffer("cos", (angles.cos() * scale).to(device), persistent=False)
        self.register_buffer("sin", (angles.sin() * scale).to(device), persistent=False)

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate `[num_tokens, heads, head_dim]` queries and keys; `positions` is `[num_tokens]`."""
        if self.rotates_all(query.shape[-1]):
            return self.ops.rotary_embedding(positions, query, key, self.cos, self.sin)
        dim = 2 * self.cos.shape[1]
        rotated = self.ops.rotary_embedding(positions, query[..., :dim], key[..., :dim], self.cos, self.sin)
        query, key = (torch.cat((part, x[..., dim:]), dim=-1) for part, x in zip(rotated, (query, key), strict=True))
        return query, key

    def rotates_all(self, head_dim: int) -> bool:
        """Whether all channels of a head are rotated: the fused and compiled kernels can do nothing else."""
        return 2 * self.cos.shape[1] == head_dim


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings of a config.json, written by transformers 5 or older, without those that are null.

    Raises:
        ModelLoadError: They are not an object.
    """
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(found, dict):
        raise ModelLoadError(f"config.json has RoPE settings that are {found!r}, but they must be an object with a 'rope_type'.")
    outside = {name: config[name] for name in _OUTSIDE if config.get(name) is not None}
    parameters = {"rope_theta": 10000.0} | outside | {name: value for name, value in found.items() if value is not None}
    if "original_max_position_embeddings" in outside:  # this one counts, as in transformers
        parameters["original_max_position_embeddings"] = outside["original_max_position_embeddings"]
    parameters.setdefault("rope_type", parameters.get("type", "default"))  # `type` is the oldest spelling
    if parameters["rope_type"] == "su":  # the name before "longrope"
        parameters["rope_type"] = "longrope"
    return parameters


_OUTSIDE = ("rope_theta", "partial_rotary_factor", "max_position_embeddings", "original_max_position_embeddings")
"""Settings that may stand beside the others, or in the object with them."""


def context_lengths(config: dict[str, Any]) -> tuple[int, int]:
    """How many positions a model is served with if nobody says, and at most: `max_position_embeddings`, or as RoPE stretches it.

    As in vLLM, `factor` multiplies it for "linear" and "dynamic", and "longrope" is not used unless it is asked for: a model answers short
    texts better without. "yarn" checkpoints have it multiplied or not, so the larger length counts; Gemma 3's have it multiplied.

    Raises:
        ModelLoadError: As `scaled_frequencies`.
    """
    parameters = rope_parameters(config)
    length: int = config["max_position_embeddings"]
    if parameters["rope_type"] in ("linear", "dynamic") and config.get("model_type") != "gemma3_text":
        length = int(length * number(parameters, "factor"))
    elif parameters["rope_type"] == "yarn":
        length = max(length, int(original_length(parameters) * number(parameters, "factor")))
    elif parameters["rope_type"] == "longrope":
        return min(length, int(original_length(parameters))), length
    return length, length
