"""Sampling without a sort of the vocabulary, and without a tensor as large as the logits: a threshold for each row, then the race of its tokens.

Every filter keeps the tokens with the largest logits, so all of them together are one number: the smallest logit that stays. It is searched for,
as in FlashInfer and in vLLM's `vllm/v1/sample/ops/topk_topp_triton.py`: a pass over a row tells for several thresholds at once how many tokens, or
how much probability, lie above each.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.kernels import checks
from minivllm.kernels.triton.launch import check_launch, on_device

TOKENS_PER_PROGRAM = 4096
"""Of a row, in the race."""
SEARCH_ROWS = 512
"""Runs of 16 bytes that a search loads at a time, two by each thread."""
CANDIDATES = tl.constexpr(1024)
"""A search ends in registers when so many logits are left."""
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
LOG2_E = tl.constexpr(math.log2(math.e))


def random_uniform(keys: Tensor, size: int, first: int = 0) -> Tensor:
    """Random numbers between 0 and 1, for each row those of its key: see `reference.random_uniform`."""
    out = torch.empty(len(keys), size, dtype=torch.float32, device=keys.device)
    check_launch(out)
    if out.numel():
        with on_device(out):
            _random_uniform[(len(keys), triton.cdiv(size, TOKENS_PER_PROGRAM))](
                out, keys.contiguous(), size, first, BLOCK=TOKENS_PER_PROGRAM
            )
    return out


@checks.DRAW
def draw(
    logits: Tensor, temperature: Tensor, keys: Tensor, thresholds: Tensor | None = None, first: int = 0
) -> tuple[Tensor, Tensor]:
    """The scores and the token ids of the winners: see `reference.draw`. Two launches; the logits are read once."""
    check_launch(logits)
    num_rows, vocab_size = logits.shape
    num_splits = triton.cdiv(vocab_size, TOKENS_PER_PROGRAM)
    scores, token_ids = logits.new_empty(num_rows, dtype=torch.float32), logits.new_empty(num_rows, dtype=torch.int64)
    if num_rows == 0:
        return scores, token_ids
    best_scores = logits.new_empty((num_rows, num_splits), dtype=torch.float32)
    best_tokens = logits.new_empty((num_rows, num_splits), dtype=torch.int32)
    with on_device(logits):
        _race[(num_rows, num_splits)](
            best_scores, best_tokens, logits, temperature, keys, temperature if thresholds is None else thresholds,
            vocab_size, first, logits.stride(0), num_splits, HAS_THRESHOLDS=thresholds is not None, BLOCK=TOKENS_PER_PROGRAM, num_warps=8,
        )  # fmt: skip
        _find_winner[(num_rows,)](
            scores, token_ids, best_scores, best_tokens, num_splits, BLOCK=triton.next_power_of_2(num_splits), num_warps=1
        )
    return scores, token_ids


@checks.FILTER_THRESHOLDS
def filter_thresholds(logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The smallest logit that each row's filters keep: see `reference.filter_thresholds`. One launch; a row without a filter ends at once."""
    check_launch(logits)
    num_rows, vocab_size = logits.shape
    thresholds = logits.new_empty(num_rows, dtype=torch.float32)
    if num_rows:
        candidates = logits.new_empty((num_rows, CANDIDATES.value), dtype=torch.float32)
        with on_device(logits):
            _filter_thresholds[(num_rows,)](
                thresholds, candidates, logits, temperature, min_p, top_k, top_p, vocab_size, logits.stride(0),
                ROWS=SEARCH_ROWS, WIDTH=16 // logits.element_size(), num_warps=8,
            )  # fmt: skip
    return thresholds


# -- the race ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["first"])
def _random_uniform(out_ptr, keys_ptr, size, first, BLOCK: tl.constexpr):
    """Some numbers of one row."""
    row = tl.program_id(0).to(tl.int64)
    numbers = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    uniform = _uniform(tl.load(keys_ptr + row), first + numbers)
    tl.store(out_ptr + row * size + numbers, uniform, mask=numbers < size)


