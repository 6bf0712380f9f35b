"""What every implementation of an operation checks before it runs: a clear sentence instead of a wrong answer.

A kernel takes addresses and trusts its lengths: a length beyond its block table would make it read another sequence's
memory. Shapes, dtypes, devices and strides are known on the host, and checking them costs microseconds. The numbers inside
tensors (slots, block tables, lengths, positions) must be read back, which on a GPU waits for all earlier work. The model
runner validates those once per step for all layers, so the engine's own calls skip them: see `Ops`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import IntEnum
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from minivllm.errors import KernelError

MAY_BE_ZERO = {"num_tokens", "num_seqs", "num_rows", "num_blocks", "max_blocks", "max_position"}

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
        rules: What its arguments must be.
        checks: What is checked of them.
    """

    def __init__(self, function: Callable[P, R], rules: Rules, checks: Checks = Checks.ALL) -> None:
        self.unchecked = function
        self._rules = rules
        self._checks = checks
        self._signature = inspect.signature(function)
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Check the arguments, and run it."""
        arguments = self._signature.bind(*args, **kwargs).arguments
        self._rules.check_shapes(arguments)
        if self._checks == Checks.ALL and self._rules.check_numbers is not None:
            self._rules.check_numbers(**arguments)
        return self.unchecked(*args, **kwargs)

    def with_checks(self, checks: Checks) -> Callable[P, R]:
        """The operation with these checks."""
        return self.unchecked if checks == Checks.NONE else Operation(self.unchecked, self._rules, checks)


class Rules:
    """What the tensors that an operation takes must be; a decorator that makes a function an `Operation`.

    A tensor may be None if the operation takes that. A shape is written as in the docstrings of `reference`. A size has one
    value wherever its name stands: `2*size` is twice as much, `num_seqs+1` one more; `...` is any dimensions.

    Args:
        floats: Names and shapes of tensors that share a float dtype.
        integers: Of int32 or int64 tensors.
        float32: Of contiguous float32 tensors.
        written: Names of the tensors that are written to.
        check_numbers: Takes the arguments by name, and raises a KernelError if the numbers in them are wrong.
    """

    def __init__(
        self,
        floats: dict[str, str] | None = None,
        integers: dict[str, str] | None = None,
        float32: dict[str, str] | None = None,
        written: tuple[str, ...] = (),
        check_numbers: Callable[..., None] | None = None,
    ) -> None:
        self._floats, self._integers, self._float32 = floats or {}, integers or {}, float32 or {}
        self._shapes = {name: shape.split() for name, shape in (self._floats | self._float32 | self._integers).items()}
        self._written = written
        self.check_numbers = check_numbers

    def __call__(self, function: Callable[P, R]) -> Operation[P, R]:
        """The function with these rules."""
        return Operation(function, self)

    def check_shapes(self, arguments: dict[str, Any]) -> None:
        """Raise a KernelError if a tensor is not as it must be."""
        first, *_ = self._shapes
        dtype, device = arguments[first].dtype, arguments[first].device
        sizes: dict[str, Any] = {}
        for name, shape in self._shapes.items():
            x: Tensor | None = arguments.get(name)
            if x is None:
                continue
            _check_shape(name, x, shape, sizes)
            if name in self._integers and x.dtype not in (torch.int32, torch.int64):
                raise KernelError(f"{name} has dtype {dtype_name(x)}, but must be int32 or int64.")
            if name in self._floats and not x.is_floating_point():
                raise KernelError(f"{name} has dtype {dtype_name(x)}, but must be a float type.")
            if name in self._floats and x.dtype != dtype:
                other = dtype_name(arguments[first])
                raise KernelError(f"{name} has dtype {dtype_name(x)}, but {first} has {other}: they must be the same.")
            if x.device != device:
                raise KernelError(f"{name} is on {x.device}, but {first} on {device}: they must be on one device.")
            if x.is_neg():
                raise KernelError(f"{name} is a view that is negated when it is read: use .resolve_neg().")
            if x.stride(-1) != 1 and x.shape[-1] > 1:
                raise KernelError(f"{name} has stride {x.stride(-1)} in its last dimension, but must have 1: use .contiguous().")
            if name in self._float32 and (x.dtype != torch.float32 or not x.is_contiguous()):
                raise KernelError(f"{name} has dtype {dtype_name(x)} and strides {x.stride()}, but must be contiguous float32.")
            if name in self._written and any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
                raise KernelError(f"{name} is an expanded tensor, whose rows share their memory: use .contiguous().")


def _check_shape(name: str, x: Tensor, shape: list[str], sizes: dict[str, Any]) -> None:
    """Compare a tensor's shape with the `sizes` known from earlier tensors, and add the new ones."""
    lengths: list[Any] = list(x.shape)
    if shape[0] == "...":
        num_leading = x.dim() - len(shape) + 1
        lengths = [x.shape[:num_leading], *x.shape[num_leading:]]
    fits, new = len(lengths) == len(shape), []
    for dimension, length in zip(shape, lengths, strict=False):
        size, step = dimension, 1
        if not dimension.isidentifier():
            factor, _, size = dimension.removesuffix("+1").rpartition("*")
            step = sizes.get(factor) or int(factor or 1)
            length = length if not dimension.endswith("+1") else length - 1
        if size not in sizes:
            if length == 0 and size not in MAY_BE_ZERO:
                raise KernelError(f"{name} is {list(x.shape)}, but its {size} must be at least 1.")
            new.append(size)
            sizes[size] = length // step if step > 1 else length
        fits = fits and step * sizes[size] == length
    if not fits:
        values = ", ".join(f"{size} = {sizes[size]}" for size in sizes if size in " ".join(shape) and size not in new)
        raise KernelError(f"{name} is {list(x.shape)}, but must be [{', '.join(shape)}]{values and f' with {values}'}.")


