"""Penalties from counts that are kept from step to step are those of all tokens, counted anew."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_sampler import make_row, random_logits, seeds

from minivllm import SamplingParams
from minivllm.kernels import reference
from minivllm.kernels.checks import Checks
from minivllm.kernels.ops import Ops
from minivllm.worker import token_counts
from minivllm.worker.sampler import adjust_logits
from minivllm.worker.token_counts import TokenCounts

pytest.importorskip("triton")  # there is none for macOS
from minivllm.kernels import triton

DEVICE = torch.device("cpu" if triton.INTERPRETED else "cuda")
VOCAB_SIZE = 5000  # more than one program takes
tokens = st.integers(0, 3) | st.integers(0, VOCAB_SIZE - 1)
penalties = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    logit_bias=st.sampled_from([None, {1: 4.0}]),
)
steps = st.lists(
    st.tuples(st.sets(st.integers(0, 5), min_size=1, max_size=2), st.lists(tokens, max_size=3), st.booleans()),
    min_size=1,
    max_size=6,
)
"""Each with the sequences that it has, the tokens that these have got since their last one, and whether one has two rows."""


@pytest.mark.parametrize("kernels", [reference, triton], ids=["reference", "triton"])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seeds, st.lists(st.tuples(penalties, st.lists(tokens, min_size=1, max_size=6)), min_size=6, max_size=6), steps)
def test_counts_that_are_kept_are_right(monkeypatch, kernels, seed, requests, steps):
    """Sequences come, go and return; there are more of them than rows of counts."""
    monkeypatch.setattr(token_counts, "LEAST_ROWS", 1)
    counts = TokenCounts(VOCAB_SIZE, DEVICE, Ops(kernels, Checks.ALL))
    known = [make_row(params, prompt=prompt, output=[]) for params, prompt in requests]
    for i, row in enumerate(known):
        row.seq.seq_id = i
    for number, (present, new, twice) in enumerate(steps):
        rows = [known[i] for i in sorted(present)]
        for row in rows:
            row.seq.output_token_ids += new
        rows += rows[:1] if twice else []
        logits = random_logits(seed + number, rows=len(rows), vocab_size=VOCAB_SIZE)
        expected = adjust_logits(logits, rows)
        found = adjust_logits(logits.to(DEVICE), rows, counts)
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0 if DEVICE.type == "cpu" else 1e-5)


def test_a_sequence_that_has_lost_tokens_is_counted_anew():
    """Its id may have been another's."""
    counts = TokenCounts(VOCAB_SIZE, DEVICE, Ops(reference, Checks.ALL))
    params = SamplingParams(frequency_penalty=1.0)
    for output in ([5, 5, 6], [7]):
        row = make_row(params, prompt=[1], output=output)
        logits = torch.zeros(1, VOCAB_SIZE)
        assert torch.equal(adjust_logits(logits.to(DEVICE), [row], counts).cpu(), adjust_logits(logits, [row]))


@pytest.mark.parametrize("failing", ["cat", "index_fill_"])
def test_after_a_step_that_failed_other_sequences_are_counted_right(monkeypatch, failing):
    """The GPU had too little memory for more rows, say, or the step was interrupted: its sequences end, and later ones take their rows."""
    monkeypatch.setattr(token_counts, "LEAST_ROWS", 2)
    counts = TokenCounts(VOCAB_SIZE, DEVICE, Ops(reference, Checks.ALL))
    rows = [make_row(SamplingParams(frequency_penalty=1.0), prompt=[1], output=[i] * i) for i in range(12)]
    for i, row in enumerate(rows):
        row.seq.seq_id = i
    logits = torch.zeros(len(rows), VOCAB_SIZE, device=DEVICE)
    adjust_logits(logits[:1], rows[:1], counts)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(*(torch, "cat") if failing == "cat" else (torch.Tensor, "index_fill_"), run_out_of_memory)
        adjust_logits(logits[1:9], rows[1:9], counts)
    for row in rows[9:]:
        found = adjust_logits(logits[:1], [row], counts)
        assert torch.equal(found.cpu(), adjust_logits(torch.zeros(1, VOCAB_SIZE), [row]))


def run_out_of_memory(*args, **options):
    raise RuntimeError("out of memory")
