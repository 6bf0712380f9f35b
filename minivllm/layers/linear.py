"""Linear layers, several of them fused into one matrix product, and the methods that compute them.

Mirrors `vllm/model_executor/layers/linear.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.layers.weights import CheckpointTensor, copy_rows

if TYPE_CHECKING:
    from minivllm.layers.platform import Platform

TRANSPOSED_ROWS = range(8, 48)
"""Batch sizes at which the CPU computes `(W @ x.T).T` with a weight that is not packed. Some processors are much faster with
it there than with `F.linear`, others a little slower."""


class LinearMethod(ABC):
    """How a linear layer is computed: chosen when the layer is made, one object for each layer.

    Mirrors `LinearMethodBase` of vLLM.

    Attributes:
        packed: The weight in the form that compiled blocks read (`layers.compiled`), if the method has it.
        dtype: Of the weight when it is loaded; None is torch's default.
    """

    packed: Any = None
    dtype: torch.dtype | None = None

    def create_weights(self, layer: Linear) -> None:
        """Allocate the parameters that the checkpoint fills: `weight` and, if the layer has one, `bias`."""
        out_features = sum(layer.out_features)
        layer.weight = nn.Parameter(torch.empty(out_features, layer.in_features, dtype=self.dtype), requires_grad=False)
        layer.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if layer.has_bias else None

    @abstractmethod
    def process_weights_after_loading(self, layer: Linear) -> None:
        """Bring the loaded weights into the form that `apply` reads, and release what it does not."""

    @abstractmethod
    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        """`[num_tokens, in_features]` to `[num_tokens, sum(out_features)]`."""

    def get_rows(self, outputs: Tensor) -> Tensor:
        """Rows of the weight, for an embedding that is the head as well: `[n]` to `[n, in_features]`. Only of a method that has taken the
        weight from the layer."""
        raise NotImplementedError


class Linear(nn.Module):
    """`x @ W.T + b`.

    Args:
        in_features: Width of the input.
        out_features: Width of the output, or the widths of several layers that read the same input and are fused
            into one product (`qkv_proj`, `gate_up_proj`). The output is theirs side by side.
        bias: Whether there is a bias.
        platform: Chooses the method.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int | list[int], bias: bool, platform: Platform) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = [out_features] if isinstance(out_features, int) else out_features
        self.has_bias = bias
        self.method = platform.get_linear_method(self)
        self.method.create_weights(self)

    def load_weight(self, parameter: nn.Parameter, tensor: CheckpointTensor, shard_id: int = 0) -> None:
        """Copy a checkpoint tensor into the rows of `weight` or `bias` that belong to the fused layer `shard_id`."""
        start, size = sum(self.out_features[:shard_id]), self.out_features[shard_id]
        copy_rows(parameter.data[start : start + size], tensor)

    def process_weights_after_loading(self) -> None:
        """To be called once, when all weights of this layer are loaded."""
        self.method.process_weights_after_loading(self)

    def forward(self, x: Tensor) -> Tensor:
        """`[num_tokens, in_features]` to `[num_tokens, sum(out_features)]`."""
        return self.method.apply(self, x)


class UnquantizedLinearMethod(LinearMethod):
    """The weight as it is loaded, by torch."""

    def process_weights_after_loading(self, layer: Linear) -> None:
        """Nothing to do."""

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        weight, bias = layer.weight, layer.bias
        assert weight is not None
        if x.device.type == "cpu" and x.shape[0] in TRANSPOSED_ROWS:
            output = (weight @ x.t()).t().contiguous()
            return output if bias is None else output.add_(bias)
        return F.linear(x, weight, bias)


class PackedLinearMethod(LinearMethod):
    """The weight in the order in which `kernels.cpu.packed_linear` reads it.

    Args:
        packed_linear: The product.
        packed_weight: `PackedWeight`, `PackedBfloat16Weight` or `PackedInt8Weight` of `kernels.cpu`, which cannot be imported
            where Numba is missing.
    """

    def __init__(self, packed_linear: Callable[..., Tensor], packed_weight: Any) -> None:
        self.packed_linear, self.packed_weight, self.dtype = packed_linear, packed_weight, packed_weight.dtype

    def process_weights_after_loading(self, layer: Linear) -> None:
        self.packed = self.packed_weight(*take_weights(layer))

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        return self.packed_linear(self.packed, x)

    def get_rows(self, outputs: Tensor) -> Tensor:
        rows: Tensor = self.packed.get_rows(outputs)
        return rows


def take_weights(layer: Linear) -> tuple[Tensor, Tensor | None]:
    """The loaded weight and bias, which the layer then lets go of."""
    assert layer.weight is not None
    weight, bias = layer.weight.data, None if layer.bias is None else layer.bias.data
    layer.weight = layer.bias = None
    return weight, bias
