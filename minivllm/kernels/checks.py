"""What every implementation of an operation checks before it runs: a clear sentence instead of a wrong answer.

A kernel takes addresses and trusts its lengths: a length beyond its block table would make it read another sequence's
memory. Shapes, dtypes, devices and strides are known on the host, and checking them costs microseconds. The numbers inside
tensors (slots, block tables, lengths, positions) must be read back, which on a GPU waits for all earlier work. The model
runner validates those once per step for all layers, so the engine's own calls skip them: see `Ops`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from minivllm.errors import KernelError

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INT_DTYPES = (torch.int32, torch.int64)

P = ParamSpec("P")
R = TypeVar("R")


class Checks(IntEnum):
    """What an operation checks when it is called: nothing, what the host knows of its tensors, or the numbers in them too."""

    NONE = 0
    SHAPES = 1
    ALL = 2


class Operation(Generic[P, R]):
    """An operation that validates its arguments. Calling it checks everything; `with_checks` gives it with fewer checks.

    Args:
        function: Computes the operation.
        check_shapes, check_numbers: Take the same arguments, and raise a KernelError.
    """

    def __init__(
        self, function: Callable[P, R], check_shapes: Callable[..., None], check_numbers: Callable[..., None] | None
    ) -> None:
        self.unchecked = function
        self._check_shapes = check_shapes
        self._check_numbers = check_numbers
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it, with all checks."""
        self._check_shapes(*args, **kwargs)
        if self._check_numbers is not None:
            self._check_numbers(*args, **kwargs)
        return self.unchecked(*args, **kwargs)

    def with_checks(self, checks: Checks) -> Callable[P, R]:
        """The operation with at most these checks."""
        if checks == Checks.NONE:
            return self.unchecked
        return self if checks == Checks.ALL else Operation(self.unchecked, self._check_shapes, None)


def checked(
    check_shapes: Callable[..., None], check_numbers: Callable[..., None] | None = None
) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Decorator: validate the arguments of an operation before it runs."""
    return lambda function: Operation(function, check_shapes, check_numbers)


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


def check_slots(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Slots that the cache has."""
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    if slot_mapping.numel() and int(slot_mapping.max()) >= num_slots:
        raise KernelError(f"slot_mapping names slot {int(slot_mapping.max())}, but the cache has {num_slots} slots.")


def check_decode(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, context_lens: Tensor, *_: Any, **__: Any
) -> None:
    """Queries, tables and lengths that fit each other and the cache, one query for each sequence."""
    _check_attention(query, key_cache, value_cache, block_tables, context_lens)
    if query.shape[0] != len(context_lens):
        raise KernelError(
            f"query has {query.shape[0]} rows, but there are {len(context_lens)} sequences: a decode has one row each."
        )


def check_decode_numbers(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, context_lens: Tensor, *_: Any, **__: Any
) -> None:
    """Lengths that fit the tables, and tables that name blocks of the cache."""
    num_blocks, block_size = key_cache.shape[:2]
    capacity = block_tables.shape[1] * block_size
    lengths = context_lens.cpu()
    wrong_lengths = lengths[(lengths < 0) | (lengths > capacity)]
    if wrong_lengths.numel():
        raise KernelError(
            f"context_lens has {int(wrong_lengths[wrong_lengths.abs().argmax()])}, but a table of {block_tables.shape[1]} blocks of {block_size} holds 0 to "
            f"{capacity} tokens."
        )
    used = torch.arange(block_tables.shape[1]) * block_size < lengths[:, None]
    blocks = block_tables.cpu()[used]
    wrong_blocks = blocks[(blocks < 0) | (blocks >= num_blocks)]
    if wrong_blocks.numel():
        raise KernelError(f"block_tables names block {int(wrong_blocks[0])}, but the cache has {num_blocks} blocks.")


def check_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """Queries, tables, lengths and starts that fit each other and the cache."""
    _check_attention(query, key_cache, value_cache, block_tables, context_lens)
    num_seqs = len(context_lens)
    if tuple(query_start_loc.shape) != (num_seqs + 1,):
        raise KernelError(f"query_start_loc is {_shape(query_start_loc)}, but [{num_seqs + 1}] is needed: num_seqs + 1.")
    _check_integers("query_start_loc", query_start_loc, key_cache)


def check_prefill_numbers(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """As `check_decode_numbers`; and starts in order, with no more new tokens than a context has."""
    check_decode_numbers(query, key_cache, value_cache, block_tables, context_lens)
    starts, lengths = query_start_loc.cpu(), context_lens.cpu()
    query_lens = starts.diff()
    if int(starts[0]) != 0 or bool((query_lens < 0).any()) or int(starts[-1]) > query.shape[0]:
        raise KernelError(
            f"query_start_loc must begin with 0, never fall, and end with at most the {query.shape[0]} rows of query; it is "
            f"{starts.tolist()[:20]}."
        )
    if bool((query_lens > lengths).any()):
        i = int((query_lens > lengths).nonzero()[0])
        raise KernelError(
            f"Sequence {i} has {int(query_lens[i])} new tokens, but a context of only {int(lengths[i])}, which includes them."
        )


def _check_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, context_lens: Tensor) -> None:
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


