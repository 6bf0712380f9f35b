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
    check_inputs,
    compare,
    dtypes_of,
    make_case,
    make_large_case,
    plain,
    seeds,
    watched,
)
from minivllm.course.lessons.paged_kernels import TILE, is_triton, launch_decode, launch_prefill, launch_write

_ROUNDS = 24
_PLAIN = 3
"""Steps on which loops run as plain Python before they are compiled."""


def _rounds(kernel: Any) -> int:
    """Steps per kernel: fewer in the interpreter, which is slow."""
    return _ROUNDS if is_triton(kernel) else 2 * _ROUNDS


# -- write -----------------------------------------------------------------------------------------------------------


def make_write_case(rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    """New tokens for random slots, some of them padding."""
    num_blocks, block_size, num_kv_heads, head_dim = (
        rng.choice((40, *range(1, 6))),
        rng.choice((1, 3, 4, 8)),
        rng.randint(1, 3),
        rng.choice((1, 3, 4, 8)),
    )
    num_slots = num_blocks * block_size
    slots = torch.randperm(num_slots, generator=generator)[: rng.randint(1, num_slots)]
    if rng.random() < 0.6:
        slots[torch.rand(len(slots), generator=generator) < 0.4] = rng.choice((-1, -2, -1_000_000))
    new = (len(slots), num_kv_heads, head_dim)
    old = (num_blocks, block_size, num_kv_heads, head_dim)
    names = {"key": new, "value": new, "key_cache": old, "value_cache": old}
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in names.items()}
    return made | {"slot_mapping": slots}


