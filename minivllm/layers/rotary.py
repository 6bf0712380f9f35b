"""Rotary position embedding: positions as rotations of pairs of query and key channels.

Su et al., 2021 (arXiv:2104.09864), in the half-split layout that Llama checkpoints use. Mirrors
`vllm/model_executor/layers/rotary_embedding`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.errors import ModelLoadError
from minivllm.kernels.ops import Ops


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by angles that grow with the position.

    Args:
        head_dim: Channels of a head; channel i is paired with channel i + head_dim / 2.
        max_position: The tables have positions 0 .. max_position - 1.
        rope_parameters: `rope_theta` (the base), and for `rope_type` "llama3" how far long wavelengths are scaled.
        ops: The operations of the platform.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_position: int, rope_parameters: dict[str, Any], ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        frequencies = _frequencies(head_dim, rope_parameters)
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32, device="cpu"), frequencies)
        device = torch.get_default_device()
        self.register_buffer("cos", angles.cos().to(device), persistent=False)
        self.register_buffer("sin", angles.sin().to(device), persistent=False)

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate `[num_tokens, heads, head_dim]` queries and keys; `positions` is `[num_tokens]`."""
        return self.ops.rotary_embedding(positions, query, key, self.cos, self.sin)


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings of a config.json, written by transformers 5 or older."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    parameters.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    if "type" in parameters:  # the oldest spelling
        parameters.setdefault("rope_type", parameters["type"])
    return parameters


def _frequencies(head_dim: int, rope_parameters: dict[str, Any]) -> Tensor:
    """Angle per position of each channel pair, `[head_dim / 2]`."""
    base = rope_parameters["rope_theta"]
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    rope_type = rope_parameters.get("rope_type", "default")
    if rope_type == "default":
        return frequencies
    if rope_type == "llama3":
        return _scale_as_llama3(frequencies, rope_parameters)
    raise ModelLoadError(f"RoPE type {rope_type!r} is not supported: only 'default' and 'llama3' are.")


def _scale_as_llama3(frequencies: Tensor, rope_parameters: dict[str, Any]) -> Tensor:
    """Low frequencies are divided by `factor`, high ones kept, those between interpolated (Llama 3.1)."""
    factor = rope_parameters["factor"]
    low, high = rope_parameters["low_freq_factor"], rope_parameters["high_freq_factor"]
    turns = rope_parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / factor
