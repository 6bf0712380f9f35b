"""What every implementation of an operation checks before it starts: one clear sentence instead of a wrong answer.

A kernel takes addresses and believes its lengths; a length that does not fit its table would make it read another
sequence's memory, or nobody's. Shapes, dtypes, devices and strides are known on the host and cost microseconds. The
numbers inside tensors (slots, tables, lengths) must be read back, which on a GPU waits for all work before: an engine
that has checked them on the host, once for all layers of a step, leaves that out with `trusted()`. Wrong numbers then are not
found: a kernel writes to memory that is not its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from minivllm.errors import KernelError

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INT_DTYPES = (torch.int32, torch.int64)

_trusted: ContextVar[bool] = ContextVar("trusted", default=False)
_shapes_trusted: ContextVar[bool] = ContextVar("shapes_trusted", default=False)


@contextmanager
def trusted(shapes: bool = False) -> Iterator[None]:
    """Within this block, the numbers in tables, lengths, slots and positions are not read back to be checked.

    Args:
        shapes: Do not look at shapes, dtypes and strides either. An engine whose kernels are called by its own code alone does
            so: it calls hundreds in a step, and each look takes microseconds.
    """
    token, shapes_token = _trusted.set(True), _shapes_trusted.set(shapes)
    try:
        yield
    finally:
        _trusted.reset(token)
        _shapes_trusted.reset(shapes_token)


def _unless_trusted(check: Callable[..., None]) -> Callable[..., None]:
    """A check that is left out where shapes are trusted."""

    @wraps(check)
    def checked(*args: Any, **kwargs: Any) -> None:
        if not _shapes_trusted.get():
            check(*args, **kwargs)

    return checked


@_unless_trusted
def check_reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Keys, values and slots of the same tokens, and a cache that they fit into."""
    check_cache(key_cache, value_cache)
    _check_own_memory("key_cache", key_cache)
    _check_own_memory("value_cache", value_cache)
    num_tokens = slot_mapping.shape[0] if slot_mapping.dim() == 1 else -1
    for name, x in (("key", key), ("value", value)):
        if tuple(x.shape) != (num_tokens, *key_cache.shape[2:]):
            raise KernelError(
                f"{name} is {_shape(x)} and slot_mapping {_shape(slot_mapping)}, but the cache of {key_cache.shape[2]} heads of "
                f"{key_cache.shape[3]} needs [num_tokens, {key_cache.shape[2]}, {key_cache.shape[3]}] and [num_tokens]."
            )
        _check_like(name, x, "the cache", key_cache)
    _check_integers("slot_mapping", slot_mapping, key_cache)
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    if not _trusted.get() and num_tokens > 0 and int(slot_mapping.max()) >= num_slots:
        raise KernelError(f"slot_mapping names slot {int(slot_mapping.max())}, but the cache has {num_slots} slots.")


@_unless_trusted
def check_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor | None = None,
) -> None:
    """Queries that fit the cache, and tables and lengths that fit the queries."""
    check_cache(key_cache, value_cache)
    num_kv_heads, head_dim = key_cache.shape[2:]
    if query.dim() != 3 or query.shape[2] != head_dim or query.shape[1] == 0 or query.shape[1] % num_kv_heads:
        raise KernelError(
            f"query is {_shape(query)}, but the cache has {num_kv_heads} heads of {head_dim}: [rows, a multiple of "
            f"{num_kv_heads}, {head_dim}] is needed."
        )
    _check_like("query", query, "the cache", key_cache)
    num_seqs = context_lens.shape[0] if context_lens.dim() == 1 else -1
    if block_tables.dim() != 2 or block_tables.shape[0] != num_seqs:
        raise KernelError(
            f"block_tables is {_shape(block_tables)} and context_lens {_shape(context_lens)}: [num_seqs, max_blocks] and "
            f"[num_seqs] are needed."
        )
    _check_integers("block_tables", block_tables, key_cache)
    _check_integers("context_lens", context_lens, key_cache)
    if query_start_loc is None:
        if query.shape[0] != num_seqs:
            raise KernelError(f"query has {query.shape[0]} rows, but there are {num_seqs} sequences: a decode has one row each.")
    else:
        if tuple(query_start_loc.shape) != (num_seqs + 1,):
            raise KernelError(f"query_start_loc is {_shape(query_start_loc)}, but [{num_seqs + 1}] is needed: num_seqs + 1.")
        _check_integers("query_start_loc", query_start_loc, key_cache)
    if not _trusted.get() and num_seqs > 0:
        _check_lengths(query.shape[0], key_cache, block_tables, context_lens, query_start_loc)


