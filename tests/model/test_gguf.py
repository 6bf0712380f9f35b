"""GGUF files against transformers' own reading of them, quantizations against the gguf library, and broken files."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quantization
from safetensors.torch import load_file

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
    with pytest.raises(ModelLoadError, match="'mamba' model, which is not supported: supported are llama, qwen3"):
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


def test_stretched_rotary_frequencies_are_refused(tmp_path):
    """Read as if they were not, the model would go wrong silently on long texts."""
    write_gguf(tmp_path / "m.gguf", rope_scaling=gguf.RopeScalingType.YARN)
    with pytest.raises(ModelLoadError, match="stretches its rotary frequencies"):
        convert_gguf(tmp_path / "m.gguf")


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
