"""What the files of a model's folder say is honoured: templates, added tokens, rows that no token has, downloads."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from tiny_folders import lay_out_download, make_folder, write_tokenizer_config

from minivllm import LLM, SamplingParams, StructuredOutputsParams
from minivllm.engine.tokenizer import Tokenizer
from minivllm.errors import ModelLoadError, RequestError
from minivllm.models.hub import resolve_model
from minivllm.models.weights import iterate_weights

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
HELLO = [{"role": "user", "content": "w5"}]
OPTIONS = {"load_format": "dummy", "num_gpu_blocks_override": 8, "max_num_seqs": 4, "enforce_eager": True}


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "model")


# -- chat templates -----------------------------------------------------------------------------------------------

NAMED = [{"name": "default", "template": "w10 {{ messages[0].content }}"}, {"name": "tool_use", "template": "w11"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def write_jinja(folder):
    (folder / "chat_template.jinja").write_text("w10 {{ messages[0].content }}")


def write_both(folder):
    write_tokenizer_config(folder, chat_template="w12")
    write_jinja(folder)


def write_additional(folder):
    write_jinja(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("w11")


def write_json(folder):
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "w10 {{ messages[0].content }}"}))


PLACES = {
    "chat_template.jinja": (write_jinja, [10, 5]),
    "chat_template.json": (write_json, [10, 5]),
    "tokenizer_config.json": (lambda folder: write_tokenizer_config(folder, chat_template="w10 {{ messages[0].content }}"), [10, 5]),
    "a file counts more than the config": (write_both, [10, 5]),
    "several by name": (lambda folder: write_tokenizer_config(folder, chat_template=NAMED), [11]),
    "several in files": (write_additional, [11]),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_chat_template_is_found_where_it_may_be(folder, place):
    write, with_tools = PLACES[place]
    write(folder)
    tokenizer = Tokenizer(folder)
    assert tokenizer.apply_chat_template(HELLO) == [10, 5]
    assert tokenizer.apply_chat_template(HELLO, tools=TOOLS) == with_tools


def test_a_model_without_a_chat_template_says_so(folder):
    with pytest.raises(RequestError, match="This model has no chat template: give it a plain prompt."):
        Tokenizer(folder).apply_chat_template(HELLO)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"chat_template": [1]}'])
def test_a_damaged_template_file_is_named(folder, content):
    (folder / "chat_template.json").write_text(content)
    with pytest.raises(ModelLoadError, match="chat_template.json has no 'chat_template' that is a text: correct or remove it."):
        Tokenizer(folder)


# -- tokens that are added, and rows without a token --------------------------------------------------------------

ADDED = {"content": "<new>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
PLACES_OF_ADDED = {
    "tokenizer_config.json, special": ({"added_tokens_decoder": {"100": ADDED | {"special": True}}}, {}, True),
    "tokenizer_config.json": ({"added_tokens_decoder": {"100": ADDED | {"special": False}}}, {}, False),
    "additional_special_tokens": ({"additional_special_tokens": ["<new>"]}, {}, True),
    "added_tokens.json": ({}, {"added_tokens.json": {"<new>": 100}}, False),
    "special_tokens_map.json": ({}, {"special_tokens_map.json": {"additional_special_tokens": ["<new>"]}}, True),
}


@pytest.mark.parametrize("place", PLACES_OF_ADDED)
def test_added_tokens_are_known_wherever_they_are_written(folder, place):
    settings, files, is_special = PLACES_OF_ADDED[place]
    write_tokenizer_config(folder, **settings)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("w5 <new> w6") == [5, 100, 6]
    assert tokenizer.has(100) and not tokenizer.has(101)
    assert (100 in tokenizer.skipped_token_ids) == is_special
    assert tokenizer.decode([100], skip_special_tokens=False) == "<new>"


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """Ids from 100 to 119 are rows of the model and no token's."""
    return LLM(str(make_folder(tmp_path_factory.mktemp("rows") / "model")), **OPTIONS)


def complete(llm, prompt="w5 w6", **changes):
    return llm.generate(prompt, replace(GREEDY, **changes), use_tqdm=False)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"allowed_token_ids": [110], "logprobs": 3, "prompt_logprobs": 2},
        {"logit_bias": {110: 100}, "stop": ["w7"], "skip_special_tokens": False},
        {"logit_bias": {110: 100}, "bad_words": ["w7"], "repetition_penalty": 1.1, "presence_penalty": 1.0},
    ],
    ids=lambda changes: ", ".join(changes),
)
def test_a_row_that_is_no_token_can_be_sampled_and_has_no_text(llm, changes):
    """As in Qwen2.5, which has 151,936 rows and 151,665 tokens."""
    output = complete(llm, **changes).outputs[0]
    assert (output.token_ids, output.text, output.finish_reason) == ([110] * 4, "", "length")
    if output.logprobs:
        assert output.logprobs[0][110].decoded_token == ""
        assert complete(llm, {"prompt_token_ids": [110, 5]}, prompt_logprobs=1).prompt_logprobs[1]


