"""Every architecture against transformers in float32: logits of ragged batches, and generated tokens."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, Qwen3Config, Qwen3ForCausalLM

from minivllm import LLM, SamplingParams
from minivllm.errors import ModelLoadError
from minivllm.layers.linear import Linear
from minivllm.layers.platform import Platform
from minivllm.models.weights import iterate_weights, load_weights
from minivllm.request import EngineCoreRequest, Request, Sequence
from minivllm.scheduler_output import ScheduledSequence

COMMON = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 3, "max_position_embeddings": 128, "eos_token_id": 2}
LLAMA = COMMON | {"intermediate_size": 96, "num_attention_heads": 4}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip

# The CPU kernels are compiled for each head_dim and group: two pairs serve all models, and test_kernels.py has the others.
TINY = {
    "llama, tied, grouped": (LlamaForCausalLM, LlamaConfig(**LLAMA, num_key_value_heads=2, tie_word_embeddings=True)),
    "llama, untied, multi-head": (LlamaForCausalLM, LlamaConfig(**LLAMA, num_key_value_heads=4, tie_word_embeddings=False)),
    "llama, one KV head, biases": (
        LlamaForCausalLM,
        LlamaConfig(**LLAMA | {"num_attention_heads": 2}, num_key_value_heads=1, attention_bias=True, mlp_bias=True, head_dim=16),
    ),
    "llama, llama3 rope": (LlamaForCausalLM, LlamaConfig(**LLAMA, num_key_value_heads=2, rope_parameters=LLAMA3_ROPE)),
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config(**LLAMA | {"num_attention_heads": 6}, num_key_value_heads=3, head_dim=16, tie_word_embeddings=True),
    ),
    "opt": (OPTForCausalLM, OPTConfig(**COMMON, ffn_dim=96, num_attention_heads=4, word_embed_proj_dim=64)),
}


@pytest.fixture(scope="module", params=list(TINY))
def tiny(request, tmp_path_factory):
    """A tiny model with random weights, in transformers and as a folder."""
    model_cls, config = TINY[request.param]
    torch.manual_seed(0)
    model = model_cls(config).float().eval()
    for parameter in model.parameters():  # the initial biases of 0 and norms of 1 would hide mistakes
        torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.15)
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    return model, folder


def engine_logits(llm: LLM, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Logits at every position of prompts that are computed as one ragged batch."""
    worker = llm.llm_engine.executor.worker
    runner, block_size = worker.model_runner, worker.cache_config.block_size
    scheduled, next_block = [], 0
    for i, prompt in enumerate(prompts):
        num_blocks = -(-len(prompt) // block_size)
        seq = Sequence(i, Request(EngineCoreRequest(str(i), prompt, SamplingParams(), max_num_tokens=1000)))
        scheduled.append(ScheduledSequence(seq, len(prompt), list(range(next_block, next_block + num_blocks))[::-1]).to_data())
        next_block += num_blocks
    inputs = runner.prepare_inputs(scheduled, worker.cache_engine.gpu_cache[0][0].shape[0])
    with torch.inference_mode():
        hidden = runner.model(inputs.input_ids, inputs.positions, worker.cache_engine.gpu_cache, inputs.metadata)
        return list(runner.model.compute_logits(hidden).cpu().split([len(prompt) for prompt in prompts]))


def random_prompts(lengths, vocab_size=320, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def test_logits_of_tiny_models_equal_transformers(tiny):
    model, folder = tiny
    llm = LLM(str(folder), skip_tokenizer_init=True, num_gpu_blocks_override=40, block_size=8)
    prompts = random_prompts([1, 7, 8, 9, 60])
    for prompt, logits in zip(prompts, engine_logits(llm, prompts), strict=True):
        expected = model(torch.tensor([prompt])).logits[0]
        assert (logits - expected).abs().max() < 1e-3
        assert expected.std() > 0.05, "the logits are too flat to tell anything"


@torch.inference_mode()
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_bfloat16_is_near(tiny, backend):
    """On a CPU with packed weights, and float32 between the layers: closer than with everything in bfloat16, as by torch or on a GPU."""
    model, folder = tiny
    options = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 40, "block_size": 8}
    llm = LLM(str(folder), dtype="bfloat16", attention_backend=backend, **options)
    worker = llm.llm_engine.executor.worker
    assert worker.cache_engine.gpu_cache[0][0].dtype == torch.bfloat16
    is_packed = backend == "auto" and worker.device.type == "cpu"
    assert worker.platform.activation_dtype == (torch.float32 if is_packed else torch.bfloat16)
    prompts = random_prompts([1, 7, 8, 9, 60])
    limit = 0.03 if is_packed else 0.1
    for prompt, logits in zip(prompts, engine_logits(llm, prompts), strict=True):
        expected = model(torch.tensor([prompt])).logits[0]
        assert (logits.float() - expected).norm() < limit * expected.norm()
    # Steps that decode compute the same as a prompt that has these tokens.
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    output = llm.generate([prompts[1]], params, use_tqdm=False)[0].outputs[0].token_ids
    (logits,) = engine_logits(llm, [prompts[1] + output[:-1]])
    logits = logits[len(prompts[1]) - 1 :].float()
    best = logits.max(dim=-1).values
    assert (best - logits[range(12), output] < limit * best.abs() + 0.05).all()


@pytest.mark.slow
def test_tokens_of_tiny_models_equal_transformers(tiny):
    model, folder = tiny
    prompts = random_prompts([3, 17, 30], seed=1)
    llm = LLM(str(folder), skip_tokenizer_init=True, num_gpu_blocks_override=40, block_size=8)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=20, min_new_tokens=20,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()


def test_sharded_weights_load_like_single_ones(tiny, tmp_path):
    model, folder = tiny
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    prompts = random_prompts([9])
    one, sharded = (
        engine_logits(LLM(str(path), skip_tokenizer_init=True, num_gpu_blocks_override=4), prompts)[0]
        for path in (folder, tmp_path)
    )
    assert torch.equal(one, sharded)


def folder_logits(folder, prompts):
    return engine_logits(LLM(str(folder), skip_tokenizer_init=True, num_gpu_blocks_override=4), prompts)


@pytest.mark.slow
def test_a_head_of_its_own_is_used_although_the_config_ties_it(tmp_path, caplog):
    """As transformers does, with a warning; a head that repeats the embedding is not a second one."""
    model_cls, config = TINY["qwen3"]
    torch.manual_seed(0)
    model_cls(config).save_pretrained(tmp_path)
    prompts, file = random_prompts([9]), tmp_path / "model.safetensors"
    weights = load_file(file)
    tied = folder_logits(tmp_path, prompts)[0]
    embedding = weights["model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": embedding.clone()}, file, {"format": "pt"})
    assert torch.equal(folder_logits(tmp_path, prompts)[0], tied)
    assert "differs" not in caplog.text
    save_file(weights | {"lm_head.weight": torch.randn_like(embedding)}, file, {"format": "pt"})
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True
    logits = folder_logits(tmp_path, prompts)[0]
    assert "its lm_head.weight differs: it is used" in caplog.text
    with torch.inference_mode():
        expected = model_cls.from_pretrained(tmp_path).float().eval()(torch.tensor(prompts)).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-3)
    assert (logits - tied).abs().max() > 0.1


