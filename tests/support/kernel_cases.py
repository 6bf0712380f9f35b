"""Random inputs for kernels, laid out so that a kernel which writes or reads where it should not is found out.

Every tensor that is written to lies between guard bands that must not change, and is filled with NaN before. What a kernel
has no business to read (slots behind a context, blocks of nobody) is NaN too, and would show in the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

GUARD = 64
GUARD_VALUE = 12345.0
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Largest norm of the difference over the norm; bfloat16 has 8 bits, and Triton's interpreter cuts instead of rounding."""


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm, in double precision; 0 where it is below what the result's type can hold."""
    unseen = torch.finfo(result.dtype).tiny * result.numel() ** 0.5
    result, expected = result.detach().cpu().double(), expected.cpu().double()
    difference = (result - expected).norm()
    return float(difference / expected.norm()) if difference > unseen or torch.isnan(difference) else 0.0


def assert_close(result: Tensor, expected: Tensor) -> None:
    assert result.shape == expected.shape
    assert not torch.isnan(result).any(), "something was not written, or read from where it should not have been"
    assert relative_error(result, expected) <= TOLERANCE[result.dtype]


@dataclass
class Guarded:
    """A tensor between guard bands, filled with NaN or the lowest integer; `stride` numbers lie between the beginnings of its rows."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    gap: int = 0
    buffer: Tensor = field(init=False)
    tensor: Tensor = field(init=False)

    def __post_init__(self) -> None:
        row = 1
        for size in self.shape[1:]:
            row *= size
        self.buffer = torch.full(
            (2 * GUARD + self.shape[0] * (row + self.gap),), GUARD_VALUE, dtype=self.dtype, device=self.device
        )
        inside = self.buffer[GUARD : GUARD + self.shape[0] * (row + self.gap)].view(self.shape[0], row + self.gap)
        self.tensor = inside[:, :row].unflatten(1, self.shape[1:]) if len(self.shape) > 1 else inside[:, 0]
        self.tensor.fill_(float("nan") if self.dtype.is_floating_point else torch.iinfo(self.dtype).min)

    def check(self) -> None:
        """The guard bands and the gaps between rows are as they were."""
        outside = self.buffer.clone()
        row = self.tensor[0].numel() if self.shape[0] else 0
        inside = outside[GUARD : len(outside) - GUARD].view(self.shape[0], -1) if self.shape[0] else outside[:0].view(0, 0)
        inside[:, :row] = GUARD_VALUE
        assert (outside == GUARD_VALUE).all(), "something was written outside of the tensor"


@contextmanager
def guarded_results() -> Iterator[None]:
    """What a kernel allocates with `new_empty` in this block is `Guarded`, and checked at the end."""
    made = []
    new_empty = Tensor.new_empty

    def allocate(
        like: Tensor, shape: int | tuple[int, ...], *more: int, dtype: torch.dtype | None = None, **options: Any
    ) -> Tensor:
        if options:  # Triton's interpreter copies tensors to the host
            return new_empty(like, shape, *more, dtype=dtype, **options)
        shape = (shape, *more) if isinstance(shape, int) else tuple(shape)
        made.append(Guarded(shape, dtype or like.dtype, like.device.type))
        return made[-1].tensor

    Tensor.new_empty = allocate
    try:
        yield
    finally:
        Tensor.new_empty = new_empty
    assert made, "nothing was allocated"
    for guarded in made:
        guarded.check()


HEADS = [(64, 3, 3), (32, 1, 2), (80, 2, 4), (96, 1, 8), (128, 2, 4), (256, 1, 1)]
"""(head_dim, KV heads, query heads to each)."""
BLOCK_SIZES = [8, 16, 32, 64, 7, 1]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CPU_SHAPES = [
    ((64, 3, 3), torch.float32, False),
    ((16, 1, 2), torch.bfloat16, False),
    ((80, 2, 4), torch.float16, True),
]
"""Heads, dtype and whether inputs are strided, for the CPU kernels. Numba takes ten seconds to compile each, so the rest is for `--long`."""
if settings().max_examples >= 100:
    CPU_SHAPES += [
        ((64, 3, 3), torch.float32, True),
        ((32, 1, 2), torch.bfloat16, False),
        ((96, 1, 8), torch.bfloat16, True),
        ((128, 2, 4), torch.float32, False),
        ((256, 1, 1), torch.float16, False),
    ]


@dataclass
class AttentionCase:
    """A batch over a paged cache.

    `clean_keys` and `clean_values` are the caches without NaN, in double precision, for the reference.
    """

    query: Tensor
    key_cache: Guarded
    value_cache: Guarded
    clean_keys: Tensor
    clean_values: Tensor
    block_tables: Tensor
    context_lens: Tensor
    query_start_loc: Tensor
    scale: float
    window: int = 0

    @property
    def _settings(self) -> tuple:
        return (self.scale, self.window) if self.window else (self.scale,)

    @property
    def args(self) -> tuple:
        """For a decode."""
        return self.query, self.key_cache.tensor, self.value_cache.tensor, self.block_tables, self.context_lens, *self._settings

    @property
    def ragged_args(self) -> tuple:
        """For a prefill."""
        return *self.args[:5], self.query_start_loc, *self._settings

    @property
    def reference_args(self) -> tuple:
        """For a decode by the reference."""
        tables = self.block_tables.cpu().clamp(0, len(self.clean_keys) - 1)
        return self.query.cpu().double(), self.clean_keys, self.clean_values, tables, self.context_lens.cpu(), *self._settings

    @property
    def ragged_reference_args(self) -> tuple:
        """For a prefill by the reference."""
        return *self.reference_args[:5], self.query_start_loc.cpu(), *self._settings


def make_attention_case(
    context_lens: list[int],
    query_lens: list[int],
    heads: tuple[int, int, int] = (64, 3, 3),
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    padding: int = 0,
    shared: bool = False,
    strided: bool = False,
    index_dtype: torch.dtype = torch.int32,
    scale: float = 1.0,
    seed: int = 0,
    window: int = 0,
) -> AttentionCase:
    """A batch of sequences with these contexts, of which the last `query_lens` tokens are new.

    Args:
        context_lens, query_lens: One of each for every sequence.
        heads: head_dim, KV heads, and query heads to each.
        block_size, dtype, device: Of the cache.
        padding: Rows of the query that belong to no sequence.
        shared: Whether sequences begin with blocks of the first one, as after a fork or a cached prefix.
        strided: Whether queries and tables are parts of wider tensors, and blocks lie apart.
        index_dtype: Of tables, lengths and starts.
        scale: Times the usual `head_dim ** -0.5`.
        seed: Of the random numbers.
        window: What a token sees; 0 for all before it. Blocks wholly before the windows have been freed: tables name a block of NaN in
            their places.
    """
    head_dim, num_kv_heads, group = heads
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-length // block_size) for length in context_lens]
    total = sum(num_blocks) + 2
    order = torch.randperm(total, generator=generator).tolist()
    width = max([1, *num_blocks])
    # What lies beyond a context is never looked at, so it may be anything.
    tables = torch.randint(-(2**30), 2**30, (len(context_lens), width + 3 * strided), dtype=torch.int32, generator=generator)
    tables = tables[:, :width]
    for i, count in enumerate(num_blocks):
        own = [order.pop() for _ in range(count)]
        if shared and i > 0:
            common = min(count, num_blocks[0]) // 2
            own[:common] = tables[0, :common].tolist()
        tables[i, :count] = torch.tensor(own, dtype=torch.int32)
    first_seen = [max(0, c - q - window + 1) if window else 0 for c, q in zip(context_lens, query_lens, strict=True)]
    for table, first in zip(tables, first_seen, strict=True):
        table[: first // block_size] = order[0]

    def make_cache(gap: int) -> tuple[Guarded, Tensor]:
        shape = (total, block_size, num_kv_heads, head_dim)
        cache = Guarded(shape, dtype, device, gap if strided else 0)
        clean = torch.randn(shape, generator=generator).to(dtype)
        used = torch.zeros(total, block_size, dtype=torch.bool)
        for table, first, length in zip(tables, first_seen, context_lens, strict=True):
            for position in range(first // block_size * block_size, length):
                used[table[position // block_size], position % block_size] = True
        cache.tensor[used.to(device)] = clean[used].to(device)
        return cache, clean.double()

    key_cache, clean_keys = make_cache(gap=32)
    value_cache, clean_values = make_cache(gap=48)
    num_tokens = sum(query_lens) + padding
    num_heads = num_kv_heads * group
    wide = torch.randn(num_tokens, num_heads + (2 * num_kv_heads if strided else 0), head_dim, generator=generator)
    starts = [0]
    for length in query_lens:
        starts.append(starts[-1] + length)
    return AttentionCase(
        wide.to(dtype).to(device)[:, :num_heads],
        key_cache,
        value_cache,
        clean_keys,
        clean_values,
        tables.to(device, index_dtype),
        torch.tensor(context_lens, dtype=index_dtype, device=device),
        torch.tensor(starts, dtype=index_dtype, device=device),
        scale * head_dim**-0.5,
        window,
    )


@st.composite
def lengths(draw: st.DrawFn, block_size: int, at_least: int = 0) -> int:
    """A context length: often one that ends on a block boundary, or one token before or behind it."""
    blocks = draw(st.integers(0, max(1, 80 // block_size)))
    near = blocks * block_size + draw(st.sampled_from([-1, 0, 1]))
    return max(at_least, draw(st.sampled_from([near, draw(st.integers(1, 100))])))


@st.composite
def attention_cases(draw: st.DrawFn, device: str, decode: bool, cpu: bool = False, windows: bool = True) -> AttentionCase:
    """Batches of 0 to 4 sequences; with `decode`, each has one new token, or no context if it is padding."""
    every_shape = st.tuples(st.sampled_from(HEADS), st.sampled_from(DTYPES), st.booleans())
    heads, dtype, strided = draw(st.sampled_from(CPU_SHAPES) if cpu else every_shape)
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    if decode:
        context_lens = draw(st.lists(lengths(block_size), max_size=4))
        query_lens = [1] * len(context_lens)
    else:
        context_lens = draw(st.lists(lengths(block_size), max_size=4))
        query_lens = [draw(st.sampled_from([min(1, length), length, draw(st.integers(0, length))])) for length in context_lens]
    return make_attention_case(
        context_lens,
        query_lens,
        heads,
        block_size,
        dtype,
        device,
        padding=0 if decode else draw(st.integers(0, 3)),
        shared=draw(st.booleans()),
        strided=strided,
        index_dtype=torch.int32 if cpu else draw(st.sampled_from([torch.int32, torch.int64])),
        scale=draw(st.sampled_from([1.0, 0.3])),
        seed=draw(st.integers(0, 2**31)),
        window=draw(st.sampled_from([0, 0, 1, 2, block_size - 1, block_size, block_size + 1, 70, 1000])) if windows else 0,
    )
