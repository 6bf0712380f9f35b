"""Compiled layers of a Llama model, and their halves: the same numbers, to the last bit, as the same kernels called one by one."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from minivllm import LLM, SamplingParams
from minivllm.layers.attention_backends import CPUAttentionBackend, TorchAttentionBackend
from minivllm.layers.compiled import CompiledAttention, CompiledLayers, CompiledMLP
from minivllm.layers.norm import RMSNorm
from minivllm.models.llama import LlamaDecoderLayer, LlamaModel

pytest.importorskip("numba")
PROMPTS = [[5, 6, 7], [8] * 20, [9, 10], [11, 12, 13, 14], [15]]


def save_llama(folder, **options):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        eos_token_id=2, **{"tie_word_embeddings": False, **options},
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"), hidden_size=64, intermediate_size=112, attention_bias=True, mlp_bias=True)


def load(folder, **options):
    return LLM(folder, skip_tokenizer_init=True, **{"num_gpu_blocks_override": 40, "max_num_seqs": 8, **options})


def layers_of(llm):
    return llm.llm_engine.executor.worker.model_runner.model.model.layers


def outputs(llm):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    completions = [result.outputs[0] for result in results]
    return [(c.token_ids, [next(iter(entry.values())).logprob for entry in c.logprobs]) for c in completions]


@pytest.fixture
def calls(monkeypatch):
    """Rows of each call of compiled code."""
    rows = {CompiledLayers: [], CompiledAttention: [], CompiledMLP: []}

    def counted(kind):
        call = kind.__call__
        return lambda self, x, *args: rows[kind].append(len(x)) or call(self, x, *args)

    for kind in rows:
        monkeypatch.setattr(kind, "__call__", counted(kind))
    return rows


def halves(llm):
    """Which halves are compiled, alike in all layers."""
    found = {(layer.compiled_attention is not None, layer.compiled_mlp is not None) for layer in layers_of(llm)}
    assert len(found) == 1
    return found.pop()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_tokens_and_logprobs_are_the_same(folder, options, calls, monkeypatch):
    """All layers in one call, in halves, and every kernel by itself; with biases, grouped heads, and sequences that end one after the other."""
    llm = load(folder, **options)
    if "quantization" in options and layers_of(llm)[0].compiled_mlp is None:
        pytest.skip("this processor lacks the instruction for 8-bit products")
    compiled = outputs(llm)
    assert calls[CompiledLayers].count(5) == 7, "seven decode steps of five sequences"
    assert calls[CompiledAttention] == []
    with monkeypatch.context() as patch:
        patch.setattr(LlamaModel, "_get_compiled_layers", lambda self: None)
        assert outputs(llm) == compiled
    assert calls[CompiledLayers].count(5) == 7
    assert calls[CompiledAttention].count(5) == calls[CompiledMLP].count(5) == 3 * 7, "the same steps through three layers"
    for layer in layers_of(llm):
        layer.compiled_attention = layer.compiled_mlp = None
    assert outputs(llm) == compiled
    assert calls[CompiledLayers].count(5) == 7


def test_layers_that_differ_are_not_one_call(folder, calls):
    llm = load(folder)
    compiled = outputs(llm)
    num_calls = len(calls[CompiledLayers])
    middle = layers_of(llm)[1]
    half, middle.compiled_attention = middle.compiled_attention, None
    assert outputs(llm) == compiled, "a layer without a compiled half calls its kernels"
    middle.compiled_attention = CompiledAttention(half.weights, (2, 1.0, 1e-6), half.group)
    assert outputs(llm) != compiled, "another scale of attention"
    assert len(calls[CompiledLayers]) == num_calls
    assert calls[CompiledAttention].count(5) == 2 * 7 + 3 * 7


class OwnLayer(LlamaDecoderLayer):
    def forward(self, x, *args):
        x, residual = super().forward(x, *args)
        return 2 * x, residual


def test_a_layer_of_ones_own_or_with_a_hook_is_called(folder):
    llm = load(folder)
    compiled, seen = outputs(llm), []
    middle = layers_of(llm)[1]
    handle = middle.register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    assert outputs(llm) == compiled
    assert seen.count(5) == 7
    handle.remove()
    middle.__class__ = OwnLayer
    changed = outputs(llm)
    assert changed != compiled
    layers_of(llm)[0].compiled_attention = None  # so that every layer is called
    assert outputs(llm) == changed


WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = sys.modules["llvmlite"] = None
from minivllm import LLM, SamplingParams
llm = LLM(sys.argv[1], skip_tokenizer_init=True, num_gpu_blocks_override=40)
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in eval(sys.argv[2])], params, use_tqdm=False)
print([output.outputs[0].token_ids for output in outputs])
"""


