"""What a model's generation_config.json recommends is the default of requests that say nothing else."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from minivllm import LLM, SamplingParams
from minivllm.config import EngineArgs
from minivllm.engine.engine_config import EngineConfig
from minivllm.entrypoints.openai.chat.protocol import ChatCompletionRequest
from minivllm.entrypoints.openai.chat.serving import ChatAnswer
from minivllm.entrypoints.openai.completions.protocol import CompletionRequest
from minivllm.entrypoints.openai.completions.serving import CompletionAnswer
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


CHAT, COMPLETION = {"messages": [{"role": "user", "content": "Hello"}]}, {"prompt": "Hello"}


@pytest.mark.parametrize(
    "answer_cls,body_cls,fields,default_length",
    [(ChatAnswer, ChatCompletionRequest, CHAT, 3), (CompletionAnswer, CompletionRequest, COMPLETION, 16)],
)
def test_the_server_uses_them_for_fields_that_a_request_leaves_out(answer_cls, body_cls, fields, default_length):
    """A null is a field left out."""

    def params(defaults, **given):
        engine = SimpleNamespace(model_config=SimpleNamespace(name="m", sampling_defaults=defaults))
        return answer_cls(engine, body_cls(**fields, **given)).params

    defaults = {"temperature": 0.6, "top_k": 20, "frequency_penalty": 0.5, "max_tokens": 3}
    left_out = params(defaults, top_k=None)
    assert (left_out.temperature, left_out.top_k, left_out.frequency_penalty) == (0.6, 20, 0.5)
    assert left_out.max_tokens == default_length
    given = params(defaults, temperature=0, top_k=0, frequency_penalty=0, max_tokens=7)
    assert (given.temperature, given.top_k, given.frequency_penalty, given.max_tokens) == (0, 0, 0, 7)
    assert params({}).temperature == 1, "generation_config='vllm'"


@pytest.mark.slow
def test_a_conversation_uses_them_too(folder, monkeypatch):
    llm = LLM(str(folder), skip_tokenizer_init=True, num_gpu_blocks_override=4)
    monkeypatch.setattr(llm, "get_tokenizer", lambda: SimpleNamespace(apply_chat_template=lambda messages, ends_open: [1, 2]))
    conversation = CHAT["messages"]
    assert len(llm.chat(conversation, use_tqdm=False)[0].outputs[0].token_ids) <= 3
    given = SamplingParams(max_tokens=5, ignore_eos=True)
    assert len(llm.chat(conversation, given, use_tqdm=False)[0].outputs[0].token_ids) == 5


def test_all_that_vllm_takes_is_taken(tmp_path):
    values = {
        "temperature": 0.5, "top_p": 0.8, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "max_new_tokens": 9,
    }  # fmt: skip
    (tmp_path / "generation_config.json").write_text(json.dumps(values | {"typical_p": 0.9, "do_sample": True}))
    expected = {"max_tokens" if name == "max_new_tokens" else name: value for name, value in values.items()}
    assert load_sampling_defaults(tmp_path) == expected


@pytest.mark.parametrize("generation_config", ["auto", "vllm"])
def test_end_tokens_count_whether_or_not_the_rest_of_the_file_does(folder, tmp_path, generation_config):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps(RECOMMENDED | {"eos_token_id": [7, 9]}))
    args = EngineArgs(str(tmp_path), skip_tokenizer_init=True, generation_config=generation_config)
    config = EngineConfig.from_engine_args(args).model_config
    assert {7, 9} <= set(config.eos_token_ids)
    assert bool(config.sampling_defaults) == (generation_config == "auto")


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
