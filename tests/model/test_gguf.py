"""GGUF files against transformers' own reading of them, quantizations against the gguf library, and broken files."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quantization
from safetensors.torch import load_file
from test_families import COMMON, LONGROPE, check_logits, save_model
from test_families import VOCAB as FAMILY_VOCAB
from transformers import LlamaConfig, Phi3Config, Qwen2Config, Qwen3Config, SmolLM3Config

from minivllm.errors import ModelLoadError
from minivllm.models.gguf_files import convert_gguf
from minivllm.models.hub import PACKAGED_MODELS, find_packaged_file

HIDDEN, HEADS, KV_HEADS, LAYERS, FFN, VOCAB = 64, 2, 1, 2, 96, 64


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))


def write_gguf(path, quantization=Quantization.F32, architecture="llama", leave_out=(), rope_scaling=None):
    """A tiny random model. Returns the float32 values that the file holds, by GGUF name."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    if rope_scaling:
        writer.add_rope_scaling_type(rope_scaling)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    letters = list(gguf_bytes())[: VOCAB - 1]
    letters.append(letters[0] + letters[1])
    writer.add_token_list(letters)
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    kv_size = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (HIDDEN,), f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.attn_q.weight": (HIDDEN, HIDDEN), f"blk.{i}.attn_k.weight": (kv_size, HIDDEN),
            f"blk.{i}.attn_v.weight": (kv_size, HIDDEN), f"blk.{i}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_gate.weight": (FFN, HIDDEN), f"blk.{i}.ffn_up.weight": (FFN, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, FFN),
        }  # fmt: skip
    values = {}
    for name, shape in shapes.items():
        if name in leave_out:
            continue
        array = rng.standard_normal(shape).astype(np.float32)
        kind = quantization if len(shape) == 2 else Quantization.F32
        packed = gguf.quants.quantize(array, kind)
        values[name] = gguf.quants.dequantize(packed, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def gguf_bytes():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return bytes_to_unicode().values()


@pytest.mark.parametrize("quantization", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantizations_are_unpacked(tmp_path, quantization):
    values = write_gguf(tmp_path / "m.gguf", Quantization[quantization])
    weights = load_file(convert_gguf(tmp_path / "m.gguf") / "model.safetensors")
    assert len(weights) == len(values)
    for gguf_name, name in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"),
        ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight"),
    ):
        assert weights[name].dtype == torch.float32
        np.testing.assert_array_equal(weights[name].numpy(), values[gguf_name])


@pytest.mark.slow
@pytest.mark.long
def test_the_default_model_is_read_as_transformers_reads_it(smollm2_path):
    """transformers has its own GGUF reader: every weight is the same, the order of query and key rows included."""
    from transformers import AutoModelForCausalLM

    file = find_packaged_file(PACKAGED_MODELS["smollm2-135m"])
    expected = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).state_dict()
    ours = load_file(smollm2_path / "model.safetensors")
    assert expected.keys() - ours.keys() == {"lm_head.weight"}, "the head is the embedding"
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.items())


def test_a_file_is_converted_once_and_again_when_it_changes(tmp_path):
    file = tmp_path / "m.gguf"
    write_gguf(file)
    folder = convert_gguf(file)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert convert_gguf(file) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    write_gguf(file, Quantization.F16)
    assert convert_gguf(file) != folder


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_refused_and_leaves_nothing_behind(tmp_path, share):
    file = tmp_path / "m.gguf"
    write_gguf(file)
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelLoadError, match="damaged or cut off"):
        convert_gguf(file)
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_unknown_architecture_is_refused_by_name(tmp_path):
    write_gguf(tmp_path / "m.gguf", architecture="mamba")
    with pytest.raises(
        ModelLoadError, match="'mamba' model, which is not supported: supported are llama, qwen2, qwen3, phi3, smollm3"
    ):
        convert_gguf(tmp_path / "m.gguf")


