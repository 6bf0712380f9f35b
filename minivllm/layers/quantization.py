"""Weights in 8 or 4 bits, on a CPU: a decode step is bound by reading memory, so a quarter or an eighth of the bytes is faster.

A row's product does not depend on its batch. But rounding amplifies small differences: where attention is summed in another
order (a prompt in chunks, draft tokens, recomputation after preemption), tokens can diverge sooner than in float32.
Mirrors `vllm/model_executor/layers/quantization`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.errors import ConfigError
from minivllm.kernels import reference
from minivllm.kernels.ops import Ops
from minivllm.layers.linear import Linear, LinearMethod, take_weights

INT4_GROUP = 32
"""Weights that share a scale and a minimum, as in the blocks of a GGUF file."""
INT4_OUTPUTS = 16
"""The 4-bit operator needs a multiple of this many outputs."""


class Int8LinearMethod(LinearMethod):
    """8-bit weights with one scale per output; inputs are rounded to 12 bits, in two products of 8-bit integers.

    A row of inputs becomes two rows of digits, `x = scale * (64 * high + low)`, and both go through the product together:
    the weights are read once. The few very large inputs (outliers), for which 8-bit inputs lose the precision of all others
    (Dettmers et al., 2022, arXiv:2208.07339), do little harm with 12 bits. Each row has its own scale, and sums of integers are
    exact; so a token's numbers do not depend on its batch.

    The digits are 7 bits wide: two products of 8 by 8 bits would overflow the 16-bit sums of processors without VNNI.

    `PackedInt8Weight` is the same product, to the last bit, for processors that have an instruction for it.

    Args:
        ops: Split and join the digits.
    """

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def process_weights_after_loading(self, layer: Linear) -> None:
        weight, self.bias = take_weights(layer)
        rounded, self.scales = reference.round_weight(weight)
        self.zero_points = torch.zeros(len(weight), dtype=torch.int64)
        self.weight = torch.ops.onednn.qlinear_prepack(rounded, None)

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        digits, row_scales = self.ops.split_digits(x.contiguous())
        products = torch.ops.onednn.qlinear_pointwise(
            digits, 1.0, reference.DIGIT_ZERO, self.weight, self.scales, self.zero_points, None, 1.0, 0, torch.float32, "none", [], ""
        )  # fmt: skip
        output = self.ops.join_digits(products, row_scales)
        return output if self.bias is None else output.add_(self.bias)


class Int4LinearMethod(LinearMethod):
    """4-bit weights: the range of every 32 in a row is divided into 15 equal steps.

    The Q4_1 blocks of a GGUF file are made like that, so their numbers, once expanded, fall on the same steps again. The
    operator takes its inputs, steps and middles in bfloat16. It is made for a few rows, and slow with many.
    """

    @staticmethod
    def supports(layer: Linear) -> bool:
        """Whether the operator takes a layer of this size."""
        return layer.in_features % INT4_GROUP == 0 and sum(layer.out_features) % INT4_OUTPUTS == 0

    def process_weights_after_loading(self, layer: Linear) -> None:
        weight, self.bias = take_weights(layer)
        groups = weight.unflatten(1, (-1, INT4_GROUP))
        lowest, highest = groups.amin(dim=-1), groups.amax(dim=-1)
        step = ((highest - lowest) / 15).clamp_(min=1e-30)
        rounded = ((groups - lowest[..., None]) / step[..., None]).round_().clamp_(0, 15).to(torch.int32).flatten(1)
        self.weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(rounded, 2)
        # The operator counts from the middle: (q - 8) * step + middle.
        self.steps = torch.stack((step, lowest + 8 * step), dim=-1).transpose(0, 1).to(torch.bfloat16).contiguous()

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(x.to(torch.bfloat16), self.weight, INT4_GROUP, self.steps)
        output = product.float()
        return output if self.bias is None else output.add_(self.bias)


def check_quantization(quantization: str, device: torch.device, dtype: torch.dtype, has_int8_dot: bool) -> None:
    """Raise ConfigError if this machine cannot compute with weights quantized like that.

    Args:
        has_int8_dot: Whether the kernels multiply 8-bit weights themselves, so that torch need not.
    """
    if device.type != "cpu" or dtype != torch.float32:
        raise ConfigError(f"quantization is {quantization!r}, which runs on the CPU in float32 only, not on {device} in {dtype}.")
    # The head of a 4-bit model has 8-bit weights.
    needed = ["aten::_convert_weight_to_int4pack_for_cpu"] if quantization == "int4" else []
    if not has_int8_dot:
        needed.append("onednn::qlinear_prepack")
    for operator in needed:
        namespace, name = operator.split("::")
        if not hasattr(getattr(torch.ops, namespace), name) or (
            namespace == "onednn" and not torch.backends.mkldnn.is_available()
        ):
            raise ConfigError(
                f"quantization is {quantization!r}, but torch {torch.__version__} has no {operator} on this machine."
            )
