"""The sampler with the Triton kernels, as on a GPU, chooses what it chooses with torch; and ties, on which both must agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampler import KINDS, column, make_row, random_logits, sample, seeds

from minivllm import LLM, SamplingParams
from minivllm.kernels.checks import Checks
from minivllm.kernels.ops import Ops, load_triton
from minivllm.worker import choice_in_parts, sampler
from minivllm.worker.choice_in_parts import choose_in_part

on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="compares with a CPU, on tensors of the CPU")


@on_a_cpu
@given(seeds, st.lists(st.sampled_from([*KINDS, SamplingParams(top_k=5, top_p=0.8)]), min_size=1, max_size=4))
@settings(max_examples=6)
def test_kernels_choose_what_torch_chooses(seed, params):
    """Mixed batches of greedy rows, filters, log-probabilities and adjusted logits."""
    pytest.importorskip("triton")
    logits = random_logits(seed, rows=len(params), vocab_size=500)
    rows = [make_row(each, seed=seed + i, eos=[5], output=[7] * i) for i, each in enumerate(params)]
    expected = sample(logits, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "load_sampling_ops", lambda device: Ops(load_triton(), Checks.ALL))
        assert sample(logits, rows) == expected
        rounded = logits.bfloat16()
        chosen = sample(rounded, rows)
    assert chosen == sample(rounded, rows)


@on_a_cpu
@pytest.mark.parametrize("temperatures", [(0.0, 0.7, 1.9), (1, 1, 2)], ids=["floats", "integers"])
def test_kernels_may_choose_in_parts_too(monkeypatch, temperatures):
    pytest.importorskip("triton")
    params = [SamplingParams(temperature=t) for t in temperatures]
    rows = [make_row(each, seed=i) for i, each in enumerate(params)]
    logits = random_logits(1, rows=3, vocab_size=900)
    expected = choose_in_part(rows, logits[:, 400:], 400)
    monkeypatch.setattr(choice_in_parts, "load_sampling_ops", lambda device: Ops(load_triton(), Checks.ALL))
    scores, token_ids = choose_in_part(rows, logits[:, 400:], 400)
    assert torch.equal(token_ids, expected[1])
    torch.testing.assert_close(scores, expected[0], rtol=0, atol=1e-5)


@on_a_cpu
def test_a_sampler_takes_logits_of_other_vocabularies_and_devices(monkeypatch):
    """With penalties, for which it keeps counts on a GPU."""
    pytest.importorskip("triton")
    one_sampler, row = sampler.Sampler(), make_row(SamplingParams(temperature=0, presence_penalty=1.0), output=[3])
    for ops, vocab_size in ((Ops(load_triton(), Checks.ALL), 500), (Ops(load_triton(), Checks.ALL), 300), (None, 200)):
        monkeypatch.setattr(sampler, "load_sampling_ops", lambda device, ops=ops: ops)
        logits = torch.zeros(1, vocab_size)
        logits[0, 3], logits[0, 7] = 0.5, 0.1
        assert one_sampler.sample(logits, [row])[0].token_id == 7


@on_a_cpu
def test_an_engine_with_kernels_has_the_tokens_of_one_without(tiny_llama, monkeypatch):
    pytest.importorskip("triton")
    wishes = [
        {"temperature": 0},
        {"seed": 1, "logprobs": 1},
        {"seed": 2, "top_k": 9, "top_p": 0.9, "n": 2},
        {"seed": 3, "presence_penalty": 1.0},
    ]
    params = [SamplingParams(max_tokens=4, **wish) for wish in wishes]
    prompts = [[7 + i] * (3 + i) for i in range(len(params))]

    def generate(**options):
        llm = LLM(
            tiny_llama,
            skip_tokenizer_init=True,
            num_gpu_blocks_override=40,
            block_size=8,
            max_num_seqs=8,
            max_model_len=64,
            **options,
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [[completion.token_ids for completion in output.outputs] for output in outputs]

    expected = generate()
    monkeypatch.setattr(sampler, "load_sampling_ops", lambda device: Ops(load_triton(), Checks.ALL))
    assert generate(attention_backend="triton") == expected


def test_top_p_keeps_what_ties_with_the_last():
    """Which of equal tokens a sort puts first means nothing."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    filtered = sampler.apply_top_p(logits, column(0.6, rows=1))
    assert filtered.isfinite().tolist() == [[False, True, True, True, True, False]]
    many = torch.zeros(1, 5000)
    many[0, 7] = 5.0
    assert bool(sampler.apply_top_p(many, column(0.5, rows=1)).isfinite().all()), "also beyond the first candidates"
