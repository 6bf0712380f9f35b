"""The checks of lesson 03 for the cache's memory: what fits, what is written where, what each token sees, and the attention over it."""

from __future__ import annotations

import random
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from minivllm.course.lessons.lesson_03.situations import (
    KVCache,
    attend_alone,
    count,
    describe,
    expect,
    isolate,
    make_attention,
    make_cache,
    make_step,
    num_slots_of,
    ranges,
    visible,
)
from minivllm.course.lessons.padded_steps import PaddedStep

_ROUNDS = 30
_NUM_ROWS, _MAX_LEN = 5, 12


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
    for seed in range(_ROUNDS):
        rng = random.Random(f"size {seed}")
        config, width = make_config(rng), rng.choice((1, 2, 4))
        size = cls(dict(config), width) if width != 2 or seed % 2 else cls(dict(config))
        said = f"config {config}, {count(width, 'byte')} for a number."
        expected, got = count_bytes(config, width), size.bytes_per_token()
        look = "keys and values, layers, heads of keys (not of queries), head_dim, bytes_per_number; and the defaults for missing config entries"
        expect(said, "bytes_per_token()", expected, _whole(got, "bytes_per_token()"), look)
        max_len, rows, num_parameters = rng.randint(10, 5000), rng.randint(1, 9), rng.randint(10**3, 10**9)
        row_bytes, weights = max_len * expected, num_parameters * width
        for memory, fit in (
            (weights + rows * row_bytes, rows),
            (weights + rows * row_bytes - 1, rows - 1),
            (weights + rows * row_bytes + rng.randrange(row_bytes), rows),
            (weights, 0),
            (weights // 2, 0),
        ):
            call = f"rows_that_fit({memory}, {num_parameters}, {max_len})"
            case = f"{said} A row of {max_len} tokens takes {row_bytes:,} bytes, and the weights take {weights:,}."
            look = "the memory left by the weights, and rounding down" if memory > weights else "weights that leave nothing"
            expect(case, call, fit, _whole(size.rows_that_fit(memory, num_parameters, max_len), call), look)


def _whole(number: Any, call: str) -> int:
    assert isinstance(number, Integral), f"{call} must be a whole number, but is {number!r}, a {type(number).__name__}."
    return int(number)


# -- into the slots --------------------------------------------------------------------------------------------------


def check_write(cls: Any) -> None:
    """`write`: each new key and value in its slot, in place; padding nowhere; a text that does not fit changes nothing."""
    steps = [make_step(random.Random(f"write {seed}"), _NUM_ROWS, _MAX_LEN, decode=seed % 5 == 4) for seed in range(_ROUNDS)]
    steps += [
        PaddedStep([3, 1], [_MAX_LEN - 1, 0], [1, 6]),  # the last slot; with its padding, the text would not fit
        PaddedStep([0, 4], [2, _MAX_LEN - 4], [7, 4]),
        PaddedStep([2], [0], [_MAX_LEN]),
    ]
    for number, step in enumerate(steps):
        generator = torch.Generator().manual_seed(number)
        cache, new = make_cache(generator, _NUM_ROWS, _MAX_LEN, 2, 4), make_new(generator, step, 2, 4)
        old = cache[0].clone(), cache[1].clone()
        call = f"write(kv_cache, keys, values, {describe(step)})"
        try:
            make_attention(cls).write(cache, *(part.clone() for part in new), step)
        except ValueError as error:
            fits = f"every text fits into its row of {_MAX_LEN} slots: padding takes no slot, and the last slot may be used"
            raise AssertionError(f"{call} raised {error!r}, but {fits}.") from None
        for name, part, before, entry in zip(("keys", "values"), cache, old, range(2), strict=True):
            _compare_slots(f"{call}, {name}", part, before, new, entry, step)
    for step in (
        PaddedStep([3, 1], [0, _MAX_LEN - 2], [2, 3]),
        PaddedStep([1, 0], [_MAX_LEN, 4], [1, 1]),
        PaddedStep([4], [0], [_MAX_LEN + 1]),
    ):
        generator = torch.Generator().manual_seed(9)
        cache = make_cache(generator, _NUM_ROWS, _MAX_LEN, 2, 4)
        old = cache[0].clone(), cache[1].clone()
        call = f"write(kv_cache, keys, values, {describe(step)}), with rows of {_MAX_LEN} slots,"
        try:
            make_attention(cls).write(cache, *make_new(generator, step, 2, 4), step)
        except ValueError:
            pass
        except (IndexError, RuntimeError) as error:
            raise AssertionError(f"{call} must raise a ValueError, but raised {error!r}. Look before you write.") from None
        else:
            raise AssertionError(f"{call} must raise a ValueError, because a text does not fit into its row, but raised nothing.")
        same = all(torch.equal(part, before) for part, before in zip(cache, old, strict=True))
        assert same, f"{call} must raise a ValueError and write nothing, but other texts of the step were written before it."


def make_new(generator: torch.Generator, step: PaddedStep, num_kv_heads: int, head_dim: int) -> KVCache:
    """New keys and values, with numbers in the padding too."""
    shape = (len(step.rows), step.width, num_kv_heads, head_dim)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def _compare_slots(call: str, got: Tensor, before: Tensor, new: KVCache, entry: int, step: PaddedStep) -> None:
    """Raise an AssertionError about the first slot that does not hold what it should."""
    owner = {
        (row, start + j): (i, j)
        for i, (row, start, new_count) in enumerate(zip(step.rows, step.starts, step.counts, strict=True))
        for j in range(new_count)
    }
    everywhere = [(row, slot) for row in range(before.shape[0]) for slot in range(before.shape[1])]
    for row, slot in sorted(everywhere, key=lambda place: place not in owner):  # first the ones to write
        place = owner.get((row, slot))
        wanted = before[row, slot] if place is None else new[entry][place]
        if torch.equal(got[row, slot], wanted):
            continue
        expected = "what was there before" if place is None else f"new token {place[1]} of text {place[0]}"
        look = (
            "what is padding, and which rows are in the step"
            if place is None
            else "step.rows[i] and step.starts[i]: where a text's new tokens begin; and whether you write to the tensors you were given"
        )
        expect(f"After {call}.", f"in slot {slot} of row {row}", expected, _name(got[row, slot], before, new, entry, step), look)


def _name(found: Tensor, before: Tensor, new: KVCache, entry: int, step: PaddedStep) -> str:
    """What a slot holds, in words."""
    for part, kind in ((entry, ""), (1 - entry, f"the {('key', 'value')[1 - entry]} of ")):
        for i in range(len(step.rows)):
            for j in range(step.width):
                if torch.equal(found, new[part][i, j]):
                    return kind + (f"new token {j}" if j < step.counts[i] else f"padding, column {j},") + f" of text {i}"
    is_old = bool((before == found).flatten(2).all(dim=2).any())
    return "what was there before" if is_old else "other numbers"


# -- what a token sees -----------------------------------------------------------------------------------------------


def check_mask(cls: Any) -> None:
    """`visible`: the slots from 0 to a token's own position."""
    for seed in range(_ROUNDS):
        rng = random.Random(f"mask {seed}")
        step = make_step(rng, _NUM_ROWS, _MAX_LEN, decode=seed % 5 == 4)
        num_slots = num_slots_of(step) + rng.choice((0, rng.randint(1, 4)))
        call = f"visible({describe(step)}, {num_slots})"
        got = make_attention(cls).visible(step, num_slots)
        assert isinstance(got, Tensor), f"{call} must return a tensor, but returned {got!r}."
        expect(call + ".", "shape", [len(step.rows), step.width, num_slots], list(got.shape), "the order of the dimensions")
        expect(call + ".", "dtype", torch.bool, got.dtype, "comparisons: they give bool tensors")
        for i, (start, new) in enumerate(zip(step.starts, step.counts, strict=True)):
            for j in range(step.width):
                seen = got[i, j].nonzero().flatten().tolist()
                if j >= new:
                    assert seen, f"{call}: column {j} of text {i} is padding and sees no slot at all: its softmax would be NaN."
                    continue
                said = f"{call}. New token {j} of text {i} has position {start + j}."
                look = "where a text's new tokens begin (step.starts), and whether a token sees itself"
                if seen and seen[-1] > start + j:
                    look = "slots beyond the token's own position: they hold later tokens, or what another text left"
                expect(said, "the slots that it sees", ranges(range(start + j + 1)), ranges(seen), look)


# -- attention -------------------------------------------------------------------------------------------------------


def make_attention_case(
    rng: random.Random, generator: torch.Generator, *, decode: bool
) -> tuple[PaddedStep, KVCache, Tensor, float]:
    """A step, a cache that already holds its keys and values, queries, and a scale.

    Slots beyond the longest text hold NaN: reading them gives NaN, even behind a mask.
    """
    step = make_step(rng, _NUM_ROWS, _MAX_LEN - 3, decode=decode)
    cache = make_cache(generator, _NUM_ROWS, _MAX_LEN, 2, 8)
    for part in cache:
        part[:, num_slots_of(step) :] = torch.nan
    query = torch.randn((len(step.rows), step.width, 6, 8), generator=generator)
    return step, cache, query, rng.choice((0.2, 0.5, 0.9))


def check_attend(cls: Any) -> None:
    """`attend`: for each text the attention it gets alone, whatever else is in the batch and in the cache.

    An object runs several steps, as a model's layer does: state from one must not leak into the next.
    """
    made = isolate(cls, visible=visible)
    layers: dict[float, Any] = {}
    for seed in range(_ROUNDS):
        rng, generator = random.Random(f"attend {seed}"), torch.Generator().manual_seed(seed)
        step, cache, query, scale = make_attention_case(rng, generator, decode=seed % 5 == 4)
        layer = layers.setdefault(scale, make_attention(made, 6, 2, 8, scale))
        _compare_attention(made, layer, step, cache, query, scale)
        turned = PaddedStep(step.rows, step.starts[::-1], step.counts[::-1])  # as large, but other tokens see other slots
        _compare_attention(made, layer, turned, cache, query, scale)


def _compare_attention(cls: Any, layer: Any, step: PaddedStep, cache: KVCache, query: Tensor, scale: float) -> None:
    """Raise an AssertionError unless a learner's object attends as each text would alone."""
    before = cache[0].clone(), cache[1].clone()
    call = f"attend(query, kv_cache, {describe(step)}) with 6 heads of queries, 2 of keys and values, and scale {scale}"
    got = layer.attend(query.clone(), cache, step)
    assert isinstance(got, Tensor), f"{call} must return a tensor, but returned {got!r}."
    expect(call + ".", "shape", list(query.shape), list(got.shape), "the order of the dimensions: the same as query's")
    for part, old in zip(cache, before, strict=True):
        assert torch.equal(part.nan_to_num(7.0), old.nan_to_num(7.0)), f"{call} must not change the cache, but did."
    assert got.isfinite().all(), (
        f"{call}.\nExpected: finite numbers\nGot: NaN or infinity\nLook at the slots from {num_slots_of(step)} on: no text of this step is that "
        f"long, so they hold NaN here and must not be read, not even behind a mask."
    )
    expected = attend_alone(query, cache, step, scale)
    for i, new in enumerate(step.counts):
        difference = (got[i, :new] - expected[i, :new]).abs().flatten(1).amax(dim=1)
        wrong = (difference > 1e-4).nonzero().flatten().tolist()
        assert not wrong, (
            f"{call}.\nExpected for new token {wrong[0]} of text {i}: what it gets when its text is alone\n"
            f"Got for new token {wrong[0]} of text {i}: numbers that differ by up to {difference.max():.2g}\n"
            f"Look at {_find_reason(cls, got, query, cache, step, scale)}."
        )


def _find_reason(cls: Any, got: Tensor, query: Tensor, cache: KVCache, step: PaddedStep, scale: float) -> str:
    """What was done instead, if the numbers reveal it."""
    from_slot_0 = PaddedStep(step.rows, [0] * len(step.rows), step.counts)
    in_turns = query.unflatten(2, (3, 2)).transpose(2, 3).flatten(2, 3)
    tiled = attend_alone(in_turns, cache, step, scale).unflatten(2, (2, 3)).transpose(2, 3).flatten(2, 3)
    finite = cache[0].nan_to_num(0.0), cache[1].nan_to_num(0.0)
    reasons = (
        (attend_alone(query, finite, step, scale, rows=range(len(step.rows))), "the rows: text i is in row step.rows[i], not in row i"),
        (tiled, "which heads belong together: 6 heads of queries and 2 of keys are 0, 0, 0, 1, 1, 1, not 0, 1, 0, 1, 0, 1"),
        (attend_alone(query, cache, step, query.shape[-1] ** -0.5), "the scale: it is self.scale"),
        (attend_alone(query, cache, step, scale, causal=False), "the mask: pass `visible` on to the softmax"),
        (attend_alone(query, (cache[1], cache[0]), step, scale), "which of the two tensors are the keys"),
        (attend_alone(query, cache, from_slot_0, scale), "the mask: `is_causal=True` takes the first query for the first token of its text; pass what `visible` says"),
    )  # fmt: skip
    for other, reason in reasons:
        if _are_same(got, other, step):
            return reason
    if _are_same(
        make_attention(cls, 6, 2, 8, scale).attend(query.clone(), cache, step), attend_alone(query, cache, step, scale), step
    ):
        return "what your object keeps from one step to the next: a fresh object gets this step right"
    return "the rows of the cache, the mask, the scale, and which heads belong together"


def _are_same(some: Tensor, other: Tensor, step: PaddedStep) -> bool:
    """Whether two outputs agree for all real tokens."""
    return all(torch.allclose(some[i, :new], other[i, :new], atol=1e-4) for i, new in enumerate(step.counts))