def _check_lengths(
    num_tokens: int, key_cache: Tensor, block_tables: Tensor, context_lens: Tensor, query_start_loc: Tensor | None
) -> None:
    """Lengths that fit the tables, and tables that name blocks of the cache; all of it read back from the device."""
    num_blocks, block_size = key_cache.shape[:2]
    capacity = block_tables.shape[1] * block_size
    lengths = context_lens.cpu()
    if int(lengths.min()) < 0 or int(lengths.max()) > capacity:
        wrong = int(lengths.min()) if int(lengths.min()) < 0 else int(lengths.max())
        raise KernelError(
            f"context_lens has {wrong}, but a table of {block_tables.shape[1]} blocks of {block_size} holds 0 to {capacity} tokens."
        )
    used = torch.arange(block_tables.shape[1]) * block_size < lengths[:, None]
    blocks = block_tables.cpu()[used]
    if blocks.numel() and (int(blocks.min()) < 0 or int(blocks.max()) >= num_blocks):
        wrong = int(blocks.min()) if int(blocks.min()) < 0 else int(blocks.max())
        raise KernelError(f"block_tables names block {wrong}, but the cache has {num_blocks} blocks.")
    if query_start_loc is not None:
        starts = query_start_loc.cpu()
        query_lens = starts.diff()
        if int(starts[0]) != 0 or int(query_lens.min()) < 0 or int(starts[-1]) > num_tokens:
            raise KernelError(
                f"query_start_loc must begin with 0, never fall, and end with at most the {num_tokens} rows of query; it is "
                f"{starts.tolist()[:20]}."
            )
        if bool((query_lens > lengths).any()):
            i = int((query_lens > lengths).nonzero()[0])
            raise KernelError(
                f"Sequence {i} has {int(query_lens[i])} new tokens, but a context of only {int(lengths[i])}, which includes them."
            )


def check_cache(key_cache: Tensor, value_cache: Tensor) -> None:
    """Two caches of one shape, dtype and device."""
    if key_cache.dim() != 4 or key_cache.shape != value_cache.shape or 0 in key_cache.shape[1:]:
        raise KernelError(
            f"key_cache is {_shape(key_cache)} and value_cache {_shape(value_cache)}: both must be "
            f"[num_blocks, block_size, num_kv_heads, head_dim], with a block_size of at least 1."
        )
    if key_cache.dtype not in FLOAT_DTYPES:
        raise KernelError(f"key_cache has dtype {_dtype(key_cache)}, but must be a float type.")
    _check_rows("key_cache", key_cache)
    _check_like("value_cache", value_cache, "key_cache", key_cache)


@_unless_trusted
def check_rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    """A weight for each channel, and a residual like `x`."""
    if x.dim() < 1 or tuple(weight.shape) != tuple(x.shape[-1:]) or weight.shape[0] == 0:
        raise KernelError(f"x is {_shape(x)} and weight {_shape(weight)}: [..., size] and [size] are needed.")
    _check_float("x", x)
    _check_rows("x", x)
    _check_like("weight", weight, "x", x)
    if residual is not None:
        if residual.shape != x.shape:
            raise KernelError(f"x is {_shape(x)}, but residual is {_shape(residual)}: they must be alike.")
        _check_like("residual", residual, "x", x)


