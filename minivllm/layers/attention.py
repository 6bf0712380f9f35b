"""Attention over a paged KV cache: what a step tells it, and the interface that a backend fills.

Mirrors `vllm/v1/attention/backend.py`. The backends are in `attention_backends.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from minivllm.kernels import reference

KVCache = tuple[Tensor, Tensor]
"""A layer's keys and values, each `[num_blocks, block_size, num_kv_heads, head_dim]`."""


@dataclass
class AttentionMetadata:
    """Where the tokens of a ragged batch belong. The tokens of all sequences stand one after another.

    Attributes:
        is_decode: Whether every sequence has one new token, as in a pure decode step.
        slot_mapping: `[num_tokens]` int64, the cache slot of each new token; negative for padding.
        block_tables: `[num_seqs, max_blocks]` int32, padded with 0.
        context_lens: `[num_seqs]` int32, tokens of each sequence in the cache, those of this step included; 0 for padding.
        query_start_loc: `[num_seqs + 1]` int32, the first row of each sequence, and the end of the last one.
    """

    is_decode: bool
    slot_mapping: Tensor
    block_tables: Tensor
    context_lens: Tensor
    query_start_loc: Tensor


class AttentionBackend(ABC):
    """Computes attention for all layers of a model; subclass it to plug in another.

    Args:
        num_heads: Query heads.
        num_kv_heads: Key and value heads; each serves `num_heads // num_kv_heads` query heads.
        head_dim: Channels of a head.
        scale: What the scores are multiplied by.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.ops = self.load_ops()

    @classmethod
    def load_ops(cls) -> ModuleType:
        """The norm, rotary, activation and block kernels that the model runs beside this backend: those of `reference`."""
        return reference

    @classmethod
    def supports_cuda_graphs(cls) -> bool:
        """Whether a decode can be captured: nothing in `forward` waits for the GPU or looks at numbers that only it has.

        A subclass of a backend that does, and that prints or reads a tensor, must say `False` again.
        """
        return False

    @abstractmethod
    def forward(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        """Write the new keys and values to the cache, then attend.

        Args:
            query: `[num_tokens, num_heads, head_dim]`.
            key, value: `[num_tokens, num_kv_heads, head_dim]`.
            kv_cache: The layer's cache, changed in place.
            metadata: Where the tokens belong.

        Returns:
            `[num_tokens, num_heads, head_dim]`.
        """
