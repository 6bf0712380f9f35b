"""Sampling: each filter against transformers' processor, the draw against exact probabilities, seeds against batches."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from scipy.stats import chisquare
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minivllm import SamplingParams
from minivllm.kernels import reference
from minivllm.kernels.ops import load_platform_kernels
from minivllm.request import EngineCoreRequest, Request, Sequence
from minivllm.scheduler_output import ScheduledSequence
from minivllm.worker import sampler
from minivllm.worker.choice_in_parts import can_choose_in_parts, choose_in_part
from minivllm.worker.sampler import Sampler, SamplingRow, exponential_noise, random_key, random_keys

sample = Sampler().sample

VOCAB_SIZE = 200


def random_logits(seed: int, rows: int = 4, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def column(value: float, rows: int = 4) -> torch.Tensor:
    return torch.tensor([[value]] * rows)


def make_row(params: SamplingParams, prompt=(1,), output=(), seed=0, index=0, eos=()) -> SamplingRow:
    request = Request(EngineCoreRequest("r", list(prompt), params, max_num_tokens=1000, eos_token_ids=tuple(eos), seed=seed))
    seq = Sequence(0, request)
    seq.token_ids += list(output)
    return SamplingRow(ScheduledSequence(seq, seq.num_tokens, []).to_data(), index)


seeds = st.integers(0, 2**31)


@given(seeds, st.floats(0.05, 5))
def test_temperature_equals_transformers(seed, temperature):
    logits = random_logits(seed)
    torch.testing.assert_close(
        sampler.apply_temperature(logits, column(temperature)), TemperatureLogitsWarper(temperature)(None, logits)
    )


@given(seeds, st.integers(1, VOCAB_SIZE - 1))
def test_top_k_equals_transformers(seed, top_k):
    logits = random_logits(seed)
    assert torch.equal(sampler.apply_top_k(logits, column(top_k).long()), TopKLogitsWarper(top_k)(None, logits))


@given(seeds, st.floats(0.01, 0.99))
def test_top_p_equals_transformers(seed, top_p):
    logits = random_logits(seed)
    assert torch.equal(sampler.apply_top_p(logits, column(top_p)), TopPLogitsWarper(top_p)(None, logits))


@given(seeds, st.floats(0.001, 1))
def test_min_p_equals_transformers(seed, min_p):
    logits = random_logits(seed)
    assert torch.equal(sampler.apply_min_p(logits, column(min_p)), MinPLogitsWarper(min_p)(None, logits))


@given(seeds, st.floats(0.5, 2), st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1), st.lists(st.integers(0, VOCAB_SIZE - 1)))
def test_repetition_penalty_equals_transformers(seed, penalty, prompt, output):
    logits = random_logits(seed, rows=1)
    ours = sampler.apply_penalties(logits[0], prompt, output, penalty, 0.0, 0.0)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits.clone())
    torch.testing.assert_close(ours, theirs[0])


@given(seeds, st.integers(1, 6), st.integers(0, 8))
def test_min_tokens_equals_transformers(seed, min_tokens, num_output):
    logits = random_logits(seed, rows=1)
    row = make_row(SamplingParams(min_tokens=min_tokens, max_tokens=20), prompt=[5, 6], output=[7] * num_output, eos=[3])
    theirs = MinNewTokensLengthLogitsProcessor(2, min_tokens, 3, device="cpu")(torch.tensor([row.seq.token_ids]), logits.clone())
    assert torch.equal(sampler.adjust_logits(logits, [row]), theirs)


@given(seeds, st.floats(-2, 2), st.floats(-2, 2), st.lists(st.integers(0, 9), max_size=20))
def test_presence_and_frequency_penalties_count_the_output_only(seed, presence, frequency, output):
    logits = random_logits(seed, rows=1)[0]
    ours = sampler.apply_penalties(logits, [1, 1, 2], output, 1.0, presence, frequency)
    for token_id in range(12):
        count = output.count(token_id)
        expected = logits[token_id] - frequency * count - presence * (count > 0)
        torch.testing.assert_close(ours[token_id], expected)


@given(seeds)
def test_rows_are_filtered_each_by_its_own_parameters(seed):
    """A batch of different wishes gives each row what it would get alone."""
    logits = random_logits(seed, rows=5)
    params = [
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.6, temperature=1.3),
        SamplingParams(min_p=0.1),
        SamplingParams(top_k=-1, top_p=0.9, min_p=0.01, temperature=0.4),
    ]
    together = sampler.filter_logits(logits, params)
    for i, param in enumerate(params):
        torch.testing.assert_close(together[i : i + 1], sampler.filter_logits(logits[i : i + 1], [param]))


def test_logit_bias_is_added():
    logits = random_logits(0, rows=2)
    row = make_row(SamplingParams(logit_bias={3: 5.0, 7: -100.0}))
    adjusted = sampler.adjust_logits(logits, [make_row(SamplingParams()), row])
    assert torch.equal(adjusted[0], logits[0])
    changed = (adjusted[1] != logits[1]).nonzero().flatten().tolist()
    assert changed == [3, 7]
    assert adjusted[1, 3] == logits[1, 3] + 5


def test_the_given_logits_are_not_changed():
    logits = random_logits(0)
    before = logits.clone()
    sample(logits, [make_row(SamplingParams(repetition_penalty=1.5, logit_bias={1: 2}, top_k=3, top_p=0.5)) for _ in range(4)])
    assert torch.equal(logits, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=7),
        SamplingParams(top_p=0.8, temperature=1.5),
        SamplingParams(min_p=0.05),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "min_p"],
)
def test_20000_draws_follow_the_exact_probabilities(params):
    logits = random_logits(7, rows=1, vocab_size=40)
    probs = sampler.filter_logits(logits, [params]).softmax(-1)[0].double()
    counts = torch.zeros(40, dtype=torch.int64)
    num_draws, batch = 20_000, 500
    for start in range(0, num_draws, batch):
        rows = [make_row(params, seed=start + i) for i in range(batch)]
        drawn = torch.tensor([token.token_id for token in sample(logits.expand(batch, -1), rows)])
        counts += torch.bincount(drawn, minlength=40)
    assert counts[probs == 0].sum() == 0, "a token that was filtered out was drawn"
    expected = probs * num_draws
    common = expected >= 5  # the chi-square approximation needs that many; the rare ones are counted together
    observed = [*counts[common].tolist(), int(counts[~common].sum())]
    wanted = [*expected[common].tolist(), float(expected[~common].sum())]
    if wanted[-1] == 0:
        observed.pop(), wanted.pop()
    total = sum(wanted)
    assert chisquare(observed, [value * num_draws / total for value in wanted]).pvalue > 1e-3


def test_keys_belong_to_seed_index_and_position():
    places = [(seed, index, position) for seed in range(20) for index in range(5) for position in range(50)]
    assert len({random_key(*place) for place in places}) == len(places)
    assert random_key(3, 1, 4) == random_key(3, 1, 4)


@given(st.integers(-(2**63), 2**63), st.integers(0, 5), st.integers(0, 10))
def test_the_keys_of_a_batch_are_those_of_its_rows(seed, index, num_output):
    rows = [make_row(SamplingParams(), seed=seed + i, index=index, output=[7] * (num_output + i)) for i in range(3)]
    assert random_keys(rows).tolist() == [random_key(seed + i, index, num_output + i) for i in range(3)]


def test_noise_is_exponential_and_no_two_rows_or_tokens_go_together():
    noise = exponential_noise([random_key(5, 0, position) for position in range(200)], 5000).double()
    assert bool((noise > 0).all()) and bool(noise.isfinite().all())
    uniform = 1 - (-noise).exp()
    counts = torch.histc(uniform, bins=200, min=0, max=1)
    assert chisquare(counts.tolist()).pvalue > 1e-3
    small = int((uniform < 1e-3).sum())
    assert abs(small - 1000) < 4.5 * 1000**0.5, "the winners of the race are among the small ones"
    for table in (uniform, uniform[:, :200].T):
        correlations = torch.corrcoef(table).fill_diagonal_(0)
        assert correlations.abs().max() < 6 / table.shape[1] ** 0.5


@pytest.mark.parametrize("distance", [1, 2, 256, 2**16, 2**24, 2**30])
def test_rows_whose_keys_are_alike_have_different_noise(distance):
    """Of a weak hash, keys that differ in one bit give numbers that go together."""
    keys = range(1, 201)
    first, second = (reference.random_uniform(torch.tensor(keys, dtype=torch.int32) + d, 5000) for d in (0, distance))
    cells = (first * 32).long() * 32 + (second * 32).long()
    assert chisquare(torch.bincount(cells.flatten(), minlength=1024).tolist()).pvalue > 1e-4


@given(seeds, st.integers(0, 30), st.integers(1, 300))
def test_noise_is_the_same_in_any_batch_and_from_any_kernel(seed, num_rows, size):
    keys = torch.randint(-(2**31), 2**31, (num_rows,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
    numbers = reference.random_uniform(keys, size)
    assert torch.equal(numbers, load_platform_kernels(torch.device("cpu")).random_uniform(keys, size))
    for row, key in enumerate(keys):
        assert torch.equal(numbers[row : row + 1], reference.random_uniform(key[None], size))
        middle = size // 2
        for implementation in (reference, load_platform_kernels(torch.device("cpu"))):
            assert torch.equal(numbers[row : row + 1, middle:], implementation.random_uniform(key[None], size - middle, middle))
    assert numbers.shape == (num_rows, size) and bool(((numbers > 0) & (numbers < 1)).all())


def test_ranks_that_choose_among_their_tokens_choose_what_one_would():
    """Greedy rows and plain draws, a vocabulary in uneven parts: the part with the best score has the token of the whole."""
    generator, differing = torch.Generator().manual_seed(0), 0
    for seed in range(300):
        params = [SamplingParams(temperature=t, seed=seed) for t in (0.0, 0.7, 1.0, 1.9)]
        rows = [make_row(each, seed=seed + i) for i, each in enumerate(params)]
        logits = torch.randn(len(rows), 3000, generator=generator) * 2
        assert can_choose_in_parts(rows)
        bounds = [0, *torch.randint(1, 2999, (2,), generator=generator).sort().values.tolist(), 3000]
        parts = [choose_in_part(rows, logits[:, start:stop], start) for start, stop in pairwise(bounds) if stop > start]
        scores, token_ids = (torch.stack(each) for each in zip(*parts, strict=True))
        chosen = token_ids.gather(0, scores.argmax(dim=0, keepdim=True)).squeeze(0).tolist()
        differing += chosen != [token.token_id for token in sample(logits, rows)]
    assert differing <= 1, "only rounding errors may decide otherwise, where two tokens arrive at almost the same moment"


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"logprobs": 0},
        {"presence_penalty": 0.1},
        {"min_tokens": 1},
        {"logit_bias": {3: 1}},
    ],
    ids=str,
)
def test_what_needs_all_logits_is_not_chosen_in_parts(params):
    plain, greedy = make_row(SamplingParams(temperature=1.0)), make_row(SamplingParams(temperature=0, top_p=0.5))
    assert can_choose_in_parts([plain, greedy])
    assert not can_choose_in_parts([plain, make_row(SamplingParams(temperature=1.0, **params)), greedy])


def test_keys_may_lie_anywhere_and_be_wide():
    kernels, keys = load_platform_kernels(torch.device("cpu")), torch.randint(-(2**31), 2**31, (6, 40))
    for strided in (keys.int()[::2, 3], keys.int().t()[5], keys[1]):
        assert torch.equal(kernels.random_uniform(strided, 33), reference.random_uniform(strided.clone(), 33))


def test_rounding_errors_of_the_logits_hardly_ever_change_a_draw():
    """They would if a number chose a point on the sum of all probabilities, because each error moves the pieces after it."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 50_000, generator=generator) * 3
    num_changed = num_changed_by_sums = 0
    for seed in range(5):
        rounded = logits + 1e-4 * torch.randn(logits.shape, generator=generator)
        rows = [make_row(SamplingParams(), seed=seed, index=i) for i in range(len(logits))]
        num_changed += sum(a != b for a, b in zip(sample(logits, rows), sample(rounded, rows), strict=True))
        points = torch.rand(len(logits), 1, dtype=torch.float64, generator=generator)
        sums = [x.double().softmax(-1).cumsum(-1) for x in (logits, rounded)]
        num_changed_by_sums += int((torch.searchsorted(sums[0], points) != torch.searchsorted(sums[1], points)).sum())
    assert num_changed_by_sums > 15 and num_changed <= 2


