"""RoPE types against transformers in float32, at short and long positions; how long a context each gives; and damaged settings."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from minivllm.errors import ModelLoadError
from minivllm.kernels import reference
from minivllm.kernels.checks import Checks
from minivllm.kernels.ops import Ops
from minivllm.layers.rotary import RotaryEmbedding, context_lengths, rope_parameters
from minivllm.models.registry import load_model_config

HEAD_DIM, TRAINED, SERVED = 64, 4096, 131072
LONG = {"short_factor": [1 + 0.02 * i for i in range(32)], "long_factor": [1 + 1.7 * i for i in range(32)]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
TYPES = {
    "default": {"rope_type": "default"},
    "part of the channels": {"rope_type": "default", "partial_rotary_factor": 0.75},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 1024},
    "yarn": YARN,
    "yarn, not truncated": YARN | {"truncate": False, "beta_fast": 20, "beta_slow": 2},
    "yarn, a small base": YARN | {"rope_theta": 5.0, "original_max_position_embeddings": 512},
    "yarn, mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    "yarn, attention_factor": YARN | {"attention_factor": 1.3},
    "yarn, part of the channels": YARN | {"partial_rotary_factor": 0.5},
    "longrope": {"rope_type": "longrope", **LONG},
    "longrope, factor": {"rope_type": "longrope", "factor": 32.0, **LONG},
    "longrope, attention_factor": {"rope_type": "longrope", "attention_factor": 1.2, **LONG},
}
OPS = Ops(reference, Checks.ALL)


def hf_config(parameters, head_dim=HEAD_DIM, max_position=TRAINED, base=10000.0, **options):
    """Of transformers; `options` stand beside the RoPE settings."""
    parameters = {"rope_theta": base} | parameters
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=max_position,
        rope_parameters=parameters,
        **options,
    )


def tables_of_transformers(config, positions):
    """cos and sin, `[positions, pairs]`, of a text that ends with the last of these positions."""
    cos, sin = Phi3RotaryEmbedding(config)(torch.zeros(1), torch.tensor([positions]))
    assert torch.equal(*cos[0].chunk(2, dim=-1)), "the two channels of a pair have the same angle"
    return cos[0].chunk(2, dim=-1)[0], sin[0].chunk(2, dim=-1)[0]


def check_tables(config, max_position, difference=3e-9):
    """At all positions that have a power of 2 near, and the last one. Frequencies may differ by so much: mostly, they are the same to the last bit."""
    rotary = RotaryEmbedding(config.head_dim, max_position, rope_parameters(json.loads(config.to_json_string())), OPS)
    positions = sorted({min(2**i + shift, max_position - 1) for i in range(20) for shift in (-1, 0)})
    for found, expected in zip((rotary.cos, rotary.sin), tables_of_transformers(config, positions), strict=True):
        assert found.dtype == torch.float32 and found.shape == (max_position, expected.shape[1])
        for row, position in enumerate(positions):
            torch.testing.assert_close(found[position], expected[row], rtol=0, atol=1e-6 + difference * position)


@pytest.mark.parametrize("served", [1024, TRAINED, SERVED])
@pytest.mark.parametrize("name", TYPES)
def test_tables_equal_transformers(name, served):
    """What depends on a text's length in transformers is that of a text as long as the model is served with."""
    options = {"original_max_position_embeddings": 2048} if "longrope" in name else {}
    check_tables(hf_config(TYPES[name], **options), served)


@pytest.mark.parametrize("name", TYPES)
def test_types_differ(name):
    """So that a comparison of two that do the same would be seen."""
    options = {"original_max_position_embeddings": 2048} if "longrope" in name else {}
    of = {
        key: RotaryEmbedding(
            HEAD_DIM, SERVED, rope_parameters(json.loads(hf_config(TYPES[key], **options).to_json_string())), OPS
        )
        for key in ("default", name)
    }
    if name != "default":
        assert of[name].cos.shape != of["default"].cos.shape or (of[name].cos - of["default"].cos).abs().max() > 0.1


