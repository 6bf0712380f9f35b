"""Paged prefill attention: a ragged batch of prompts, chunks behind a cached prefix, and decodes.

Arithmetic is the limit here, not memory: a tile of keys and values is loaded once for many queries, as FlashAttention (Dao et al., 2022,
arXiv:2205.14135) does in a GPU's shared memory. The queries are the columns of all matrices, 16 of them in a vector:

    scores  = keys [tokens, channels] @ queries [channels, columns]
    weights = 2 ** (scores - the largest of their column so far)
    output += values.T [channels, tokens] @ weights [tokens, columns]

Both products are those of the linear layers (`panels`), with queries and weights in the place of a packed weight, and the softmax between
them needs no sum or maximum across a vector.

A sequence with a single new token is left to the decode kernel, so that its numbers are the same whether or not its batch has prompts. (The
last token of a prompt, if it is a chunk by itself, is computed so too: its sums have another order than in a longer chunk.)
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload
from torch import Tensor

from minivllm.kernels import checks
from minivllm.kernels.cpu.decode_attention import _decode
from minivllm.kernels.cpu.launch import as_numpy, check_launch, constant, use_threads_of_torch
from minivllm.kernels.cpu.native.features import HAS_BFLOAT16_AMX, HAS_BFLOAT16_DOT
from minivllm.kernels.cpu.native.thread_pool import parallel_for
from minivllm.kernels.cpu.prefill_bfloat16 import attend_bfloat16
from minivllm.kernels.cpu.prefill_float32 import attend_float32

QUERY_TILE = 64
"""Query tokens that share a tile of the cache."""


@checks.PREFILL
def paged_prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Causal attention of a ragged batch: see `reference.paged_prefill_attention`."""
    check_launch(key_cache)
    queries, keys, values = (as_numpy(x) for x in (query.float().contiguous(), key_cache, value_cache))
    result = query.new_empty(query.shape, dtype=torch.float32)
    _prefill(
        queries, keys, values, block_tables.numpy(), context_lens.numpy(), query_start_loc.numpy(), np.float32(scale),
        window, use_threads_of_torch(), result.numpy(), constant(query.shape[2]), constant(query.shape[1] // key_cache.shape[2]),
    )  # fmt: skip
    return result.to(query.dtype)


@njit(error_model="numpy")
def _order_tiles(starts, context_lens, window):
    """The query tiles of a prefill, those with the most work first: threads take one after the other, and the last are short.

    A tile's work is the context that it sees, at most the window. Sequences of one token have none: they are decodes.

    Returns:
        `[tiles, 2]`: the sequence of each tile, and its first row in it.
    """
    tiles = np.empty((starts[-1] // QUERY_TILE + len(context_lens), 2), np.int64)
    work, count = np.empty(len(tiles), np.int64), 0
    for seq in range(len(context_lens)):
        num_tokens = starts[seq + 1] - starts[seq]
        if num_tokens > 1:
            for first in range(0, num_tokens, QUERY_TILE):
                tiles[count] = seq, first
                work[count] = context_lens[seq] - num_tokens + first
                if window > 0:
                    work[count] = min(work[count], window)
                count += 1
    return tiles[:count][np.argsort(-work[:count])]


def attend(*arguments):
    """One KV head for a tile of query tokens, by whichever instructions suit the cache."""
    raise NotImplementedError("only within compiled functions")


@overload(attend)
def _compile_attend(query, key_cache, value_cache, table, kv_head, position, scale, window, out, channels, group):
    kernel = attend_bfloat16 if (HAS_BFLOAT16_AMX or HAS_BFLOAT16_DOT) and key_cache.dtype == types.int16 else attend_float32
    return lambda query, key_cache, value_cache, table, kv_head, position, scale, window, out, channels, group: kernel(
        query, key_cache, value_cache, table, kv_head, position, scale, window, out, channels, group
    )


@njit(error_model="numpy")
def _prefill_part(
    part, tiles, query, key_cache, value_cache, block_tables, context_lens, starts, scale, window, out, channels, group
):
    """A KV head of a tile of queries."""
    num_kv_heads = key_cache.shape[2]
    seq, first = tiles[part // num_kv_heads]
    start, end = starts[seq] + first, min(starts[seq] + first + QUERY_TILE, starts[seq + 1])
    position = context_lens[seq] - (starts[seq + 1] - start)
    attend(
        query[start:end], key_cache, value_cache, block_tables[seq], part % num_kv_heads, position, scale, window,
        out[start:end], channels, group,
    )  # fmt: skip


@njit(error_model="numpy")
def _decode_some(
    query, key_cache, value_cache, block_tables, context_lens, starts, scale, window, num_threads, out, channels, group
):
    """The sequences with a single new token."""
    seqs = np.flatnonzero(starts[1:] - starts[:-1] == 1)
    if len(seqs) > 0:
        rows = starts[seqs]
        attended = np.empty((len(rows), query.shape[1], query.shape[2]), np.float32)
        _decode(
            query[rows], key_cache, value_cache, block_tables[seqs], context_lens[seqs], scale, window, num_threads, attended, channels,
            group,
        )  # fmt: skip
        for i in range(len(rows)):
            out[rows[i]] = attended[i]


@njit(error_model="numpy", cache=True)
def _prefill(query, key_cache, value_cache, block_tables, context_lens, starts, scale, window, num_threads, out, channels, group):
    """All sequences; the rows after them become 0."""
    out[starts[-1] :] = 0
    _decode_some(
        query, key_cache, value_cache, block_tables, context_lens, starts, scale, window, num_threads, out, channels, group
    )
    tiles = _order_tiles(starts, context_lens, window)
    parallel_for(
        num_threads, len(tiles) * key_cache.shape[2], _prefill_part,
        (tiles, query, key_cache, value_cache, block_tables, context_lens, starts, scale, window, out, channels, group),
    )  # fmt: skip