def test_a_token_that_was_filtered_out_is_never_drawn():
    logits = torch.tensor([[0.0, 50.0, -30.0, 1.0]])
    rows = [make_row(SamplingParams(top_k=1), seed=seed) for seed in range(2000)]
    assert {token.token_id for token in sample(logits.expand(2000, -1), rows)} == {1}


@given(seeds, st.integers(1, 6), st.randoms())
def test_a_draw_does_not_depend_on_the_batch(seed, num_rows, rng):
    logits = random_logits(seed, rows=num_rows)
    rows = [
        make_row(
            SamplingParams(
                temperature=rng.choice([0.0, 0.5, 1.0]), top_k=rng.choice([0, 3, 50]), top_p=rng.choice([1.0, 0.7]),
                repetition_penalty=rng.choice([1.0, 1.2]), min_p=rng.choice([0.0, 0.02]),
            ),
            output=[rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(5))], seed=rng.randrange(100),
        )
        for _ in range(num_rows)
    ]  # fmt: skip
    together = [token.token_id for token in sample(logits, rows)]
    alone = [sample(logits[i : i + 1], [rows[i]])[0].token_id for i in range(num_rows)]
    assert together == alone


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {3: 5.0}},
        {"allowed_token_ids": [3, 4], "min_tokens": 2},
        {"min_tokens": 2, "max_tokens": 9},
        {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"top_k": 3, "min_p": 0.1},
    ],
    ids=str,
)
def test_a_launch_asks_for_no_value_that_the_device_must_compute_first(options):
    """On the device "meta", tensors have no values, and whatever asks for one fails."""
    logits = torch.zeros(3, VOCAB_SIZE, device="meta")
    params = SamplingParams(**options)
    rows = [make_row(SamplingParams()), make_row(params, output=[7, 7], eos=[3]), make_row(params, eos=[3])]
    rows[0].seq.masks = [bytes([255] * (VOCAB_SIZE // 8))]
    assert sampler.filter_logits(sampler.adjust_logits(logits, rows), [row.params for row in rows]).device.type == "meta"


KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, logprobs=2),
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=3, logprobs=2),
    SamplingParams(top_p=0.5, min_p=0.01),
    SamplingParams(temperature=0, logit_bias={3: 50}, logprobs=0),
    SamplingParams(min_tokens=3),
]