@given(st.data())
def test_tables_of_any_settings_equal_transformers(data):
    draw = data.draw
    rope_type = draw(st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn", "longrope"]), "type")
    trained, factor = draw(st.integers(16, 600), "trained"), draw(st.floats(1, 20), "factor")
    head_dim = 4 * draw(st.integers(1, 8), "quarter of head_dim")
    parameters = {"rope_type": rope_type}
    if draw(st.booleans(), "half"):
        parameters["partial_rotary_factor"] = 0.5
    dim = int(head_dim * parameters.get("partial_rotary_factor", 1))
    if rope_type == "dynamic" and dim == 2:
        return  # transformers divides by 0
    if rope_type != "default":
        parameters["factor"] = factor
    if rope_type == "llama3":
        low = draw(st.floats(0.5, 4), "low")
        parameters |= {"low_freq_factor": low, "high_freq_factor": low * draw(st.floats(1.5, 8), "high / low")}
    if rope_type == "longrope":
        lists = st.lists(st.floats(0.5, 60), min_size=dim // 2, max_size=dim // 2)
        parameters |= {"short_factor": draw(lists, "short"), "long_factor": draw(lists, "long")}
    if rope_type == "yarn":
        parameters |= {"beta_fast": draw(st.integers(8, 64), "fast"), "beta_slow": draw(st.integers(1, 4), "slow")}
        parameters["truncate"] = draw(st.booleans(), "truncate")
    options = {}
    if rope_type in ("llama3", "yarn", "longrope"):  # in either place, or in none
        where = draw(st.sampled_from(["inside", "beside", "nowhere"]), "original length")
        place = parameters if where == "inside" else options if where == "beside" else {}
        place["original_max_position_embeddings"] = draw(st.integers(16, trained), "original")
    base = draw(st.sampled_from([20.0, 100.0, 10000.0, 5e5]), "base")
    check_tables(
        hf_config(parameters, head_dim, trained, base, **options), draw(st.integers(1, 3 * trained), "served"), difference=3e-7
    )


@pytest.mark.parametrize("name", ["default", "part of the channels"])
def test_channels_are_rotated_in_pairs_and_the_rest_stays(name):
    rotary = RotaryEmbedding(HEAD_DIM, 100, {"rope_theta": 10000.0} | TYPES[name], OPS)
    positions, query, key = torch.tensor([0, 3, 99]), torch.randn(3, 4, HEAD_DIM), torch.randn(3, 2, HEAD_DIM)
    dim = 48 if "part" in name else 64
    for x, rotated in zip((query, key), rotary(positions, query, key), strict=True):
        as_complex = torch.complex(x[..., : dim // 2], x[..., dim // 2 : dim])
        angles = positions[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
        turned = as_complex * torch.polar(torch.ones_like(angles), angles)[:, None]
        torch.testing.assert_close(rotated[..., :dim], torch.cat((turned.real, turned.imag), dim=-1), rtol=1e-4, atol=1e-5)
        assert torch.equal(rotated[..., dim:], x[..., dim:])


# -- spellings and lengths ---------------------------------------------------------------------------------------------


def test_all_spellings_say_the_same():
    old = {"max_position_embeddings": 64, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}}
    both = {
        "max_position_embeddings": 64,
        "rope_theta": 500.0,
        "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0},
    }
    tables = [RotaryEmbedding(16, 64, rope_parameters(config), OPS).cos for config in (old, new, both)]
    assert torch.equal(tables[0], tables[1]) and torch.equal(tables[0], tables[2])
    assert rope_parameters({"rope_scaling": None}) == {"rope_type": "default", "rope_theta": 10000.0}
    assert rope_parameters({"rope_scaling": {"type": "su"}})["rope_type"] == "longrope"
    with_null = {"rope_type": "yarn", "factor": 2.0, "attention_factor": None, "mscale": None}
    assert "mscale" not in rope_parameters({"rope_scaling": with_null})


@pytest.mark.parametrize(
    ("settings", "default", "most"),
    [
        ({}, 4096, 4096),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 10240, 10240),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, 8192, 8192),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 512}}, 4096, 4096),
        # Qwen2.5 says how long the text may be by the factor alone; others have multiplied it already.
        ({"rope_scaling": YARN}, 16384, 16384),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 1024}}, 4096, 4096),
        # Phi-3.5: as vLLM, with the short factors unless more is asked for.
        ({"original_max_position_embeddings": 512, "rope_scaling": {"type": "longrope", **LONG}}, 512, 4096),
    ],
    ids=str,
)
def test_how_long_a_context_is(tmp_path, settings, default, most):
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 1, "num_hidden_layers": 1}
    config |= {"vocab_size": 8, "max_position_embeddings": 4096} | settings
    assert context_lengths(config) == (default, most)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model_config("tiny", tmp_path).max_model_len == default
    assert load_model_config("tiny", tmp_path, most).max_model_len == most
    with pytest.raises(ModelLoadError, match=f"max_model_len is {most + 1}, but tiny was trained for {most} tokens"):
        load_model_config("tiny", tmp_path, most + 1)