@pytest.mark.slow
def test_text_goes_on_around_a_row_that_is_no_token(llm):
    output = complete(llm, allowed_token_ids=[7, 110], temperature=9.0, max_tokens=12, seed=1).outputs[0]
    assert {7, 110} == set(output.token_ids)
    assert output.text.split() == ["w7"] * output.token_ids.count(7)


@pytest.mark.slow
def test_a_row_that_is_no_token_can_end_a_text(llm):
    output = complete(llm, logit_bias={119: 100}, stop_token_ids=[119]).outputs[0]
    assert (output.token_ids, output.finish_reason) == ([119], "stop")
    with pytest.raises(RequestError, match="allowed_token_ids has token id 120, but this model's ids go from 0 to 119"):
        complete(llm, allowed_token_ids=[120])


@pytest.fixture(scope="module")
def short_llm(tmp_path_factory):
    """A model with fewer rows than its tokenizer has tokens."""
    folder = make_folder(tmp_path_factory.mktemp("short") / "model", vocab_size=60)
    write_tokenizer_config(folder, added_tokens_decoder={"100": ADDED | {"special": True}})
    return LLM(str(folder), **OPTIONS)


@pytest.mark.slow
def test_a_text_with_a_token_that_the_model_has_no_row_for_is_refused(short_llm):
    with pytest.raises(
        RequestError, match="Token id 61, which its tokenizer gives for this text, is out of range: .* from 0 to 59"
    ):
        complete(short_llm, "w5 w61")
    with pytest.raises(RequestError, match=r"^Token id 61 is out of range: this model's ids go from 0 to 59\.$"):
        complete(short_llm, [5, 61])
    with pytest.raises(RequestError, match="Structured outputs cannot use this model's tokenizer"):
        complete(short_llm, structured_outputs=StructuredOutputsParams(choice=["w5"]))


@pytest.mark.slow
def test_what_it_cannot_write_needs_not_be_forbidden(short_llm):
    """A word with such a token, and a stop string that is one, before `min_tokens`."""
    expected = complete(short_llm).outputs[0].token_ids
    assert complete(short_llm, bad_words=["w61"]).outputs[0].token_ids == expected
    assert complete(short_llm, stop=["<new>"], min_tokens=2).outputs[0].token_ids == expected
    first = short_llm.get_tokenizer().decode(expected[:1])
    assert complete(short_llm, bad_words=["w61", first]).outputs[0].token_ids[0] != expected[0]


# -- downloads ----------------------------------------------------------------------------------------------------

NAME, COMMIT = "Qwen/Qwen2.5-0.5B-Instruct", "7ae557604adf67be50417f59c2c2f167def9a775"


@pytest.fixture
def download(tmp_path, monkeypatch):
    """The folder of a model in Hugging Face's cache. The hub is out of reach."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    source = make_folder(tmp_path / "source")
    write_jinja(source)
    return lay_out_download(source, tmp_path / "hub", NAME, COMMIT)


@pytest.mark.slow
def test_a_download_is_found_by_its_name_when_the_hub_is_out_of_reach(download):
    assert resolve_model(NAME) == download
    llm = LLM(NAME, **OPTIONS)
    assert llm.chat(HELLO, GREEDY, use_tqdm=False)[0].prompt_token_ids == [10, 5]
    assert llm.llm_engine.model_config.name == NAME
    with pytest.raises(ModelLoadError, match="snapshots/.* has a config but no weights"):
        LLM(NAME, **OPTIONS | {"load_format": "auto"})


def test_an_index_of_files_that_a_download_leaves_out_is_passed_over(folder):
    """A repository may hold the weights twice, and each kind has its index; *.json are downloaded, and of the weights only safetensors."""
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    index = {"weight_map": {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert [name for name, _ in iterate_weights(folder)] == ["a"]
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    with pytest.raises(ModelLoadError, match="lacks pytorch_model-00001-of-00002.bin, pytorch_model-00002"):
        list(iterate_weights(folder))


def test_what_was_never_downloaded_says_what_to_do(download):
    with pytest.raises(ModelLoadError, match="could not be fetched from Hugging Face .* give a local folder"):
        resolve_model("Qwen/Qwen2.5-1.5B-Instruct")
