"""`minivllm doctor MODEL` says what a model's folder needs and gets here, without loading it, and refuses what loading it would refuse."""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_folders import CONFIG, lay_out_download, make_folder, write_tokenizer_config, write_weights
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from minivllm import LLM, ModelRegistry
from minivllm.config import EngineArgs
from minivllm.engine.engine_config import EngineConfig
from minivllm.entrypoints.cli import doctor_model, main
from minivllm.errors import MinivllmError
from minivllm.worker import worker
from minivllm.worker.memory import measure_peak_memory


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("doctor") / "tiny")
    write_weights(folder)
    return folder


@pytest.fixture
def folder(whole_folder, tmp_path):
    """A copy of a good model's folder, for the test to change."""
    return shutil.copytree(whole_folder, tmp_path / "tiny")


@pytest.fixture
def examine(capsys):
    """The exit status, and the lines by their labels; the last ones are under ""."""

    def run(model):
        status = main.main(["doctor", str(model)])
        found = {}
        for line in capsys.readouterr().out.splitlines():
            label, text = (line[:14].rstrip(": "), line[14:]) if line[13:14] == " " and ":" in line[:14] else ("", line)
            found[label] = f"{found.get(label, '')}{text}"
        return status, found

    return run


@pytest.fixture
def memory(monkeypatch):
    """Set how many bytes are free."""
    return lambda num_bytes: monkeypatch.setattr(doctor_model, "available_cpu_memory", lambda: num_bytes)


def change_config(folder, **changes):
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | changes))


def test_the_default_model_is_described(examine, memory):
    memory(8 * 2**30)
    status, lines = examine("smollm2-135m")
    assert status == 0
    assert lines["model"] == "smollm2-135m, LlamaForCausalLM"
    assert lines["weights"] == "134,515,008 parameters, stored as float32"
    assert lines["as loaded"].startswith("513 MiB in float32, 257 MiB in bfloat16, 131 MiB in int8")
    assert lines["KV cache"].startswith("45 KiB a token, 720 KiB a block of 16, in ")
    if not torch.cuda.is_available():
        assert lines["memory"].startswith("8 GiB free for the CPU, less 513 MiB of weights in float32")
        assert lines["fits here"] == "a cache of about 5,825 blocks, 93,200 tokens"
        assert lines["context"] == "8,192 tokens; 11 sequences of that length at once"
    assert lines["sampling"] == "ends at token 2; no defaults of its own"
    assert lines["tokenizer"] == "49,152 tokens for 49,152 rows of the model; a chat template"
    assert lines[""] == "It can be served: try `minivllm serve smollm2-135m`."


@pytest.mark.skipif(torch.cuda.is_available(), reason="the page shows a CPU")
def test_the_page_shows_what_it_prints(capsys, memory):
    page = (Path(__file__).parents[2] / "docs/using.md").read_text(encoding="utf-8")
    command, shown = re.search(r"```console\n\$ minivllm (doctor .*)\n((?:.*\n)*?)```", page).groups()
    memory(int(6.2 * 2**30))
    assert main.main(command.split()) == 0
    assert capsys.readouterr().out == shown


def test_what_the_files_say_is_told(folder, examine):
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20, "eos_token_id": [2, 9]}))
    write_tokenizer_config(folder, chat_template="{{ messages[0].content }}")
    status, lines = examine(folder)
    assert status == 0
    assert lines["sampling"] == "ends at token 2, 9; defaults temperature 0.6, top_k 20 (--generation-config vllm for none)"
    assert lines["tokenizer"] == "100 tokens for 120 rows of the model; a chat template"
    assert examine(folder)[1]["context"].startswith("64 tokens; ")


def test_what_does_no_harm_until_it_is_used_is_told_too(folder, examine):
    assert examine(folder)[1]["tokenizer"].endswith("; NO chat template")
    write_tokenizer_config(folder, chat_template="{% if %}")
    status, lines = examine(folder)
    assert status == 0
    assert "a chat template that DOES NOT WORK: The model's chat template is broken" in lines["tokenizer"]
    change_config(folder, tie_word_embeddings=True)
    status, lines = examine(folder)
    assert status == 0
    assert "the config ties the head, which is used if it differs from the embedding" in lines["weights"]


