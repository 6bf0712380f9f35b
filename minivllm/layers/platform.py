"""What the layers of a model are computed with on one device. Mirrors `vllm/platforms`."""

from __future__ import annotations

import logging
from typing import Any

import torch

from minivllm.distributed.parallel_state import GroupCoordinator, SingleRank
from minivllm.errors import ConfigError
from minivllm.kernels.checks import Checks
from minivllm.kernels.ops import Ops, has_cpu_kernels, load_platform_kernels
from minivllm.layers.attention import AttentionBackend
from minivllm.layers.attention_backends import BACKENDS, CPUAttentionBackend, get_attention_backend
from minivllm.layers.compiled import is_compiled
from minivllm.layers.linear import Linear, LinearMethod, PackedLinearMethod, UnquantizedLinearMethod
from minivllm.layers.quantization import Int8LinearMethod, check_quantization

logger = logging.getLogger(__name__)


class Platform:
    """Chooses operations, linear methods and the attention backend, once, before any layer is made.

    Args:
        device, dtype: Where the model lies, and in what; see the attributes.
        attention_backend: "auto", a name, or a class of the user's own.
        quantization: None or "int8".
        group: The ranks that have a part of the model each; a group of one if None.

    Attributes:
        dtype: Of the KV cache, and of the weights unless they are quantized.
        activation_dtype: Of what flows between the layers: float32 where weights are quantized or packed in bfloat16 (on a CPU), else
            `dtype`. Reading weights is what takes the time there, and activations are few.
        ops: Norm, rotary embedding, activation and block copies; they do not depend on the attention backend.
        runs_compiled_layers: Whether layers, or halves of layers, run as one call where they are compiled.

    Raises:
        ConfigError: The backend or the quantization cannot run here.
    """

    packs_weights = True
    """Whether weights that are not quantized are packed where there are kernels for that; tests turn it off."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        attention_backend: str | type = "auto",
        quantization: str | None = None,
        group: GroupCoordinator | None = None,
    ) -> None:
        self.device, self.dtype = device, dtype
        self.group = group or SingleRank()
        self.quantization = quantization
        self.attention_backend = get_attention_backend(attention_backend, device)
        if issubclass(self.attention_backend, CPUAttentionBackend) and not is_compiled(self.attention_backend):
            logger.warning(
                "%s has a forward of its own, which is called instead of the compiled attention: steps are slower.",
                self.attention_backend.__name__,
            )
        self.kernels = load_platform_kernels(device)
        mixes_dtypes = dtype == torch.bfloat16 and self.attention_backend is CPUAttentionBackend  # others want all in one dtype
        if quantization is not None:
            check_quantization(quantization, device, getattr(self.kernels, "HAS_INT8_DOT", False))
            if dtype == torch.float16:
                raise ConfigError(f"quantization is {quantization!r}, which needs dtype 'float32' or 'bfloat16', not 'float16'.")
            if dtype != torch.float32 and not mixes_dtypes:
                raise ConfigError(
                    f"quantization is {quantization!r}, and dtype 'bfloat16': together they need Numba and the attention backend "
                    "'cpu'. Use dtype 'float32' instead."
                )
        self.ops = Ops(self.kernels, Checks.NONE)
        self.runs_compiled_layers = hasattr(self.kernels, "decoder_layers")
        self._packed_weight: Any = None
        if hasattr(self.kernels, "packed_linear") and self.packs_weights:
            if dtype == torch.float32:
                self._packed_weight = self.kernels.PackedWeight
            elif mixes_dtypes:
                self._packed_weight = self.kernels.PackedBfloat16Weight
        self.activation_dtype = dtype if self._packed_weight is None and quantization is None else torch.float32

    def get_linear_method(self, layer: Linear) -> LinearMethod:
        """How to compute a linear layer."""
        kernels = self.kernels
        if self.quantization is None:
            packed_weight = self._packed_weight
            return (
                UnquantizedLinearMethod() if packed_weight is None else PackedLinearMethod(kernels.packed_linear, packed_weight)
            )
        if getattr(kernels, "HAS_INT8_DOT", False):
            return PackedLinearMethod(kernels.packed_linear, kernels.PackedInt8Weight)
        return Int8LinearMethod(self.ops)

    def make_attention(self, num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionBackend:
        """The attention of one layer."""
        backend = self.attention_backend(num_heads, num_kv_heads, head_dim, head_dim**-0.5)
        if self.attention_backend in BACKENDS.values():
            backend.ops = Ops(backend.load_ops(), Checks.NONE)
        return backend


def describe_cpu_kernels() -> str:
    """How weights are multiplied on this machine's processor, in words."""
    if not has_cpu_kernels():
        return "none, because Numba is missing: PyTorch computes everything"
    from minivllm.kernels.cpu import features

    vectors = "AVX-512" if features.HAS_AVX512 else "vectors of at most 8 numbers"
    without_amx = "by VDPBF16PS" if features.HAS_BFLOAT16_DOT else "made float32 in registers"
    bfloat16 = "by AMX" if features.HAS_BFLOAT16_AMX else without_amx
    without_amx = "by VPDPBUSD" if features.HAS_INT8_DOT else "by PyTorch"
    int8 = "by AMX" if features.HAS_INT8_AMX else without_amx
    return f"float32 ({vectors}), bfloat16 ({bfloat16}), int8 ({int8})"
