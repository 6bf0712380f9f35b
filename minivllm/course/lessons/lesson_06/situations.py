"""Paged caches for the checks of lesson 06: shuffled and shared blocks, lengths around a block's end, and NaN in every slot that must not be read."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from minivllm.course.lessons.lesson_05.launches import check_reads, explained, refuse_problems
from minivllm.course.lessons.lesson_05.launches import compare as compare_numbers
from minivllm.course.lessons.paged_kernels import is_triton
from minivllm.course.observations import expect, fail, is_recording, require, rounds
from minivllm.kernels import reference
from minivllm.kernels.accesses import record_accesses
from minivllm.kernels.launches import Launch

TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-4, torch.float16: 4e-3}
"""The largest error allowed, as a share of the largest number in the result."""
_PLAIN = 3
"""Steps on which loops run as plain Python before they are compiled; then comes a large one, unless the grader looks."""
_SEEN = 10
"""Steps that the grader sees."""


@dataclass
class PagedCase:
    """A step over a paged cache.

    Attributes:
        query: `[num_tokens, num_heads, head_dim]`; in a decode, one for each sequence.
        key_cache, value_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`; NaN, or a stranger's numbers, in slots that no sequence of the step has.
        block_tables: `[num_seqs, max_blocks]` int32.
        context_lens: `[num_seqs]` int32.
        query_start_loc: `[num_seqs + 1]` int32.
        scale: What scores are multiplied by.
    """

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    context_lens: Tensor
    query_start_loc: Tensor
    scale: float

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of them, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    @property
    def context(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The cache arguments of every attention kernel, in order."""
        return self.key_cache, self.value_cache, self.block_tables, self.context_lens

    @property
    def num_new(self) -> list[int]:
        """New tokens of each sequence."""
        return self.query_start_loc.diff().tolist()

    def describe(self, decode: bool) -> str:
        """The step in words."""
        _, block_size, num_kv_heads, head_dim = self.key_cache.shape
        new = "" if decode else f", new tokens {self.num_new}"
        step = f"{'Decode' if decode else 'Prefill'}: context_lens {self.context_lens.tolist()}{new}, block_size {block_size}"
        heads = f"{self.query.shape[1]} heads of queries, {num_kv_heads} of keys and values, head_dim {head_dim}"
        return f"{step}, block_tables {self.block_tables.tolist()}, {heads}, {str(self.query.dtype).removeprefix('torch.')}."

    def gather(self, seq: int) -> tuple[Tensor, Tensor]:
        """A sequence's keys and values side by side, in double precision, repeated for each head of queries: `[num_heads, context_len, head_dim]`."""
        block_size, num_kv_heads = self.key_cache.shape[1:3]
        positions = torch.arange(int(self.context_lens[seq]))
        blocks, offsets = self.block_tables[seq].long()[positions // block_size], positions % block_size
        group = self.query.shape[1] // num_kv_heads
        parts = (cache[blocks, offsets].double().transpose(0, 1) for cache in (self.key_cache, self.value_cache))
        keys, values = (part.repeat_interleave(group, dim=0) for part in parts)
        return keys, values

    def attend(self) -> Tensor:
        """The attention, computed by the package's reference in double precision; zeros for padding."""
        numbers = [x.double().nan_to_num() for x in (self.query, self.key_cache, self.value_cache)]
        if len(self.query) == len(self.context_lens):  # one new token each
            return reference.paged_decode_attention(*numbers, self.block_tables, self.context_lens, self.scale)
        return reference.paged_prefill_attention(*numbers, self.block_tables, self.context_lens, self.query_start_loc, self.scale)


def state_of(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest of `[..., n]` scores, the sum of exp(score - largest), and the same sum with each value `[..., n, head_dim]`.

    Of no scores: -infinity, 0 and zeros.
    """
    maximum = pad(scores, (1, 0), value=-torch.inf).amax(dim=-1)
    weights = (scores - maximum[..., None]).exp()
    return maximum, weights.sum(dim=-1), (weights[..., None] * values).sum(dim=-2)


Lengths = Sequence[tuple[int, int]]
"""The context of each sequence, and how many of its tokens are new."""


def make_lengths(rng: random.Random, block_size: int, decode: bool) -> Lengths:
    """Lengths around the ends of blocks; in a decode, each sequence has one new token."""
    ends = (rng.randint(0, 4) * block_size for _ in range(rng.randint(1, 4)))
    context_lens = [max(1, end + rng.choice((-1, 0, 1, rng.randint(0, block_size)))) for end in ends]
    if rng.random() < 0.2:
        context_lens[0] = 1
    return [(length, 1 if decode else rng.choice((1, length, rng.randint(1, length)))) for length in context_lens]


def make_case(
    rng: random.Random, dtype: torch.dtype, decode: bool, block_sizes: Sequence[int] = (1, 2, 4, 8), lengths: Lengths = ()
) -> PagedCase:
    """A random step: blocks in any order, and some sequences share their first blocks.

    Args:
        rng: Of all random numbers.
        dtype: Of the query and the caches.
        decode: Whether each sequence has one new token.
        block_sizes: To choose from.
        lengths: If they are not to be random.
    """
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    block_size, num_kv_heads, group = rng.choice(block_sizes), rng.randint(1, 3), rng.choice((1, 2, 3, 4))
    head_dim, num_spare = rng.choice((2, 4, 8)), rng.randint(1, 3) + (200 if lengths else 0)  # so many do not fit into a byte
    context_lens, new = map(list, zip(*(lengths or make_lengths(rng, block_size, decode)), strict=True))
    if decode and rng.random() < 0.3:
        context_lens.append(0)  # padding
        new.append(1)
    needed = [-(-length // block_size) for length in context_lens]
    num_blocks = sum(needed) + num_spare
    blocks = rng.sample(range(num_blocks), num_blocks)
    tables = [[blocks.pop() for _ in range(count)] for count in needed]
    if len(tables) > 1 and rng.random() < 0.4:  # a common beginning that was computed before
        shared = max(0, min((length - count) // block_size for length, count in zip(context_lens[:2], new[:2], strict=True)))
        tables[1][:shared] = tables[0][:shared]
    width = max(needed) + rng.randint(0, 2)
    padded = [table + [rng.randrange(num_blocks) for _ in range(width - len(table))] for table in tables]
    num_tokens, shape = sum(new) + (rng.randint(0, 2) if not decode else 0), (num_blocks, block_size, num_kv_heads, head_dim)
    case = PagedCase(
        torch.randn(num_tokens, num_kv_heads * group, head_dim, generator=generator).to(dtype),
        *(torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)),
        torch.tensor(padded, dtype=torch.int32), torch.tensor(context_lens, dtype=torch.int32),
        torch.tensor([0, *accumulate(new)], dtype=torch.int32), rng.choice((head_dim**-0.5, 0.3, 1.0)),
    )  # fmt: skip
    _fill(case, rng, generator)
    return case


def _fill(case: PagedCase, rng: random.Random, generator: torch.Generator) -> None:
    """Put keys and values into the slots of the step's sequences: of ordinary size, or such that scores are very small or very large.

    Very large ones are made of whole numbers, so that float32 computes them exactly. Of half of the steps, unused slots hold finite numbers,
    and scores that would win.
    """
    size = rng.choice((1.0, 1.0, 8.0, 30.0, 512.0))
    if size == 512.0:
        case.query.copy_(torch.randint(-4, 5, case.query.shape, generator=generator))
        case.scale = 0.5
    block_size, *shape = case.key_cache.shape[1:]
    for table, context_len in zip(case.block_tables.tolist(), case.context_lens.tolist(), strict=True):
        for position in range(context_len):
            slot = table[position // block_size], position % block_size
            whole, any_ = torch.randint(-3, 4, shape, generator=generator), torch.randn(shape, generator=generator)
            case.key_cache[slot] = size * (whole if size == 512.0 else any_)
            case.value_cache[slot] = torch.randn(shape, generator=generator)
    if size == 1.0 and rng.random() < 0.3:  # all scores far below 0: a maximum that begins with 0 loses them
        case.query.copy_(case.query.abs())
        case.key_cache.copy_(-20.0 - case.key_cache.abs())
    if rng.random() < 0.5:
        for cache, stranger in ((case.key_cache, 30.0), (case.value_cache, 1000.0)):
            cache.copy_(torch.where(cache.isnan(), stranger * torch.randn(cache.shape, generator=generator), cache))


def situations(name: str, kernel: Any) -> Iterator[tuple[random.Random, torch.dtype, bool, Any]]:
    """Random numbers for launches of a kernel: a dtype, whether the step is to be a large one, and what to launch.

    Loops run as plain Python first: there errors have a line, and they can be interrupted. Triton is slow in the interpreter, so it gets fewer
    steps, in two dtypes. What the grader sees does not depend on the language.
    """
    dtypes = (torch.float32, torch.float16) if is_triton(kernel) and not is_recording() else (torch.float32,)
    count = _SEEN if is_recording() else 24 if is_triton(kernel) else 48
    for number, rng in enumerate(rounds(name, count)):
        launched = getattr(kernel, "py_func", kernel) if number < _PLAIN else kernel
        yield rng, dtypes[number % len(dtypes)], number == _PLAIN and not is_recording(), launched


@contextmanager
def watched(call: str, kernel: Any) -> Iterator[list[Launch]]:
    """Launch a kernel inside: its errors are reported with the line, and so are Triton's out-of-bounds accesses and races."""
    options = getattr(kernel, "targetoptions", None)  # Numba's
    if options is not None and not options.get("boundscheck"):
        rule = "without it, an index outside of an array ends the whole notebook"
        fail(f"{call}\nKeep the line `@njit(boundscheck=True)`: {rule}.")
    if not callable(kernel) and not is_triton(kernel):
        fail(f"{kernel!r} is not a kernel: keep the line with `def`, and the one above it.")
    with explained(call, kernel), record_accesses() if is_triton(kernel) else nullcontext([]) as launches:
        yield launches
    for recorded in launches:
        refuse_problems(call, kernel, recorded)


def interpreted() -> AbstractContextManager[Any]:
    """For calls that may launch Triton kernels on tensors in host memory.

    They are interpreted, on a GPU too, and an access outside of a tensor is recorded and not made.
    """
    return record_accesses() if find_spec("triton") else nullcontext([])


def check_unchanged(call: str, who: str, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Raise an AssertionError if an input was written to."""
    for name, old in before.items():
        same = torch.equal(old.nan_to_num(7e4), after[name].nan_to_num(7e4))
        require(True, same, f"{call}\n{who} changed {name}, which it must only read.")


def check_cache_reads(call: str, launches: list[Launch], least: int) -> None:
    """Raise an AssertionError if a Triton kernel has read more of the cache than necessary; the reads of loops are not recorded."""
    for recorded in [] if is_recording() else launches:
        numbers = {tensor.name: i for i, tensor in enumerate(recorded.tensors)}
        check_reads(call, recorded, {numbers[name]: least for name in ("key_cache_ptr", "value_cache_ptr") if name in numbers})


def compare(call: str, name: str, got: Any, expected: Tensor, places: tuple[str, ...], look: str) -> None:
    """Raise an AssertionError about the first number that differs from the exact one; `places` say what the dimensions count."""
    require(True, isinstance(got, Tensor), f"{call}\nExpected {name}: a tensor\nGot: {got!r}")
    expect(call, f"{name} of shape", list(expected.shape), list(got.shape), f"the shape of {name}")
    compare_numbers(
        call, got, expected, TOLERANCE.get(got.dtype, 2e-4),
        lambda place: f"{name} at {', '.join(f'{what} {number}' for what, number in zip(places, place, strict=False))}",
        lambda place: _NO_NUMBER if got[tuple(place)].isnan() else "",
        look,
    )  # fmt: skip


_NO_NUMBER = (
    ". That is not a number: was nothing stored there, was an unused slot read, or was infinity subtracted from infinity?"
)
