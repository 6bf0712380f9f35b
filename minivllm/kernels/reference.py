"""Every operation in plain torch: the definition that the faster implementations are tested against.

The KV cache of a layer is two tensors, keys and values, each `[num_blocks, block_size, num_kv_heads, head_dim]`. A slot
is the place of one token: `block * block_size + offset`. A block table lists the blocks of a sequence in order, so token i
of a sequence is in slot `table[i // block_size] * block_size + i % block_size` (Kwon et al., 2023,
arXiv:2309.06180).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.kernels import checks
from minivllm.kernels.reference_sampling import draw, filter_thresholds, mix, penalize, random_uniform  # noqa: F401


@checks.RESHAPE_AND_CACHE
def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write new keys and values to their slots, in place.

    Args:
        key, value: `[num_tokens, num_kv_heads, head_dim]`.
        key_cache, value_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`.
        slot_mapping: `[num_tokens]`, the slot of each token; negative for padding, which is not written.
    """
    block_size = key_cache.shape[1]
    if bool((slot_mapping < 0).any()):
        kept = slot_mapping >= 0
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    key_cache[blocks, offsets] = key
    value_cache[blocks, offsets] = value


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


@checks.DECODE
def paged_decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Attention of one new token per sequence over all its cached tokens, itself included, or the last `window` of them.

    Args:
        query: `[num_seqs, num_heads, head_dim]`.
        key_cache, value_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`. Whole blocks are read here, so
            what follows a context in its last block must be finite.
        block_tables: `[num_seqs, max_blocks]`; entries beyond a context are ignored, but must name blocks.
        context_lens: `[num_seqs]`, cached tokens of each sequence; 0 for padding, whose output is 0.
        scale: What the scores are multiplied by, usually `head_dim ** -0.5`.
        window: Sliding-window attention (Beltagy et al., 2020, arXiv:2004.05150; Jiang et al., 2023, arXiv:2310.06825): each
            token sees that many tokens, itself included; 0 for all. Blocks wholly before the window are not read.

    Returns:
        `[num_seqs, num_heads, head_dim]`.
    """
    num_seqs, num_heads, head_dim = query.shape
    lengths = context_lens
    if window:
        block_tables, lengths = skip_blocks(block_tables, context_lens, window, key_cache.shape[1])
    keys = gather_blocks(key_cache, block_tables)
    values = gather_blocks(value_cache, block_tables)
    num_kv_heads, max_context = keys.shape[1], keys.shape[2]
    # The query heads that share a KV head become the rows of one small matrix, so that no key is repeated.
    grouped = query.reshape(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    positions = torch.arange(max_context, device=query.device)
    visible = positions < lengths[:, None]
    if window:
        visible &= positions >= lengths[:, None] - window
    output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=visible[:, None, None, :], scale=scale)
    output = output.masked_fill((context_lens == 0)[:, None, None, None], 0)
    return output.reshape(num_seqs, num_heads, head_dim)


def skip_blocks(block_tables: Tensor, context_lens: Tensor, window: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Block tables without the blocks wholly before the last `window` tokens, and the lengths that are left.

    Returns:
        `[num_seqs, blocks that a window can touch]` and `[num_seqs]`.
    """
    first_blocks = (context_lens - window).clamp(min=0) // block_size
    num_blocks = min(block_tables.shape[1], -(-window // block_size) + 1)
    columns = first_blocks[:, None] + torch.arange(num_blocks, device=block_tables.device)
    columns = columns.clamp(max=max(0, block_tables.shape[1] - 1)).long()
    return block_tables.gather(1, columns), context_lens - first_blocks * block_size


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
    """Causal attention of a ragged batch: the last tokens of each sequence, one or many, attend to its whole context.

    A prompt, a chunk after a cached prefix and a decode differ only in how many tokens are new.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, one sequence after another; their keys and values are in the cache.
        key_cache, value_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`.
        block_tables: `[num_seqs, max_blocks]`; entries beyond a context are ignored.
        context_lens: `[num_seqs]`, cached tokens of each sequence, including the new ones.
        query_start_loc: `[num_seqs + 1]`: sequence i has rows `query_start_loc[i]` to `query_start_loc[i + 1] - 1`.
            Rows after the last sequence are padding, and their output is 0.
        scale: What the scores are multiplied by.
        window: As for a decode: the token at position p sees those from p - window + 1 on. Blocks wholly before the window of a
            sequence's first new token are not read.

    Returns:
        `[num_tokens, num_heads, head_dim]`.
    """
    output = torch.zeros_like(query)
    block_size = key_cache.shape[1]
    starts = query_start_loc.tolist()
    for i, context_len in enumerate(context_lens.tolist()):
        start, end = starts[i], starts[i + 1]
        if start < end:
            first_block = max(0, context_len - (end - start) - window + 1) // block_size if window else 0
            block_table = block_tables[i : i + 1, first_block : -(-context_len // block_size)]
            num_keys = context_len - first_block * block_size
            keys = gather_blocks(key_cache, block_table)[0, :, :num_keys]
            values = gather_blocks(value_cache, block_table)[0, :, :num_keys]
            output[start:end] = causal_attention(query[start:end], keys, values, scale, window)
    return output


def causal_attention(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int = 0) -> Tensor:
    """Attention of the last tokens of one sequence over its keys and values.

    Args:
        query: `[num_tokens, num_heads, head_dim]`.
        keys, values: `[num_kv_heads, context_len, head_dim]`.
        scale: What the scores are multiplied by.
        window: The keys that each token sees, its own included; 0 for all before it.

    Returns:
        `[num_tokens, num_heads, head_dim]`.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, context_len = keys.shape[:2]
    grouped = query.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(1, 2, 0, 3)
    keys = keys[:, None].expand(-1, grouped.shape[1], -1, -1)
    values = values[:, None].expand(-1, grouped.shape[1], -1, -1)
    if context_len == num_tokens and not window:
        output = F.scaled_dot_product_attention(grouped, keys, values, is_causal=True, scale=scale)
    else:
        visible = torch.ones(num_tokens, context_len, dtype=torch.bool, device=query.device)
        visible = visible.tril(context_len - num_tokens)
        if window:
            visible = visible.triu(context_len - num_tokens - window + 1)
        output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=visible, scale=scale)
    return output.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)


