"""Weights in 8 bits, on a CPU: a decode step is bound by reading memory, so a quarter of the bytes is faster.

A row's product does not depend on its batch. But rounding amplifies small differences: where attention is summed in another
order (draft tokens, recomputation after preemption, a chunk of one token), tokens can diverge sooner than in float32.
Mirrors `vllm/model_executor/layers/quantization`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minivllm.kernels import reference
from minivllm.kernels.ops import Ops
from minivllm.layers.linear_methods import LinearMethod, take_weights


class Int8LinearMethod(LinearMethod):
    """8-bit weights with one scale per output, and 8-bit inputs with one scale per token.

    A few inputs are much larger than all others (outliers), so that 8 bits leave little of the others (Dettmers et al., 2022,
    arXiv:2208.07339). So inputs and weights are transformed first, which changes nothing in their product and spreads outliers evenly: see
    `reference.hadamard_transform`. Each row has its own scale, and sums of integers are exact; so a token's numbers do not depend on its batch.

    Processors without VNNI add two products in 16 bits, which two of 8 by 8 bits would overflow. So a row of inputs becomes two rows of
    digits, `16 * high + low`, and both go through the product together: the weights are read once.

    `PackedInt8Weight` is the same product, to the last bit, for processors that have an instruction for it.

    Args:
        ops: Split and join the digits.
    """

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight, self.bias = take_weights(layer)
        self.in_features = weight.shape[1]
        rounded, self.scales = reference.round_weight(weight.float())
        self.rounded = rounded if getattr(layer, "is_tied", False) else None
        self.ones, self.zero_points = torch.ones(len(weight)), torch.zeros(len(weight), dtype=torch.int64)
        self.weight = torch.ops.onednn.qlinear_prepack(rounded, None)

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        digits, row_scales = self.ops.split_digits(x)
        products = torch.ops.onednn.qlinear_pointwise(
            digits, 1.0, reference.DIGIT_ZERO, self.weight, self.ones, self.zero_points, None, 1.0, 0, torch.float32, "none", [], ""
        )  # fmt: skip
        output = self.ops.join_digits(products, row_scales).mul_(self.scales)
        return output if self.bias is None else output.add_(self.bias)

    def get_rows(self, outputs: Tensor) -> Tensor:
        assert self.rounded is not None
        return reference.restore_weight(self.rounded[outputs], self.scales[outputs], self.in_features)
