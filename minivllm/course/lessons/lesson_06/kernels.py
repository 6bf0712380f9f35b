"""The checks of lesson 06 for the three kernels over a paged cache: write, decode and prefill, in Triton or in loops."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import Tensor

from minivllm.course.lessons.lesson_06.situations import (
    PagedCase,
    check_cache_reads,
    check_unchanged,
    compare,
    make_case,
    situations,
    state_of,
    watched,
)
from minivllm.course.lessons.paged_kernels import TILE, launch_decode, launch_prefill, launch_write
from minivllm.course.lessons.tensors import see_tensor
from minivllm.course.observations import fail

# -- write -----------------------------------------------------------------------------------------------------------


def make_write_case(rng: random.Random, dtype: torch.dtype) -> dict[str, Tensor]:
    """New tokens for random slots, some of them padding."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    num_blocks, block_size = rng.choice((40, *range(1, 6))), rng.choice((1, 3, 4, 8))
    num_kv_heads, head_dim = rng.randint(1, 3), rng.choice((1, 3, 4, 8))
    num_slots = num_blocks * block_size
    slots = torch.randperm(num_slots, generator=generator)[: rng.randint(1, num_slots)]
    if rng.random() < 0.6:
        slots[torch.rand(len(slots), generator=generator) < 0.4] = rng.choice((-1, -2, -1_000_000))
    new, old = (len(slots), num_kv_heads, head_dim), (num_blocks, block_size, num_kv_heads, head_dim)
    names = {"key": new, "value": new, "key_cache": old, "value_cache": old}
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in names.items()}
    return made | {"slot_mapping": slots}


def check_write(kernel: Any) -> None:
    """New keys and values are in their slots, padding is not written, and nothing else is touched."""
    for rng, dtype, _, launched in situations("write", kernel):
        case = make_write_case(rng, dtype)
        shape, slots, before = list(case["key_cache"].shape), case["slot_mapping"].tolist(), copy.deepcopy(case)
        call = f"Write: caches of shape {shape} ([num_blocks, block_size, num_kv_heads, head_dim]), slots {slots}."
        with watched(call, kernel):
            launch_write(launched, **case)
        for name in ("key", "value"):
            got, wanted = case[f"{name}_cache"].flatten(0, 1), before.pop(f"{name}_cache").flatten(0, 1)
            for token, slot in enumerate(slots):
                if slot >= 0:
                    wanted[slot] = before[name][token]
            see_tensor(wanted, got, 1e-6)
            bad = (got != wanted).flatten(1).any(dim=1).nonzero().flatten().tolist()
            for slot in bad[:1]:
                should = f"the {name} of token {slots.index(slot)}" if slot in slots else "what was there before"
                where = f"slot {slot} of {name}_cache (block {slot // shape[1]}, offset {slot % shape[1]})"
                wrong = f"{len(bad)} {'slot is' if len(bad) == 1 else 'slots are'} wrong"
                look = "where a slot begins, and at the tokens whose slot is negative"
                fail(f"{call}\nExpected in {where}: {should}\nGot: something else. {wrong}.\nLook at {look}.")
        check_unchanged(call, "The kernel", before, case)


# -- decode ----------------------------------------------------------------------------------------------------------


def exact_parts(case: PagedCase, part_len: int, num_parts: int) -> tuple[Tensor, ...]:
    """The state of each part, in double precision; (-infinity, 0, zeros) for an empty one."""
    states = []
    for seq in range(len(case.query)):
        keys, values = case.gather(seq)
        scores = (keys * case.query[seq].double()[:, None]).sum(dim=2) * case.scale
        for begin in range(0, num_parts * part_len, part_len):
            states.append(state_of(scores[:, begin : begin + part_len], values[:, begin : begin + part_len]))
    stacked = (torch.stack(parts).unflatten(0, (len(case.query), num_parts)) for parts in zip(*states, strict=True))
    return tuple(parts.transpose(1, 2) for parts in stacked)


