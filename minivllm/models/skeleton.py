"""A model without its numbers: what its config and the headers of its checkpoint say, known in a moment, whatever the size.

The model is built, and its tensors are given their places, by the code that loads models, but on torch's meta device, where tensors have
shapes and no memory. So what that code would refuse is refused here, with the same sentence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.layers.attention import AttentionBackend
from minivllm.layers.platform import Platform
from minivllm.models.base import CausalLM
from minivllm.models.weights import build_model, iterate_weights, load_weights

META = torch.device("meta")
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
}  # fmt: skip
"""By their names in safetensors. Others are bytes here, and are refused like these when they are loaded."""


def read_headers(folder: Path) -> list[tuple[str, Any]]:
    """Names and tensors of a folder's checkpoint files, the tensors on the meta device: no number is read.

    Raises:
        ModelLoadError: There are no weights, or their headers cannot be read.
    """
    return [(name, _without_numbers(source)) for name, source in iterate_weights(folder)]


def _without_numbers(source: Any) -> Any:
    if isinstance(source, Tensor):
        return source.to(META)
    if not hasattr(source, "get_shape"):  # not a tensor; loading refuses it by name
        return source
    return torch.empty(source.get_shape(), dtype=DTYPES.get(source.get_dtype(), torch.uint8), device=META)


def build_skeleton(
    config: ModelConfig, dtype: torch.dtype, attention_backend: type[AttentionBackend], headers: list[tuple[str, Any]]
) -> CausalLM:
    """The model on the meta device, with the tensors of `read_headers` in their places, unless there are none.

    Raises:
        ModelLoadError: The config or the weights cannot be used.
        ConfigError: The attention backend cannot compute the model.
    """
    model = build_model(config, Platform(META, dtype, attention_backend))
    model.requires_grad_(False)
    if headers and model.load_weights is None:
        load_weights(model, iter(headers), config.name)
    return model
