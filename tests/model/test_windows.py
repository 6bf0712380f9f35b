"""Sliding-window attention: which layers have it, and models with it against transformers in float32."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_families import greedy_of_transformers
from test_models import engine_logits, random_prompts
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from minivllm import LLM, SamplingParams, StaticBatchScheduler
from minivllm.config import ModelConfig, SchedulerConfig
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.errors import ConfigError, ModelLoadError
from minivllm.layers.attention import AttentionBackend
from minivllm.layers.attention_backends import CPUAttentionBackend, TorchAttentionBackend
from minivllm.models.llama import LlamaForCausalLM
from minivllm.models.windows import cache_window, layer_windows

WINDOW = 11

# -- config.json ---------------------------------------------------------------------------------------------------------


def config_of(architecture, max_model_len=8192, num_layers=4, **hf_config) -> ModelConfig:
    return ModelConfig(
        "tiny",
        Path("folder"),
        architecture + "ForCausalLM",
        hf_config,
        num_layers,
        1,
        1,
        16,
        50,
        max_model_len,
        (0,),
        LlamaForCausalLM,
    )


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (config_of("Llama", sliding_window=7), [0] * 4),
        (config_of("Mistral", sliding_window=7), [7] * 4),
        (config_of("Mistral", sliding_window=None), [0] * 4),
        (config_of("Mistral"), [4096] * 4),
        (config_of("Mistral", sliding_window=8192), [0] * 4),
        (config_of("Mistral", sliding_window=8191), [8191] * 4),
        (config_of("Phi3", sliding_window=2047), [2047] * 4),
        (config_of("Phi3"), [0] * 4),
        (config_of("Qwen2", sliding_window=7), [0] * 4),
        (config_of("Qwen2", sliding_window=7, use_sliding_window=False), [0] * 4),
        (config_of("Qwen2", sliding_window=7, use_sliding_window=True, max_window_layers=3), [0, 0, 0, 7]),
        (config_of("Qwen3", sliding_window=7, use_sliding_window=True), [0] * 4),
        (config_of("Qwen3", use_sliding_window=True, max_window_layers=0), [4096] * 4),
        (
            config_of("Qwen3", sliding_window=7, use_sliding_window=True, max_window_layers=0, layer_types=[FULL, SLIDING] * 2),
            [0, 7] * 2,
        ),
        (config_of("SmolLM3", sliding_window=7, use_sliding_window=False, layer_types=[FULL] * 4), [0] * 4),
        (config_of("SmolLM3", sliding_window=7, use_sliding_window=True, layer_types=[FULL, FULL, SLIDING, FULL]), [0, 0, 7, 0]),
        (config_of("Gemma3", num_layers=7, sliding_window=512), [512] * 5 + [0, 512]),
        (config_of("Gemma3", sliding_window=512, sliding_window_pattern=2), [512, 0] * 2),
        (config_of("Others", sliding_window=7, layer_types=[SLIDING] * 4), [7] * 4),
    ],
)
def test_windows_are_those_of_the_file(config, windows):
    assert layer_windows(config) == windows


def test_blocks_are_freed_only_if_no_layer_looks_further_back():
    for types, window in (([SLIDING] * 4, 7), ([SLIDING, FULL] * 2, 0), ([FULL] * 4, 0)):
        config = config_of("Qwen3", sliding_window=7, use_sliding_window=True, layer_types=types)
        assert cache_window(config) == window
        assert cache_window(replace(config, model_cls=None)) == 0, "another class may look at all"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of("Mistral", sliding_window=0), "sliding_window = 0, but it must be a whole number of at least 1"),
        (config_of("Mistral", sliding_window="7"), "sliding_window = '7', but it must be a whole number of at least 1"),
        (config_of("Qwen2", use_sliding_window=True, max_window_layers=-1), "max_window_layers = -1, but"),
        (config_of("Qwen3", use_sliding_window=True, layer_types=[FULL]), "layer_types = ['full_attention'], but it must have"),
        (config_of("Gemma3", layer_types=["linear_attention"] * 4), "but it must have 'sliding_attention' or 'full_attention'"),
        (config_of("Gemma3", sliding_window_pattern=0), "sliding_window_pattern = 0, but"),
        (config_of("SmolLM3", sliding_window=7, use_sliding_window=True), "but no layer_types that say where"),
    ],
)
def test_a_damaged_file_is_refused(config, message):
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        layer_windows(config)


# -- models ----------------------------------------------------------------------------------------------------------------

TINY = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 2, "sliding_window": WINDOW, "head_dim": 16,
}  # fmt: skip
MIXED = Qwen3Config(**TINY, use_sliding_window=True, layer_types=[SLIDING, FULL, SLIDING])


def make_tiny(model_cls, config, folder):
    torch.manual_seed(0)
    model = model_cls(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.15)
    model.save_pretrained(folder)
    return model, str(folder)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    return make_tiny(MistralForCausalLM, MistralConfig(**TINY), tmp_path_factory.mktemp("mistral"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    return make_tiny(Qwen3ForCausalLM, MIXED, tmp_path_factory.mktemp("qwen3"))


def load(folder, **args) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, **{"num_gpu_blocks_override": 40, "block_size": 8} | args)


@torch.inference_mode()
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("name", ["mistral", "mixed"])
def test_logits_and_tokens_equal_transformers(request, name, backend):
    """Far beyond the window, in a ragged batch, and then token by token."""
    model, folder = request.getfixturevalue(name)
    llm = load(folder, attention_backend=backend)
    prompts = random_prompts([1, WINDOW, WINDOW + 1, 60], vocab_size=128)
    for prompt, logits in zip(prompts, engine_logits(llm, prompts), strict=True):
        expected = model(torch.tensor([prompt])).logits[0]
        assert (logits - expected).abs().max() < 1e-3
        assert expected.std() > 0.05, "the logits are too flat to tell anything"
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == greedy_of_transformers(model, prompt, 30)


def test_layers_are_one_compiled_call_only_if_their_windows_are_alike(mistral):
    compiled = load(mistral[1]).llm_engine.executor.worker.compiled_model
    if compiled is None:
        pytest.skip("the layers are compiled on a CPU with Numba")
    assert compiled.describe() == "all layers in one compiled call"
    settings = [attention.settings for attention, _ in compiled.halves]
    assert {window for _, _, window, _ in settings} == {WINDOW}
    layers = compiled.model.layers
    layers[1].self_attn.backend.window = 5
    compiled._compile()
    assert compiled.describe() == "layer by layer, attention and MLP compiled"


class NoWindows(AttentionBackend):
    """A user's backend that has never heard of windows."""

    def forward(self, query, key, value, kv_cache, metadata):
        raise NotImplementedError


