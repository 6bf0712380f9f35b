"""The checks of lesson 03 for the cache's memory: what fits, what is written where, what each token sees, and the attention over it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from minivllm.course.lessons.lesson_03.situations import (
    MAX_LEN,
    NUM_ROWS,
    KVCache,
    attend_alone,
    count,
    describe,
    isolate,
    make_pair,
    make_step,
    num_slots_of,
    ranges,
    require_tensor,
    visible,
    written,
)
from minivllm.course.lessons.padded_steps import PaddedStep
from minivllm.course.lessons.tensors import Suspect, expect_close, is_close
from minivllm.course.observations import expect, require, rounds

_ROUNDS = 30


# -- what fits -------------------------------------------------------------------------------------------------------


def make_config(rng: random.Random) -> dict[str, int]:
    """A random config.json, with or without the entries that may be missing."""
    num_kv_heads, group, head_dim = rng.randint(1, 8), rng.randint(2, 6), 2 * rng.randint(8, 64)
    num_heads = num_kv_heads * group
    config = {"num_hidden_layers": rng.randint(2, 90), "num_attention_heads": num_heads, "hidden_size": num_heads * head_dim}
    if rng.random() < 0.6:
        config["num_key_value_heads"] = num_kv_heads
    if rng.random() < 0.6:
        config["head_dim"] = rng.choice((64, 80, 96, 128, 256))
    return config


def count_bytes(config: dict[str, int], bytes_per_number: int) -> int:
    """Bytes of a token's keys and values."""
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    return 2 * config["num_hidden_layers"] * config.get("num_key_value_heads", num_heads) * head_dim * bytes_per_number


