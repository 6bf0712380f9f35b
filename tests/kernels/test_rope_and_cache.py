"""Norms, rotation and the write to the cache in one Triton kernel: against the single kernels, bit for bit, and in a model."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import BLOCK_SIZES, DTYPES, HEADS, Guarded, assert_close, guarded_results
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from minivllm import LLM, SamplingParams
from minivllm.errors import KernelError
from minivllm.kernels import reference
from minivllm.layers import platform as platforms
from minivllm.models import fused_attention

pytest.importorskip("triton")  # there is none for macOS
from minivllm.kernels import triton

DEVICE = "cpu" if triton.INTERPRETED else "cuda"
FEWER = settings(max_examples=settings().max_examples // 3)


def make_case(num_tokens, heads, dtype, block_size, has_norm, seed):
    """Arguments of the operation but the caches, as views into one QKV product; and caches between guard bands."""
    head_dim, num_kv_heads, group = heads
    generator = torch.Generator().manual_seed(seed)
    num_blocks = num_tokens // block_size + 2
    qkv = torch.randn(num_tokens, num_kv_heads * (group + 2), head_dim, generator=generator).to(dtype).to(DEVICE)
    angles = torch.rand(50, head_dim // 2, generator=generator) * 6
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
    slots[torch.rand(num_tokens, generator=generator) < 0.3] = -1
    positions = torch.randint(0, 50, (num_tokens,), generator=generator)
    weights = (torch.randn(2, head_dim, generator=generator) + 1).to(dtype).to(DEVICE).unbind() if has_norm else (None, None)
    caches = [Guarded((num_blocks, block_size, num_kv_heads, head_dim), dtype, DEVICE) for _ in range(2)]
    before = (positions.to(DEVICE), *qkv.split([num_kv_heads * group, num_kv_heads, num_kv_heads], dim=1))
    return (*before, angles.cos().to(DEVICE), angles.sin().to(DEVICE)), caches, (slots.to(DEVICE), *weights, 1e-5)


@FEWER
@given(
    num_tokens=st.integers(0, 5), heads=st.sampled_from([*HEADS, (64, 20, 2), (100, 3, 1)]), dtype=st.sampled_from(DTYPES),
    block_size=st.sampled_from(BLOCK_SIZES), has_norm=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_one_kernel_computes_what_four_do(num_tokens, heads, dtype, block_size, has_norm, seed):
    before, caches, after = make_case(num_tokens, heads, dtype, block_size, has_norm, seed)
    with guarded_results():
        query = triton.norm_rope_and_cache(*before, caches[0].tensor, caches[1].tensor, *after)
    expected = [torch.full_like(cache.tensor, float("nan"), device="cpu") for cache in caches]
    on_host = [[x.cpu() if isinstance(x, torch.Tensor) else x for x in args] for args in (before, after)]
    expected_query = reference.norm_rope_and_cache(*on_host[0], *expected, *on_host[1])
    assert_close(query, expected_query)
    for cache, theirs in zip(caches, expected, strict=True):
        cache.check()
        ours = cache.tensor.cpu()
        assert torch.equal(ours.isnan(), theirs.isnan()), "something else was written than the slots of tokens"
        assert_close(ours.nan_to_num(), theirs.nan_to_num())

    positions, q, k, v, cos, sin = before
    slots, query_weight, key_weight, eps = after
    if has_norm:
        q, k = triton.rms_norm(q, query_weight, eps), triton.rms_norm(k, key_weight, eps)
    q, k = triton.rotary_embedding(positions, q, k, cos, sin)
    single = [torch.full_like(cache.tensor, float("nan")) for cache in caches]
    triton.reshape_and_cache(k, v, *single, slots)
    if triton.INTERPRETED:  # a compiler may round a product before it is added, or not
        assert torch.equal(query, q)
        assert torch.equal(caches[0].tensor.nan_to_num(7), single[0].nan_to_num(7))
    assert torch.equal(caches[1].tensor.nan_to_num(7), single[1].nan_to_num(7))


@pytest.mark.parametrize("kernels", [reference, triton], ids=["reference", "triton"])
def test_wrong_arguments_are_refused(kernels):
    before, caches, after = make_case(3, (64, 1, 2), torch.float32, 8, True, seed=0)
    args = dict(zip(("positions", "query", "key", "value", "cos", "sin"), before, strict=True))
    args |= {"key_cache": caches[0].tensor, "value_cache": caches[1].tensor}
    args |= dict(zip(("slot_mapping", "query_weight", "key_weight", "eps"), after, strict=True))
    for name, change, message in (
        ("slot_mapping", lambda x: x + 99, "slot_mapping names slot"),
        ("positions", lambda x: x + 50, "positions go from"),
        ("value", lambda x: x[..., :32], "value is .3, 1, 32., but must be"),
        ("key_weight", lambda x: x[:32], "key_weight is .32., but must be"),
        ("key_cache", lambda x: x.half(), "key_cache has dtype float16"),
    ):
        with pytest.raises(KernelError, match=message):
            kernels.norm_rope_and_cache(**args | {name: change(args[name])})


# -- in a model ----------------------------------------------------------------------------------------------------------

SIZES = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 128, "intermediate_size": 96}
CONFIGS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, eos_token_id=2)),
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config(**SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=16, eos_token_id=2),
    ),
    "smollm3": (
        SmolLM3ForCausalLM,
        SmolLM3Config(**SIZES | {"num_hidden_layers": 2}, num_attention_heads=4, num_key_value_heads=2, no_rope_layers=[0, 1], pad_token_id=0),
    ),
    "phi3": (
        Phi3ForCausalLM,
        Phi3Config(
            **SIZES, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, original_max_position_embeddings=128,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        ),
    ),
}  # fmt: skip


@pytest.fixture(params=["llama", "qwen3", "smollm3"])
def llm(request, tmp_path, monkeypatch):
    """An engine whose operations are all Triton's, as on a GPU."""
    model_cls, config = CONFIGS[request.param]
    torch.manual_seed(0)
    model = model_cls(config).float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.15)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(platforms, "load_platform_kernels", lambda device: triton)
    options = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 40, "block_size": 8, "dtype": "float32"}
    return LLM(str(tmp_path), attention_backend="triton", **options)