@_unless_trusted
def check_rotary_embedding(positions: Tensor, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Queries, keys and positions of the same tokens, and tables that hold every position."""
    if query.dim() != 3 or key.dim() != 3 or query.shape[::2] != key.shape[::2] or positions.shape != query.shape[:1]:
        raise KernelError(
            f"positions is {_shape(positions)}, query {_shape(query)} and key {_shape(key)}: [num_tokens], [num_tokens, "
            f"num_heads, head_dim] and [num_tokens, num_kv_heads, head_dim] are needed."
        )
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] != query.shape[2] or cos.shape[1] == 0:
        raise KernelError(
            f"cos is {_shape(cos)} and sin {_shape(sin)}, but heads of {query.shape[2]} need [max_position, "
            f"{query.shape[2] // 2}] (and an even head_dim)."
        )
    _check_float("query", query)
    _check_rows("query", query)
    _check_like("key", key, "query", query)
    _check_integers("positions", positions, query)
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype != torch.float32 or table.device != query.device or not table.is_contiguous():
            raise KernelError(
                f"{name} is {_dtype(table)} on {table.device}: a contiguous float32 table on {query.device} is needed."
            )
    if not _trusted.get() and len(positions) > 0 and not 0 <= int(positions.min()) <= int(positions.max()) < cos.shape[0]:
        raise KernelError(
            f"positions go from {int(positions.min())} to {int(positions.max())}, but cos and sin have the rows 0 to "
            f"{cos.shape[0] - 1}."
        )


@_unless_trusted
def check_linear(x: Tensor, in_features: int) -> None:
    """Rows of the width that the weight has, float32 on the CPU."""
    if x.dim() != 2 or x.shape[1] != in_features:
        raise KernelError(f"x is {_shape(x)}, but the weight needs [num_tokens, {in_features}].")
    if x.dtype != torch.float32 or x.device.type != "cpu":
        raise KernelError(f"x has dtype {_dtype(x)} on {x.device}, but a packed weight takes float32 on the CPU.")


@_unless_trusted
def check_digits(x: Tensor, scales: Tensor | None = None) -> None:
    """float32 rows; with scales, two for each of them."""
    if x.dim() != 2 or x.shape[1] == 0 or (scales is not None and x.shape[0] != 2 * scales.shape[0]):
        needed = "[num_tokens, size]" if scales is None else f"[{2 * scales.shape[0]}, out_features]"
        raise KernelError(f"x is {_shape(x)}, but must be {needed}.")
    for name, tensor in (("x", x), ("scales", x if scales is None else scales)):
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise KernelError(
                f"{name} has dtype {_dtype(tensor)} on {tensor.device} and strides {tensor.stride()}, but must be float32 on the CPU "
                f"and contiguous."
            )


@_unless_trusted
def check_silu_and_mul(x: Tensor) -> None:
    """Two halves side by side."""
    if x.dim() != 2 or x.shape[1] % 2 or x.shape[1] == 0:
        raise KernelError(f"x is {_shape(x)}, but must be [num_tokens, 2 * size].")
    _check_float("x", x)
    _check_rows("x", x)


def check_block_pairs(source: Tensor, destination: Tensor, pairs: list[tuple[int, int]]) -> None:
    """Caches of blocks alike, and pairs that name blocks of theirs."""
    if source.dim() != 4 or destination.dim() != 4 or source.shape[1:] != destination.shape[1:]:
        raise KernelError(f"The caches are {_shape(source)} and {_shape(destination)}: only blocks of one shape can be copied.")
    if source.dtype != destination.dtype:
        raise KernelError(f"The caches have dtypes {_dtype(source)} and {_dtype(destination)}: they must be the same.")
    for pair in pairs:
        if not (0 <= pair[0] < source.shape[0] and 0 <= pair[1] < destination.shape[0]):
            raise KernelError(
                f"Block {pair[0]} was to be copied to block {pair[1]}, but the caches have {source.shape[0]} and "
                f"{destination.shape[0]} blocks."
            )
    if len({pair[1] for pair in pairs}) < len(pairs):
        raise KernelError("Two blocks were to be copied to the same block.")


@_unless_trusted
def check_out(out: Tensor, like: Tensor, shape: tuple[int, ...]) -> None:
    """A tensor that a kernel is to write to."""
    if tuple(out.shape) != shape:
        raise KernelError(f"out is {_shape(out)}, but must be [{', '.join(map(str, shape))}].")
    _check_like("out", out, "the input", like)
    _check_own_memory("out", out)
    if out.data_ptr() == like.data_ptr() and out.numel() > 0:
        raise KernelError("out is the input itself, which would be overwritten before it is read: give another tensor.")


def _check_like(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    if x.dtype != other.dtype:
        raise KernelError(f"{name} has dtype {_dtype(x)}, but {other_name} has {_dtype(other)}: they must be the same.")
    if x.device != other.device:
        raise KernelError(f"{name} is on {x.device}, but {other_name} on {other.device}: they must be on one device.")
    _check_rows(name, x)


def _check_float(name: str, x: Tensor) -> None:
    if x.dtype not in FLOAT_DTYPES:
        raise KernelError(f"{name} has dtype {_dtype(x)}, but must be a float type.")


def _check_own_memory(name: str, x: Tensor) -> None:
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        raise KernelError(f"{name} is an expanded tensor, whose rows share their memory: use .contiguous() or another tensor.")


def _check_rows(name: str, x: Tensor) -> None:
    if x.is_neg():
        raise KernelError(f"{name} is a view that is negated when it is read: use .resolve_neg().")
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise KernelError(
            f"{name} has stride {x.stride(-1)} in its last dimension, but must be contiguous there: use .contiguous()."
        )


def _check_integers(name: str, x: Tensor, other: Tensor) -> None:
    if x.dtype not in INT_DTYPES:
        raise KernelError(f"{name} has dtype {_dtype(x)}, but must be int32 or int64.")
    if x.device != other.device:
        raise KernelError(f"{name} is on {x.device}, but the tensors are on {other.device}: they must be on one device.")
    _check_rows(name, x)


def _shape(x: Tensor) -> str:
    return f"[{', '.join(map(str, x.shape))}]"


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