def check_size(cls: Any) -> None:
    """`bytes_per_token` and `rows_that_fit`, on random configs and with memory that just fits."""
    for number, rng in enumerate(rounds("size", _ROUNDS)):
        config, width = make_config(rng), rng.choice((1, 2, 4))
        size = cls(dict(config), width) if width != 2 or number % 2 else cls(dict(config))
        said, expected = f"config {config}, {count(width, 'byte')} for a number.", count_bytes(config, width)
        look = "keys and values, layers, heads of keys (not of queries), head_dim, bytes_per_number; and the defaults for missing config entries"
        _expect_whole(said, "bytes_per_token()", expected, size.bytes_per_token(), look)
        max_len, rows, num_parameters = rng.randint(10, 5000), rng.randint(1, 9), rng.randint(10**3, 10**9)
        row_bytes, weights = max_len * expected, num_parameters * width
        said = f"{said} A row of {max_len} tokens takes {row_bytes:,} bytes, and the weights take {weights:,}."
        for left, fit in (
            (rows * row_bytes, rows),
            (rows * row_bytes - 1, rows - 1),
            (rows * row_bytes + rng.randrange(row_bytes), rows),
            (0, 0),
            (weights // 2 - weights, 0),
        ):
            arguments = weights + left, num_parameters, max_len
            look = "the memory left by the weights, and rounding down" if left > 0 else "weights that leave nothing"
            _expect_whole(said, f"rows_that_fit{arguments}", fit, size.rows_that_fit(*arguments), look)


def _expect_whole(said: str, call: str, expected: int, got: Any, look: str) -> None:
    is_whole = isinstance(got, Integral)
    require(True, is_whole, f"{call} must be a whole number, but is {got!r}, a {type(got).__name__}.")
    expect(said, call, expected, int(got), look)


# -- into the slots --------------------------------------------------------------------------------------------------

_EDGES = (
    PaddedStep([3, 1], [MAX_LEN - 1, 0], [1, 6]),  # the last slot; with its padding, the text would not fit
    PaddedStep([0, 4], [2, MAX_LEN - 4], [7, 4]),
    PaddedStep([2], [0], [MAX_LEN]),
    PaddedStep([3, 1], [0, MAX_LEN - 2], [2, 3]),  # from here on, a text does not fit
    PaddedStep([1, 0], [MAX_LEN, 4], [1, 1]),
    PaddedStep([4], [0], [MAX_LEN + 1]),
)


def make_writes() -> Iterator[tuple[random.Random, PaddedStep]]:
    """Steps to write, some of which do not fit, and random numbers for each."""
    for number, rng in enumerate(rounds("write", _ROUNDS + len(_EDGES))):
        step = make_step(rng, decode=number % 5 == 4) if number < _ROUNDS else _EDGES[number - _ROUNDS]
        if number < _ROUNDS and number % 6 == 5:
            step.starts[-1] = MAX_LEN - step.counts[-1] + 1
        yield rng, step


def check_write(cls: Any) -> None:
    """`write`: each new key and value in its slot, in place; padding nowhere; a text that does not fit changes nothing."""
    for rng, step in make_writes():
        cache, new = make_pair(rng, NUM_ROWS, MAX_LEN, 2, 4), make_pair(rng, len(step.rows), step.width, 2, 4)
        old, fits = (cache[0].clone(), cache[1].clone()), num_slots_of(step) <= MAX_LEN
        call = f"write(kv_cache, keys, values, {describe(step)})"
        error: Exception | None = None
        try:
            cls(2, 2, 4, 0.5).write(cache, *(part.clone() for part in new), step)
        except (ValueError, IndexError, RuntimeError) as raised:
            if fits and not isinstance(raised, ValueError):
                raise
            error = raised
        if fits:
            rule = f"every text fits into its row of {MAX_LEN} slots: padding takes no slot, and the last slot may be used"
            require(None, error, f"{call} raised {error!r}, but {rule}.")
            _compare_slots(call, cache, old, new, step)
        else:
            came = "raised nothing" if error is None else f"raised {error!r}. Look before you write"
            rule = f"{call}, with rows of {MAX_LEN} slots, must raise a ValueError"
            require(True, isinstance(error, ValueError), f"{rule}, because a text does not fit into its row, but {came}.")
            same = torch.equal(cache[0], old[0]) and torch.equal(cache[1], old[1])
            require(True, same, f"{rule} and write nothing, but other texts of the step were written before it.")


def _compare_slots(call: str, cache: KVCache, old: KVCache, new: KVCache, step: PaddedStep) -> None:
    """Raise an AssertionError about the first slot that does not hold what it should; first come those that are written."""
    names = {
        tuple(part[i, j].flatten().tolist()): f"the {kind} of {'new token' if j < number else 'padding, column'} {j} of text {i}"
        for kind, part in zip(("key", "value"), new, strict=True)
        for i, number in enumerate(step.counts)
        for j in range(step.width)
    }

    def name(found: Tensor, before: Tensor) -> str:
        is_old = torch.equal(found, before)
        return "what was there before" if is_old else names.get(tuple(found.flatten().tolist()), "other numbers")

    look = "step.rows[i], step.starts[i] and step.counts[i]: the new tokens, without padding, go there, and every other slot stays as it is; and whether you write to the tensors you were given"
    for what, got, before, part in zip(("keys", "values"), cache, old, new, strict=True):
        wanted = written(before, part, step)
        is_old = (wanted == before).flatten(2).all(dim=2)
        places = [*(~is_old).nonzero().tolist(), *is_old.nonzero().tolist()]
        expected, came = (
            {f"slot {slot} of row {row}": name(found[row, slot], before[row, slot]) for row, slot in places}
            for found in (wanted, got)
        )
        expect(f"After {call}.", what, expected, came, look)


# -- what a token sees -----------------------------------------------------------------------------------------------


def check_mask(cls: Any) -> None:
    """`visible`: the slots from 0 to a token's own position."""
    for number, rng in enumerate(rounds("mask", _ROUNDS)):
        step = make_step(rng, decode=number % 5 == 4)
        num_slots = num_slots_of(step) + rng.choice((0, rng.randint(1, 4)))
        call = f"visible({describe(step)}, {num_slots})"
        got = cls(2, 2, 4, 0.5).visible(step, num_slots)
        require_tensor(call, got)
        expect(f"{call}.", "shape", [len(step.rows), step.width, num_slots], list(got.shape), "the order of the dimensions")
        expect(f"{call}.", "dtype", "torch.bool", str(got.dtype), "comparisons: they give bool tensors")
        for i, (start, new) in enumerate(zip(step.starts, step.counts, strict=True)):
            for j in range(step.width):
                seen = got[i, j].nonzero().flatten().tolist()
                if j >= new:
                    message = f"{call}: column {j} of text {i} is padding and sees no slot at all: its softmax would be NaN."
                    require(True, bool(seen), message)
                    continue
                said = f"{call}. New token {j} of text {i} has position {start + j}."
                look = "where a text's new tokens begin (step.starts), and whether a token sees itself"
                if seen and seen[-1] > start + j:
                    look = "slots beyond the token's own position: they hold later tokens, or what another text left"
                expect(said, "the slots that it sees", ranges(range(start + j + 1)), ranges(seen), look)


# -- attention -------------------------------------------------------------------------------------------------------


def check_attend(cls: Any) -> None:
    """`attend`: for each text the attention it gets alone, whatever else is in the batch and in the cache.

    Slots beyond the longest text hold NaN: reading them gives NaN, even behind a mask. An object runs several steps, as a model's layer
    does: state from one must not leak into the next.
    """
    made = isolate(cls, visible=visible)
    layers: dict[float, Any] = {}
    for number, rng in enumerate(rounds("attend", _ROUNDS)):
        step = make_step(rng, MAX_LEN - 3, decode=number % 5 == 4)
        cache, (query, _) = make_pair(rng, NUM_ROWS, MAX_LEN, 2, 8), make_pair(rng, len(step.rows), step.width, 6, 8)
        for part in cache:
            part[:, num_slots_of(step) :] = torch.nan
        scale = rng.choice((0.2, 0.5, 0.9))
        layer = layers.setdefault(scale, made(6, 2, 8, scale))
        turned = PaddedStep(step.rows, step.starts[::-1], step.counts[::-1])  # as large, but other tokens see other slots
        for each in (step, turned):
            _compare_attention(layer, each, cache, query, scale)


def _compare_attention(layer: Any, step: PaddedStep, cache: KVCache, query: Tensor, scale: float) -> None:
    """Raise an AssertionError unless a learner's object attends as each text would alone."""
    call = f"attend(query, kv_cache, {describe(step)}) with 6 heads of queries, 2 of keys and values, and scale {scale}"
    is_real = (torch.arange(step.width) < torch.tensor(step.counts)[:, None])[..., None, None]
    before, got = (cache[0].clone(), cache[1].clone()), layer.attend(query.clone(), cache, step)
    require_tensor(call, got)
    expect(f"{call}.", "shape", list(query.shape), list(got.shape), "the order of the dimensions: the same as query's")
    same = all(torch.equal(part.nan_to_num(7.0), old.nan_to_num(7.0)) for part, old in zip(cache, before, strict=True))
    require(True, same, f"{call} must not change the cache, but did.")
    message = (
        f"{call}.\nExpected: finite numbers\nGot: NaN or infinity\nLook at the slots from {num_slots_of(step)} on: no text of this step is that "
        "long, so they hold NaN here and must not be read, not even behind a mask."
    )
    require(True, bool(got.isfinite().all()), message)
    expected = attend_alone(query, cache, step, scale)

    def look() -> str:
        fresh = type(layer)(6, 2, 8, scale).attend(query.clone(), cache, step)
        if is_close(expected, torch.where(is_real, fresh, 0.0)):
            return "what your object keeps from one step to the next: a fresh object gets this step right"
        return "the rows of the cache, the mask, the scale, and which heads belong together"

    said = f"{call}. At [text, new token, head, channel], the output must be what the text gets when it is alone."
    expect_close(said, "output", expected, torch.where(is_real, got, 0.0), look, _suspects(query, cache, step, scale))


def _suspects(query: Tensor, cache: KVCache, step: PaddedStep, scale: float) -> Iterator[Suspect]:
    """What common mistakes give."""
    finite = cache[0].nan_to_num(0.0), cache[1].nan_to_num(0.0)
    from_slot_0 = PaddedStep(step.rows, [0] * len(step.rows), step.counts)
    in_turns = query.unflatten(2, (3, 2)).transpose(2, 3).flatten(2, 3)
    tiled = attend_alone(in_turns, cache, step, scale).unflatten(2, (2, 3)).transpose(2, 3).flatten(2, 3)
    yield (
        attend_alone(query, finite, step, scale, rows=range(len(step.rows))),
        "the rows: text i is in row step.rows[i], not in row i",
    )
    yield tiled, "which heads belong together: 6 heads of queries and 2 of keys are 0, 0, 0, 1, 1, 1, not 0, 1, 0, 1, 0, 1"
    yield attend_alone(query, cache, step, query.shape[-1] ** -0.5), "the scale: it is self.scale"
    yield attend_alone(query, cache, step, scale, causal=False), "the mask: pass `visible` on to the softmax"
    yield attend_alone(query, (cache[1], cache[0]), step, scale), "which of the two tensors are the keys"
    look = "the mask: `is_causal=True` takes the first query for the first token of its text; pass what `visible` says"
    yield attend_alone(query, cache, from_slot_0, scale), look