@given(seeds, st.data())
def test_what_is_kept_of_earlier_batches_changes_nothing(seed, data):
    """Each row of each batch gets the token and the log-probabilities that it would get alone, from a new sampler."""
    kept = Sampler()
    sequences = [make_row(params, seed=i % 3, eos=[5]).seq for i, params in enumerate(KINDS * 2)]
    size = data.draw(st.integers(1, 4))
    places = st.lists(st.tuples(st.sampled_from(range(len(sequences))), st.integers(0, 1)), min_size=size, max_size=size)
    batches = data.draw(st.lists(places, min_size=2, max_size=3))
    batches += [[(i, 0) for i, _ in batch] for batch in batches]  # of many batches, only one thing is different
    for step in range(10):
        batch = data.draw(st.sampled_from(batches))
        logits = random_logits(seed + step, rows=len(batch))
        rows = [SamplingRow(replace(sequences[i], num_output_tokens=step), index) for i, index in batch]
        alone = [Sampler().sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
        assert kept.sample(logits, rows) == alone


@given(seeds, st.integers(0, 3), st.integers(0, 6))
def test_a_row_after_drafts_is_as_if_they_were_output(seed, num_drafts, min_tokens):
    params = SamplingParams(temperature=1.0, min_tokens=min_tokens, max_tokens=10)
    drafts, eos = [3] * num_drafts, range(VOCAB_SIZE // 2)
    row = make_row(params, output=(7, 8), seed=seed, eos=eos)
    row.num_drafts = num_drafts
    same = make_row(params, output=(7, 8, *drafts), seed=seed, eos=eos)
    logits = random_logits(seed, rows=1)
    assert sample(logits, [row]) == sample(logits, [same])


def test_greedy_takes_the_most_likely_token():
    logits = random_logits(3)
    rows = [make_row(SamplingParams(temperature=0.0, top_k=1)), *[make_row(SamplingParams(temperature=0.0))] * 3]
    assert [token.token_id for token in sample(logits, rows)] == logits.argmax(-1).tolist()


def test_logprobs_are_the_models_own_and_ranked():
    logits = random_logits(5, rows=1)
    params = SamplingParams(temperature=0.3, top_k=2, logprobs=3, seed=1)
    token = sample(logits, [make_row(params)])[0]
    logprobs = logits.log_softmax(-1)[0]
    top = logprobs.topk(3)
    assert set(token.logprobs) == {*top.indices.tolist(), token.token_id}
    assert next(iter(token.logprobs)) == token.token_id
    for token_id, entry in token.logprobs.items():
        assert math.isclose(entry.logprob, float(logprobs[token_id]), abs_tol=1e-6)
        assert entry.rank == int((logprobs > logprobs[token_id]).sum()) + 1


def test_zero_logprobs_gives_the_chosen_token_alone():
    token = sample(random_logits(5, rows=1), [make_row(SamplingParams(logprobs=0))])[0]
    assert list(token.logprobs) == [token.token_id]


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 5.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999, 1.0])
def test_top_p_of_a_large_vocabulary_is_that_of_sorting_it(spread, top_p):
    """Flat distributions need more than the most likely thousand tokens, peaked ones a few."""
    logits = torch.randn(3, 20_000, generator=torch.Generator().manual_seed(0)) * spread
    logits[:, :5] += torch.tensor([3.0, 2.0, 1.0, 0.5, 0.1])  # no tie for the first place
    filtered = sampler.apply_top_p(logits, torch.full((3, 1), top_p))
    probs = logits.double().softmax(dim=-1)
    for row in range(3):
        kept = filtered[row] > float("-inf")
        assert torch.equal(filtered[row][kept], logits[row][kept])
        mass = probs[row][kept].sum()
        assert kept[logits[row].argmax()] and mass >= min(top_p, 1 - 1e-4) - 1e-4
        assert probs[row][kept].min() >= probs[row][~kept].max() if not kept.all() else True
        assert probs[row][logits[row] > logits[row][kept].min()].sum() < top_p + 1e-4, "none too many"
