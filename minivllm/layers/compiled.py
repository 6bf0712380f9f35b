"""A decoder layer whose decode steps are one call of compiled code: see `kernels.cpu.decoder_layer`."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from minivllm.layers.attention import AttentionBackend, AttentionMetadata, KVCache
from minivllm.layers.attention_backends import CPUAttentionBackend
from minivllm.layers.linear import Linear
from minivllm.layers.norm import RMSNorm
from minivllm.layers.rotary import RotaryEmbedding


class CompiledDecoderLayer:
    """One Llama layer of a decode step, on the CPU.

    Args:
        cpu: The module of kernels.
        weights: Its `DecoderLayerWeights`.
        backend: For the shape of attention.
        eps: Of the norms.
    """

    def __init__(self, cpu: ModuleType, weights: tuple, backend: AttentionBackend, eps: float) -> None:
        self.kernel = cpu.decoder_layer
        self.max_rows = cpu.MAX_DECODER_ROWS
        self.weights = weights
        self.group = backend.num_heads // backend.num_kv_heads
        self.scale = backend.scale
        self.eps = eps

    @classmethod
    def make(
        cls, linears: list[Linear], norms: list[RMSNorm], rotary: RotaryEmbedding, backend: AttentionBackend
    ) -> CompiledDecoderLayer | None:
        """The compiled form of a layer, or None: its attention is not this package's on the CPU, or
        its weights are not packed, or are of a width that panels do not fill.

        Args:
            linears: qkv, output, gate and up, and down projections.
            norms: Those before attention and before the MLP.
            rotary: Position embedding.
            backend: Attention.
        """
        packed = [getattr(linear.forward, "packed", None) for linear in linears]
        if type(backend) is not CPUAttentionBackend or None in packed or len({type(weight) for weight in packed}) > 1:
            return None
        from minivllm.kernels import cpu

        if any(weight.out_features % cpu.PANEL for weight in packed):  # whole panels are written: they must end where a row ends
            return None
        arrays = [weight.arrays for weight in packed]
        vectors = [norm.weight.numpy() for norm in norms]
        weights = cpu.DecoderLayerWeights(*arrays, *vectors, rotary.cos.numpy(), rotary.sin.numpy())
        return cls(cpu, weights, backend, norms[0].eps)

    def takes(self, metadata: AttentionMetadata) -> bool:
        """Whether a step is one for it: a decode of few sequences."""
        return metadata.is_decode and len(metadata.context_lens) <= self.max_rows

    def __call__(
        self, x: Tensor, residual: Tensor, positions: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """As the layer's `forward`."""
        return self.kernel(
            self.weights, x, residual, positions, *kv_cache, metadata.slot_mapping, metadata.block_tables, metadata.context_lens,
            self.group, self.scale, self.eps,
        )  # fmt: skip
