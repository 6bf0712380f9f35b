"""Linear layers, and several of them fused into one matrix product.

Mirrors `vllm/model_executor/layers/linear.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TRANSPOSED_PRODUCT_ROWS = range(8, 48)
"""Batch sizes at which the CPU computes `(W @ x.T).T`. Some processors are much faster with it there than with
`F.linear`, others a little slower: benchmarks/linear_layers.py says what yours does."""


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
        self.out_features = [out_features] if isinstance(out_features, int) else out_features
        self.weight = nn.Parameter(torch.empty(sum(self.out_features), in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(self.out_features)), requires_grad=False) if bias else None

    def part(self, parameter: Tensor, index: int) -> Tensor:
        """The rows of `weight` or `bias` that belong to the fused layer `index`, for loading."""
        start = sum(self.out_features[:index])
        return parameter[start : start + self.out_features[index]]

    def forward(self, x: Tensor) -> Tensor:
        """`[num_tokens, in_features]` to `[num_tokens, sum(out_features)]`."""
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, or on a CPU, at some batch sizes, the equal product `(W @ x.T).T`."""
    if x.device.type == "cpu" and x.shape[0] in TRANSPOSED_PRODUCT_ROWS:
        output = (weight @ x.t()).t().contiguous()
        return output if bias is None else output.add_(bias)
    return F.linear(x, weight, bias)
