"""Invariants 2 and 3 on real tensors: a tiny Llama gives a request the same tokens in any workload, on one rank or two, as alone.

The shadow model of test_invariants.py checks that the right slots are read; this checks that what stands in them is right
after copying, swapping, caching and chunking, and that attention and sampling do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from test_invariants import Job, jobs, run
from thread_ranks import engine_on_threads
from transformers import LlamaConfig, LlamaForCausalLM

from minivllm import LLM, SamplingParams, StaticBatchScheduler
from minivllm.config import EngineArgs
from minivllm.request import Sequence
from minivllm.worker.transfer import RecentTokens

MAX_MODEL_LEN = 56


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, eos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():  # logits far enough apart that rounding decides nothing
        torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.4)
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    return folder


def load(folder, **args) -> LLM:
    return LLM(str(folder), skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN, **args)


def alone(llm: LLM) -> Callable[[Job], list[list[int]]]:
    """What a job gives when nothing else runs; remembered."""
    known: dict[str, list[list[int]]] = {}

    def compute(job: Job) -> list[list[int]]:
        key = repr((job.prompt, job.params))
        if key not in known:
            output = llm.generate(job.prompt, job.params, use_tqdm=False)[0]
            known[key] = [completion.token_ids for completion in output.outputs]
        return known[key]

    return compute


@pytest.fixture(scope="module")
def tokens_alone(tiny_folder):
    return alone(load(tiny_folder, num_gpu_blocks_override=100))


class Seer:
    """Proposes drafts in the place of `PromptLookup`: the right tokens, but every fifth wrong. Random models never repeat
    themselves, so a look-up would find little.
    """

    def __init__(self, right: dict[str, list[list[int]]], vocab_size: int = 50) -> None:
        self.right, self.vocab_size = right, vocab_size

    def propose(self, seq: Sequence, num_tokens: int) -> list[int]:
        right = self.right[seq.request.request_id][seq.index][seq.num_output_tokens :]
        drafts = (right + [1] * num_tokens)[: max(0, num_tokens)]
        return [(token + ((seq.num_tokens + i) % 5 == 0)) % self.vocab_size for i, token in enumerate(drafts)]

    def forget(self, seq: Sequence) -> None:
        pass


@st.composite
def engine_arguments(draw):
    max_num_seqs = draw(st.integers(2, 6))
    args = {
        "block_size": draw(st.sampled_from([1, 3, 8])),
        "max_num_seqs": max_num_seqs,
        "enable_prefix_caching": draw(st.booleans()),
        "preemption_mode": draw(st.sampled_from(["recompute", "swap"])),
        "swap_space": 1e-4,  # a hundred kilobytes: some tens of blocks
        "num_speculative_tokens": draw(st.sampled_from([0, 2, 5])),
        "scheduler_cls": draw(st.sampled_from([None, None, StaticBatchScheduler])),
    }
    args["num_gpu_blocks_override"] = -(-MAX_MODEL_LEN // args["block_size"]) + draw(st.integers(0, 20))
    if draw(st.booleans()):
        args |= {"enable_chunked_prefill": True, "max_num_batched_tokens": draw(st.integers(max_num_seqs, 20))}
    return args


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 5)
@given(args=engine_arguments(), workload=st.lists(jobs(40, 2), min_size=2, max_size=8), num_ranks=st.sampled_from([1, 1, 2]))
def test_tokens_are_the_same_alone_and_in_any_workload(tiny_folder, tokens_alone, args, workload, num_ranks):
    engine = engine_on_threads(
        EngineArgs(str(tiny_folder), skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN, **args), num_ranks
    )
    if args["num_speculative_tokens"]:
        engine.scheduler.speculation.proposer = Seer({str(i): tokens_alone(job) for i, job in enumerate(workload)})
    results = run(engine, workload)
    for name, job in zip(results, workload, strict=True):
        result = results[name]
        if result.error != "aborted":
            assert result.finished and result.error is None
            assert result.tokens == tokens_alone(job)


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 5)
@given(
    args=engine_arguments(),
    workload=st.lists(jobs(40, 2), min_size=2, max_size=8),
    num_in_flight=st.integers(2, 3),
    num_ranks=st.sampled_from([1, 1, 2]),
)
def test_tokens_are_the_same_with_several_steps_in_flight(tiny_folder, tokens_alone, args, workload, num_in_flight, num_ranks):
    args |= {"scheduler_cls": None, "async_scheduling": True, "enforce_eager": True}
    args["num_speculative_tokens"] = args["num_speculative_tokens"] if num_in_flight == 3 else 0
    engine = engine_on_threads(
        EngineArgs(str(tiny_folder), skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN, **args), num_ranks
    )
    engine.executor.max_concurrent_batches = num_in_flight
    if args["num_speculative_tokens"]:
        engine.scheduler.speculation.proposer = Seer({str(i): tokens_alone(job) for i, job in enumerate(workload)})
    fill_in, num_placeholders = RecentTokens.fill_in, 0

    def count_and_fill_in(recent, input_ids, placeholders):
        nonlocal num_placeholders
        num_placeholders += len(placeholders)
        fill_in(recent, input_ids, placeholders)

    with patch.object(RecentTokens, "fill_in", count_and_fill_in):
        results = run(engine, workload)
    event(f"placeholders: {num_placeholders > 0}")
    for name, job in zip(results, workload, strict=True):
        if results[name].error != "aborted":
            assert results[name].finished and results[name].error is None
            assert results[name].tokens == tokens_alone(job)
    assert engine.block_manager.get_num_free_gpu_blocks() == engine.block_manager.num_gpu_blocks


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "cpu", "triton"])
def test_drafts_change_no_token_on_any_attention_backend(tiny_folder, tokens_alone, backend):
    """One decodes, another verifies drafts, a third is in its prompt: all in one step."""
    workload = [
        Job(prompt, SamplingParams(temperature=i % 2, seed=i, max_tokens=15, ignore_eos=True), arrival=2 * i, priority=0, abort_after=None)
        for i, prompt in enumerate([[5, 6, 7] * 4, [9, 8, 7, 6, 5, 4, 3], [4, 3] * 15, [8]])
    ]  # fmt: skip
    llm = load(
        tiny_folder, num_gpu_blocks_override=40, block_size=4, attention_backend=backend, num_speculative_tokens=3,
        enable_chunked_prefill=True, max_num_batched_tokens=16, max_num_seqs=4, trace=True,
    )  # fmt: skip
    right = {str(i): tokens_alone(job) for i, job in enumerate(workload)}
    llm.llm_engine.scheduler.speculation.proposer = Seer(right)
    assert {name: result.tokens for name, result in run(llm.llm_engine, workload).items()} == right
    trace = llm.llm_engine.trace
    assert any(step.phase == "mixed" and part.num_drafts for step in trace for part in step.scheduled)
    assert len({part.num_accepted for step in trace for part in step.scheduled if part.num_drafts}) > 2


@pytest.mark.slow
def test_a_large_vocabulary_is_sampled_alike_in_chunks_and_alone(tokenizer):
    """A chunk of a single token is computed in another order than as a part of a longer one, so that logits differ in their last digits."""
    prompts = [
        "Once upon a time there was a king who",
        "The capital of France is",
        "A recipe for bread: take flour and",
        "def main():\n",
    ]
    llm = LLM(
        "smollm2-135m", max_num_seqs=4, max_model_len=64, num_gpu_blocks_override=32, enable_chunked_prefill=True,
        max_num_batched_tokens=12, trace=True,
    )  # fmt: skip
    for seed in range(0, 12, 4):
        params = [SamplingParams(seed=seed + i, max_tokens=12, ignore_eos=True) for i in range(len(prompts))]
        alone = [
            llm.generate([prompt], each, use_tqdm=False)[0].outputs[0].token_ids
            for prompt, each in zip(prompts, params, strict=True)
        ]
        workload = [
            Job(tokenizer.encode(prompt), each, arrival=seed % 7 * i, priority=0, abort_after=None)
            for i, (prompt, each) in enumerate(zip(prompts, params, strict=True))
        ]
        assert [result.tokens for result in run(llm.llm_engine, workload).values()] == [[tokens] for tokens in alone]
    assert any(step.phase == "mixed" for step in llm.llm_engine.trace)