def written(case: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Both caches as they must be afterwards."""
    caches = case["key_cache"].clone(), case["value_cache"].clone()
    for token, slot in enumerate(case["slot_mapping"].tolist()):
        if slot >= 0:
            for cache, new in zip(caches, (case["key"], case["value"]), strict=True):
                cache.flatten(0, 1)[slot] = new[token]
    return caches


def check_write(kernel: Any) -> None:
    """New keys and values are in their slots, padding is not written, and nothing else is touched."""
    for number, (rng, generator, dtype) in enumerate(seeds("write", _ROUNDS, dtypes_of(kernel))):
        case = make_write_case(rng, generator, dtype)
        expected, before = written(case), {name: x.clone() for name, x in case.items()}
        shape = list(case["key_cache"].shape)
        call = f"Write: caches of shape {shape} ([num_blocks, block_size, num_kv_heads, head_dim]), slots {case['slot_mapping'].tolist()}."
        with watched(call, kernel):
            launch_write(plain(kernel) if number < _PLAIN else kernel, **case)
        for name, wanted in zip(("key_cache", "value_cache"), expected, strict=True):
            got = case[name]
            if not torch.equal(got, wanted):
                bad = (got != wanted).flatten(2).any(dim=2).flatten()
                slot = int(bad.nonzero()[0])
                owner = case["slot_mapping"].tolist().index(slot) if slot in case["slot_mapping"].tolist() else None
                should = "what was there before" if owner is None else f"the {name.removesuffix('_cache')} of token {owner}"
                count = int(bad.sum())
                raise AssertionError(
                    f"{call}\nExpected in slot {slot} of {name} (block {slot // shape[1]}, offset {slot % shape[1]}): {should}\n"
                    f"Got: something else. {count} {'slot is' if count == 1 else 'slots are'} wrong.\nLook at where a slot begins, and at the tokens whose slot is negative."
                )
        for name in ("key", "value", "slot_mapping"):
            assert torch.equal(case[name], before[name]), f"{call}\nThe kernel changed {name}, which it must only read."


# -- decode ----------------------------------------------------------------------------------------------------------


def exact_parts(case: PagedCase, part_len: int, num_parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The state of each part, in double precision; (-infinity, 0, zeros) for an empty one."""
    num_seqs, num_heads, head_dim = case.query.shape
    maxima = torch.full((num_seqs, num_heads, num_parts), -torch.inf, dtype=torch.float64)
    totals, outputs = torch.zeros_like(maxima), torch.zeros(num_seqs, num_heads, num_parts, head_dim, dtype=torch.float64)
    for seq in range(num_seqs):
        keys, values = case.gather(seq)
        scores = (keys * case.query[seq].double()[:, None]).sum(dim=2) * case.scale
        for part in range(num_parts):
            own = slice(part * part_len, (part + 1) * part_len)
            if scores[:, own].shape[1]:
                maxima[seq, :, part] = scores[:, own].amax(dim=1)
                weights = (scores[:, own] - maxima[seq, :, part, None]).exp()
                totals[seq, :, part] = weights.sum(dim=1)
                outputs[seq, :, part] = (weights[:, :, None] * values[:, own]).sum(dim=1)
    return maxima, totals, outputs


def check_decode(kernel: Any) -> None:
    """The state of each part of each context: its own blocks, in order, up to its own length."""
    looks = {
        "maxima": "which block a token is in (block_tables[sequence, position // block_size]), which heads share its keys (head // group), the scale, the "
        "end of the context, and what the maximum begins with",
        "totals": "the correction by exp(old maximum - new maximum), where the part ends (at its own end or that of the context, whichever comes first), and what lies "
        "after the context in its last block",
        "outputs": "the correction, which the output needs too; the values (not the keys); and do not divide by the total yet",
    }
    for number, (rng, generator, dtype) in enumerate(seeds("decode", _rounds(kernel), dtypes_of(kernel))):
        case = (make_large_case if number == _PLAIN else make_case)(rng, generator, dtype, decode=True)
        block_size = case.key_cache.shape[1]
        part_len = block_size * rng.choice((1, 2, 3, 100))
        call = f"{case.describe(decode=True)} Parts of {part_len} tokens."
        exact = exact_parts(case, part_len, -(-case.block_tables.shape[1] * block_size // part_len))
        before = copy.deepcopy(case)
        with watched(call, kernel) as launches:
            states = launch_decode(
                plain(kernel) if number < _PLAIN else kernel,
                case.query,
                *case.context,
                case.scale,
                part_len,
            )
        check_inputs(call, before, case)
        for (name, look), got, expected in zip(looks.items(), states, exact, strict=True):
            tolerant = got if dtype == torch.float32 else _as_coarse(got, expected)
            compare(call, name, tolerant, expected, ("sequence", "head", "part", "channel"), look)
        num_kv_heads, head_dim = case.key_cache.shape[2:]
        check_cache_reads(call, launches, int(case.context_lens.sum()) * num_kv_heads * head_dim)


def _as_coarse(got: Tensor, expected: Tensor) -> Tensor:
    """Numbers computed from float16 are exact to three digits: closer ones count as equal."""
    near = (got.double() - expected).abs() <= 4e-3 * (1e-3 + expected.abs().nan_to_num(posinf=0, neginf=0))
    return torch.where(near, expected.to(got.dtype), got)


# -- prefill ---------------------------------------------------------------------------------------------------------


def make_prefill_case(rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> PagedCase:
    """A ragged batch; now and then a prompt longer than a tile, or exactly as long."""
    if rng.random() < 0.15:
        counts = TILE, TILE + rng.randint(1, 4)
        return make_case(
            rng, generator, dtype, decode=False, lengths=tuple((count + rng.randint(0, 5), count) for count in counts)
        )
    case = make_case(rng, generator, dtype, decode=False)
    if rng.random() < 0.25:
        for _ in range(50):  # until one is long
            if max(case.num_new) > TILE:
                break
            case = make_case(rng, generator, dtype, decode=False)
    return case


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
    for number, (rng, generator, dtype) in enumerate(seeds("prefill", _rounds(kernel), dtypes_of(kernel))):
        case = make_large_case(rng, generator, dtype, False) if number == _PLAIN else make_prefill_case(rng, generator, dtype)
        call = case.describe(decode=False)
        expected, before = case.attend(), copy.deepcopy(case)
        with watched(call, kernel) as launches:
            got = launch_prefill(
                plain(kernel) if number < _PLAIN else kernel,
                case.query,
                *case.context,
                case.query_start_loc,
                case.scale,
            )
        check_inputs(call, before, case)
        compare(call, "output", got, expected, ("token", "head", "channel"), look)
        check_cache_reads(call, launches, least_prefill_reads(case))
