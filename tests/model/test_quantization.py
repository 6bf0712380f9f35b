"""Weights in 8 and 4 bits: how near the products are, that a row does not depend on its batch, and whole models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from minivllm import LLM, SamplingParams
from minivllm.bench.quality import compute_logits, measure_quality
from minivllm.errors import ConfigError
from minivllm.layers.linear import Linear
from minivllm.layers.quantization import HEAD, Int4Product, Int8Product, choose_product

PRODUCTS = {"int8": Int8Product, "int4": Int4Product}
CPU = torch.device("cpu")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [True, False])
@given(rows=st.sampled_from([1, 2, 7, 16, 50]), in_features=st.sampled_from([1, 16, 100, 576]), seed=st.integers(0, 2**31))
def test_int8_is_near(bias, rows, in_features, seed):
    weight, b = random(33, in_features, seed=seed), random(33, seed=seed + 1) if bias else None
    x = random(rows, in_features, seed=seed + 2)
    x[0, 0] = 100  # an outlier, which inputs of one digit would drown beside
    expected = F.linear(x, weight, b)
    # Weights are rounded to a 254th of their row's range, inputs to an 8,126th.
    bound = 0.51 * (
        weight.abs().amax(1) / 127 * x.abs().sum(1, keepdim=True) + x.abs().amax(1, keepdim=True) / 4063 * weight.abs().sum(1)
    )
    assert ((Int8Product(weight, b)(x) - expected).abs() <= bound + 1e-4).all()


def test_int8_of_numbers_that_have_8_bits_is_exact():
    weight = torch.randint(-127, 128, (20, 64), generator=torch.Generator().manual_seed(0)).float()
    weight[:, 0] = 127
    x = torch.randint(-4063, 4064, (5, 64), generator=torch.Generator().manual_seed(1)).float()
    x[:, 0] = 4063
    torch.testing.assert_close(Int8Product(weight, None)(x), x @ weight.t(), rtol=1e-6, atol=0)


def test_int4_of_numbers_on_16_steps_is_exact_but_for_bfloat16():
    """What a GGUF file's Q4_1 blocks expand to, is found again."""
    generator = torch.Generator().manual_seed(0)
    steps, lowest = (
        torch.rand(32, 3, 1, generator=generator).half().float(),
        torch.randn(32, 3, 1, generator=generator).half().float(),
    )
    numbers = torch.randint(0, 16, (32, 3, 32), generator=generator)
    numbers[..., 0], numbers[..., 1] = 0, 15
    weight = (lowest + steps * numbers).flatten(1)
    product = Int4Product(weight, None)(torch.eye(96))  # the weight itself, as the operator sees it
    spread = (steps * 15).squeeze(-1).repeat_interleave(32, dim=1)
    assert ((product.t() - weight).abs() <= 0.01 * (spread + weight.abs())).all()


@pytest.mark.parametrize("name", PRODUCTS)
@given(rows=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_a_row_does_not_depend_on_its_batch(name, rows, seed):
    product = PRODUCTS[name](random(48, 64, seed=seed), None)
    x = random(rows, 64, seed=seed + 1)
    x[0] *= 1000
    together = product(x)
    assert all(torch.equal(product(x[i : i + 1])[0], together[i]) for i in range(rows))


def test_what_is_packed_into_what():
    weight = random(32, 64)
    for quantization, name, kind in (
        ("int8", "model.layers.0.mlp.down_proj", Int8Product),
        ("int4", "model.layers.0.mlp.down_proj", Int4Product),
        ("int4", HEAD, Int8Product),
    ):
        assert isinstance(choose_product(quantization, False, CPU, torch.float32)(name, weight, None), kind)
    make = choose_product("int4", False, CPU, torch.float32)
    assert isinstance(make("x", random(32, 40), None), Int8Product), "40 inputs are no whole groups of 32"
    assert isinstance(make("x", random(20, 64), None), Int8Product), "20 outputs are no multiple of 16"
    assert choose_product(None, True, CPU, torch.float32) is None
    assert choose_product(None, False, CPU, torch.bfloat16) is None, "packed weights are float32"
    layer = Linear(64, 32, bias=True)
    layer.weight.data, layer.bias.data = weight, random(32, seed=1)
    x = random(3, 64, seed=2)
    before = layer(x)
    layer.pack(lambda w, b: choose_product(None, False, CPU, torch.float32)("x", w, b))
    torch.testing.assert_close(layer(x), before)
    assert layer.weight is None and not list(layer.parameters()), "the weight is there once"


def test_what_cannot_be_quantized_is_told():
    with pytest.raises(
        ConfigError, match="quantization is 'int8', which runs on the CPU in float32 only, not on cpu in torch.bfloat16"
    ):
        LLM(dtype="bfloat16", quantization="int8")
    with pytest.raises(ConfigError, match="quantization is 'int3', but must be one of 'int8', 'int4'"):
        LLM(quantization="int3")


@pytest.fixture(scope="module")
def engines():
    def load(**options):
        return LLM(max_num_seqs=8, max_model_len=512, num_gpu_blocks_override=200, **options)

    return {
        "float32": load(low_memory=True),
        "packed": load(),
        "int8": load(quantization="int8"),
        "int4": load(quantization="int4"),
    }


def test_quality_of_the_default_model(engines):
    quantized = {name: engines[name].llm_engine for name in ("packed", "int8", "int4")}
    results = {
        result.quantization: result
        for result in measure_quality(engines["float32"].llm_engine, quantized, num_positions=200, use_tqdm=False)
    }
    assert results["packed"].agreement == 1 and abs(results["packed"].mean_kl) < 1e-6
    for name in ("int8", "int4"):
        assert results[name].agreement >= 0.9 and 1e-5 < results[name].mean_kl <= 0.03, results[name]


@pytest.mark.parametrize("name", ["packed", "int8", "int4"])
def test_tokens_do_not_depend_on_the_batch(engines, name):
    """To the last bit: rows are rounded for themselves, and sums are made in one order."""
    prompts = ["The capital of France is", "def mean(values):", "Water boils at", "Once upon a time", "The best way to learn"]
    params = SamplingParams(temperature=0, max_tokens=24)
    together = [output.outputs[0].token_ids for output in engines[name].generate(prompts, params, use_tqdm=False)]
    alone = [engines[name].generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    assert together == alone


def test_low_memory_computes_the_same(engines):
    token_ids = list(range(1000, 1040))
    packed, unpacked = (compute_logits(engines[name].llm_engine, token_ids) for name in ("packed", "float32"))
    torch.testing.assert_close(packed, unpacked, rtol=1e-3, atol=1e-3)