def test_a_model_that_can_only_be_tied_refuses_a_head_of_its_own(tmp_path):
    model_cls, config = TINY["opt"]
    model_cls(config).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = torch.randn_like(weights["model.decoder.embed_tokens.weight"])
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match="tie_word_embeddings"):
        LLM(str(tmp_path), skip_tokenizer_init=True, num_gpu_blocks_override=4)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_the_index_says_which_of_two_tensors_of_a_name_counts(tmp_path, kind):
    model_cls, config = TINY["llama, tied, grouped"]
    torch.manual_seed(0)
    model_cls(config).save_pretrained(tmp_path)
    prompts, file = random_prompts([9]), tmp_path / "model.safetensors"
    expected = folder_logits(tmp_path, prompts)[0]
    weights = load_file(file)
    file.unlink()
    names = sorted(weights)
    halves = {"1": names[::2], "2": names[1::2]}
    weight_map = {name: f"model-{half}.{kind}" for half, part in halves.items() for name in part}
    for half, part in halves.items():  # each file has the others' tensors, too, with wrong numbers
        tensors = {name: weights[name] if name in part else torch.zeros_like(weights[name]) for name in names}
        if kind == "bin":
            torch.save(tensors, tmp_path / f"model-{half}.bin")
        else:
            save_file(tensors, tmp_path / f"model-{half}.safetensors")
    index = tmp_path / ("model.safetensors.index.json" if kind == "safetensors" else "pytorch_model.bin.index.json")
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(folder_logits(tmp_path, prompts)[0], expected)
    if kind == "safetensors":
        index.unlink()
        with pytest.raises(ModelLoadError, match="more than once, and no index says which of them counts"):
            folder_logits(tmp_path, prompts)


