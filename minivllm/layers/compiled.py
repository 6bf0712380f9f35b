"""The layers of a Llama model in compiled code: see `kernels.cpu.decoder_layer`.

Each half of a layer is one call; between two halves the ranks of a tensor-parallel group sum their results. With a single rank there is
nothing to sum, and all layers are one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from minivllm.distributed.parallel_state import GroupCoordinator
from minivllm.errors import KernelError
from minivllm.layers.attention import AttentionBackend, AttentionMetadata, KVCache
from minivllm.layers.attention_backends import CPUAttentionBackend
from minivllm.layers.linear import Linear, RowParallelLinear
from minivllm.layers.norm import RMSNorm
from minivllm.layers.rotary import RotaryEmbedding


class CompiledAttention:
    """Norm, attention and output projection.

    Attributes:
        weights: `AttentionWeights` of the layer.
        settings: Query heads for each KV head, the scale of attention, and epsilon of the norm.
        group: Who sums the results.
    """

    def __init__(self, weights: Any, settings: tuple[int, float, float], group: GroupCoordinator) -> None:
        self.weights, self.settings, self.group = weights, settings, group

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """Takes the previous layer's output and the residual stream (None at the first layer); returns attention's output and the
        stream, to which the former was added.
        """
        from minivllm.kernels import cpu

        out, total = cpu.attention_block(
            self.weights, x, x.new_zeros(x.shape) if residual is None else residual, positions, *kv_cache, metadata.slot_mapping,
            metadata.block_tables, metadata.context_lens, metadata.query_start_loc, bool(metadata.is_decode), *self.settings,
        )  # fmt: skip
        return self.group.all_reduce(out), total


class CompiledMLP:
    """Norm, SwiGLU and down projection.

    Attributes:
        weights: `MLPWeights` of the layer.
        eps: Of the norm.
        group: Who sums the results.
    """

    def __init__(self, weights: Any, eps: float, group: GroupCoordinator) -> None:
        self.weights, self.eps, self.group = weights, eps, group

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Takes attention's output and the residual stream; returns the MLP's output and the stream, to which the former was added."""
        from minivllm.kernels import cpu

        out, total = cpu.mlp_block(self.weights, x, residual, self.eps)
        return self.group.all_reduce(out), total


Halves = Sequence[tuple[CompiledAttention | None, CompiledMLP | None]]
"""Those of all layers; None where a half is not compiled."""


class CompiledLayers:
    """Runs all layers, and the norm after them, in one call.

    Args:
        halves: Of the layers.
        norm: The one after them.

    Attributes:
        can_run: Whether all halves are compiled, alike in all layers, and on a single rank.
    """

    def __init__(self, halves: Halves, norm: RMSNorm) -> None:
        from minivllm.kernels import cpu

        self.halves, self.norm = halves, norm
        pairs = [(attention, mlp) for attention, mlp in halves if attention is not None and mlp is not None]
        layers = [cpu.LayerWeights(attention.weights, mlp.weights) for attention, mlp in pairs]
        kinds = {(attention.settings, mlp.eps, layer.describe()) for (attention, mlp), layer in zip(pairs, layers, strict=True)}
        is_single = all(half.group.world_size == 1 for pair in pairs for half in pair)
        is_contiguous = all(layer.is_contiguous() for layer in layers) and norm.weight.is_contiguous()
        self.can_run = len(pairs) == len(halves) and len(kinds) == 1 and is_single and is_contiguous
        if self.can_run:
            self.weights = layers[0]
            self.addresses = np.array([layer.addresses() for layer in layers], np.int64)
            self.settings = (*pairs[0][0].settings, pairs[0][1].eps)
        self._checked: list[tuple[int, int]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has addresses of its own."""
        return CompiledLayers, (self.halves, self.norm)

    def __call__(self, x: Tensor, positions: Tensor, kv_caches: Sequence[KVCache], metadata: AttentionMetadata) -> Tensor:
        """Takes the embeddings; returns the hidden states.

        Raises:
            KernelError: The caches are not alike, or not one for each layer.
        """
        from minivllm.kernels import cpu

        if len(kv_caches) != len(self.halves):
            raise KernelError(f"There are {len(self.halves)} layers, but {len(kv_caches)} caches.")
        caches = [(key.data_ptr(), value.data_ptr()) for key, value in kv_caches]
        if caches != self._checked:  # mostly, they are those of the step before
            cpu.check_caches(kv_caches)
            self._checked = caches
        return cpu.decoder_layers(
            self.weights, self.addresses, self.norm.weight.numpy(), x, positions, kv_caches[0], np.array(caches, np.int64),
            metadata.slot_mapping, metadata.block_tables, metadata.context_lens, metadata.query_start_loc, bool(metadata.is_decode),
            *self.settings, self.norm.eps,
        )  # fmt: skip


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
    return CompiledAttention(weights, (backend.num_heads // backend.num_kv_heads, backend.scale, norm.eps), output.group)


def is_compiled(backend_cls: type[AttentionBackend]) -> bool:
    """Whether compiled code may stand in for the backend's `forward`."""
    return backend_cls.forward is CPUAttentionBackend.forward


def compile_mlp(norm: RMSNorm, gate_up: Linear, down: RowParallelLinear) -> CompiledMLP | None:
    """Norm, SwiGLU and down projection; None if the linear layers cannot be compiled."""
    arrays = _packed_arrays(gate_up, down)
    if arrays is None:
        return None
    from minivllm.kernels import cpu

    return CompiledMLP(cpu.MLPWeights(norm.weight.numpy(), arrays[0], arrays[1]), norm.eps, down.group)


def _packed_arrays(*linears: Linear) -> list[Any] | None:
    """The packed weights as arrays; None if they are not packed, not all alike, or of a width that leaves a panel unfilled."""
    packed = [linear.method.packed for linear in linears]
    if None in packed or len({type(weight) for weight in packed}) > 1 or any(not weight.fills_panels for weight in packed):
        return None
    return [weight.arrays for weight in packed]
