"""The halves of a Llama layer as one call of compiled code each, for a few rows: see `kernels.cpu.decoder_layer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from minivllm.layers.attention import AttentionBackend, AttentionMetadata, KVCache
from minivllm.layers.attention_backends import CPUAttentionBackend
from minivllm.layers.linear import Linear, RowParallelLinear
from minivllm.layers.norm import RMSNorm
from minivllm.layers.rotary import RotaryEmbedding

CompiledAttention = Callable[[Tensor, Tensor | None, Tensor, KVCache, AttentionMetadata], tuple[Tensor, Tensor]]
"""From what the layer before adds to the residual stream, and the stream (None begins it), to what attention adds, and the
stream; positions, cache and metadata are those of a decode step."""

CompiledMLP = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From what attention adds to the residual stream, and the stream, to what the MLP adds, and the stream."""


def compile_attention(
    norm: RMSNorm, qkv: Linear, output: RowParallelLinear, rotary: RotaryEmbedding, backend: AttentionBackend
) -> CompiledAttention | None:
    """Norm, attention and output projection; None if the backend's `forward` is not that of the CPU backend, or if the linear
    layers cannot be compiled.
    """
    arrays = _packed_arrays(qkv, output)
    if arrays is None or not is_compiled(type(backend)):
        return None
    from minivllm.kernels import cpu

    weights = cpu.AttentionWeights(norm.weight.numpy(), arrays[0], arrays[1], rotary.cos.numpy(), rotary.sin.numpy())
    group, scale, eps = backend.num_heads // backend.num_kv_heads, backend.scale, norm.eps

    def forward(
        x: Tensor, residual: Tensor | None, positions: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        out, total = cpu.attention_block(
            weights, x, x.new_zeros(x.shape) if residual is None else residual, positions, *kv_cache, metadata.slot_mapping,
            metadata.block_tables, metadata.context_lens, group, scale, eps,
        )  # fmt: skip
        return output.group.all_reduce(out), total

    return forward


def is_compiled(backend_cls: type[AttentionBackend]) -> bool:
    """Whether compiled code may stand in for the backend's `forward`."""
    return backend_cls.forward is CPUAttentionBackend.forward


def compile_mlp(norm: RMSNorm, gate_up: Linear, down: RowParallelLinear) -> CompiledMLP | None:
    """Norm, SwiGLU and down projection; None if the linear layers cannot be compiled."""
    arrays = _packed_arrays(gate_up, down)
    if arrays is None:
        return None
    from minivllm.kernels import cpu

    weights, eps = cpu.MLPWeights(norm.weight.numpy(), arrays[0], arrays[1]), norm.eps

    def forward(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        out, total = cpu.mlp_block(weights, x, residual, eps)
        return down.group.all_reduce(out), total

    return forward


def _packed_arrays(*linears: Linear) -> list[Any] | None:
    """The packed weights as arrays; None if they are not packed, not all alike, or of a width that leaves a panel unfilled."""
    packed = [linear.method.packed for linear in linears]
    if None in packed or len({type(weight) for weight in packed}) > 1 or any(not weight.fills_panels for weight in packed):
        return None
    return [weight.arrays for weight in packed]
