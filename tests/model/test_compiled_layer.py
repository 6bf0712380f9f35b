"""Decode steps of a Llama layer in one compiled call: the same numbers, to the last bit, as the same kernels called one by one."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from minivllm import LLM, SamplingParams
from minivllm.layers.attention_backends import CPUAttentionBackend

pytest.importorskip("numba")
PROMPTS = [[5, 6, 7], [8] * 20, [9, 10], [11, 12, 13, 14], [15]]


def save_llama(folder, **options):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        eos_token_id=2, tie_word_embeddings=False, **options,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"), hidden_size=64, intermediate_size=112, attention_bias=True, mlp_bias=True)


def load(folder, **options):
    return LLM(folder, skip_tokenizer_init=True, num_gpu_blocks_override=40, max_num_seqs=8, **options)


def layers_of(llm):
    return llm.llm_engine.executor.worker.model_runner.model.model.layers


def outputs(llm):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    completions = [result.outputs[0] for result in results]
    return [(c.token_ids, [next(iter(entry.values())).logprob for entry in c.logprobs]) for c in completions]


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_tokens_and_logprobs_are_the_same(folder, quantization):
    """With biases, grouped heads, and sequences that end one after the other."""
    llm = load(folder, quantization=quantization)
    if quantization and layers_of(llm)[0].compiled is None:
        pytest.skip("this processor lacks the instruction for 8-bit products")
    calls = []
    for layer in layers_of(llm):
        layer.compiled.kernel = lambda *args, kernel=layer.compiled.kernel: calls.append(len(args[1])) or kernel(*args)
    compiled = outputs(llm)
    assert calls.count(5) == 2 * 7, "seven decode steps of five sequences; the first layer has no residual yet"
    for layer in layers_of(llm):
        layer.compiled = None
    assert outputs(llm) == compiled


class OwnBackend(CPUAttentionBackend):
    """What a learner may plug in."""


def test_where_it_cannot_be_compiled_it_is_not(folder, tmp_path):
    assert all(layer.compiled is None for layer in layers_of(load(folder, attention_backend=OwnBackend)))
    assert all(layer.compiled is None for layer in layers_of(load(folder, attention_backend="torch")))
    assert all(layer.compiled is None for layer in layers_of(load(folder, low_memory=True)))
    assert all(layer.compiled is None for layer in layers_of(load(folder, quantization="int4")))
    odd = save_llama(tmp_path, hidden_size=40, intermediate_size=60)
    llm = load(odd)
    assert all(layer.compiled is None for layer in layers_of(llm)), "panels of 16 do not fill rows of 40"
    assert all(len(token_ids) == 8 for token_ids, _ in outputs(llm))