def test_a_model_runs_without_numba(folder):
    command = [sys.executable, "-c", WITHOUT_NUMBA, folder, str(PROMPTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([token_ids for token_ids, _ in outputs(load(folder))])


class OwnNorm(RMSNorm):
    def add_and_norm(self, x, residual):
        normed, residual = super().add_and_norm(x, residual)
        return 2 * normed, residual


def test_a_norm_of_ones_own_is_called(folder):
    llm = load(folder)
    compiled = outputs(llm)
    model = llm.llm_engine.executor.worker.model_runner.model.model
    model.norm.__class__ = OwnNorm
    changed = outputs(llm)
    assert changed != compiled
    layers_of(llm)[0].compiled_attention, half = None, layers_of(llm)[0].compiled_attention
    assert outputs(llm) == changed
    layers_of(llm)[0].compiled_attention = half
    model.norm.__class__ = RMSNorm
    assert outputs(llm) == compiled
    old = model.norm
    model.norm = RMSNorm(old.weight.shape[0], 100.0, model.platform.ops)
    model.norm.weight.copy_(old.weight)
    changed = outputs(llm)
    assert changed != compiled, "another epsilon"
    layers_of(llm)[0].compiled_attention = None  # so that every layer is called
    assert outputs(llm) == changed


@pytest.mark.parametrize(
    ("num_tokens", "options"),
    [(270, {}), (505, {}), (1008, {}), (1010, {}), (1019, {"dtype": "bfloat16"}), (1010, {"quantization": "int8"})],
    ids=str,
)
def test_many_sequences_at_once(folder, num_tokens, options, calls):
    """Also more tokens than go through an MLP together."""
    llm = load(folder, max_num_seqs=90, num_gpu_blocks_override=400, max_num_batched_tokens=2048, **options)
    if "quantization" in options and layers_of(llm)[0].compiled_mlp is None:
        pytest.skip("this processor lacks the instruction for 8-bit products")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    lengths = [num_tokens // 90 + (i < num_tokens % 90) for i in range(90)]

    def answers():
        prompts = [{"prompt_token_ids": [(1 + i + 5 * j) % 96 for j in range(length)]} for i, length in enumerate(lengths)]
        return [(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in llm.generate(prompts, params, use_tqdm=False)]

    compiled = answers()
    assert calls[CompiledLayers] == [num_tokens, 90, 90, 90], "all prompts in one step, then three decode steps"
    for layer in layers_of(llm):
        layer.compiled_attention = layer.compiled_mlp = None
    assert answers() == compiled


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_chunks_of_prompts_beside_decodes(folder, options, calls, monkeypatch):
    """Prompts of 1 to 50 tokens, in chunks of at most 16, some of them behind a cached prefix: all layers in one call, and each by itself."""
    llm = load(folder, max_num_batched_tokens=16, enable_chunked_prefill=True, enable_prefix_caching=True, **options)
    if "quantization" in options and layers_of(llm)[0].compiled_mlp is None:
        pytest.skip("this processor lacks the instruction for 8-bit products")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    prompts = [{"prompt_token_ids": [3 + i % 50 for i in range(length)]} for length in (50, 1, 17, 50, 40, 2, 33)]

    def answers():
        llm.llm_engine.block_manager.reset_prefix_cache()
        return [(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in llm.generate(prompts, params, use_tqdm=False)]

    compiled = answers()
    assert 16 in calls[CompiledLayers]
    with monkeypatch.context() as patch:
        patch.setattr(LlamaModel, "_get_compiled_layers", lambda self: None)
        assert answers() == compiled
    assert 16 in calls[CompiledAttention]
    for layer in layers_of(llm):
        layer.compiled_attention = layer.compiled_mlp = None
    assert answers() == compiled


@pytest.mark.parametrize(
    "options",
    [*(pytest.param(each, marks=pytest.mark.long) for each in ({}, {"dtype": "bfloat16"})), {"quantization": "int8"}],
    ids=str,
)
def test_a_tied_embedding_of_a_width_that_the_hadamard_transform_fills_up(options, tmp_path):
    llm = load(save_llama(tmp_path, hidden_size=48, intermediate_size=80, tie_word_embeddings=True), **options)
    if "quantization" in options and layers_of(llm)[0].compiled_mlp is None:
        pytest.skip("this processor lacks the instruction for 8-bit products")
    compiled = outputs(llm)
    for layer in layers_of(llm):
        layer.compiled_attention = layer.compiled_mlp = None
    assert outputs(llm) == compiled


def test_caches_may_be_replaced(folder):
    llm = load(folder)
    compiled = outputs(llm)
    caches = llm.llm_engine.executor.worker.cache_engine.gpu_cache
    old = list(caches)
    caches[:] = [(torch.zeros_like(keys), torch.zeros_like(values)) for keys, values in old]
    for keys, values in old:
        keys.fill_(torch.nan), values.fill_(torch.nan)
    assert outputs(llm) == compiled


def test_a_copy_of_the_model_reads_its_own_weights(folder):
    llm = load(folder)
    outputs(llm)
    compiled = llm.llm_engine.executor.worker.model_runner.model.model._compiled_layers
    copied = copy.deepcopy(compiled)
    assert copied.can_run
    assert not set(copied.addresses.flat) & set(compiled.addresses.flat)


def test_a_layer_needs_a_cache_like_the_others(folder):
    llm = load(folder)
    caches = llm.llm_engine.executor.worker.cache_engine.gpu_cache
    keys, values = caches[1]
    caches[1] = keys, torch.stack((values, values), dim=-1)[..., 0]
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": [5]}, params, use_tqdm=False)
    assert "must be contiguous" in output.error
    del caches[1]
    (output,) = llm.generate({"prompt_token_ids": [5]}, params, use_tqdm=False)
    assert "3 layers, but 2 caches" in output.error


class OwnForward(CPUAttentionBackend):
    """What a learner may plug in."""

    def forward(self, *args):
        return super().forward(*args)


class OneRowMore(TorchAttentionBackend):
    """A mistake with which compiled code would read beyond its tensors."""

    def forward(self, query, *args):
        output = super().forward(query, *args)
        return torch.cat((output, output[:1]))


def test_what_a_wrong_backend_returns_is_found_before_compiled_code_reads_it(folder):
    llm = load(folder, attention_backend=OneRowMore)
    assert halves(llm) == (False, True)
    (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, use_tqdm=False)
    assert (
        "OneRowMore.forward returned [4, 4, 16] of torch.float32 on cpu, but must return what query is, [3, 4, 16]"
        in output.error
    )


class OwnScale(CPUAttentionBackend):
    """Changes something else than `forward`."""

    def __init__(self, num_heads, num_kv_heads, head_dim, scale):
        super().__init__(num_heads, num_kv_heads, head_dim, 2 * scale)


def test_a_backend_with_a_forward_of_its_own_is_called_and_told_why_it_is_slower(folder, caplog):
    llm = load(folder, attention_backend=OwnForward)
    assert halves(llm) == (False, True)
    assert "OwnForward has a forward of its own, which is called instead of" in caplog.text
    assert outputs(llm) == outputs(load(folder))


def test_another_subclass_of_the_cpu_backend_is_compiled(folder):
    llm = load(folder, attention_backend=OwnScale)
    assert halves(llm) == (True, True)
    compiled = outputs(llm)
    assert compiled != outputs(load(folder)), "the scale is that of the subclass"
    for layer in layers_of(llm):
        layer.compiled_attention = None
    assert outputs(llm) == compiled


@pytest.mark.slow
def test_where_it_cannot_be_compiled_it_is_not(folder, tmp_path):
    assert halves(load(folder, attention_backend="torch")) == (False, True)
    assert halves(load(folder, dtype="float16")) == (False, False)
    odd = save_llama(tmp_path, hidden_size=40, intermediate_size=60, head_dim=16)  # for which attention is compiled already
    llm = load(odd)
    assert halves(llm) == (False, False), "panels of 16 do not fill rows of 40"
    assert all(len(token_ids) == 8 for token_ids, _ in outputs(llm))