def check_rms_norm(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> None:
    """A weight for each channel."""
    if x.dim() < 1 or tuple(weight.shape) != tuple(x.shape[-1:]) or weight.shape[0] == 0:
        raise KernelError(f"x is {_shape(x)} and weight {_shape(weight)}: [..., size] and [size] are needed.")
    _check_float("x", x)
    _check_rows("x", x)
    _check_like("weight", weight, "x", x)


def check_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *_: Any, **__: Any) -> None:
    """A weight for each channel, and a residual like `x`."""
    check_rms_norm(x, weight)
    if residual.shape != x.shape:
        raise KernelError(f"x is {_shape(x)}, but residual is {_shape(residual)}: they must be alike.")
    _check_like("residual", residual, "x", x)


def check_rotary_embedding(positions: Tensor, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> None:
    """Queries, keys and positions of the same tokens, and tables for heads of their size."""
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


def check_positions(positions: Tensor, query: Tensor, key: Tensor, cos: Tensor, *_: Any, **__: Any) -> None:
    """Positions that the tables have."""
    if len(positions) > 0 and not 0 <= int(positions.min()) <= int(positions.max()) < cos.shape[0]:
        raise KernelError(
            f"positions go from {int(positions.min())} to {int(positions.max())}, but cos and sin have the rows 0 to "
            f"{cos.shape[0] - 1}."
        )


def check_linear(weight: Any, x: Tensor) -> None:
    """Rows as wide as the packed weight, float32 on the CPU."""
    if x.dim() != 2 or x.shape[1] != weight.in_features:
        raise KernelError(f"x is {_shape(x)}, but the weight needs [num_tokens, {weight.in_features}].")
    if x.dtype != torch.float32 or x.device.type != "cpu":
        raise KernelError(f"x has dtype {_dtype(x)} on {x.device}, but a packed weight takes float32 on the CPU.")


def check_mlp_block(weights: Any, x: Tensor, residual: Tensor, *_: Any) -> None:
    """Rows as wide as the norm, and a residual like them, contiguous float32 on the CPU."""
    for name, rows in (("x", x), ("residual", residual)):
        if rows.shape != (len(x), len(weights.norm)) or rows.dtype != torch.float32 or not rows.is_contiguous():
            raise KernelError(
                f"{name} is {_shape(rows)} of {_dtype(rows)}, but [{len(x)}, {len(weights.norm)}] contiguous float32 is needed."
            )


def check_digits(x: Tensor, scales: Tensor | None = None) -> None:
    """Contiguous float32 rows on the CPU; with scales, two rows for each of them."""
    if x.dim() != 2 or x.shape[1] == 0 or (scales is not None and x.shape[0] != 2 * scales.shape[0]):
        needed = "[num_tokens, size]" if scales is None else f"[{2 * scales.shape[0]}, out_features]"
        raise KernelError(f"x is {_shape(x)}, but must be {needed}.")
    for name, tensor in (("x", x), ("scales", x if scales is None else scales)):
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise KernelError(
                f"{name} has dtype {_dtype(tensor)} on {tensor.device} and strides {tensor.stride()}, but must be float32 on the CPU "
                f"and contiguous."
            )


def check_silu_and_mul(x: Tensor, *_: Any, **__: Any) -> None:
    """Two halves side by side."""
    if x.dim() != 2 or x.shape[1] % 2 or x.shape[1] == 0:
        raise KernelError(f"x is {_shape(x)}, but must be [num_tokens, 2 * size].")
    _check_float("x", x)
    _check_rows("x", x)


def check_block_pairs(source: Tensor, destination: Tensor, pairs: list[tuple[int, int]]) -> None:
    """Caches with blocks of one shape, and pairs that name blocks in them."""
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


def prepare_out(out: Tensor | None, like: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """A tensor to write a result to: `out` if it is given and fits, else a new one.

    Args:
        out: What the caller gave.
        like: The input, whose dtype and device the result has.
        shape: Of the result; the input's if None.
    """
    shape = tuple(like.shape) if shape is None else shape
    if out is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    if tuple(out.shape) != shape:
        raise KernelError(f"out is {_shape(out)}, but must be [{', '.join(map(str, shape))}].")
    _check_like("out", out, "the input", like)
    _check_own_memory("out", out)
    if out.data_ptr() == like.data_ptr() and out.numel() > 0:
        raise KernelError("out is the input itself, which would be overwritten before it is read: give another tensor.")
    return out


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