def test_an_unknown_quantization_is_refused_by_name(tmp_path, monkeypatch):
    write_gguf(tmp_path / "m.gguf", Quantization.Q8_0)

    def cannot(data, kind):
        raise NotImplementedError

    monkeypatch.setattr(gguf.quants, "dequantize", cannot)
    with pytest.raises(ModelLoadError, match="weights in (Q8_0|F32), which cannot be unpacked"):
        convert_gguf(tmp_path / "m.gguf")


def test_a_file_that_lacks_a_tensor_is_refused_when_it_is_loaded(tmp_path):
    from minivllm import LLM

    write_gguf(tmp_path / "m.gguf", leave_out=("blk.1.attn_k.weight",))
    with pytest.raises(ModelLoadError, match="incomplete: model.layers.1.self_attn.k_proj.weight"):
        LLM(str(tmp_path / "m.gguf"), skip_tokenizer_init=True, num_gpu_blocks_override=4)


@pytest.mark.long
def test_a_file_generates_text(tmp_path):
    from minivllm import LLM, SamplingParams

    write_gguf(tmp_path / "m.gguf", Quantization.Q4_1)
    output = LLM(str(tmp_path / "m.gguf"), num_gpu_blocks_override=8).generate(
        "ABC", SamplingParams(max_tokens=4), use_tqdm=False
    )
    assert len(output[0].outputs[0].token_ids) >= 1


# -- families: models of transformers, written as llama.cpp's converter writes them -------------------------------------

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 256}
CONFIGS = {
    "llama": LlamaConfig(**COMMON, tie_word_embeddings=True),
    "llama, head_dim, linear rope": LlamaConfig(**COMMON | {"num_attention_heads": 2, "num_key_value_heads": 1}, head_dim=16, rope_parameters=LINEAR),
    "llama, llama3 rope": LlamaConfig(**COMMON, rope_parameters=LLAMA3),
    "qwen2": Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen2, untied, yarn": Qwen2Config(**COMMON, rope_parameters=YARN),
    "qwen3, head_dim": Qwen3Config(**COMMON | {"num_attention_heads": 2, "num_key_value_heads": 1}, head_dim=16),
    "phi3": Phi3Config(**COMMON),
    "phi3, longrope": Phi3Config(**COMMON, original_max_position_embeddings=64, rope_parameters=LONGROPE),
    "smollm3": SmolLM3Config(**COMMON | {"num_hidden_layers": 4}, tie_word_embeddings=True),
}  # fmt: skip
ARCHES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
ARCHES |= {"phi3": gguf.MODEL_ARCH.PHI3, "smollm3": gguf.MODEL_ARCH.SMOLLM3}


