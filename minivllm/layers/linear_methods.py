"""How a linear layer is computed: by torch from the weight as it was loaded, or by the CPU kernels from packed weights.

Mirrors `LinearMethodBase` and its subclasses in `vllm/model_executor/layers/linear.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.kernels.pages import zero_pages
from minivllm.layers.weights import TensorPart, copy_rows

TRANSPOSED_ROWS = range(8, 48)
"""Batch sizes at which the CPU computes `(W @ x.T).T` with a weight that is not packed. Some processors are much faster with
it there than with `F.linear`, others a little slower."""


class LinearMethod(ABC):
    """Computes one linear layer, whose `weight` and `bias` it creates, fills and may take away.

    Attributes:
        packed: The weight in the form that compiled layers read (`models.compiled_llama`), if the method has it.
    """

    packed: Any = None

    def create_weights(self, layer: nn.Module, out_features: int, in_features: int, has_bias: bool) -> None:
        """Allocate the parameters that the checkpoint fills: `weight` and, if the layer has one, `bias`."""
        layer.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        layer.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if has_bias else None

    def load_weight(self, parameter: nn.Parameter, first_row: int, part: TensorPart) -> None:
        """Copy a part of a checkpoint tensor into `weight` or `bias`, starting at `first_row`."""
        copy_rows(parameter.data[first_row : first_row + len(part.rows)], part)

    def process_weights_after_loading(self, layer: nn.Module) -> None:  # noqa: B027 - there may be nothing to convert
        """Convert the loaded weights to the form that `apply` reads, and release what it does not."""

    @abstractmethod
    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        """`[num_tokens, in_features]` to `[num_tokens, out_features]`."""

    def get_rows(self, outputs: Tensor) -> Tensor:
        """Rows of the weight, `[n]` to `[n, in_features]`, for an embedding that shares it. Only a method that has taken the weight
        from the layer is asked."""
        raise NotImplementedError


class UnquantizedLinearMethod(LinearMethod):
    """The weight as it was loaded, multiplied by torch."""

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        weight, bias = layer.weight, layer.bias
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

    def create_weights(self, layer: nn.Module, out_features: int, in_features: int, has_bias: bool) -> None:
        """As for any method, but reserved lazily: pages that `load_weight` leaves untouched cost nothing."""
        super().create_weights(layer, out_features, in_features, has_bias)
        dtype = self.packed_weight.number_dtype
        layer.weight.data = zero_pages((out_features, in_features), dtype if dtype.is_floating_point else torch.float32)

    def load_weight(self, parameter: nn.Parameter, first_row: int, part: TensorPart) -> None:
        """Rows of the weight go straight into the packed form, and not into the parameter."""
        if parameter.dim() == 1:
            super().load_weight(parameter, first_row, part)
            return
        if self.packed is None:
            self.packed = self.packed_weight(*parameter.shape)
            parameter.data = parameter.data.new_zeros(1).expand(parameter.shape)  # a later write to it raises: it would be lost
        for start, rows in part.read_rows():
            self.packed.set_rows(first_row + start, rows)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight, bias = layer.weight.data, None if layer.bias is None else layer.bias.data
        layer.weight = layer.bias = None  # the layer gives them up
        if self.packed is None:  # the model has filled the parameter itself
            self.packed = self.packed_weight.of(weight, bias)
        elif bias is not None:
            self.packed.set_bias(bias)

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        return self.packed_linear(self.packed, x)

    def get_rows(self, outputs: Tensor) -> Tensor:
        rows: Tensor = self.packed.get_rows(outputs)
        return rows