def change_weights(change):
    def break_folder(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return break_folder


def configure(**changes):
    return lambda folder: change_config(folder, **changes)


def twice(folder):
    weights = load_file(folder / "model.safetensors")
    for i in (1, 2):
        save_file(weights, folder / f"model-0000{i}-of-00002.safetensors")
    (folder / "model.safetensors").unlink()


OBSTACLES = {
    "an architecture": configure(architectures=["GPT2LMHeadModel"]),
    "quantized weights": configure(quantization_config={"quant_method": "awq"}),
    "an activation": configure(hidden_act="gelu"),
    "a kind of RoPE": configure(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
    "heads that do not divide": configure(num_attention_heads=3, num_key_value_heads=2),
    "a dtype": configure(num_hidden_layers="2"),
    "a tensor too few": change_weights(lambda weights: weights.pop("model.norm.weight")),
    "a tensor too many": change_weights(lambda weights: weights.update(extra=torch.zeros(1))),
    "another shape": change_weights(lambda weights: weights.update({"model.norm.weight": torch.zeros(7)})),
    "whole numbers": change_weights(lambda weights: weights.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)})),
    "the same tensors twice": twice,
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "damaged weights": lambda folder: (folder / "model.safetensors").write_bytes(b"damaged"),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "a default out of range": lambda folder: (folder / "generation_config.json").write_text('{"top_p": 2}'),
}  # fmt: skip


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_what_loading_refuses_is_refused_with_its_sentence(folder, examine, obstacle):
    OBSTACLES[obstacle](folder)
    with pytest.raises(MinivllmError) as caught:
        LLM(str(folder), num_gpu_blocks_override=4, enforce_eager=True)
    status, lines = examine(folder)
    assert status == 1
    assert f"It cannot be served. {caught.value}" in lines[""]
    assert lines["weights"] and lines["sampling"] and lines["tokenizer"], "the rest is said nevertheless"


def test_several_reasons_are_all_given(folder, examine):
    change_config(folder, hidden_act="gelu")
    (folder / "tokenizer.json").unlink()
    lines = examine(folder)[1]
    assert lines[""].count("It cannot be served.") == 2
    assert lines["tokenizer"] == "NONE that can be read"


def test_a_folder_without_weights_is_counted_by_its_config(folder, examine):
    whole = examine(folder)[1]
    num_parameters = whole["weights"].split()[0]
    (folder / "model.safetensors").unlink()
    status, lines = examine(folder)
    assert status == 1
    assert (
        lines["weights"]
        == f"NONE that can be read (--load-format dummy does without); by the config, {num_parameters} parameters"
    )
    assert lines["as loaded"] == whole["as loaded"]


SIZES = {name: value for name, value in CONFIG.items() if name not in ("architectures", "model_type")} | {
    "pad_token_id": 0,
    "bos_token_id": 1,
}


@pytest.mark.parametrize("architecture", ModelRegistry.get_supported_archs())
def test_each_family_is_known_and_has_as_many_parameters_as_in_transformers(examine, tmp_path, architecture):
    model_type = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}[architecture]
    sizes = SIZES | ({"ffn_dim": 48, "word_embed_proj_dim": 32} if model_type == "opt" else {})
    config = CONFIG_MAPPING[model_type](**sizes, architectures=[architecture])
    folder = make_folder(tmp_path / "tiny")
    config.save_pretrained(folder)
    with torch.device("meta"):
        expected = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    lines = examine(folder)[1]
    assert lines["weights"].endswith(f"by the config, {expected:,} parameters")
    assert lines[""].count("It cannot be served.") == 1 and "has a config but no weights" in lines[""]