def permute(weight, num_heads):
    """The rows of queries or keys with the two channels of a pair side by side, as llama.cpp rotates them in some architectures."""
    return weight.reshape(num_heads, 2, len(weight) // num_heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_model(path, model, architecture, **extra_fields):
    """The names are those of the gguf package."""
    config = model.config
    rope, head_dim = config.rope_parameters, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    if head_dim != config.hidden_size // config.num_attention_heads:
        writer.add_key_length(head_dim)
    if architecture == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_attn_factors(model.model.rotary_emb.attention_scaling)
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))
    if rope["rope_type"] == "llama3":
        plain = 1 / rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32))
    for name, value in extra_fields.items():
        writer.add_float32(f"{architecture}.{name}", value)
    letters = list(gguf_bytes())[: FAMILY_VOCAB - 2]
    merges = ("A", "B"), ("C", "D")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*letters, *map("".join, merges)])
    writer.add_token_types([gguf.TokenType.NORMAL] * FAMILY_VOCAB)
    writer.add_token_merges([*map(" ".join, merges)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(ARCHES[architecture], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if architecture in ("llama", "smollm3") and ".q_proj." in name:
            array = permute(array, config.num_attention_heads)
        if architecture in ("llama", "smollm3") and ".k_proj." in name:
            array = permute(array, config.num_key_value_heads)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_family_is_read_as_it_was_written(tmp_path, name):
    """Weights, to the last bit, and logits; at lengths that the model was stretched to as well."""
    from minivllm import LLM

    architecture = name.partition(",")[0]
    model = save_model(CONFIGS[name], tmp_path / "hf")
    write_model(tmp_path / "m.gguf", model, architecture)
    file = tmp_path / "m.gguf"
    weights = load_file(convert_gguf(file) / "model.safetensors")
    expected = load_file(tmp_path / "hf" / "model.safetensors")
    assert weights.keys() == expected.keys() and all(torch.equal(weights[key], expected[key]) for key in weights)
    check_logits(model, file, [1, 9, 60])
    check_logits(model, file, [70, 256], max_model_len=256)
    if "linear" in name or "yarn" in name:
        check_logits(model, file, [512], max_model_len=512)
    tokenizer = LLM(str(file), num_gpu_blocks_override=8).get_tokenizer()
    assert tokenizer.encode("ABACD") == [126, 32, 127] and tokenizer.decode([126, 32, 127]) == "ABACD"


def test_windows_of_a_file_are_those_of_the_model(tmp_path):
    for window in (None, 100):
        model = save_model(Phi3Config(**COMMON, sliding_window=window), tmp_path / "hf")
        write_model(tmp_path / f"{window}.gguf", model, "phi3")
        assert json.loads((convert_gguf(tmp_path / f"{window}.gguf") / "config.json").read_text())["sliding_window"] == window


@pytest.mark.parametrize(
    ("scaling", "fields", "message"),
    [
        ("yarn", {"rope.scaling.yarn_beta_fast": 16.0}, r"stretches its rotary frequencies .yarn_beta_fast."),
        ("yarn", {"rope.scaling.attn_factor": 1.2}, r"stretches its rotary frequencies .attn_factor."),
        ("none", {"rope.scaling.type": 2.0}, r"stretches its rotary frequencies .2.0."),
    ],
)
def test_frequencies_that_are_stretched_in_other_ways_are_refused(tmp_path, scaling, fields, message):
    """Read as if they were not, the model would go wrong silently on long texts."""
    model = save_model(LlamaConfig(**COMMON, rope_parameters=YARN if scaling == "yarn" else None), tmp_path / "hf")
    write_model(tmp_path / "m.gguf", model, "llama", **fields)
    with pytest.raises(ModelLoadError, match=message):
        convert_gguf(tmp_path / "m.gguf")


def test_a_stretch_without_a_factor_is_refused_when_it_is_loaded(tmp_path):
    from minivllm import LLM

    write_gguf(tmp_path / "m.gguf", rope_scaling=gguf.RopeScalingType.YARN)
    with pytest.raises(ModelLoadError, match="have factor = 0.0, but it must be a number above 0"):
        LLM(str(tmp_path / "m.gguf"), skip_tokenizer_init=True, num_gpu_blocks_override=4)


@pytest.mark.long
def test_damage_anywhere_in_the_header_gets_a_sentence(tmp_path):
    file = tmp_path / "m.gguf"
    write_gguf(file)
    good = file.read_bytes()
    rng = np.random.default_rng(0)
    num_refused = 0
    for _ in range(60):
        content = bytearray(good)
        for position in rng.integers(0, 3000, size=3):
            content[position] = rng.integers(0, 256)
        file.write_bytes(content)
        try:
            convert_gguf(file)
        except ModelLoadError as error:
            num_refused += 1
            assert str(error).endswith(".")
        assert not list((tmp_path / "cache").glob(".converting-*")) if (tmp_path / "cache").exists() else True
    assert num_refused > 10


def test_a_cache_that_cannot_be_made_says_what_to_set(tmp_path, monkeypatch):
    write_gguf(tmp_path / "m.gguf")
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "m.gguf" / "below"))
    with pytest.raises(ModelLoadError, match="set MINIVLLM_CACHE to another folder"):
        convert_gguf(tmp_path / "m.gguf")
