"""Attention over a paged KV cache: what a step tells it, the interface of backends, and the torch backend.

Mirrors `vllm/v1/attention/backend.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.errors import ConfigError
from minivllm.kernels import reference

KVCache = tuple[Tensor, Tensor]
"""A layer's keys and values, each `[num_blocks, block_size, num_kv_heads, head_dim]`."""


MAX_GATHERED_TOKENS = 2**16
"""Cached tokens that the torch backend copies at a time when it decodes."""


@dataclass
class AttentionMetadata:
    """Where the tokens of a ragged batch belong. The tokens of all sequences stand one after another.

    Attributes:
        query_lens: New tokens of each sequence in this step: 1 for a decode, more for a prefill.
        context_lens: Tokens of each sequence in the cache, those of this step included.
        slot_mapping: `[num_tokens]`, the cache slot of each new token.
        block_tables: `[num_seqs, max_blocks]`, padded with 0.
        context_lens_tensor: `context_lens` on the device, `[num_seqs]`.
    """

    query_lens: list[int]
    context_lens: list[int]
    slot_mapping: Tensor
    block_tables: Tensor
    context_lens_tensor: Tensor


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


class TorchAttentionBackend(AttentionBackend):
    """The reference in plain torch. Runs everywhere; copies the cached blocks of each sequence before it attends."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        key_cache, value_cache = kv_cache
        reference.reshape_and_cache(key, value, key_cache, value_cache, metadata.slot_mapping)
        if max(metadata.query_lens) == 1:
            # A few sequences at a time, so that the copies of their blocks stay within bounds.
            rows = max(1, MAX_GATHERED_TOKENS // (metadata.block_tables.shape[1] * key_cache.shape[1]))
            parts = zip(
                query.split(rows), metadata.block_tables.split(rows), metadata.context_lens_tensor.split(rows), strict=True
            )
            outputs = [
                reference.paged_decode_attention(q, key_cache, value_cache, block_tables, context_lens, self.scale)
                for q, block_tables, context_lens in parts
            ]
            return torch.cat(outputs)
        output = torch.empty_like(query)
        block_size = key_cache.shape[1]
        start = 0
        for i, (query_len, context_len) in enumerate(zip(metadata.query_lens, metadata.context_lens, strict=True)):
            end = start + query_len
            block_table = metadata.block_tables[i, : -(-context_len // block_size)]
            output[start:end] = reference.paged_prefill_attention(
                query[start:end], key_cache, value_cache, block_table, context_len, self.scale
            )
            start = end
        return output


BACKENDS: dict[str, type[AttentionBackend]] = {"torch": TorchAttentionBackend}


def get_attention_backend(backend: str | type) -> type[AttentionBackend]:
    """The backend class of that name, or the class itself if one is given."""
    if isinstance(backend, type) and issubclass(backend, AttentionBackend):
        return backend
    if isinstance(backend, str) and backend in BACKENDS:
        return BACKENDS[backend]
    names = ", ".join(map(repr, BACKENDS))
    raise ConfigError(f"attention_backend is {backend!r}, but must be one of {names}, or an AttentionBackend subclass.")
