"""Compiled layers of a Llama model: the same numbers, to the last bit, as the model as it is written."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from minivllm import LLM, SamplingParams
from minivllm.layers.attention_backends import CPUAttentionBackend, TorchAttentionBackend
from minivllm.layers.norm import RMSNorm
from minivllm.models.compiled_llama import CompiledAttention, CompiledLayers, CompiledMLP
from minivllm.models.llama import LlamaDecoderLayer

pytest.importorskip("numba")
PROMPTS = [[5, 6, 7], [8] * 20, [9, 10], [11, 12, 13, 14], [15]]
ALL, HALVES, MLPS = (
    "all layers in one compiled call",
    "layer by layer, attention and MLP compiled",
    "layer by layer, MLP compiled",
)


def save_model(folder, config_cls=LlamaConfig, model_cls=LlamaForCausalLM, **options):
    torch.manual_seed(0)
    config = config_cls(
        vocab_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        eos_token_id=2, **{"tie_word_embeddings": False, **options},
    )  # fmt: skip
    model_cls(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("llama"), hidden_size=64, intermediate_size=112, attention_bias=True, mlp_bias=True)


def load(folder, **options):
    return LLM(folder, skip_tokenizer_init=True, **{"num_gpu_blocks_override": 40, "max_num_seqs": 8, **options})


def worker_of(llm):
    return llm.llm_engine.executor.worker


def decoder_of(llm):
    return worker_of(llm).model_runner.model.model


def way(llm):
    """How the layers run now."""
    return llm.describe_model().partition(": ")[2]


def outputs(llm):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    completions = [result.outputs[0] for result in results]
    return [(c.token_ids, [next(iter(entry.values())).logprob for entry in c.logprobs]) for c in completions]


def as_written(folder, change=lambda llm: None, **options):
    """What the model gives without compiled kernels, after a change of it."""
    llm = load(folder, enforce_eager=True, **options)
    assert way(llm) == "as written"
    change(llm)
    return outputs(llm)


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


# -- the same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_tokens_and_logprobs_are_the_same(folder, options, calls):
    """All layers in one call, in halves, and as written; with biases, grouped heads, and sequences that end one after the other."""
    llm = load(folder, **options)
    assert way(llm) == ALL
    compiled = outputs(llm)
    assert calls[CompiledLayers].count(5) == 7, "seven decode steps of five sequences"
    assert calls[CompiledAttention] == []
    worker_of(llm).compiled_model.all_layers = None
    assert way(llm) == HALVES
    assert outputs(llm) == compiled
    assert calls[CompiledLayers].count(5) == 7
    assert calls[CompiledAttention].count(5) == calls[CompiledMLP].count(5) == 3 * 7, "the same steps through three layers"
    assert as_written(folder, **options) == compiled
    assert calls[CompiledLayers].count(5) == 7


def test_enforce_eager_runs_the_model_as_it_is_written(smollm2_path, calls):
    """The default model: the same tokens, and nothing compiled is called."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = ["The capital of France is", "def fibonacci(n):"]
    texts = []
    for enforce_eager in (False, True):
        llm = LLM(str(smollm2_path), enforce_eager=enforce_eager, max_model_len=64, num_gpu_blocks_override=20)
        assert llm.describe_model() == f"minivllm.models.llama.LlamaForCausalLM: {'as written' if enforce_eager else ALL}"
        texts.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
        assert bool(calls[CompiledLayers]) is not enforce_eager
        calls[CompiledLayers].clear()
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("num_tokens", "options"),
    [(270, {}), (505, {}), (1008, {}), (1010, {}), (1019, {"dtype": "bfloat16"}), (1010, {"quantization": "int8"})],
    ids=str,
)
def test_many_sequences_at_once(folder, num_tokens, options, calls):
    """Also more tokens than go through an MLP together."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    lengths = [num_tokens // 90 + (i < num_tokens % 90) for i in range(90)]
    prompts = [{"prompt_token_ids": [(1 + i + 5 * j) % 96 for j in range(length)]} for i, length in enumerate(lengths)]
    answers = []
    for enforce_eager in (False, True):
        llm = load(
            folder, max_num_seqs=90, num_gpu_blocks_override=400, max_num_batched_tokens=2048, enforce_eager=enforce_eager, **options
        )  # fmt: skip
        results = llm.generate(prompts, params, use_tqdm=False)
        answers.append([(result.outputs[0].token_ids, result.outputs[0].cumulative_logprob) for result in results])
    assert calls[CompiledLayers] == [num_tokens, 90, 90, 90], "all prompts in one step, then three decode steps"
    assert answers[0] == answers[1]


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_chunks_of_prompts_beside_decodes(folder, options, calls):
    """Prompts of 1 to 50 tokens, in chunks of at most 16, some of them behind a cached prefix."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    prompts = [{"prompt_token_ids": [3 + i % 50 for i in range(length)]} for length in (50, 1, 17, 50, 40, 2, 33)]

    def answers(llm):
        llm.llm_engine.block_manager.reset_prefix_cache()
        return [(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in llm.generate(prompts, params, use_tqdm=False)]

    options = options | {"max_num_batched_tokens": 16, "enable_chunked_prefill": True, "enable_prefix_caching": True}
    llm = load(folder, **options)
    compiled = answers(llm)
    assert 16 in calls[CompiledLayers]
    worker_of(llm).compiled_model.all_layers = None
    assert answers(llm) == compiled
    assert 16 in calls[CompiledAttention]
    assert answers(load(folder, enforce_eager=True, **options)) == compiled


@pytest.mark.parametrize(
    "options",
    [*(pytest.param(each, marks=pytest.mark.long) for each in ({}, {"dtype": "bfloat16"})), {"quantization": "int8"}],
    ids=str,
)
def test_a_tied_embedding_of_a_width_that_the_hadamard_transform_fills_up(options, tmp_path):
    folder = save_model(tmp_path, hidden_size=48, intermediate_size=80, head_dim=16, tie_word_embeddings=True)
    llm = load(folder, **options)
    assert way(llm) == ALL
    assert outputs(llm) == as_written(folder, **options)


def test_caches_may_be_replaced(folder):
    llm = load(folder)
    compiled = outputs(llm)
    caches = worker_of(llm).cache_engine.gpu_cache
    old = list(caches)
    caches[:] = [(torch.zeros_like(keys), torch.zeros_like(values)) for keys, values in old]
    for keys, values in old:
        keys.fill_(torch.nan), values.fill_(torch.nan)
    assert outputs(llm) == compiled


def test_a_layer_needs_a_cache_like_the_others(folder):
    llm = load(folder)
    caches = worker_of(llm).cache_engine.gpu_cache
    keys, values = caches[1]
    caches[1] = keys, torch.stack((values, values), dim=-1)[..., 0]
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": [5]}, params, use_tqdm=False)
    assert "must be contiguous" in output.error
    del caches[1]
    (output,) = llm.generate({"prompt_token_ids": [5]}, params, use_tqdm=False)
    assert "3 layers, but 2 caches" in output.error


def test_a_copy_of_the_model_reads_its_own_weights(folder):
    llm = load(folder)
    compiled = outputs(llm)
    runner = worker_of(llm).model_runner
    original, runner.model = runner.model, copy.deepcopy(runner.model)
    for module in original.modules():
        if hasattr(module, "method"):
            module.method.packed.words.zero_()
    assert way(llm) == ALL
    assert outputs(llm) == compiled
    runner.model = original
    assert outputs(llm) != compiled


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


# -- what a user has put in place of a part ----------------------------------------------------------------------------


class OwnLayer(LlamaDecoderLayer):
    def forward(self, x, *args):
        x, residual = super().forward(x, *args)
        return 2 * x, residual


class OwnNorm(RMSNorm):
    def add_and_norm(self, x, residual):
        normed, residual = super().add_and_norm(x, residual)
        return 2 * normed, residual


class Adapter(nn.Module):
    """As LoRA puts it around a linear layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 2 * self.inner(x)


def replace_layer(llm):
    decoder_of(llm).layers[1].__class__ = OwnLayer


def remove_layer(llm):
    del decoder_of(llm).layers[2:], worker_of(llm).cache_engine.gpu_cache[2:]


def replace_last_norm_cls(llm):
    decoder_of(llm).norm.__class__ = OwnNorm


def replace_last_norm(llm):
    old = decoder_of(llm).norm
    decoder_of(llm).norm = RMSNorm(old.weight.shape[0], 100.0, old.ops)
    decoder_of(llm).norm.weight.copy_(old.weight)


def adapt_linear(llm):
    attention = decoder_of(llm).layers[1].self_attn
    attention.qkv_proj = Adapter(attention.qkv_proj)


def replace_operations(llm):
    class Ops:
        def silu_and_mul(self, x):
            gate, up = x.chunk(2, dim=-1)
            return gate * up

    decoder_of(llm).layers[2].mlp.ops = Ops()


def replace_backend(llm):
    """The layers are no longer alike: another scale of attention."""
    attention = decoder_of(llm).layers[1].self_attn
    attention.backend = copy.copy(attention.backend)
    attention.backend.scale = 1.0


@pytest.mark.parametrize(
    ("change", "now"),
    [
        (replace_layer, "as written"),
        (remove_layer, ALL),
        (replace_last_norm_cls, "as written"),
        (replace_last_norm, ALL),
        (adapt_linear, "as written"),
        (replace_operations, "as written"),
        (replace_backend, HALVES),
    ],
)
def test_what_is_changed_in_the_model_is_what_runs(folder, change, now):
    llm = load(folder)
    compiled = outputs(llm)
    change(llm)
    changed = outputs(llm)
    assert changed != compiled
    assert changed == as_written(folder, change)
    assert way(llm) == now


@pytest.mark.parametrize("find", [lambda layer: layer, lambda layer: layer.mlp.down_proj])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_are_called(folder, find, kind):
    llm = load(folder)
    compiled, seen = outputs(llm), []
    handle = getattr(find(decoder_of(llm).layers[1]), kind)(lambda module, args, *output: seen.append(len(args[0])))
    assert outputs(llm) == compiled
    assert seen.count(5) == 7 and way(llm) == "as written"
    handle.remove()
    assert outputs(llm) == compiled
    assert seen.count(5) == 7 and way(llm) == ALL


class OwnForward(CPUAttentionBackend):
    """What a learner may plug in."""

    def forward(self, *args):
        return super().forward(*args)


class OneRowMore(TorchAttentionBackend):
    """A mistake with which compiled code would read beyond its tensors."""

    def forward(self, query, *args):
        output = super().forward(query, *args)
        return torch.cat((output, output[:1]))


class OwnScale(CPUAttentionBackend):
    """Changes something else than `forward`."""

    def __init__(self, num_heads, num_kv_heads, head_dim, scale):
        super().__init__(num_heads, num_kv_heads, head_dim, 2 * scale)


def test_what_a_wrong_backend_returns_is_found_before_compiled_code_reads_it(folder):
    llm = load(folder, attention_backend=OneRowMore)
    assert way(llm) == MLPS
    (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, use_tqdm=False)
    assert (
        "OneRowMore.forward returned [4, 4, 16] of torch.float32 on cpu, but must return what query is, [3, 4, 16]"
        in output.error
    )


def test_a_backend_with_a_forward_of_its_own_is_called_and_told_why_it_is_slower(folder, caplog):
    llm = load(folder, attention_backend=OwnForward)
    assert way(llm) == MLPS
    assert "OwnForward has a forward of its own, which is called instead of" in caplog.text
    assert outputs(llm) == outputs(load(folder))


def test_another_subclass_of_the_cpu_backend_is_compiled(folder):
    llm = load(folder, attention_backend=OwnScale)
    assert way(llm) == ALL
    compiled = outputs(llm)
    assert compiled != outputs(load(folder)), "the scale is that of the subclass"
    assert compiled == as_written(folder, attention_backend=OwnScale)


@pytest.mark.slow
def test_where_it_cannot_be_compiled_it_is_not(folder, tmp_path):
    assert way(load(folder, attention_backend="torch")) == MLPS
    assert way(load(folder, dtype="float16")) == "as written"
    odd = save_model(tmp_path / "odd", hidden_size=40, intermediate_size=60, head_dim=16)
    llm = load(odd)
    assert way(llm) == "as written", "panels of 16 do not fill rows of 40"
    assert all(len(token_ids) == 8 for token_ids, _ in outputs(llm))


def test_normalized_queries_leave_attention_as_it_is_written(tmp_path):
    folder = save_model(tmp_path, Qwen3Config, Qwen3ForCausalLM, hidden_size=64, intermediate_size=112, head_dim=16)
    llm = load(folder)
    assert way(llm) == MLPS
    assert outputs(llm) == as_written(folder)