def test_a_model_of_the_hub_needs_no_weights_here(folder, examine, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (folder / "model.safetensors").unlink()
    lay_out_download(folder, tmp_path / "hub", "some/model", "a" * 40)
    status, lines = examine("some/model")
    assert status == 0
    assert lines["weights"].startswith("not downloaded yet; by the config, ")
    status, lines = examine("some/other")
    assert status == 1 and lines["model"].startswith("NOT FOUND. 'some/other' is not a folder here")


def test_no_weights_are_downloaded(folder, examine, monkeypatch):
    patterns = []

    def download(name, allow_patterns, ignore_patterns=()):
        patterns.extend(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert examine("some/model")[0] == 0
    assert "*.json" in patterns and not [pattern for pattern in patterns if "safetensors" in pattern or "bin" in pattern]


LARGE = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 131_072,
}  # fmt: skip
"""Llama 3.1 8B."""


def write_hollow_weights(folder, hf_config):
    """A file of the right size, in bfloat16, that takes no place on the disk."""
    hidden, mlp, vocab = hf_config["hidden_size"], hf_config["intermediate_size"], hf_config["vocab_size"]
    kv = hidden // hf_config["num_attention_heads"] * hf_config["num_key_value_heads"]
    layer = {
        "self_attn.q_proj": [hidden, hidden], "self_attn.k_proj": [kv, hidden], "self_attn.v_proj": [kv, hidden],
        "self_attn.o_proj": [hidden, hidden], "mlp.gate_proj": [mlp, hidden], "mlp.up_proj": [mlp, hidden],
        "mlp.down_proj": [hidden, mlp], "input_layernorm": [hidden], "post_attention_layernorm": [hidden],
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": [vocab, hidden], "lm_head.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    for i in range(hf_config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def test_a_large_model_is_examined_in_little_memory(examine, memory, tmp_path):
    folder = make_folder(tmp_path / "large", **LARGE)
    write_hollow_weights(folder, LARGE)
    memory(64 * 2**30)
    found = []
    assert measure_peak_memory(lambda: found.append(examine(folder))) < 2**30, "16 GB of weights were read"
    lines = found[0][1]
    assert lines["weights"] == "8,030,261,248 parameters, stored as bfloat16"
    assert lines["as loaded"].startswith("29.9 GiB in float32, 15 GiB in bfloat16")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the memory of a CPU is set")
def test_a_context_that_does_not_fit_gets_the_option_that_says_so(examine, memory, tmp_path):
    folder = make_folder(tmp_path / "large", **LARGE)
    write_hollow_weights(folder, LARGE)
    memory(80 * 2**30)
    status, lines = examine(folder)
    assert status == 0
    assert lines["fits here"] == "a cache of about 1,024 blocks, 16,384 tokens"
    whole = 32 * 2**30
    assert lines["context"] == (
        "131,072 tokens, MORE THAN FIT: longer requests are refused; --max-model-len 16384 says so to clients, and "
        f"--kv-cache-memory-bytes {whole} gives all of it room"
    )
    memory(40 * 2**30)
    assert examine(folder)[1]["context"].endswith("--max-model-len 16384 says so to clients")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the memory of a CPU is set")
def test_too_little_memory_gets_the_option_that_suffices(folder, examine, memory):
    """50 million parameters, and a step of 80 MB."""
    change_config(
        folder, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4
    )
    (folder / "model.safetensors").unlink()
    expected = {
        240: "use --dtype bfloat16, which leaves",
        160: "use --quantization int8, which leaves",
        40: "free at least ",
    }
    for megabytes, advice in expected.items():
        memory(megabytes * 10**6)
        status, lines = examine(folder)
        assert status == 1
        assert lines["fits here"].startswith(f"NO. {advice}")
        assert f"It cannot be served. The memory does not suffice: {lines['fits here'][4:]}" in lines[""]
    memory(320 * 10**6)
    assert examine(folder)[1]["fits here"].startswith("a cache of about ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the memory of a CPU is set")
def test_a_step_with_a_whole_prompt_may_be_too_large_where_the_server_has_room(folder, examine, memory):
    change_config(folder, max_position_embeddings=65_536)
    memory(200 * 10**6)
    status, lines = examine(folder)
    assert status == 0
    assert lines["in Python"] == "LLM(..., enable_chunked_prefill=True), as there is NO ROOM for a step with a whole prompt"
    memory(10**9)
    assert "in Python" not in examine(folder)[1]


@pytest.mark.slow
@pytest.mark.parametrize("free", [2**26, 2**40], ids=["little memory", "more than is useful"])
def test_as_many_blocks_fit_as_the_engine_finds_room_for(folder, monkeypatch, free):
    """But for what a step takes, which the engine measures."""
    change_config(folder, max_position_embeddings=4096)
    monkeypatch.setattr(doctor_model, "ACTIVATION_COPIES", 0)
    monkeypatch.setattr(doctor_model, "LOGIT_COPIES", 0)
    monkeypatch.setattr(worker, "measure_peak_memory", lambda work: 0)
    monkeypatch.setattr(worker, "available_cpu_memory", lambda: free)
    args = EngineArgs(str(folder), device="cpu")
    config = EngineConfig.from_engine_args(args)
    started = worker.Worker(config.model_config, config.cache_config, config.scheduler_config, config.worker_config)
    started.load_model()
    skeleton = doctor_model.Examination(str(folder), folder).model
    weights = doctor_model.weight_bytes(skeleton, torch.float32)
    monkeypatch.setattr(doctor_model, "available_cpu_memory", lambda: free + weights)
    room = doctor_model.find_room(config.model_config, skeleton, torch.float32, torch.device("cpu"), args)
    assert started.determine_num_available_blocks()[0] == room.num_blocks > 0
    assert weights == 4 * sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())


def test_sizes_are_told_in_units_that_fit():
    assert [doctor_model._size(size) for size in (17, 1536, 720 * 1024, 2**30, 150 * 2**30)] == [
        "17 bytes", "1.5 KiB", "720 KiB", "1 GiB", "150 GiB",
    ]  # fmt: skip