def check_slots(key_cache: Tensor, slot_mapping: Tensor, **_: Any) -> None:
    """Slots that the cache has."""
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    if slot_mapping.numel() and int(slot_mapping.max()) >= num_slots:
        raise KernelError(f"slot_mapping names slot {int(slot_mapping.max())}, but the cache has {num_slots} slots.")


def check_decode_numbers(key_cache: Tensor, block_tables: Tensor, context_lens: Tensor, window: int = 0, **_: Any) -> None:
    """Lengths that fit the tables, tables that name blocks of the cache, and a window that is one."""
    if window < 0:
        raise KernelError(f"window is {window}, but must be a number of tokens, or 0 for no window.")
    num_blocks, block_size = key_cache.shape[:2]
    max_blocks = block_tables.shape[1]
    lengths = context_lens.cpu()
    wrong_lengths = lengths[(lengths < 0) | (lengths > max_blocks * block_size)]
    if wrong_lengths.numel():
        raise KernelError(
            f"context_lens has {int(wrong_lengths[wrong_lengths.abs().argmax()])}, but a table of {max_blocks} blocks of "
            f"{block_size} holds 0 to {max_blocks * block_size} tokens."
        )
    used = torch.arange(max_blocks) * block_size < lengths[:, None]
    blocks = block_tables.cpu()[used]
    wrong_blocks = blocks[(blocks < 0) | (blocks >= num_blocks)]
    if wrong_blocks.numel():
        raise KernelError(f"block_tables names block {int(wrong_blocks[0])}, but the cache has {num_blocks} blocks.")


def check_prefill_numbers(query: Tensor, context_lens: Tensor, query_start_loc: Tensor, **others: Any) -> None:
    """As `check_decode_numbers`; and starts in order, with no more new tokens than a context has."""
    check_decode_numbers(context_lens=context_lens, **others)
    starts, lengths = query_start_loc.cpu(), context_lens.cpu()
    query_lens = starts.diff()
    if int(starts[0]) != 0 or bool((query_lens < 0).any()) or int(starts[-1]) > query.shape[0]:
        raise KernelError(
            f"query_start_loc must begin with 0, never fall, and end with at most the {query.shape[0]} rows of query; it is "
            f"{starts.tolist()[:20]}."
        )
    if bool((query_lens > lengths).any()):
        i = int((query_lens > lengths).nonzero()[0])
        new, context_len = int(query_lens[i]), int(lengths[i])
        raise KernelError(f"Sequence {i} has {new} new tokens, but a context of only {context_len}, which includes them.")


def check_positions(positions: Tensor, cos: Tensor, **_: Any) -> None:
    """Positions that the tables have."""
    low, high = map(int, positions.aminmax()) if len(positions) else (0, 0)
    if len(positions) and not 0 <= low <= high < len(cos):
        raise KernelError(f"positions go from {low} to {high}, but cos and sin have the rows 0 to {len(cos) - 1}.")


def check_slots_and_positions(**arguments: Any) -> None:
    """Both."""
    check_slots(**arguments)
    check_positions(**arguments)