def generate(llm):
    prompts = [[5, 6, 7, 8, 9, 10, 11], [20, 21]]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def attention_layers(llm):
    return [layer.self_attn for layer in llm.llm_engine.executor.worker.model_runner.model.model.layers]


@pytest.mark.slow
@pytest.mark.skipif(not triton.INTERPRETED, reason="on a GPU the layers that are captured are not called again")
def test_a_model_calls_it_and_its_tokens_are_the_same(llm, monkeypatch):
    layers = attention_layers(llm)
    assert all(type(layer) is fused_attention.FusedLlamaAttention for layer in layers)
    calls = []
    for layer in layers:
        ops = copy.copy(layer.backend.ops)
        layer.backend.ops, single = ops, ops.norm_rope_and_cache
        monkeypatch.setattr(ops, "norm_rope_and_cache", lambda *args, call=single: calls.append(1) or call(*args))
    tokens = generate(llm)
    assert len(calls) == 4 * len(layers)
    seen = []
    for layer in layers:  # a hook makes a layer run as it is written
        layer.rotary.register_forward_hook(lambda *_: seen.append(1))
    assert generate(llm) == tokens
    assert len(calls) == 4 * len(layers) and seen


@pytest.mark.slow
@pytest.mark.parametrize("llm", ["phi3"], indirect=True)
@pytest.mark.skipif(not triton.INTERPRETED, reason="on a GPU the layers that are captured are not called again")
def test_a_model_that_rotates_some_channels_alone_does_not_call_it(llm, tmp_path, monkeypatch):
    for layer in attention_layers(llm):
        assert type(layer) is fused_attention.FusedLlamaAttention
        monkeypatch.setattr(layer.backend, "ops", copy.copy(layer.backend.ops))
        monkeypatch.setattr(layer.backend.ops, "norm_rope_and_cache", None)
    model = Phi3ForCausalLM.from_pretrained(tmp_path)
    expected = []
    for prompt in ([5, 6, 7, 8, 9, 10, 11], [20, 21]):
        output = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=4, min_new_tokens=4, eos_token_id=None)
        expected.append(output[0, len(prompt) :].tolist())
    assert generate(llm) == expected