# -- damage --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "spiral"}, "RoPE type 'spiral' is not supported: supported are 'default', 'linear', 'dynamic', 'yarn'"),
        ({"rope_type": ["linear"]}, "RoPE type .* is not supported"),
        ("linear", "RoPE settings that are 'linear', but they must be an object"),
        (
            {"full_attention": {"rope_type": "default"}, "sliding_attention": {}},
            "some layers alone .full_attention, sliding_attention.",
        ),
        *(({"rope_type": name}, f"lack 'factor', which type '{name}' needs") for name in ("linear", "dynamic", "yarn", "llama3")),
        ({"rope_type": "linear", "factor": None}, "lack 'factor'"),
        *(
            ({"rope_type": "linear", "factor": value}, "have factor = .*, but it must be a number above 0")
            for value in ("4", True, 0, -1.0, math.nan, math.inf, 1e300, [4.0])
        ),
        ({"rope_type": "default", "rope_theta": "big"}, "have rope_theta = 'big', but it must be a number above 1"),
        ({"rope_type": "default", "rope_theta": 1}, "have rope_theta = 1, but it must be a number above 1"),
        ({"rope_type": "llama3", "factor": 8, "high_freq_factor": 4}, "lack 'low_freq_factor'"),
        ({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1}, "lack 'high_freq_factor'"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "have high_freq_factor = 1.0, but it must be a number above 1"),
        (LLAMA3 | {"original_max_position_embeddings": 0}, "have original_max_position_embeddings = 0"),
        (YARN | {"beta_fast": "32"}, "have beta_fast = '32'"),
        (YARN | {"mscale": "1", "mscale_all_dim": 1}, "have mscale = '1'"),
        (YARN | {"attention_factor": -1}, "have attention_factor = -1"),
        (
            {"rope_type": "longrope", "long_factor": LONG["long_factor"]},
            "short_factor .* is missing, but .* a list of 32 numbers",
        ),
        ({"rope_type": "longrope", "short_factor": LONG["short_factor"]}, "long_factor .* is missing"),
        ({"rope_type": "longrope", **LONG, "long_factor": [1.0] * 31}, "long_factor .* has 31, but .* a list of 32 numbers"),
        ({"rope_type": "longrope", **LONG, "long_factor": 4.0}, "long_factor .* is 4.0"),
        ({"rope_type": "longrope", **LONG, "short_factor": [1.0] * 31 + ["x"]}, r"have short_factor\[31\] = 'x'"),
        ({"rope_type": "longrope", **LONG, "short_factor": [1.0, None] * 16}, r"short_factor\[1\]"),
        ({"rope_type": "default", "partial_rotary_factor": 1.5}, "have partial_rotary_factor = 1.5, .* up to 1"),
        (
            {"rope_type": "default", "partial_rotary_factor": 0.3},
            "rotates 19 channels of each head of 64, but they must be pairs",
        ),
    ],
    ids=str,
)
def test_damaged_settings_are_named(settings, message):
    with pytest.raises(ModelLoadError, match=message) as error:
        RotaryEmbedding(HEAD_DIM, 128, rope_parameters({"max_position_embeddings": 128, "rope_scaling": settings}), OPS)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)