@triton.jit
def _uniform(key, numbers):
    """`reference.random_uniform`, bit for bit."""
    bits = _mix(_mix(numbers.to(tl.uint32)) + key.to(tl.uint32))
    uniform = (bits.to(tl.int32, bitcast=True).to(tl.float32) + 0.5) * 2.0**-32
    return tl.minimum(uniform - tl.floor(uniform), 1 - 2.0**-24)


@triton.jit
def _mix(bits):
    bits = (bits ^ (bits >> 17)) * 0xED5AD4BB
    bits = (bits ^ (bits >> 11)) * 0xAC4C1B51
    bits = (bits ^ (bits >> 15)) * 0x31848BAB
    return bits ^ (bits >> 14)


@triton.jit(do_not_specialize=["first"])
def _race(
    scores_ptr, tokens_ptr, logits_ptr, temperature_ptr, keys_ptr, thresholds_ptr, vocab_size, first, row_stride, num_splits,
    HAS_THRESHOLDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The winner among some tokens of one row."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    tokens = split * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * row_stride + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
    scores = tl.where(logits == logits, logits, float("-inf"))  # NaN never wins
    runs = True
    if HAS_THRESHOLDS:
        scores = tl.where(scores >= tl.load(thresholds_ptr + row), scores, float("-inf"))
        runs = tl.max(scores, axis=0) > float("-inf")  # where all have been filtered out, there is no race
    temperature = tl.load(temperature_ptr + row)
    if runs & (temperature > 0):
        uniform = _uniform(tl.load(keys_ptr + row), first + tokens)
        scores = tl.div_rn(scores, temperature) - tl.log(_minus_log1p(uniform))
    best, place = tl.max(scores, axis=0, return_indices=True)  # ties: the lowest id
    tl.store(scores_ptr + row * num_splits + split, best)
    tl.store(tokens_ptr + row * num_splits + split, split * BLOCK + place)


@triton.jit
def _minus_log1p(uniform):
    """`-log1p(-uniform)`, as exact for small numbers as for large ones: what is lost in `1 - uniform` is made up for by the quotient."""
    rest = 1.0 - uniform
    lost = 1.0 - rest
    return tl.where(lost > 0, -tl.log(rest) * (uniform / tl.where(lost > 0, lost, 1.0)), uniform)


@triton.jit
def _find_winner(scores_ptr, token_ids_ptr, best_scores_ptr, best_tokens_ptr, num_splits, BLOCK: tl.constexpr):
    """The best of the winners of one row."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, BLOCK)
    scores = tl.load(best_scores_ptr + row * num_splits + splits, mask=splits < num_splits, other=float("-inf"))
    best, place = tl.max(scores, axis=0, return_indices=True)
    tl.store(scores_ptr + row, best)
    tl.store(token_ids_ptr + row, tl.load(best_tokens_ptr + row * num_splits + place).to(tl.int64))


# -- filters -----------------------------------------------------------------------------------------------------------


@triton.jit
def _filter_thresholds(
    out_ptr, candidates_ptr, logits_ptr, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, vocab_size, row_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One row: the highest logit, then a search for top-k among what min-p leaves, and one for top-p among what both leave."""
    row = tl.program_id(0).to(tl.int64)
    min_p = tl.load(min_p_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    threshold = tl.full([], float("-inf"), tl.float32)
    if (min_p > 0) | (top_k < vocab_size) | (top_p < 1):
        temperature = tl.load(temperature_ptr + row)
        row_ptr = logits_ptr + row * row_stride
        maxima = tl.full([ROWS], float("-inf"), tl.float32)
        for start in range(0, vocab_size, ROWS * WIDTH):
            logits = _load(row_ptr, start, vocab_size, ROWS, WIDTH)
            maxima = tl.maximum(maxima, tl.max(tl.where(logits == logits, logits, float("-inf")), axis=1))
        highest = tl.max(maxima, axis=0)
        threshold = tl.full([], LOWEST, tl.float32)
        if min_p > 0:
            threshold = tl.maximum(threshold, highest + temperature * tl.log(min_p))
        num_left = tl.full([], 0.0, tl.float32) + vocab_size
        candidates_row = candidates_ptr + row * CANDIDATES
        if top_k < vocab_size:
            threshold, num_left = _search(
                row_ptr, candidates_row, vocab_size, num_left, threshold, highest,
                unit=1.0, number=top_k.to(tl.float32), share=0.0, COUNT=True, ROWS=ROWS, WIDTH=WIDTH,
            )  # fmt: skip
        if top_p < 1:
            threshold, num_left = _search(
                row_ptr, candidates_row, vocab_size, num_left, threshold, highest,
                unit=temperature, number=0.0, share=top_p, COUNT=False, ROWS=ROWS, WIDTH=WIDTH,
            )  # fmt: skip
    tl.store(out_ptr + row, threshold)


@triton.jit
def _load(row_ptr, start, vocab_size, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """`[ROWS, WIDTH]` logits as float32, each run of WIDTH by one thread. Minus infinity behind the row's end."""
    tokens = start + tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return tl.load(row_ptr + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def _search(
    row_ptr, candidates_ptr, vocab_size, num_left, floor, highest, unit, number, share,
    COUNT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The highest logit of a token so that all tokens from there on weigh enough together; `floor`, or a logit next to it, if all from there do not.
    And how many tokens there are from there on, or more. No more than `num_left` are at `floor` or above.

    Tokens are counted, or weigh `e ** ((logit - highest) / unit)`. Enough is `number` plus `share` times the weight of all from `floor` on.

    Floats are searched as integers in the same order (`_to_key`), so the search ends. What lies from `low` on weighs enough, from `high` on it
    does not. A pass over the row tries three thresholds between the two: at first 2, 4 and 8 `unit`s below the highest logit, then at equal
    distances. It also finds the logits next to `low` and `high`, so that ties are nothing special. When few tokens are left, they
    are collected, and the rest happens without the row.
    """
    low, high = _to_key(floor), _to_key(highest) + 1
    key1, key2, key3 = _to_key(highest - 8.0 * unit), _to_key(highest - 4.0 * unit), _to_key(highest - 2.0 * unit)
    scale = LOG2_E / unit
    enough = tl.full([], -1.0, tl.float32)  # not known yet
    while (low + 1 < high) & (num_left > CANDIDATES):
        limit1, limit2, limit3 = _from_key(key1), _from_key(key2), _from_key(key3)
        lowest_open, highest_open = _from_key(low), _from_key(high - 1)
        counts1 = tl.zeros([ROWS], tl.float32)
        counts2 = tl.zeros([ROWS], tl.float32)
        counts3 = tl.zeros([ROWS], tl.float32)
        all_weights = tl.zeros([ROWS], tl.float32)
        weights1 = tl.zeros([ROWS], tl.float32)
        weights2 = tl.zeros([ROWS], tl.float32)
        weights3 = tl.zeros([ROWS], tl.float32)
        least = tl.full([ROWS], float("inf"), tl.float32)
        most = tl.full([ROWS], float("-inf"), tl.float32)
        for start in range(0, vocab_size, ROWS * WIDTH):
            logits = _load(row_ptr, start, vocab_size, ROWS, WIDTH)
            counts1 += tl.sum(tl.where(logits >= limit1, 1.0, 0.0), axis=1)
            counts2 += tl.sum(tl.where(logits >= limit2, 1.0, 0.0), axis=1)
            counts3 += tl.sum(tl.where(logits >= limit3, 1.0, 0.0), axis=1)
            if not COUNT:
                weights = tl.where(logits >= floor, tl.exp2((logits - highest) * scale), 0.0)
                all_weights += tl.sum(weights, axis=1)
                weights1 += tl.sum(tl.where(logits >= limit1, weights, 0.0), axis=1)
                weights2 += tl.sum(tl.where(logits >= limit2, weights, 0.0), axis=1)
                weights3 += tl.sum(tl.where(logits >= limit3, weights, 0.0), axis=1)
            least = tl.minimum(least, tl.min(tl.where(logits >= lowest_open, logits, float("inf")), axis=1))
            most = tl.maximum(most, tl.max(tl.where(logits <= highest_open, logits, float("-inf")), axis=1))
        count1, count2, count3 = tl.sum(counts1, axis=0), tl.sum(counts2, axis=0), tl.sum(counts3, axis=0)
        low = tl.maximum(low, _to_key(tl.min(least, axis=0)))
        high = tl.minimum(high, _to_key(tl.max(most, axis=0)) + 1)
        if COUNT:
            enough = number
            weight1, weight2, weight3 = count1, count2, count3
        else:
            enough = share * tl.sum(all_weights, axis=0)
            weight1, weight2, weight3 = tl.sum(weights1, axis=0), tl.sum(weights2, axis=0), tl.sum(weights3, axis=0)
        low, high, num_left = _narrow(low, high, num_left, key1, weight1 >= enough, count1)
        low, high, num_left = _narrow(low, high, num_left, key2, weight2 >= enough, count2)
        low, high, num_left = _narrow(low, high, num_left, key3, weight3 >= enough, count3)
        quarter = tl.maximum((high - low) >> 2, 1)
        key1, key2, key3 = low + quarter, low + tl.maximum((high - low) >> 1, 1), high - quarter
    if low + 1 < high:
        logits = _collect(row_ptr, candidates_ptr, vocab_size, _from_key(low), ROWS * 2)
        if COUNT:
            weights = tl.where(logits >= floor, 1.0, 0.0)
            enough = number
        else:
            weights = tl.where(logits >= floor, tl.exp2((logits - highest) * scale), 0.0)
            enough = tl.where(enough < 0, share * tl.sum(weights, axis=0), enough)
        while low + 1 < high:
            key = low + ((high - low) >> 1)
            limit = _from_key(key)
            is_enough = tl.sum(tl.where(logits >= limit, weights, 0.0), axis=0) >= enough
            low, high = tl.where(is_enough, key, low), tl.where(is_enough, high, key)
    return _from_key(low), num_left


@triton.jit
def _narrow(low, high, num_left, key, is_enough, count):
    """The bounds of a search, and the tokens from `low` on, once it is known whether the `count` tokens from `key` on weigh enough."""
    is_higher = is_enough & (key > low)
    return (
        tl.where(is_higher, key, low),
        tl.where(is_enough, high, tl.minimum(high, key)),
        tl.where(is_enough, tl.minimum(num_left, count), num_left),
    )


@triton.jit
def _collect(row_ptr, candidates_ptr, vocab_size, limit, BLOCK: tl.constexpr):
    """`[CANDIDATES]`: the logits from `limit` on, of which there must not be more, in the order of the row; then minus infinity."""
    tl.debug_barrier()  # all threads have read what they collected before
    num_found = tl.zeros([], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
        is_found = logits >= limit
        ends = num_found + tl.cumsum(is_found.to(tl.int32), axis=0)
        tl.store(candidates_ptr + ends - 1, logits, mask=is_found & (ends <= CANDIDATES))
        num_found = tl.max(ends, axis=0)
    tl.debug_barrier()  # all have written
    places = tl.arange(0, CANDIDATES)
    return tl.load(candidates_ptr + places, mask=places < num_found, other=float("-inf"))


@triton.jit
def _to_key(x):
    """A float32 number's place among all of them, uint32; NaN aside."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 0, bits | 0x80000000, bits ^ 0xFFFFFFFF)


@triton.jit
def _from_key(key):
    """The number at that place."""
    return tl.where(key >> 31 == 1, key ^ 0x80000000, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)
