"""The families on top of Llama against transformers in float32: logits and tokens, also of random shapes, and the config.json files that people have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import steps_in_processes
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_families import families
from nightly import NIGHTLY
from safetensors.torch import load_file, save_file
from test_models import engine_logits
from thread_ranks import engine_on_threads
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from minivllm import LLM, SamplingParams
from minivllm.config import EngineArgs
from minivllm.errors import ModelLoadError
from minivllm.models.registry import MODELS

ROOT = Path(__file__).parents[2]
VOCAB = 128
# The pair of head_dim and group that tests/model/test_models.py compiles CPU kernels for.
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [1.0 + 1.3 * i for i in range(6)],
}  # fmt: skip
FAMILIES = {
    "qwen2": Qwen2Config(**COMMON, tie_word_embeddings=True),
    "mistral": MistralConfig(**COMMON, sliding_window=None),
    "phi3": Phi3Config(**COMMON, original_max_position_embeddings=64, rope_parameters=LONGROPE),
    "smollm3": SmolLM3Config(**COMMON | {"num_hidden_layers": 3}, no_rope_layers=[0, 1, 1]),
    "gemma3": Gemma3TextConfig(
        **COMMON | {"num_hidden_layers": 3},
        head_dim=16,
        query_pre_attn_scalar=20,
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}
MORE = {
    "mistral, sliding windows": MistralConfig(**COMMON, sliding_window=20),
    "qwen2, windows in some layers": Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "phi3, windows": Phi3Config(**COMMON, sliding_window=20),
    "gemma3, untied, linear": Gemma3TextConfig(
        **COMMON | {"num_hidden_layers": 7},
        head_dim=16,
        sliding_window=9,
        tie_word_embeddings=False,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "qwen2, untied, yarn": Qwen2Config(**COMMON, rope_parameters=YARN),
    "mistral, a window that covers all": MistralConfig(**COMMON, sliding_window=256, head_dim=16),
    "phi3, no longrope": Phi3Config(**COMMON, tie_word_embeddings=True),
    "smollm3, every second layer": SmolLM3Config(**COMMON, no_rope_layer_interval=2, attention_bias=True, mlp_bias=True),
    "smollm3, every fourth layer": SmolLM3Config(**COMMON | {"num_hidden_layers": 5}, tie_word_embeddings=False),
}
HOW = {
    "phi3": "layer by layer, MLP compiled",
    "gemma3": "as written",
    "gemma3, untied, linear": "as written",
    "qwen2, windows in some layers": "layer by layer, attention and MLP compiled",
}
"""How the layers run on a CPU; otherwise, all of them in one call."""
OPTIONS = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 80, "block_size": 8}


def save_model(config, folder, seed=0):
    """A model of transformers with random weights, also in a folder."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():  # the initial biases of 0 and norms of 1 would hide mistakes
        torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.15)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By name, a tiny model and its folder."""
    made = {}

    def make(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("family")
            made[name] = save_model((FAMILIES | MORE)[name], folder), folder
        return made[name]

    return make


def prompts_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def check_logits(model, folder, lengths, **options):
    """Logits of prompts of these lengths, computed as one ragged batch. Returns the engine."""
    llm = LLM(str(folder), **OPTIONS | options)
    prompts = prompts_of(lengths)
    for prompt, logits in zip(prompts, engine_logits(llm, prompts), strict=True):
        expected = model(torch.tensor([prompt])).logits[0]
        assert (logits - expected).abs().max() < 1e-4 * max(1, expected.abs().max().item())
        assert expected.std() > 0.05, "the logits are too flat to tell anything"
    return llm


@pytest.mark.parametrize("name", [*FAMILIES, *MORE])
def test_logits_equal_transformers(models, name):
    """At prompt positions, and at long ones; with longrope, prompts are on one side of the original length, as all are for the engine."""
    model, folder = models(name)
    llm = check_logits(model, folder, [1, 7, 8, 9, 60])
    is_cpu = llm.llm_engine.executor.worker.device.type == "cpu"
    assert not is_cpu or llm.describe_model().partition(": ")[2] == HOW.get(name, "all layers in one compiled call")
    check_logits(model, folder, [65, 200, 256], max_model_len=256)
    check_logits(model, folder, [65, 200], max_model_len=256, enforce_eager=True)


def greedy_of_transformers(model, prompt, num_tokens):
    output = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=num_tokens,
        min_new_tokens=num_tokens, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return output[0, len(prompt) :].tolist()


ALL_AT_ONCE = {
    "enable_chunked_prefill": True, "max_num_batched_tokens": 16, "max_num_seqs": 8, "enable_prefix_caching": True,
    "num_gpu_blocks_override": 14,
}  # fmt: skip
WAYS = {
    "one batch": ({}, 1, 1),
    "all at once": (ALL_AT_ONCE, 1, 1),
    "two ranks": ({}, 2, 1),
    "chunks, prefix cache": (ALL_AT_ONCE | {"num_gpu_blocks_override": 80}, 1, 1),
    "recompute": ({"num_gpu_blocks_override": 14}, 1, 1),
    "swap": ({"num_gpu_blocks_override": 14, "preemption_mode": "swap", "swap_space": 0.01}, 1, 1),
    "drafts": ({"num_speculative_tokens": 3}, 1, 1),
    "eager": ({"enforce_eager": True}, 1, 1),
    "two ranks, all at once": (ALL_AT_ONCE, 2, 1),
    "two stages of two ranks": ({}, 2, 2),
}
BY_DAY = ("all at once", "two ranks", "two stages of two ranks", "eager")


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way in BY_DAY else pytest.mark.nightly) for way in WAYS])
@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.nightly) for name in MORE)])
def test_tokens_equal_transformers(models, name, way):
    """A batch of prompts, two of which begin alike. Together they need more than 14 blocks."""
    model, folder = models(name)
    options, num_ranks, num_stages = WAYS[way]
    engine = engine_on_threads(EngineArgs(str(folder), **OPTIONS | options), num_ranks, num_stages)
    prompts = prompts_of([1, 17, 40, 33], seed=1)
    prompts[3][:24] = prompts[2][:24]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for _ in range(2 if "enable_prefix_caching" in options else 1):
        outputs = steps_in_processes.generate(engine, prompts, params)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.outputs[0].token_ids == greedy_of_transformers(model, prompt, 12)
    frees_blocks = engine.scheduler_config.window > 0  # and so may need no preemption
    if options.get("num_gpu_blocks_override", 80) < 20 and not frees_blocks:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    if "enable_prefix_caching" in options:
        assert sum(output.num_cached_tokens for output in outputs) > 0


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_other_numbers_are_near(models, name, dtype):
    model, folder = models(name)
    options = {"quantization": "int8"} if dtype == "int8" else {"dtype": dtype}
    llm = LLM(str(folder), **OPTIONS | options)
    prompts = prompts_of([9, 60])
    for prompt, logits in zip(prompts, engine_logits(llm, prompts), strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0]
        assert (logits.float() - expected).norm() < 0.05 * expected.norm()


# -- any shape -----------------------------------------------------------------------------------------------------------

TRAINED, LONGER = 32, 48
PROMPTS = [1, 9, 30]


@st.composite
def configs(draw):
    """A config of some family, `max_model_len`, and the lengths of prompts for which transformers has the same angles."""
    config_cls = draw(st.sampled_from([LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig, Phi3Config, SmolLM3Config]))
    num_kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_heads, head_dim = num_kv_heads * group, draw(st.sampled_from([8, 16, 24]))
    has_head_dim = config_cls in (LlamaConfig, Qwen3Config, MistralConfig)
    hidden_size = num_heads * (draw(st.sampled_from([10, 16])) if has_head_dim else head_dim)
    options = COMMON | {
        "hidden_size": hidden_size, "intermediate_size": draw(st.sampled_from([24, 52])), "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads, "num_hidden_layers": draw(st.integers(1, 4)), "max_position_embeddings": TRAINED,
        "tie_word_embeddings": draw(st.booleans()), "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-3])),
    }  # fmt: skip
    if has_head_dim:
        options["head_dim"] = head_dim
    if config_cls in (LlamaConfig, Qwen3Config, SmolLM3Config):
        options["attention_bias"] = draw(st.booleans())
    if config_cls in (LlamaConfig, SmolLM3Config):
        options["mlp_bias"] = draw(st.booleans())
    if config_cls in (MistralConfig, Phi3Config):
        options["sliding_window"] = draw(st.sampled_from([None, 5, 100]))
    if config_cls in (Qwen2Config, Qwen3Config) and draw(st.booleans()):
        options |= {
            "use_sliding_window": True,
            "sliding_window": draw(st.sampled_from([1, 7])),
            "max_window_layers": draw(st.integers(0, 3)),
        }
    if config_cls is SmolLM3Config:
        layers = st.lists(st.integers(0, 1), min_size=options["num_hidden_layers"], max_size=options["num_hidden_layers"])
        options |= draw(st.one_of(layers.map(lambda x: {"no_rope_layers": x}), st.just({"no_rope_layer_interval": 2})))
    rope = {"rope_theta": draw(st.sampled_from([100.0, 10000.0])), "rope_type": "default"}
    max_model_len, lengths = TRAINED, PROMPTS
    if config_cls is Phi3Config:
        rope["partial_rotary_factor"] = draw(st.sampled_from([1.0, 0.5]))
    if config_cls is not Phi3Config:
        rope["rope_type"] = draw(st.sampled_from(["default", "linear", "dynamic", "yarn", "llama3", "longrope"]))
    elif draw(st.booleans()):
        rope["rope_type"] = "longrope"
    if rope["rope_type"] in ("linear", "dynamic", "yarn", "llama3"):
        rope["factor"] = draw(st.floats(1.5, 8))
    if rope["rope_type"] in ("linear", "dynamic", "yarn"):
        max_model_len = LONGER
        lengths = [LONGER] if rope["rope_type"] == "dynamic" else [1, LONGER]
    if rope["rope_type"] in ("yarn", "llama3", "longrope"):
        place = options if config_cls is Phi3Config else rope
        place["original_max_position_embeddings"] = TRAINED if rope["rope_type"] == "yarn" else 12
    if rope["rope_type"] == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": draw(st.floats(1.5, 6))}
    if rope["rope_type"] == "longrope":
        num_pairs = int(head_dim * rope.get("partial_rotary_factor", 1)) // 2
        divisors = st.lists(st.floats(1, 9), min_size=num_pairs, max_size=num_pairs)
        rope |= {"short_factor": draw(divisors), "long_factor": draw(divisors)}
        max_model_len, lengths = draw(st.sampled_from([(12, [1, 9, 12]), (TRAINED, [13, TRAINED])]))
    return config_cls(**options, rope_parameters=rope), max_model_len, lengths


@pytest.mark.slow
@given(configs(), st.booleans())
@settings(max_examples=300 if NIGHTLY else 15)
def test_logits_of_any_shape_equal_transformers(tmp_path_factory, drawn, eager):
    """Attention by torch: the compiled one is compiled for each `head_dim` and group."""
    config, max_model_len, lengths = drawn
    folder = tmp_path_factory.mktemp("shape")
    model = save_model(config, folder)
    check_logits(model, folder, lengths, max_model_len=max_model_len, attention_backend="torch", enforce_eager=eager)


# -- the files that people have --------------------------------------------------------------------------------------------

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
}
OLD = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}
PHI = OLD | {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False, "attention_dropout": 0.0, "embd_pdrop": 0.0,
    "resid_pdrop": 0.0, "pad_token_id": 0, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "original_max_position_embeddings": 4096,
}  # fmt: skip
LONG_FACTORS = {
    "long_factor": [1.08, 1.1, 1.3, 1.3, 1.5, 2.1, 9.0, 60.0],
    "short_factor": [1.0, 1.02, 1.03, 1.03, 1.05, 1.05, 1.1, 2.8],
}
FILES = {
    "Qwen2.5-7B-Instruct": OLD | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0, "max_position_embeddings": 32768,
        "max_window_layers": 28, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False,
        "use_sliding_window": False,
    },
    "Qwen2.5-0.5B-Instruct": OLD | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0, "max_position_embeddings": 32768,
        "max_window_layers": 21, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "Qwen2.5-3B-Instruct with YaRN": OLD | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "sliding_window": 32768, "use_sliding_window": False, "tie_word_embeddings": True,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    "gemma-3-1b-it": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attention_bias": False, "attn_logit_softcapping": None, "bos_token_id": 2,
        "cache_implementation": "hybrid", "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768, "num_hidden_layers": 7, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 16, "sliding_window_pattern": 6, "use_cache": True,
    },
    "Mistral-7B-v0.1": OLD | {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    },
    "Mistral-7B-Instruct-v0.3": OLD | {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "attention_dropout": 0.0, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
    },
    "Mistral-Nemo-Instruct-2407": OLD | {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "attention_dropout": 0.0, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "Phi-3-mini-4k-instruct": PHI | {
        "max_position_embeddings": 4096, "rope_scaling": None, "sliding_window": 2047, "tie_word_embeddings": False, "num_key_value_heads": 4,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    },
    "Phi-3.5-mini-instruct": PHI | {
        "max_position_embeddings": 131072, "rope_scaling": {**LONG_FACTORS, "type": "longrope"}, "sliding_window": 262144,
        "tie_word_embeddings": False, "num_key_value_heads": 4,
    },
    "Phi-4-mini-instruct": PHI | {
        "max_position_embeddings": 131072, "rope_scaling": {**{name: values[:6] for name, values in LONG_FACTORS.items()}, "type": "longrope"},
        "sliding_window": 262144, "tie_word_embeddings": True, "partial_rotary_factor": 0.75, "full_attn_mod": 1, "interpolate_factor": 1,
        "lm_head_bias": False, "mlp_bias": False,
    },
    "phi-4": PHI | {
        "max_position_embeddings": 16384, "original_max_position_embeddings": 16384, "rope_theta": 250000, "rope_scaling": None,
        "sliding_window": None, "tie_word_embeddings": False,
    },
    "SmolLM3-3B": OLD | {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "attention_bias": False, "attention_dropout": 0.0,
        "layer_types": ["full_attention"] * 4, "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False,
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0], "pad_token_id": 0, "pretraining_tp": 2, "rms_norm_eps": 1e-6,
        "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False,
    },
}  # fmt: skip
FILES["gemma-3-4b-it, its text model"] = FILES["gemma-3-1b-it"] | {
    "max_position_embeddings": 131072, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}  # fmt: skip
FILES["SmolLM3-3B, without lists"] = {
    name: value for name, value in FILES["SmolLM3-3B"].items() if name not in ("no_rope_layers", "layer_types")
}
"""The config.json of models on the Hugging Face hub, with sizes made small and factor lists as long as these ask for."""
LENGTHS = {
    "Qwen2.5-3B-Instruct with YaRN": 131072, "Phi-3.5-mini-instruct": 4096, "Phi-4-mini-instruct": 4096,
}  # fmt: skip
"""What they are served with, where that is not `max_position_embeddings`: the original length, or as RoPE stretches it."""


def save_file_of(folder, content):
    """A folder with the config.json as it is, and random weights; and the model as transformers reads it from there."""
    text = json.dumps(SIZES | content)
    (folder / "config.json").write_text(text)
    made = folder / "made"
    save_model(AutoConfig.from_pretrained(folder), made)
    save_file(load_file(made / "model.safetensors"), folder / "model.safetensors", {"format": "pt"})
    assert (folder / "config.json").read_text() == text
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", FILES)
def test_the_files_that_people_have_are_read_as_transformers_reads_them(tmp_path, name):
    model = save_file_of(tmp_path, FILES[name])
    llm = check_logits(model, tmp_path, [1, 40, 300])
    length = llm.llm_engine.executor.worker.model_config.max_model_len
    assert length == LENGTHS.get(name, FILES[name]["max_position_embeddings"])


@pytest.mark.parametrize("name", ["Phi-3.5-mini-instruct", "Phi-4-mini-instruct"])
def test_longrope_uses_the_long_factors_if_more_is_asked_for(tmp_path, name):
    """The config's lengths are shrunk, too: to 16, and 512 of them."""
    model = save_file_of(tmp_path, FILES[name] | {"original_max_position_embeddings": 16, "max_position_embeddings": 512})
    check_logits(model, tmp_path, [1, 16])
    check_logits(model, tmp_path, [17, 300], max_model_len=512)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("SmolLM3-3B", {"no_rope_layers": [1, 0]}, "has no_rope_layers = .1, 0., but needs 0 or 1 for each of 4 layers"),
        ("SmolLM3-3B", {"no_rope_layers": [1, 0, 2, 1]}, "has no_rope_layers"),
        (
            "SmolLM3-3B",
            {"no_rope_layers": None, "no_rope_layer_interval": 0},
            "no_rope_layer_interval = 0, but it must be a whole",
        ),
        ("Mistral-7B-v0.1", {"sliding_window": "wide"}, "sliding_window = .wide., but it must be a whole number"),
        ("Phi-3.5-mini-instruct", {"rope_scaling": {**LONG_FACTORS, "type": "long"}}, "RoPE type 'long' is not supported"),
        ("Phi-4-mini-instruct", {"partial_rotary_factor": 0.5}, "short_factor .* has 6, but .* a list of 4 numbers"),
        ("Qwen2.5-7B-Instruct", {"rope_scaling": {"type": "yarn"}}, "lack 'factor', which type 'yarn' needs"),
    ],
)
def test_damaged_files_are_refused_with_the_settings_name(tmp_path, name, changes, message):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | FILES[name] | changes))
    with pytest.raises(ModelLoadError, match=message):
        LLM(str(tmp_path), load_format="dummy", **OPTIONS)


def test_a_fused_tensor_of_another_size_is_refused(models, tmp_path):
    _, folder = models("phi3")
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.qkv_proj.weight"
    save_file(weights | {name: weights[name][:-16].clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelLoadError, match=r"qkv_proj.weight has shape \[112, 64\], but the config asks for \[128, 64\]"):
        LLM(str(tmp_path), **OPTIONS)


def test_the_table_of_families_is_complete():
    """A new architecture gets a row: run `python benchmarks/model_families.py`, and name the file in docs/using.md."""
    page = (ROOT / "docs/using.md").read_text()
    stored = json.loads((ROOT / re.search(r"<!-- (benchmarks/results/model_families_\S+\.json) -->", page)[1]).read_text())
    configs = {name: config for name, (config, _) in families().items()}
    architectures = {type(config).__name__.removesuffix("Config").removesuffix("Text") for config in configs.values()}
    assert {f"{name}ForCausalLM" for name in architectures} == MODELS.keys()
    found = {name: row for name, row in stored.items() if isinstance(row, dict) and "tokens" in row}
    assert found.keys() == configs.keys()
    for row in found.values():
        assert row["error"] < 1e-3 and set(row["tokens"].values()) == {row["num_tokens"]}
