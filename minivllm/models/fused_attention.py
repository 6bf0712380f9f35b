"""`LlamaAttention.forward` in fewer kernels, on a GPU; `LLM(enforce_eager=True)` runs it as it is written.

A decode step's kernels are short, so that their number counts. Two norms (Qwen3), the rotation and the write to the cache are one
launch here, with the same numbers. A part that a user has replaced, subclassed or hooked is called, as in any model.
"""

from __future__ import annotations

from torch import Tensor, nn

from minivllm.kernels.ops import Ops
from minivllm.layers.attention import AttentionMetadata, KVCache
from minivllm.layers.attention_backends import TritonAttentionBackend
from minivllm.layers.norm import RMSNorm
from minivllm.layers.platform import Platform
from minivllm.layers.rotary import RotaryEmbedding
from minivllm.models.llama import LlamaAttention


def fuse_attention(model: nn.Module, platform: Platform) -> int:
    """Let the attention layers of a loaded model use the fused kernel, where the platform has one. Returns how many do."""
    if platform.attention_backend is not TritonAttentionBackend or not hasattr(platform.kernels, "norm_rope_and_cache"):
        return 0
    layers = [part for part in model.modules() if type(part) is LlamaAttention]
    for layer in layers:
        layer.__class__ = FusedLlamaAttention  # another forward over the same parts, which a copy of the model keeps
        layer.ops = platform.ops
    return len(layers)


class FusedLlamaAttention(LlamaAttention):
    """`LlamaAttention` with one kernel between the QKV product and attention.

    Attributes:
        ops: The engine's operations, which its parts have, too, unless a user has given them others.
    """

    ops: Ops

    def forward(self, x: Tensor, positions: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        if not self._is_plain():
            return super().forward(x, positions, kv_cache, metadata)
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        ops, tables, lengths = self.backend.ops, metadata.block_tables, metadata.context_lens
        norm = () if self.q_norm is None or self.k_norm is None else (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        cos, sin = self.rotary.cos, self.rotary.sin
        q = ops.norm_rope_and_cache(positions, q, k, v, cos, sin, *kv_cache, metadata.slot_mapping, *norm)
        if metadata.is_decode:
            output = ops.paged_decode_attention(q, *kv_cache, tables, lengths, self.backend.scale, *self.backend.window_argument)
        else:
            starts, scale = metadata.query_start_loc, self.backend.scale
            output = ops.paged_prefill_attention(q, *kv_cache, tables, lengths, starts, scale, *self.backend.window_argument)
        return self.o_proj(output.flatten(1))

    def _is_plain(self) -> bool:
        """Whether the kernel does what the parts would do: they are the engine's own, without hooks, and all channels are rotated."""
        parts = [self.rotary] if self.q_norm is None or self.k_norm is None else [self.rotary, self.q_norm, self.k_norm]
        are_plain = all(
            type(part) in (RotaryEmbedding, RMSNorm)
            and part.ops is self.ops
            and not part._forward_hooks
            and not part._forward_pre_hooks
            for part in parts
        )
        are_plain = are_plain and len({part.eps for part in parts[1:]}) < 2 and type(self.backend) is TritonAttentionBackend
        return are_plain and self.rotary.rotates_all(self.head_dim)