def check_block_pairs(source: Tensor, destination: Tensor, pairs: list[tuple[int, int]]) -> None:
    """Caches of one number and blocks of one shape, on one device, and pairs that name blocks in them."""
    shapes = [(x.shape[0], *x.shape[2:]) if x.dim() == 5 else None for x in (source, destination)]
    if None in shapes or shapes[0] != shapes[1]:
        raise KernelError(
            f"The caches are {list(source.shape)} and {list(destination.shape)}: only as many caches, with blocks of one shape, "
            "can be copied."
        )
    for name, one, other in (
        ("dtypes", dtype_name(source), dtype_name(destination)),
        ("devices", source.device, destination.device),
    ):
        if one != other:
            raise KernelError(f"The caches have the {name} {one} and {other}: they must be the same.")
    num_sources, num_destinations = source.shape[1], destination.shape[1]
    for pair in pairs:
        if not (0 <= pair[0] < num_sources and 0 <= pair[1] < num_destinations):
            raise KernelError(
                f"Block {pair[0]} was to be copied to block {pair[1]}, but the caches have {num_sources} and "
                f"{num_destinations} blocks."
            )
    if len({pair[1] for pair in pairs}) < len(pairs):
        raise KernelError("Two blocks were to be copied to the same block.")


def dtype_name(x: Tensor) -> str:
    """A tensor's dtype, for messages."""
    return str(x.dtype).removeprefix("torch.")


_CACHE = "num_blocks block_size num_kv_heads head_dim"
_CACHES = {"key_cache": _CACHE, "value_cache": _CACHE}
_TABLES = {"context_lens": "num_seqs", "block_tables": "num_seqs max_blocks"}

RESHAPE_AND_CACHE = Rules(
    {**_CACHES, "key": "num_tokens num_kv_heads head_dim", "value": "num_tokens num_kv_heads head_dim"},
    integers={"slot_mapping": "num_tokens"},
    written=("key_cache", "value_cache"),
    check_numbers=check_slots,
)
DECODE = Rules({**_CACHES, "query": "num_seqs num_kv_heads*group head_dim"}, integers=_TABLES, check_numbers=check_decode_numbers)
PREFILL = Rules(
    {**_CACHES, "query": "num_tokens num_kv_heads*group head_dim"},
    integers={**_TABLES, "query_start_loc": "num_seqs+1"},
    check_numbers=check_prefill_numbers,
)
RMS_NORM = Rules({"x": "... size", "weight": "size"})
ADD_RMS_NORM = Rules({"x": "... size", "residual": "... size", "weight": "size"})
ROTARY_EMBEDDING = Rules(
    {"query": "num_tokens num_heads 2*pairs", "key": "num_tokens num_kv_heads 2*pairs"},
    integers={"positions": "num_tokens"},
    float32={"cos": "max_position pairs", "sin": "max_position pairs"},
    check_numbers=check_positions,
)
NORM_ROPE_AND_CACHE = Rules(
    {
        "query": "num_tokens num_heads 2*pairs",
        "key": "num_tokens num_kv_heads 2*pairs",
        "value": "num_tokens num_kv_heads 2*pairs",
        "key_cache": "num_blocks block_size num_kv_heads 2*pairs",
        "value_cache": "num_blocks block_size num_kv_heads 2*pairs",
        "query_weight": "2*pairs",
        "key_weight": "2*pairs",
    },
    integers={"positions": "num_tokens", "slot_mapping": "num_tokens"},
    float32={"cos": "max_position pairs", "sin": "max_position pairs"},
    written=("key_cache", "value_cache"),
    check_numbers=check_slots_and_positions,
)
SILU_AND_MUL = Rules({"x": "num_tokens 2*size"})
DRAW = Rules(
    {"logits": "num_rows vocab_size"},
    integers={"keys": "num_rows"},
    float32={"temperature": "num_rows", "thresholds": "num_rows"},
)
PENALIZE = Rules(
    {"logits": "num_rows vocab_size"},
    integers={
        "rows": "penalized",
        "slots": "penalized",
        "counts": "num_slots vocab_size",
    },
    float32={"repetition": "penalized", "presence": "penalized", "frequency": "penalized"},
    written=("logits",),
)
FILTER_THRESHOLDS = Rules(
    {"logits": "num_rows vocab_size"},
    integers={"top_k": "num_rows"},
    float32={"temperature": "num_rows", "min_p": "num_rows", "top_p": "num_rows"},
)
