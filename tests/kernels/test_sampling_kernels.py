"""The sampling kernels against the reference, bit by bit or token by token. On a GPU they are compiled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, guarded_results
from scipy.stats import chisquare

from minivllm.errors import KernelError
from minivllm.kernels import reference

pytest.importorskip("triton")  # there is none for macOS
from minivllm.kernels import triton
from minivllm.kernels.triton.sampling import TOKENS_PER_PROGRAM

DEVICE = "cpu" if triton.INTERPRETED else "cuda"
FEWER = settings(max_examples=settings().max_examples // 2)
"""Interpreted kernels are slow."""
SIZES = [1, 2, 33, 1000, TOKENS_PER_PROGRAM, 2 * TOKENS_PER_PROGRAM + 7]
MIN_LOGIT = float("-inf")

seeds = st.integers(0, 2**31)


def make_logits(seed, num_rows, vocab_size, dtype=torch.float32, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab_size, generator=generator) * spread).to(dtype)


def make_keys(seed, num_rows):
    return torch.randint(-(2**31), 2**31, (num_rows,), generator=torch.Generator().manual_seed(seed)).to(torch.int32)


def column(values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


def run(operation, *args):
    """The kernel's results, on the CPU."""
    with guarded_results():
        results = operation(*(arg.to(DEVICE) if isinstance(arg, torch.Tensor) else arg for arg in args))
    return tuple(x.cpu() for x in results) if isinstance(results, tuple) else results.cpu()


def filter_both(logits, temperature, min_p, top_k, top_p):
    """The thresholds of the kernel and of the reference."""
    columns = (column(temperature), column(min_p), column(top_k, torch.int64).clamp(max=logits.shape[1]), column(top_p))
    return run(triton.filter_thresholds, logits, *columns), reference.filter_thresholds(logits, *columns)


# -- random numbers ----------------------------------------------------------------------------------------------------


@FEWER
@given(seeds, st.integers(0, 4), st.sampled_from(SIZES), st.sampled_from([0, 1, 75_968, 2**31 - 20_000]))
def test_random_numbers_are_those_of_the_reference_bit_for_bit(seed, num_rows, size, first):
    keys = make_keys(seed, num_rows)
    numbers = triton.random_uniform(keys.to(DEVICE), size, first).cpu()
    assert torch.equal(numbers.view(torch.int32), reference.random_uniform(keys, size, first).view(torch.int32))


# -- the race ----------------------------------------------------------------------------------------------------------


@FEWER
@given(
    seeds, st.integers(0, 5), st.sampled_from(SIZES), st.sampled_from(DTYPES), st.sampled_from([0, 40_000]), st.booleans(), st.booleans()
)  # fmt: skip
def test_the_race_has_the_winners_of_the_reference(seed, num_rows, vocab_size, dtype, first, has_thresholds, strided):
    logits = make_logits(seed, num_rows, vocab_size + 16 * strided, dtype)[:, :vocab_size]
    temperature = column([0.0, 0.01, 0.6, 1.0, 7.0][:num_rows])
    thresholds = column([0.0, 2.0, -1.0, MIN_LOGIT, 4.0][:num_rows]) if has_thresholds else None
    keys = make_keys(seed, num_rows)
    scores, token_ids = run(triton.draw, logits, temperature, keys, thresholds, first)
    expected, expected_ids = reference.draw(logits, temperature, keys, thresholds, first)
    torch.testing.assert_close(scores, expected, rtol=1e-6, atol=2e-6)
    for row in (token_ids != expected_ids).nonzero().flatten().tolist():
        # Only rounding may decide otherwise: the two must have arrived together.
        loser = logits[row].float().clone()
        loser[expected_ids[row]] = MIN_LOGIT
        again = reference.draw(loser[None], temperature[row, None], keys[row, None], None, first)
        assert int(again[1]) == int(token_ids[row]) and abs(float(again[0] - expected[row])) < 1e-4


