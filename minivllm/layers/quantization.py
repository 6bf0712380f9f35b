"""Weights in 8 or 4 bits, on a CPU: a decode step reads memory, so a quarter or an eighth of the bytes is faster.

A row's product does not depend on its batch. But rounding makes more of small differences: where attention is summed in another
order (a prompt in chunks, guesses to check, a context computed anew after preemption), tokens can change sooner than in float32.
Mirrors `vllm/model_executor/layers/quantization`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from minivllm.errors import ConfigError
from minivllm.kernels import has_cpu_kernels, reference
from minivllm.layers.linear import PackedProduct, Product, can_pack

INT4_GROUP = 32
"""Weights that share a scale and a lowest value, as in the blocks of a GGUF file."""
INT4_OUTPUTS = 16
"""The operator takes a multiple of so many outputs."""
HEAD = "lm_head"


class Int8Product:
    """8-bit weights with one scale for each output; inputs are rounded to 12 bits, in two products of 8-bit integers.

    A row of inputs becomes two rows of digits, `x = scale * (64 * high + low)`, and both go through the product together:
    the weights are read once. The few inputs that are very large, which one digit of 8 bits would spoil all others for (Dettmers
    et al., 2022, arXiv:2208.07339), do little harm with 12. Each row has its own scale, and sums of integers are exact; so a
    token's numbers do not depend on its batch.

    The digits are 7 bits wide: two products of 8 by 8 bits would overflow the 16-bit sums of processors without VNNI.

    Args:
        weight: `[out_features, in_features]`, float32.
        bias: `[out_features]` or None.
        in_layer: Whether it belongs to a layer that may be compiled; its weight is then packed once more, for a few rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, in_layer: bool = True) -> None:
        self.ops = _row_operations()
        self.bias = bias
        self.scales = (weight.abs().amax(dim=1) / 127).clamp_(min=1e-30)
        self.zero_points = torch.zeros(len(weight), dtype=torch.int64)
        rounded = (weight / self.scales[:, None]).round_().to(torch.int8)
        self.weight = torch.ops.onednn.qlinear_prepack(rounded, None)
        packs = in_layer and getattr(self.ops, "HAS_INT8_DOT", False)
        self.packed = self.ops.PackedInt8Weight(rounded, self.scales, bias) if packs else None

    def __call__(self, x: Tensor) -> Tensor:
        digits, row_scales = self.ops.split_digits(x.contiguous())
        products = torch.ops.onednn.qlinear_pointwise(
            digits, 1.0, reference.DIGIT_ZERO, self.weight, self.scales, self.zero_points, None, 1.0, 0, torch.float32, "none", [], ""
        )  # fmt: skip
        output = self.ops.join_digits(products, row_scales)
        return output if self.bias is None else output.add_(self.bias)


class Int4Product:
    """4-bit weights: of every 32 in a row, the lowest and 15 equal steps up to the highest.

    That is how the Q4_1 blocks of a GGUF file are made; so their numbers, once expanded, fall on the same steps again. The
    operator takes its inputs, steps and middles in bfloat16. It is made for a few rows: with many, it is slow.

    Args:
        weight: `[out_features, in_features]`, float32; `in_features` a multiple of 32, `out_features` of 16.
        bias: `[out_features]` or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.bias = bias
        groups = weight.unflatten(1, (-1, INT4_GROUP))
        lowest, highest = groups.amin(dim=-1), groups.amax(dim=-1)
        step = ((highest - lowest) / 15).clamp_(min=1e-30)
        rounded = ((groups - lowest[..., None]) / step[..., None]).round_().clamp_(0, 15).to(torch.int32).flatten(1)
        self.weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(rounded, 2)
        # The operator counts from the middle: (q - 8) * step + middle.
        self.steps = torch.stack((step, lowest + 8 * step), dim=-1).transpose(0, 1).to(torch.bfloat16).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(x.to(torch.bfloat16), self.weight, INT4_GROUP, self.steps)
        output = product.float()
        return output if self.bias is None else output.add_(self.bias)


def choose_product(
    quantization: str | None, low_memory: bool, device: torch.device, dtype: torch.dtype
) -> Callable[[str, Tensor, Tensor | None], Product] | None:
    """How linear layers are to be packed (given name, weight and bias), or None to leave them as they are.

    Args:
        quantization: None, "int8" or "int4".
        low_memory: Whether weights that are not quantized stay as they are.
        device, dtype: Where the model lies, and in what.

    Raises:
        ConfigError: The quantization is not to be had here.
    """
    if quantization is not None:
        if device.type != "cpu" or dtype != torch.float32:
            raise ConfigError(
                f"quantization is {quantization!r}, which runs on the CPU in float32 only, not on {device} in {dtype}."
            )
        operator = {"int8": "onednn::qlinear_prepack", "int4": "aten::_convert_weight_to_int4pack_for_cpu"}[quantization]
        namespace, name = operator.split("::")
        # The 8-bit operator is oneDNN's; 4-bit models have it in their head.
        if not torch.backends.mkldnn.is_available() or not hasattr(getattr(torch.ops, namespace), name):
            raise ConfigError(
                f"quantization is {quantization!r}, but torch {torch.__version__} has no {operator} on this machine."
            )

    def make(name: str, weight: Tensor, bias: Tensor | None) -> Product:
        if quantization is None:
            return PackedProduct(weight, bias)
        fits = weight.shape[1] % INT4_GROUP == 0 and weight.shape[0] % INT4_OUTPUTS == 0
        # The head chooses between tens of thousands of tokens: GGUF files keep it in 8 bits too.
        return (
            Int4Product(weight, bias)
            if quantization == "int4" and fits and name != HEAD
            else Int8Product(weight, bias, in_layer=name != HEAD)
        )

    if quantization is None and (low_memory or not can_pack(torch.empty(0, dtype=dtype, device=device))):
        return None
    return make


def _row_operations() -> ModuleType:
    if has_cpu_kernels():
        from minivllm.kernels import cpu

        return cpu
    return reference
