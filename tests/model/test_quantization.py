"""Weights in 8 bits: how near the products are, that a row does not depend on its batch, and whole models."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from quality import compute_logits, measure_quality

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError
from minivllm.kernels.reference import hadamard_order, hadamard_transform, round_weight
from minivllm.layers.embedding import ParallelLMHead
from minivllm.layers.linear import Linear
from minivllm.layers.linear_methods import PackedLinearMethod, UnquantizedLinearMethod
from minivllm.layers.platform import PACKED_WEIGHTS, Platform

CPU = torch.device("cpu")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unpacked():
    """A context in which weights stay as they are loaded."""
    return mock.patch.dict(PACKED_WEIGHTS, clear=True)


def make_linear(weight, bias=None, quantization=None):
    """A layer with these weights, as a model has it after loading."""
    platform = Platform(CPU, torch.float32, quantization=quantization)
    layer = Linear(weight.shape[1], weight.shape[0], bias is not None, platform)
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            layer.get_parameter(name).data.copy_(value)
    layer.process_weights_after_loading()
    return layer


@pytest.mark.parametrize("bias", [True, False])
@given(rows=st.sampled_from([1, 2, 7, 16, 50]), in_features=st.sampled_from([1, 16, 100, 576]), seed=st.integers(0, 2**31))
def test_int8_is_near(bias, rows, in_features, seed):
    weight, b = random(33, in_features, seed=seed), random(33, seed=seed + 1) if bias else None
    x = random(rows, in_features, seed=seed + 2)
    x[0, 0] = 100  # an outlier
    expected = F.linear(x, weight, b)
    # Transformed weights and inputs are rounded to a 254th of the largest of their row.
    inputs, weights = hadamard_transform(x), hadamard_transform(weight) / hadamard_order(in_features)
    bound = (
        0.505
        / 127
        * (weights.abs().amax(1) * inputs.abs().sum(1, keepdim=True) + inputs.abs().amax(1, keepdim=True) * weights.abs().sum(1))
    )
    assert ((make_linear(weight, b, "int8")(x) - expected).abs() <= bound + 1e-4).all()


@pytest.mark.parametrize("outlier", [0.0, 100.0])
def test_an_outlier_costs_others_little(outlier):
    """100 in 127 steps: without the transform, the error beside it would be a quarter."""
    weight, x = random(64, 576), random(8, 576, seed=1)
    x[:, 5] = outlier
    weight[:, 5] = 0  # of the outlier itself, nothing is seen
    expected = F.linear(x, weight)
    error = (make_linear(weight, None, "int8")(x) - expected).norm() / expected.norm()
    assert error < (0.06 if outlier else 0.02)


def test_int8_of_numbers_that_have_8_bits_is_exact():
    """What is transformed is made of 8-bit integers, of which the largest is 127."""
    weight = torch.randint(-127, 128, (20, 64), generator=torch.Generator().manual_seed(0)).float()
    x = torch.randint(-127, 128, (5, 64), generator=torch.Generator().manual_seed(1)).float()
    weight[:, 0] = x[:, 0] = 127
    product = make_linear(hadamard_transform(weight), None, "int8")  # a second transform undoes the first, but for a factor of 64
    torch.testing.assert_close(product(hadamard_transform(x) / 64), x @ weight.t(), rtol=1e-6, atol=0)


@given(rows=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_a_row_does_not_depend_on_its_batch(rows, seed):
    product = make_linear(random(48, 64, seed=seed), None, "int8")
    x = random(rows, 64, seed=seed + 1)
    x[0] *= 1000
    together = product(x)
    assert all(torch.equal(product(x[i : i + 1])[0], together[i]) for i in range(rows))


@pytest.mark.parametrize("bias", [True, False])
@given(
    rows=st.integers(1, 60),
    in_features=st.integers(1, 150) | st.sampled_from([576, 1536]),
    out_features=st.integers(1, 100),
    seed=st.integers(0, 2**31),
)
def test_int8_products_have_the_bits_of_exact_sums(bias, rows, in_features, out_features, seed):
    weight, b = random(out_features, in_features, seed=seed), random(out_features, seed=seed + 1) if bias else None
    x = random(rows, in_features, seed=seed + 2) * torch.rand(rows, 1) * 100
    rounded, scales = round_weight(weight)
    transformed = hadamard_transform(x)
    row_scales = (transformed.abs().amax(dim=1, keepdim=True) / 127).clamp_(min=1e-30)
    sums = torch.floor(transformed * (1 / row_scales) + 0.5).double() @ rounded.double().t()
    expected = sums.float() * row_scales * scales + (0 if b is None else b)
    assert torch.equal(make_linear(weight, b, "int8")(x), expected)


def test_which_layer_is_computed_how():
    def method(quantization, layer_cls=None, dtype=torch.float32):
        platform = Platform(CPU, dtype, quantization=quantization)
        layer = ParallelLMHead(64, 32, platform) if layer_cls is ParallelLMHead else Linear(64, 32, False, platform)
        return type(layer.method)

    assert method("int8") is PackedLinearMethod
    assert method("int8", layer_cls=ParallelLMHead) is PackedLinearMethod
    assert method("int8", dtype=torch.bfloat16) is PackedLinearMethod
    assert method(None) is PackedLinearMethod
    assert method(None, dtype=torch.bfloat16) is PackedLinearMethod
    assert method(None, dtype=torch.float16) is UnquantizedLinearMethod, "there is no packed float16"
    with unpacked():
        assert method(None) is method(None, dtype=torch.bfloat16) is UnquantizedLinearMethod


@pytest.mark.parametrize("rows", [3, 10])
def test_a_packed_layer_computes_the_same_and_keeps_its_weight_once(rows):
    weight, bias, x = random(32, 64), random(32, seed=1), random(rows, 64, seed=2)
    packed = make_linear(weight, bias)
    with unpacked():
        plain = make_linear(weight, bias)
    torch.testing.assert_close(packed(x), plain(x))
    assert packed.weight is None and not list(packed.parameters())


def test_what_cannot_be_quantized_is_told():
    with pytest.raises(ConfigError, match="quantization is 'int8', which needs dtype 'float32' or 'bfloat16', not 'float16'"):
        LLM(dtype="float16", quantization="int8")
    with pytest.raises(ConfigError, match="together they need the attention backend 'cpu'"):
        LLM(dtype="bfloat16", quantization="int8", attention_backend="torch")
    with pytest.raises(ConfigError, match="quantization is 'int4', but must be 'int8'"):
        LLM(quantization="int4")


@pytest.fixture(scope="module")
def engines():
    def load(**options):
        return LLM(max_num_seqs=8, max_model_len=512, num_gpu_blocks_override=200, **options)

    with unpacked():
        plain = load()
    return {
        "float32": plain,
        "packed": load(),
        "bfloat16": load(dtype="bfloat16"),
        "int8": load(quantization="int8"),
        "int8 and bfloat16": load(quantization="int8", dtype="bfloat16"),
    }


@pytest.mark.slow
def test_quality_of_the_default_model(engines):
    quantized = {name: engines[name].llm_engine for name in ("packed", "bfloat16", "int8", "int8 and bfloat16")}
    results = {
        result.quantization: result
        for result in measure_quality(engines["float32"].llm_engine, quantized, num_positions=200, use_tqdm=False)
    }
    assert results["packed"].agreement == 1 and abs(results["packed"].mean_kl) < 1e-6
    assert results["bfloat16"].agreement >= 0.97 and 0 < results["bfloat16"].mean_kl <= 0.002
    for name in ("int8", "int8 and bfloat16"):
        assert results[name].agreement >= 0.9 and 1e-5 < results[name].mean_kl <= 0.01, results[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["packed", "bfloat16", "int8", "int8 and bfloat16"])
def test_tokens_do_not_depend_on_the_batch(engines, name):
    """To the last bit: rows are rounded for themselves, and sums are made in one order."""
    prompts = ["The capital of France is", "def mean(values):", "Water boils at", "Once upon a time", "The best way to learn"]
    params = SamplingParams(temperature=0, max_tokens=24)
    together = [output.outputs[0].token_ids for output in engines[name].generate(prompts, params, use_tqdm=False)]
    alone = [engines[name].generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    assert together == alone


@pytest.mark.slow
def test_packed_weights_compute_the_same(engines):
    token_ids = list(range(1000, 1040))
    packed, unpacked = (compute_logits(engines[name].llm_engine, token_ids) for name in ("packed", "float32"))
    torch.testing.assert_close(packed, unpacked, rtol=1e-3, atol=1e-3)
