"""Cache and attention operations in plain torch: the definition that every faster version is held against.

The KV cache of a layer is two tensors, keys and values, each `[num_blocks, block_size, num_kv_heads, head_dim]`. A slot
is one token's place in it: `block * block_size + offset`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write new keys and values to their slots, in place.

    Args:
        key, value: `[num_tokens, num_kv_heads, head_dim]`.
        key_cache, value_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`.
        slot_mapping: `[num_tokens]`, the slot of each token.
    """
    key_cache.view(-1, *key.shape[1:]).index_copy_(0, slot_mapping, key)
    value_cache.view(-1, *value.shape[1:]).index_copy_(0, slot_mapping, value)


def gather_blocks(cache: Tensor, block_tables: Tensor) -> Tensor:
    """Copy the blocks of each table next to each other.

    Args:
        cache: `[num_blocks, block_size, num_kv_heads, head_dim]`.
        block_tables: `[num_seqs, blocks]`.

    Returns:
        `[num_seqs, num_kv_heads, blocks * block_size, head_dim]`.
    """
    num_seqs, num_blocks = block_tables.shape
    _, block_size, num_kv_heads, head_dim = cache.shape
    gathered = cache.index_select(0, block_tables.reshape(-1))
    return gathered.view(num_seqs, num_blocks * block_size, num_kv_heads, head_dim).transpose(1, 2)


def paged_decode_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, context_lens: Tensor, scale: float
) -> Tensor:
    """Attention of one new token per sequence over all its cached tokens, itself included.

    Args:
        query: `[num_seqs, num_heads, head_dim]`.
        key_cache, value_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`.
        block_tables: `[num_seqs, max_blocks]`; what lies beyond a context is ignored.
        context_lens: `[num_seqs]`, cached tokens of each sequence.
        scale: What the scores are multiplied by, usually `head_dim ** -0.5`.

    Returns:
        `[num_seqs, num_heads, head_dim]`.
    """
    num_seqs, num_heads, head_dim = query.shape
    keys = gather_blocks(key_cache, block_tables)
    values = gather_blocks(value_cache, block_tables)
    num_kv_heads, max_context = keys.shape[1], keys.shape[2]
    # The query heads that share a KV head become the rows of one small matrix: no key is repeated.
    grouped = query.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    in_context = torch.arange(max_context, device=query.device) < context_lens[:, None]
    output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=in_context[:, None, None, :], scale=scale)
    return output.reshape(num_seqs, num_heads, head_dim)


def paged_prefill_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, context_len: int, scale: float
) -> Tensor:
    """Causal attention of the last `num_tokens` tokens of one sequence over all its cached tokens.

    Args:
        query: `[num_tokens, num_heads, head_dim]`; their keys and values are in the cache already.
        key_cache, value_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`.
        block_table: `[blocks]` of the sequence.
        context_len: Cached tokens, the new ones included.
        scale: What the scores are multiplied by.

    Returns:
        `[num_tokens, num_heads, head_dim]`.
    """
    num_tokens, num_heads, head_dim = query.shape
    keys = gather_blocks(key_cache, block_table[None])[0, :, None, :context_len]
    values = gather_blocks(value_cache, block_table[None])[0, :, None, :context_len]
    num_kv_heads = keys.shape[0]
    grouped = query.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(1, 2, 0, 3)
    keys = keys.expand(-1, grouped.shape[1], -1, -1)
    values = values.expand(-1, grouped.shape[1], -1, -1)
    if context_len == num_tokens:
        output = F.scaled_dot_product_attention(grouped, keys, values, is_causal=True, scale=scale)
    else:
        visible = torch.ones(num_tokens, context_len, dtype=torch.bool, device=query.device)
        visible = visible.tril(context_len - num_tokens)
        output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=visible, scale=scale)
    return output.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)


def copy_blocks(cache: Tensor, pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks within a cache, in place. All sources are read before anything is written."""
    sources, destinations = torch.tensor(pairs, device=cache.device).unbind(1)
    cache.index_copy_(0, destinations, cache.index_select(0, sources))


def swap_blocks(source_cache: Tensor, destination_cache: Tensor, pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks from one cache to another, which may lie on another device."""
    sources, destinations = torch.tensor(pairs).unbind(1)
    blocks = source_cache.index_select(0, sources.to(source_cache.device))
    destination_cache.index_copy_(0, destinations.to(destination_cache.device), blocks.to(destination_cache.device))
