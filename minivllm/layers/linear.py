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

from minivllm.kernels.pages import zero_pages
from minivllm.layers.weights import CheckpointTensor, copy_rows, read_rows

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
    """

    packed: Any = None

    def create_weights(self, layer: Linear) -> None:
        """Allocate the parameters that the checkpoint fills: `weight` and, if the layer has one, `bias`."""
        out_features = sum(layer.out_features)
        layer.weight = nn.Parameter(torch.empty(out_features, layer.in_features), requires_grad=False)
        layer.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if layer.has_bias else None

    def load_weight(self, parameter: nn.Parameter, first_row: int, num_rows: int, tensor: CheckpointTensor) -> None:
        """Copy a checkpoint tensor into rows of `weight` or `bias`."""
        copy_rows(parameter.data[first_row : first_row + num_rows], tensor)

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
        """Fill the rows of `weight` or `bias` that belong to the fused layer `shard_id` with a checkpoint tensor."""
        self.method.load_weight(parameter, sum(self.out_features[:shard_id]), self.out_features[shard_id], tensor)

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
        self.packed_linear, self.packed_weight = packed_linear, packed_weight

    def create_weights(self, layer: Linear) -> None:
        """As for any method, but in memory that is not taken as long as nobody writes to it: `load_weight` does not."""
        super().create_weights(layer)
        assert layer.weight is not None
        dtype = self.packed_weight.number_dtype
        layer.weight.data = zero_pages(tuple(layer.weight.shape), dtype if dtype.is_floating_point else torch.float32)

    def load_weight(self, parameter: nn.Parameter, first_row: int, num_rows: int, tensor: CheckpointTensor) -> None:
        """Rows of the weight go straight into the packed form, and not into the parameter."""
        if parameter.dim() == 1:
            super().load_weight(parameter, first_row, num_rows, tensor)
            return
        if self.packed is None:
            self.packed = self.packed_weight(*parameter.shape)
            # From now on nobody can write to the parameter: it would be lost.
            parameter.data = parameter.data.new_zeros(1).expand(parameter.shape)
        for start, rows in read_rows(tensor, (num_rows, parameter.shape[1])):
            self.packed.set_rows(first_row + start, rows)

    def process_weights_after_loading(self, layer: Linear) -> None:
        weight, bias = take_weights(layer)
        if self.packed is None:  # something else has filled the parameter
            self.packed = self.packed_weight.of(weight, bias)
        elif bias is not None:
            self.packed.set_bias(bias)

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