class OwnForward(CPUAttentionBackend):
    """What CPUAttentionBackend says does not hold for this forward."""

    def forward(self, query, key, value, kv_cache, metadata):
        return super().forward(query, key, value, kv_cache, metadata)


class SaysSo(OwnForward):
    @classmethod
    def supports_windows(cls):
        return True


class Inherits(TorchAttentionBackend):
    """The same forward under another name."""


def test_a_backend_that_does_not_honour_windows_is_refused(mistral):
    for backend in (NoWindows, OwnForward):
        with pytest.raises(
            ConfigError, match=f"sliding-window attention, which attention_backend {backend.__name__} does not say"
        ):
            load(mistral[1], attention_backend=backend)
    prompt = random_prompts([40], vocab_size=128)
    for backend in (SaysSo, Inherits):
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        output = load(mistral[1], attention_backend=backend).generate(prompt, params, use_tqdm=False)
        assert output[0].outputs[0].token_ids == greedy_of_transformers(mistral[0], prompt[0], 5)


# -- the cache -------------------------------------------------------------------------------------------------------------

PARAMS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True, "enable_prefix_caching": True},
        {"num_speculative_tokens": 3, "preemption_mode": "swap"},
        {"attention_backend": "torch", "enforce_eager": True},
    ],
    ids=str,
)
def test_sequences_grow_far_beyond_the_cache(mistral, options):
    """A cache of 40 tokens, of which a window touches 16, serves prompts of 5 to 120 tokens with answers of 60; preemption loses nothing."""
    model, folder = mistral
    prompts = random_prompts([5, 120, 5, 6, 70], vocab_size=128, seed=3)
    llm = load(folder, num_gpu_blocks_override=10, block_size=4, enable_chunked_prefill=True, max_num_batched_tokens=16, max_num_seqs=4, **options)  # fmt: skip
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    manager = llm.llm_engine.core.block_manager
    assert llm.llm_engine.core.num_preemptions > 0
    assert manager.get_num_free_gpu_blocks() == 10
    assert not manager.num_freed_blocks
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == greedy_of_transformers(model, prompt, 60)


def test_without_chunks_a_sequence_has_room_in_the_cache(mistral):
    """As it may be computed again as one prompt; but blocks behind the window are free for others meanwhile."""
    llm = load(mistral[1], num_gpu_blocks_override=12, block_size=4)
    output = llm.generate(random_prompts([30], vocab_size=128), PARAMS, use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 12 * 4 + 1 - 30
    free = []
    engine = llm.llm_engine
    engine.add_request("0", random_prompts([30], vocab_size=128)[0], PARAMS)
    while engine.has_unfinished_requests():
        engine.step()
        free.append(engine.core.block_manager.get_num_free_gpu_blocks())
    assert min(free) >= 12 - 4, "a window of 11 tokens touches at most 4 blocks of 4, the next token's included"


def test_classes_of_a_users_own_keep_all_blocks(mistral, mixed):
    class Mine(BlockSpaceManager):
        pass

    for folder, options, window in (
        (mistral[1], {}, WINDOW),
        (mistral[1], {"block_space_manager_cls": Mine}, 0),
        (mistral[1], {"scheduler_cls": StaticBatchScheduler}, 0),
        (mixed[1], {}, 0),
    ):
        assert load(folder, **options).llm_engine.scheduler_config.window == window


def test_the_cache_must_hold_a_window_and_a_step():
    config = SchedulerConfig(4, 16, enable_chunked_prefill=True, window=12)
    assert config.may_exceed_cache(36, block_size=4)
    assert not config.may_exceed_cache(35, block_size=4)
    assert not replace(config, window=0).may_exceed_cache(1000, block_size=4)
    assert not replace(config, enable_chunked_prefill=False).may_exceed_cache(1000, block_size=4)


def test_blocks_are_kept_for_classes_that_do_not_say_that_their_layers_have_the_windows():
    """A class of the user's own inherits no promise, and may have layers of kinds that we do not know."""

    class Own(LlamaForCausalLM):
        def __init__(self, config, platform):
            super().__init__(config, platform)

    config = replace(config_of("Mistral", sliding_window=7), model_cls=LlamaForCausalLM)
    assert cache_window(config) == 7
    assert cache_window(replace(config, model_cls=Own)) == 0
    others = replace(config_of("Qwen3Next", layer_types=["linear_attention"] * 4), model_cls=Own)
    assert cache_window(others) == 0