def test_a_large_vocabulary():
    logits = make_logits(0, 3, 151_936, torch.bfloat16)
    temperature, keys = column([0.0, 0.6, 1.0]), make_keys(0, 3)
    assert torch.equal(run(triton.draw, logits, temperature, keys)[1], reference.draw(logits, temperature, keys)[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_equal_scores_the_first_wins(dtype):
    """Within a program and between programs."""
    size = 3 * TOKENS_PER_PROGRAM
    logits = torch.zeros(3, size, dtype=dtype)
    logits[1, [77, 78, size - 1]] = 2
    logits[2, [TOKENS_PER_PROGRAM, TOKENS_PER_PROGRAM - 1]] = 2
    token_ids = run(triton.draw, logits, torch.zeros(3), make_keys(0, 3))[1]
    assert token_ids.tolist() == [0, 77, TOKENS_PER_PROGRAM - 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_odd_logits_end_with_a_token_of_the_vocabulary(temperature):
    """NaN never wins; with nothing to choose from, any token is right."""
    size = TOKENS_PER_PROGRAM + 100
    logits = torch.full((5, size), MIN_LOGIT)
    logits[0, 4100] = -7.0
    logits[1] = float("nan")
    logits[2, 50:] = float("nan")
    logits[2, 20] = 1.0
    logits[3, 10] = float("inf")
    logits[3, 11] = 5.0
    columns = [temperature] * 5, [0.1 * (temperature > 0)] * 5, [3] * 5, [0.5] * 5
    thresholds, _ = filter_both(logits, *columns) if temperature else (None, None)
    for wanted in (None, thresholds):
        token_ids = run(triton.draw, logits, column(columns[0]), make_keys(0, 5), wanted)[1]
        assert token_ids[[0, 2, 3]].tolist() == [4100, 20, 10]
        assert bool(((token_ids >= 0) & (token_ids < size)).all())


@pytest.mark.parametrize("filtered", [False, True])
def test_draws_follow_the_exact_probabilities(filtered):
    num_draws, temperature = 20_000, 0.7
    logits = make_logits(3, 1, 50, torch.bfloat16, spread=1.5).expand(num_draws, -1)
    threshold = float(logits[0].float().sort().values[20]) if filtered else MIN_LOGIT
    keys = torch.arange(num_draws, dtype=torch.int32) * 77_777
    columns = torch.full((num_draws,), temperature), keys, torch.full((num_draws,), threshold)
    token_ids = reference.draw(logits, *columns)[1]
    if not triton.INTERPRETED:  # which would take minutes for so many programs
        assert (run(triton.draw, logits, *columns)[1] != token_ids).sum() <= 2
    probs = (logits[0].double() / temperature).masked_fill(logits[0] < threshold, MIN_LOGIT).softmax(0)
    observed, expected = torch.bincount(token_ids, minlength=50), probs * num_draws
    assert observed[probs == 0].sum() == 0
    order = expected.argsort(descending=True)  # the rare ones are counted together
    common, rare = order[: int((expected >= 5).sum()) - 1], order[int((expected >= 5).sum()) - 1 :]
    counts, wanted = ([*each[common].tolist(), float(each[rare].sum())] for each in (observed, expected))
    assert chisquare(counts, wanted).pvalue > 1e-3


# -- filters -----------------------------------------------------------------------------------------------------------

wishes = st.tuples(
    st.sampled_from([0.05, 0.6, 1.0, 3.0]), st.sampled_from([0.0, 0.0, 0.02, 1.0]), st.sampled_from([2**40, 2**40, 1, 2, 20, 999]),
    st.sampled_from([1.0, 1.0, 1e-6, 0.3, 0.95, 0.999]),
)  # fmt: skip


@FEWER
@given(
    seeds, st.lists(wishes, max_size=4), st.sampled_from(SIZES), st.sampled_from(DTYPES),
    st.sampled_from([0.0, 0.01, 1.0, 3.0]), st.sampled_from([0.0, -100.0, 100.0]),
)  # fmt: skip
def test_the_filters_keep_what_the_reference_keeps(seed, rows, vocab_size, dtype, spread, offset):
    """Flat and peaked distributions; in 16 bits, or far from 0, many logits are equal."""
    logits = make_logits(seed, len(rows), vocab_size, dtype, spread) + offset
    temperature, min_p, top_k, top_p = (list(values) for values in zip(*rows, strict=True)) if rows else ([], [], [], [])
    ours, theirs = filter_both(logits, temperature, min_p, top_k, top_p)
    for row, (x, t) in enumerate(zip(logits.float(), temperature, strict=True)):
        if torch.equal(x >= ours[row], x >= theirs[row]):
            continue
        # What they disagree about is one logit, whose tokens make the sum, or come close to the limit, within rounding.
        between = x[(x >= min(ours[row], theirs[row])) & (x < max(ours[row], theirs[row]))]
        probs = (x.double() / t).masked_fill(x < min(ours[row], theirs[row]), MIN_LOGIT).softmax(0)
        assert len(between.unique()) == 1
        mass = float(probs[x > between[0]].sum())
        ratio = float(((between[0] - x.max()).double() / t).exp())
        assert abs(mass - top_p[row] * float(probs.sum())) < 1e-4 or abs(ratio - min_p[row]) < 1e-4


@pytest.mark.parametrize(
    ("dtype", "vocab_size"), [(torch.float32, 49_152), pytest.param(torch.bfloat16, 151_936, marks=pytest.mark.long)]
)
def test_filters_of_a_large_vocabulary(dtype, vocab_size):
    logits = make_logits(1, 2, vocab_size, dtype)
    ours, theirs = filter_both(logits, [0.6, 1.0], [0.0, 0.0], [20, 2**40], [0.95, 1.0])
    assert torch.equal(ours, theirs)
    assert ours[1] == MIN_LOGIT


def test_what_ties_with_the_last_token_is_kept():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0, -1.0]] * 3)
    ours, theirs = filter_both(logits, [1.0] * 3, [0.0, 0.0, 0.368], [2, 99, 99], [1.0, 0.6, 1.0])
    assert torch.equal(logits >= ours[:, None], logits >= theirs[:, None])
    assert [row.nonzero().flatten().tolist() for row in logits >= ours[:, None]] == [[1, 2, 3, 4], [1, 2, 3, 4], [1]]


def test_wrong_columns_are_refused():
    logits, keys = torch.zeros(2, 5, device=DEVICE), make_keys(0, 2).to(DEVICE)
    good = torch.ones(2, device=DEVICE)
    for kernels in (triton, reference):
        with pytest.raises(KernelError, match=r"temperature is \[3\], but must be \[num_rows\] with num_rows = 2"):
            kernels.draw(logits, torch.ones(3, device=DEVICE), keys)
        with pytest.raises(KernelError, match="thresholds has dtype float64"):
            kernels.draw(logits, good, keys, good.double())
        with pytest.raises(KernelError, match="top_k has dtype float32, but must be int32 or int64"):
            kernels.filter_thresholds(logits, good, good, good, good)