_LOOKS = {
    "maxima": "which block a token is in (block_tables[sequence, position // block_size]), which heads share its keys (head // group), the scale, the "
    "end of the context, and what the maximum begins with",
    "totals": "the correction by exp(old maximum - new maximum), where the part ends (at its own end or that of the context, whichever comes first), and what lies "
    "after the context in its last block",
    "outputs": "the correction, which the output needs too; the values (not the keys); and do not divide by the total yet",
}


def check_decode(kernel: Any) -> None:
    """The state of each part of each context: its own blocks, in order, up to its own length."""
    for rng, dtype, is_large, launched in situations("decode", kernel):
        case = make_case(rng, dtype, True, (8,), ((150, 1),)) if is_large else make_case(rng, dtype, True)
        block_size, num_kv_heads, head_dim = case.key_cache.shape[1:]
        part_len = block_size * rng.choice((1, 2, 3, 100))
        call = f"{case.describe(decode=True)} Parts of {part_len} tokens."
        exact = exact_parts(case, part_len, -(-case.block_tables.shape[1] * block_size // part_len))
        before = copy.deepcopy(case.tensors)
        with watched(call, kernel) as launches:
            states = launch_decode(launched, case.query, *case.context, case.scale, part_len)
        check_unchanged(call, "The kernel", before, case.tensors)
        for (name, look), got, expected in zip(_LOOKS.items(), states, exact, strict=True):
            tolerant = got if dtype == torch.float32 else _as_coarse(got, expected)
            compare(call, name, tolerant, expected, ("sequence", "head", "part", "channel"), look)
        check_cache_reads(call, launches, int(case.context_lens.sum()) * num_kv_heads * head_dim)


def _as_coarse(got: Tensor, expected: Tensor) -> Tensor:
    """Numbers computed from float16 are exact to three digits: closer ones count as equal."""
    near = (got.double() - expected).abs() <= 4e-3 * (1e-3 + expected.abs().nan_to_num(posinf=0, neginf=0))
    return torch.where(near, expected.to(got.dtype), got)


# -- prefill ---------------------------------------------------------------------------------------------------------


def make_prefill_case(rng: random.Random, dtype: torch.dtype, is_large: bool) -> PagedCase:
    """A ragged batch; now and then with a prompt longer than a tile, or exactly as long."""
    if is_large:
        return make_case(rng, dtype, False, (8,), ((150, 40),))
    kind = rng.random()
    if kind < 0.15:
        counts, sizes = (TILE, TILE + rng.randint(1, 4)), (2, 4, 8)
    elif kind < 0.3:
        counts, sizes = (rng.randint(1, 9), rng.randint(TILE + 1, 2 * TILE)), (4, 8)
    else:
        return make_case(rng, dtype, False)
    return make_case(rng, dtype, False, sizes, tuple((count + rng.randint(0, 5), count) for count in counts))


def least_prefill_reads(case: PagedCase) -> int:
    """How many numbers of the key cache tiles must read: each reads what its last token may see, for each query head."""
    num_heads, head_dim = case.query.shape[1:]
    total = 0
    for context_len, count in zip(case.context_lens.tolist(), case.num_new, strict=True):
        total += sum(context_len - count + min(first + TILE, count) for first in range(0, count, TILE))
    return total * num_heads * head_dim


def check_prefill(kernel: Any) -> None:
    """Each new token sees its own context up to itself: what was cached before, and the new ones before it."""
    look = (
        "the position of a new token, context_len - (new tokens of its sequence) + its place among them: it sees positions up to that one, "
        "its own included; at the block table's row; at head // group; and at the division by the total, at the end"
    )
    for rng, dtype, is_large, launched in situations("prefill", kernel):
        case = make_prefill_case(rng, dtype, is_large)
        call, before = case.describe(decode=False), copy.deepcopy(case.tensors)
        with watched(call, kernel) as launches:
            got = launch_prefill(launched, case.query, *case.context, case.query_start_loc, case.scale)
        check_unchanged(call, "The kernel", before, case.tensors)
        compare(call, "output", got, case.attend(), ("token", "head", "channel"), look)
        check_cache_reads(call, launches, least_prefill_reads(case))