def test_torch_checkpoints_load_like_safetensors(tiny, tmp_path):
    """facebook/opt-125m has only a pytorch_model.bin, with names that lack `model.`."""
    _, folder = tiny
    weights = load_file(folder / "model.safetensors")
    weights = {name.removeprefix("model.") if ".decoder." in name else name: tensor for name, tensor in weights.items()}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    prompts = random_prompts([9])
    one, other = (
        engine_logits(LLM(str(path), skip_tokenizer_init=True, num_gpu_blocks_override=4), prompts)[0]
        for path in (folder, tmp_path)
    )
    assert torch.equal(one, other)


class HalfColumns(Linear):
    """What one of two tensor-parallel ranks holds of a fused layer: half of the rows of each."""

    def load_weight(self, parameter, tensor, shard_id=0):
        size = self.out_features[shard_id]
        start = sum(self.out_features[:shard_id])
        parameter.data[start : start + size] = tensor.read((2 * size, *parameter.shape[1:]), slice(size, 2 * size))


class HalfRows(Linear):
    """Half of the columns of a layer."""

    def load_weight(self, parameter, tensor, shard_id=0):
        size = self.in_features
        parameter.data.copy_(tensor.read((parameter.shape[0], 2 * size), (slice(None), slice(size, 2 * size))))


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("packed", [True, False])
def test_a_rank_can_load_its_part_alone(tmp_path, suffix, packed, monkeypatch):
    """Column- and row-parallel layers sit on the weight loader and the linear method; only their slices are read."""

    class Rank(torch.nn.Module):
        fused_layers = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
        ignored_weights = ()
        tie_word_embeddings = False

        def __init__(self, platform):
            super().__init__()
            self.gate_up_proj = HalfColumns(8, [16, 16], False, platform)
            self.down_proj = HalfRows(16, 8, False, platform)

    weights = {
        f"{name}_proj.weight": torch.randn(shape) for name, shape in (("gate", (32, 8)), ("up", (32, 8)), ("down", (8, 32)))
    }
    if suffix == ".safetensors":
        save_file(weights, tmp_path / "model.safetensors")
    else:
        torch.save(weights, tmp_path / "pytorch_model.bin")
    if not packed:
        monkeypatch.setattr("minivllm.layers.platform.PACKED_WEIGHTS", {})
    rank = Rank(Platform(torch.device("cpu"), torch.float32))
    load_weights(rank, iterate_weights(tmp_path), "a rank")
    x = torch.randn(3, 8)
    expected = torch.cat([x @ weights["gate_proj.weight"][16:].t(), x @ weights["up_proj.weight"][16:].t()], dim=1)
    torch.testing.assert_close(rank.gate_up_proj(x), expected)
    y = torch.randn(3, 16)
    torch.testing.assert_close(rank.down_proj(y), y @ weights["down_proj.weight"][:, 16:].t())


@torch.inference_mode()
def test_logits_of_smollm2_equal_transformers(llm, hf_smollm2, tokenizer):
    prompts = [tokenizer.encode(text) for text in ("Hello", "The capital of France is Paris, 你好 नमस्ते 👋" * 8)]
    for prompt, logits in zip(prompts, engine_logits(llm, prompts), strict=True):
        assert (logits - hf_smollm2(torch.tensor([prompt])).logits[0]).abs().max() < 1e-3


@pytest.mark.parametrize("tiny", ["llama, tied, grouped", "llama, llama3 rope"], indirect=True)
def test_the_config_of_older_transformers_is_understood(tiny, tmp_path):
    """`rope_theta` and `rope_scaling` at the top level, `torch_dtype`, no head_dim."""
    _, folder = tiny
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    config["torch_dtype"] = config.pop("dtype", "float32")
    config.pop("head_dim", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(load_file(folder / "model.safetensors"), tmp_path / "model.safetensors")
    prompts = random_prompts([40])
    old, new = (
        engine_logits(LLM(str(path), skip_tokenizer_init=True, num_gpu_blocks_override=4), prompts)[0]
        for path in (tmp_path, folder)
    )
    assert torch.equal(old, new)
