"""Linear layers, and several of them fused into one matrix product.

Mirrors `vllm/model_executor/layers/linear.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.kernels import has_cpu_kernels

TRANSPOSED_PRODUCT_ROWS = range(8, 48)
"""Batch sizes at which the CPU computes `(W @ x.T).T` with a weight that is not packed. Some processors are much faster with
it there than with `F.linear`, others a little slower: `minivllm bench kernels` says what yours does."""

Product = Callable[[Tensor], Tensor]
"""`[num_tokens, in_features]` to `[num_tokens, out_features]`, with a weight of its own inside."""


class Linear(nn.Module):
    """`x @ W.T + b`, with a weight of `[out_features, in_features]` as in torch.

    Args:
        in_features: Width of the input.
        out_features: Width of the output, or the widths of several layers that read the same input and are fused
            into one product (`qkv_proj`, `gate_up_proj`). The output is theirs side by side.
        bias: Whether there is a bias.
    """

    def __init__(self, in_features: int, out_features: int | list[int], bias: bool = False) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = [out_features] if isinstance(out_features, int) else out_features
        self.weight = nn.Parameter(torch.empty(sum(self.out_features), in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(self.out_features)), requires_grad=False) if bias else None

    def part(self, parameter: Tensor, index: int) -> Tensor:
        """The rows of `weight` or `bias` that belong to the fused layer `index`, for loading."""
        start = sum(self.out_features[:index])
        return parameter[start : start + self.out_features[index]]

    def pack(self, make_product: Callable[[Tensor, Tensor | None], Product]) -> None:
        """From now on compute with what `make_product(weight, bias)` returns; it replaces weight and bias, which are let go."""
        self.forward = make_product(self.weight.data, None if self.bias is None else self.bias.data)
        self.weight = self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """`[num_tokens, in_features]` to `[num_tokens, sum(out_features)]`."""
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, or on a CPU, at some batch sizes, the equal product `(W @ x.T).T`."""
    if x.device.type == "cpu" and x.shape[0] in TRANSPOSED_PRODUCT_ROWS:
        output = (weight @ x.t()).t().contiguous()
        return output if bias is None else output.add_(bias)
    return F.linear(x, weight, bias)


class PackedProduct:
    """float32 on a CPU: a product with the weight in the order in which `kernels.cpu.packed_linear` reads it.

    Args:
        weight: `[out_features, in_features]`.
        bias: `[out_features]` or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        from minivllm.kernels import cpu  # here, because Numba may be missing

        self.packed = cpu.PackedWeight(weight, bias)
        self.kernel = cpu.packed_linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernel(self.packed, x)


def can_pack(weight: Tensor) -> bool:
    """Whether `PackedProduct` takes a weight here."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and has_cpu_kernels()
