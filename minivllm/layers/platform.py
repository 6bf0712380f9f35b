"""What a model is computed with on one device. Mirrors `vllm/platforms`.

| device                    | dtype             | quantization | weights are           | operations  | attention |
|---------------------------|-------------------|--------------|-----------------------|-------------|-----------|
| CPU, with Numba           | float32           | –            | `PackedWeight`        | `cpu`       | `cpu`     |
|                           | bfloat16          | –            | `PackedBfloat16Weight`| `cpu`       | `cpu`     |
|                           | float32, bfloat16 | int8         | `PackedInt8Weight`    | `cpu`       | `cpu`     |
|                           | float16           | –            | as they were loaded   | `cpu`       | `cpu`     |
| GPU, since Ampere         | any               | –            | as they were loaded   | `triton`    | `triton`  |
| any other                 | any               | –            | as they were loaded   | `reference` | `torch`   |

Packed weights are multiplied by `PackedLinearMethod`, others by `UnquantizedLinearMethod`. The last column is what
`attention_backend="auto"` selects; operations do not depend on it.
"""

from __future__ import annotations

from typing import Any

import torch

from minivllm.distributed.parallel_state import GroupCoordinator, SingleRank
from minivllm.distributed.partition import Stage
from minivllm.errors import ConfigError
from minivllm.kernels.checks import Checks
from minivllm.kernels.ops import Ops, has_cpu_kernels, load_platform_kernels
from minivllm.layers.attention import AttentionBackend
from minivllm.layers.attention_backends import BACKENDS, CPUAttentionBackend, get_attention_backend, honours_windows
from minivllm.layers.linear_methods import LinearMethod, PackedLinearMethod, UnquantizedLinearMethod

PACKED_WEIGHTS = {
    (torch.float32, None): "PackedWeight",
    (torch.bfloat16, None): "PackedBfloat16Weight",
    (torch.float32, "int8"): "PackedInt8Weight",
    (torch.bfloat16, "int8"): "PackedInt8Weight",
}
"""By dtype and quantization, the class of `kernels.cpu` that holds the weights."""


class Platform:
    """Chooses operations, linear methods and the attention backend, once, before any layer is made.

    Args:
        device, dtype: Where the model is, and in which dtype; see the attributes.
        attention_backend: "auto", a name, or a class of the user's own.
        quantization: None or "int8".
        group: The ranks that share the model; a group of one if None.
        stage: Which of the layers are made; all if None.

    Attributes:
        dtype: Of the KV cache, and of the weights unless they are quantized.
        activation_dtype: Of what flows between the layers: float32 where weights are packed, whatever their dtype, because reading
            the weights is what takes the time there; otherwise `dtype`.
        kernels: The module of `minivllm.kernels` with the fastest operations for the device.
        ops: Its norm, rotary embedding, activation and block copies.

    Raises:
        ConfigError: The backend or the quantization cannot run here.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        attention_backend: str | type = "auto",
        quantization: str | None = None,
        group: GroupCoordinator | None = None,
        stage: Stage | None = None,
    ) -> None:
        self.device, self.dtype = device, dtype
        self.group, self.stage = group or SingleRank(), stage or Stage()
        self.attention_backend = get_attention_backend(attention_backend, device)
        self.kernels = load_platform_kernels(device)
        self.ops = Ops(self.kernels, Checks.NONE)
        self.packed_weight = self._find_packed_weight(quantization)
        self.activation_dtype = dtype if self.packed_weight is None else torch.float32

    def make_linear_method(self) -> LinearMethod:
        """How to compute one linear layer."""
        if self.packed_weight is None:
            return UnquantizedLinearMethod()
        return PackedLinearMethod(self.kernels.packed_linear, self.packed_weight)

    def make_attention(self, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None = None) -> AttentionBackend:
        """The attention of one layer.

        Args:
            num_heads, num_kv_heads, head_dim: See `AttentionBackend`.
            window: The tokens that each token sees, itself included; None or 0 for all before it.

        Raises:
            ConfigError: The layer has a window, and the backend does not honour it.
        """
        if window and not honours_windows(self.attention_backend):
            raise ConfigError(
                f"The model has sliding-window attention, which attention_backend {self.attention_backend.__name__} does not say it honours: "
                "let its forward pass self.window on and its supports_windows return True, or use 'auto'."
            )
        backend = self.attention_backend(num_heads, num_kv_heads, head_dim, head_dim**-0.5)
        backend.window = window or 0
        if self.attention_backend in BACKENDS.values():
            backend.ops = Ops(backend.load_ops(), Checks.NONE)
        return backend

    def _find_packed_weight(self, quantization: str | None) -> Any:
        """The class that holds the weights, or None if they stay as they were loaded."""
        can_pack = hasattr(self.kernels, "packed_linear")
        # Only this backend takes float32 queries with a bfloat16 cache.
        can_mix = self.attention_backend is CPUAttentionBackend
        name = PACKED_WEIGHTS.get((self.dtype, quantization))
        if name is not None and can_pack and (self.dtype == torch.float32 or can_mix):
            return getattr(self.kernels, name)
        if quantization is None:
            return None
        dtype = str(self.dtype).removeprefix("torch.")
        if self.device.type != "cpu":
            raise ConfigError(f"quantization is {quantization!r}, which runs on a CPU only, not on {self.device}.")
        if name is None:
            raise ConfigError(f"quantization is {quantization!r}, which needs dtype 'float32' or 'bfloat16', not {dtype!r}.")
        if not can_pack:
            raise ConfigError(f"quantization is {quantization!r}, which needs Numba: `pip install numba`.")
        raise ConfigError(
            f"quantization is {quantization!r}, and dtype {dtype!r}: together they need the attention backend 'cpu'. Use dtype "
            "'float32' instead."
        )


def describe_cpu_kernels() -> str:
    """How weights are multiplied on this machine's processor, in words."""
    if not has_cpu_kernels():
        return "none, because Numba is missing: PyTorch computes everything"
    from minivllm.kernels.cpu.native import features

    vectors = "AVX-512" if features.HAS_AVX512 else "vectors of at most 8 numbers"
    without_amx = "by VDPBF16PS" if features.HAS_BFLOAT16_DOT else "made float32 in registers"
    bfloat16 = "by AMX" if features.HAS_BFLOAT16_AMX else without_amx
    without_amx = "by VPDPBUSD" if features.HAS_INT8_DOT else "made 16-bit in registers"
    int8 = "by AMX" if features.HAS_INT8_AMX else without_amx
    return f"float32 ({vectors}), bfloat16 ({bfloat16}), int8 ({int8})"
