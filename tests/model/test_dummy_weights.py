"""`load_format="dummy"`: random weights without files, the same ones however the model is divided."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thread_ranks import engine_on_threads

from minivllm import LLM, SamplingParams
from minivllm.config import EngineArgs
from minivllm.errors import ConfigError, ModelLoadError
from minivllm.models import hub
from minivllm.models.dummy_weights import RandomTensor
from minivllm.models.llama import LlamaForCausalLM
from minivllm.models.registry import MODELS, ModelRegistry

SIZES = {
    "vocab_size": 323, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "eos_token_id": 2,
}  # fmt: skip
OPT = {
    "vocab_size": 323, "hidden_size": 80, "ffn_dim": 96, "num_hidden_layers": 5, "num_attention_heads": 5,
    "max_position_embeddings": 128, "eos_token_id": 2,
}  # fmt: skip
CONFIGS = {
    "llama, tied": SIZES | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "llama": SIZES | {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "qwen3": SIZES | {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "opt": OPT | {"architectures": ["OPTForCausalLM"]},
}
OPTIONS = {"load_format": "dummy", "skip_tokenizer_init": True, "num_gpu_blocks_override": 60, "block_size": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
PROMPTS = [[5], [7, 11, 300], list(range(3, 40))]


@pytest.fixture(params=CONFIGS)
def folder(request, tmp_path):
    """A folder with a config.json and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[request.param]))
    return str(tmp_path)