@checks.RMS_NORM
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square of the last dimension, then scale. Zhang and Sennrich, 2019 (arXiv:1910.07467).

    Args:
        x: `[..., size]`; computed in float32, whatever its dtype.
        weight: `[size]`.
        eps: Added to the mean square.

    Returns:
        Same shape and dtype as `x`.
    """
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return weight * x32.to(x.dtype)


@checks.ADD_RMS_NORM
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add to the residual stream, and normalize the sum for the next layer.

    Args:
        x, residual: `[num_tokens, size]`.
        weight: `[size]`.
        eps: Added to the mean square.

    Returns:
        `rms_norm(x + residual)` and `x + residual`.
    """
    residual = x + residual
    return rms_norm.unchecked(residual, weight, eps), residual


@checks.ROTARY_EMBEDDING
def rotary_embedding(positions: Tensor, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate pairs of channels, i and i + head_dim / 2, by the angles of each token's position.

    Su et al., 2021 (arXiv:2104.09864), in the half-split layout that Llama checkpoints use.

    Args:
        positions: `[num_tokens]`.
        query: `[num_tokens, num_heads, head_dim]`.
        key: `[num_tokens, num_kv_heads, head_dim]`.
        cos, sin: `[max_position, head_dim / 2]`, float32: a row for each position, a column for each pair.

    Returns:
        The rotated query and key, of the same shapes and dtypes; the rotation is computed in float32.
    """
    cos = cos[positions].unsqueeze(1)
    sin = sin[positions].unsqueeze(1)

    def rotate(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    return rotate(query), rotate(key)


@checks.NORM_ROPE_AND_CACHE
def norm_rope_and_cache(
    positions: Tensor, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor,
    key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
    query_weight: Tensor | None = None, key_weight: Tensor | None = None, eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """What lies between the QKV product and attention: normalize the heads of queries and keys, if there are weights (Qwen3), rotate
    them, and write keys and values to their slots.

    Args:
        positions, query, key, cos, sin: As for `rotary_embedding`.
        value, key_cache, value_cache, slot_mapping: As for `reshape_and_cache`.
        query_weight, key_weight, eps: Of `rms_norm`, `[head_dim]`; None for no norm.

    Returns:
        The queries for attention, of the shape of `query`.
    """
    if query_weight is not None and key_weight is not None:
        query, key = rms_norm.unchecked(query, query_weight, eps), rms_norm.unchecked(key, key_weight, eps)
    query, key = rotary_embedding.unchecked(positions, query, key, cos, sin)
    reshape_and_cache.unchecked(key, value, key_cache, value_cache, slot_mapping)
    return query


@checks.SILU_AND_MUL
def silu_and_mul(x: Tensor) -> Tensor:
    """The gate of SwiGLU, `silu(first half) * second half`. Shazeer, 2020 (arXiv:2002.05202).

    Args:
        x: `[num_tokens, 2 * size]`.

    Returns:
        `[num_tokens, size]`.
    """
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


HADAMARD_BLOCK = 64
"""`hadamard_transform` fills rows up to a multiple of this."""


def hadamard_transform(x: Tensor) -> Tensor:
    """Mix the numbers of a row: each becomes a sum of up to all of them, half with the sign changed.

    A Hadamard matrix H is symmetric, of numbers 1 and -1, and `H @ H = order * I`. So `(x @ H) @ (W @ H).T / order = x @ W.T`: a linear layer
    whose input and weight are both transformed computes the same. But a single large number, an *outlier*, has become many of middling size,
    and then few bits are enough for all of them (Ashkboos et al., 2024, "QuaRot", arXiv:2404.00456).

    The order is `hadamard_order`, the largest power of two that divides the filled-up length: blocks of that size are mixed. The matrix
    is never built. In steps of 1, 2, 4, ... two halves `a` and `b` become `a + b` and `a - b`: the fast Walsh-Hadamard transform.

    Args:
        x: `[rows, size]`.

    Returns:
        `[rows, size filled up with zeros to a multiple of HADAMARD_BLOCK]`.
    """
    x = F.pad(x, (0, -x.shape[1] % HADAMARD_BLOCK))
    num_rows, size = x.shape
    half, order = 1, hadamard_order(size)
    while half < order:
        first, second = x.view(num_rows, size // (2 * half), 2, half).unbind(dim=2)
        x = torch.stack((first + second, first - second), dim=2).view(num_rows, size)
        half *= 2
    return x


def hadamard_order(size: int) -> int:
    """How many numbers `hadamard_transform` mixes in a row of `size`."""
    size += -size % HADAMARD_BLOCK
    return size & -size


def round_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Transform a weight, scale each row, and round it to 8-bit integers.

    Args:
        weight: `[out_features, in_features]`, float32.

    Returns:
        `[out_features, in_features filled up]` int8 and `[out_features]` float32: their product is about the transformed weight, divided by
        the order.
    """
    return round_transformed_weight(hadamard_transform(weight).div_(hadamard_order(weight.shape[1])))


def round_transformed_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`round_weight` of a weight that is transformed and divided already."""
    scales = (weight.abs().amax(dim=1) / 127).clamp_(min=1e-30)
    return (weight / scales[:, None]).round_().to(torch.int8), scales


def restore_weight(rounded: Tensor, scales: Tensor, in_features: int) -> Tensor:
    """Approximately the weight that `round_weight` was given: `[out_features, in_features]`."""
    return hadamard_transform(rounded.float() * scales[:, None])[:, :in_features].contiguous()


def unpack_inputs(
    packed: Tensor, input_ids: Tensor, positions: Tensor, slot_mapping: Tensor, context_lens: Tensor, block_tables: Tensor,
    query_start_loc: Tensor,
) -> None:  # fmt: skip
    """Spread a step, which came to the device in one piece, over the rows of the tensors that a CUDA graph reads.

    The numbers in `packed` decide what goes where, and only the device reads them.

    Args:
        packed: Bytes, each part from a multiple of 16 bytes on: the numbers of tokens and sequences, the width of the block tables, and 0
            (int32); input ids, positions and slots (int64); context lengths, block tables, and where the sequences begin (int32).
        input_ids, positions, slot_mapping: `[token rows]` int64, written. Rows without a token are padding: token 0 at position 0, slot -1.
        context_lens: `[sequence rows]` int32, written; 0 for padding.
        block_tables: `[sequence rows, max_blocks]` int32. What lies beyond the width, and in rows of padding, stays.
        query_start_loc: `[sequence rows + 1]` int32, written. Padding has no tokens: it begins where the last sequence ends.
    """
    numbers, halves = packed.view(torch.int64), packed.view(torch.int32)
    num_tokens, num_seqs, width, _ = halves[:4].unbind()
    tokens, seqs, columns = (
        torch.arange(size, device=packed.device) for size in (len(input_ids), len(query_start_loc), block_tables.shape[1])
    )

    def take(source: Tensor, start: Tensor | int, rows: Tensor, count: Tensor, padding: int) -> Tensor:
        return torch.where(rows < count, source[torch.where(rows < count, start + rows, 0)], padding)

    length = (num_tokens + 1) // 2 * 2
    for i, (out, padding) in enumerate(((input_ids, 0), (positions, 0), (slot_mapping, -1))):
        out.copy_(take(numbers, 2 + i * length, tokens, num_tokens, padding))
    lens = 4 + 6 * length
    tables = lens + (num_seqs + 3) // 4 * 4
    starts = tables + (num_seqs * width + 3) // 4 * 4
    query_start_loc.copy_(halves[starts + torch.minimum(seqs, num_seqs)])
    seqs = seqs[:-1]
    context_lens.copy_(take(halves, lens, seqs, num_seqs, 0))
    inside = (seqs < num_seqs)[:, None] & (columns < width)
    block_tables.copy_(
        torch.where(inside, halves[torch.where(inside, tables + seqs[:, None] * width + columns, 0)], block_tables)
    )


def copy_blocks(source: Tensor, destination: Tensor, pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks, each in all caches of a model. All sources are read before anything is written.

    Args:
        source, destination: `[num_caches, num_blocks, block_size, num_kv_heads, head_dim]` each, on one device: the keys and
            the values of each layer. They may be the same tensor.
        pairs: (block of the source, block of the destination), each destination at most once.
    """
    checks.check_block_pairs(source, destination, pairs)
    if pairs:
        sources, destinations = torch.tensor(pairs, device=source.device).unbind(1)
        destination[:, destinations] = source[:, sources]
