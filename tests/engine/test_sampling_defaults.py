"""What a model's generation_config.json recommends is the default of requests that say nothing else."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError, ModelLoadError
from minivllm.models.registry import load_sampling_defaults

RECOMMENDED = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": None,
    "max_new_tokens": 3,
    "bos_token_id": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("defaults")
    LlamaForCausalLM(config).save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    return path


@pytest.mark.slow
def test_llm_uses_what_the_model_recommends_unless_told_otherwise(folder):
    options = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 4}
    llm = LLM(str(folder), **options)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_p=0.95, top_k=20, max_tokens=3)
    assert len(llm.generate([[1, 2]], use_tqdm=False)[0].outputs[0].token_ids) <= 3
    given = SamplingParams(max_tokens=5, ignore_eos=True)
    assert len(llm.generate([[1, 2]], given, use_tqdm=False)[0].outputs[0].token_ids) == 5
    assert llm.llm_engine.add_request("a", [1]).sampling_params == llm.get_default_sampling_params()
    assert LLM(str(folder), generation_config="vllm", **options).get_default_sampling_params() == SamplingParams()


def test_a_folder_without_recommendations_leaves_the_defaults(tmp_path):
    assert load_sampling_defaults(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert load_sampling_defaults(tmp_path) == {}


@pytest.mark.parametrize("value", [{"temperature": -1}, {"top_p": "most"}, {"max_new_tokens": 0}])
def test_a_recommendation_out_of_range_is_named(tmp_path, value):
    (tmp_path / "generation_config.json").write_text(json.dumps(value))
    with pytest.raises(ModelLoadError, match="generation_config.json cannot be used: .* set generation_config='vllm'"):
        load_sampling_defaults(tmp_path)


def test_the_option_has_two_values(folder):
    with pytest.raises(ConfigError, match="generation_config is 'mine', but must be one of 'auto', 'vllm'"):
        LLM(str(folder), generation_config="mine")