@pytest.fixture
def llama_folder(tmp_path):
    """The same, always of the same model."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    return str(tmp_path)


def generate(engine):
    """Tokens of all prompts, and their log-probabilities."""
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, GREEDY)
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            completion = output.outputs[0]
            chosen = zip(completion.token_ids, completion.logprobs or (), strict=True)
            found[output.request_id] = completion.token_ids, [entry[token].logprob for token, entry in chosen]
    return found


def test_tokens_are_the_same_however_the_model_is_divided(folder):
    """One rank, ranks, stages, both; uneven parts, of heads and of layers."""
    expected = generate(engine_on_threads(EngineArgs(folder, **OPTIONS)))
    assert len({tuple(token_ids) for token_ids, _ in expected.values()}) == len(PROMPTS), "the prompts are not told apart"
    for size, partition in (((2, 1), None), ((3, 1), None), ((1, 2), None), ((1, 3), "1,1,3"), ((2, 2), None)):
        args = EngineArgs(folder, **OPTIONS)
        args.pp_layer_partition = partition
        found = generate(engine_on_threads(args, *size))
        for name, (token_ids, logprobs) in expected.items():
            assert found[name][0] == token_ids, size
            assert found[name][1] == pytest.approx(logprobs, abs=1e-4), size


@pytest.mark.parametrize("folder", ["llama, tied", "llama", "opt"], indirect=True)
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "attention_backend": "torch"},
        {"quantization": "int8"},
        pytest.param({"dtype": "float16"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_log_probabilities_are_finite_and_near_those_of_float32(folder, options):
    """In what form the weights are held changes rounding alone: packed or not, in 8 bits, tied or not."""
    expected = generate(engine_on_threads(EngineArgs(folder, **OPTIONS)))
    found = generate(engine_on_threads(EngineArgs(folder, **OPTIONS, **options)))
    for name, (_, logprobs) in found.items():
        assert torch.tensor(logprobs).isfinite().all()
        assert logprobs[0] == pytest.approx(expected[name][1][0], abs=0.3)


@given(
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(0, 40), st.integers(0, 40)),
    st.tuples(st.integers(0, 40), st.integers(0, 40)),
)
def test_a_part_is_a_part_of_the_whole(shape, first, second):
    tensor = RandomTensor("a model", "a.weight", None, torch.device("cpu"))
    rows, columns = (
        slice(min(first[0], second[0]), max(first[0], second[0])),
        slice(min(first[1], second[1]), max(first[1], second[1])),
    )
    whole = tensor.read(shape)
    assert whole.shape == shape and torch.equal(tensor.read(shape, (rows, columns)), whole[rows, columns])
    assert torch.equal(tensor.read(shape, rows), whole[rows])
    bias = tensor.read(shape[:1])
    assert bias.shape == shape[:1] and torch.equal(tensor.read(shape[:1], rows), bias[rows])


def test_the_numbers_are_random():
    """Mean, spread, and no relation between rows, columns or weights: as many large singular values as random matrices have."""

    def read(name, shape=(400, 900)):
        return RandomTensor("a model", name, None, torch.device("cpu")).read(shape)

    weight = read("a.weight")
    assert abs(weight.mean()) < 5 * (1 / 30) / 600 and weight.std() == pytest.approx(1 / 30, rel=0.01)
    assert abs(weight).max() < 3**0.5 / 30
    assert torch.linalg.matrix_norm(weight, 2) < 1.1 * (1 + (400 / 900) ** 0.5)
    assert torch.linalg.matrix_norm(torch.cat([weight, read("b.weight")]), 2) < 1.1 * (1 + (800 / 900) ** 0.5)
    norm, bias = read("norm.weight", (5000,)), read("proj.bias", (5000,))
    assert norm.mean() == pytest.approx(1, abs=0.01) and norm.std() == pytest.approx(0.1, rel=0.05)
    assert bias.mean() == pytest.approx(0, abs=0.01) and bias.std() == pytest.approx(0.1, rel=0.05)


def test_another_process_makes_the_same_model(llama_folder):
    """The numbers depend on names alone, and not on what was drawn before, or on how Python hashes."""
    torch.manual_seed(1)
    one = LLM(llama_folder, **OPTIONS)
    two = LLM(llama_folder, tensor_parallel_size=2, **OPTIONS)
    outputs = [[o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] for llm in (one, two)]
    two.llm_engine.engine_core.shutdown()
    assert outputs[0] == outputs[1]


def test_weights_that_are_there_are_not_read(llama_folder, tmp_path):
    expected = generate(engine_on_threads(EngineArgs(llama_folder, **OPTIONS)))
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert generate(engine_on_threads(EngineArgs(llama_folder, **OPTIONS))) == expected
    with pytest.raises(ModelLoadError, match="cannot be read"):
        LLM(llama_folder, **OPTIONS | {"load_format": "auto"})


class LoadsItself(LlamaForCausalLM):
    """A class that fills its parameters itself, and declares no fused layers."""

    fused_layers = {}

    def load_weights(self, weights):
        raise AssertionError("there are no weights")


def test_a_class_that_loads_its_own_weights_gets_random_ones_too(llama_folder):
    expected = generate(engine_on_threads(EngineArgs(llama_folder, **OPTIONS)))
    before = MODELS["LlamaForCausalLM"]
    try:
        ModelRegistry.register_model("LlamaForCausalLM", LoadsItself)
        assert generate(engine_on_threads(EngineArgs(llama_folder, **OPTIONS))) == expected
    finally:
        MODELS["LlamaForCausalLM"] = before


def test_no_weights_are_downloaded(monkeypatch, tmp_path):
    patterns = []

    def download(name, allow_patterns, ignore_patterns=()):
        patterns.extend(allow_patterns)
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3"]))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert hub.resolve_model("some/model", with_weights=False) == tmp_path
    assert "*.json" in patterns and not [pattern for pattern in patterns if "safetensors" in pattern or "bin" in pattern]
    patterns.clear()
    LLM("some/model", **OPTIONS)
    assert "*.json" in patterns and "*.safetensors" not in patterns
    patterns.clear()
    hub.resolve_model("some/model")
    assert "*.safetensors" in patterns


def test_a_wrong_load_format_is_told_at_the_door():
    with pytest.raises(ConfigError, match=r"load_format.*'random'.*'auto'.*'dummy'"):
        EngineArgs("nowhere", load_format="random")
