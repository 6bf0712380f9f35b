"""Every architecture against transformers in float32: logits of ragged batches, and generated tokens."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, Qwen3Config, Qwen3ForCausalLM

from minivllm import LLM, SamplingParams
from minivllm.request import Request, Sequence
from minivllm.scheduler_output import ScheduledSequence

COMMON = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 3, "max_position_embeddings": 128, "eos_token_id": 2}
LLAMA = COMMON | {"intermediate_size": 96, "num_attention_heads": 4}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip

TINY = {
    "llama, tied, grouped": (LlamaForCausalLM, LlamaConfig(**LLAMA, num_key_value_heads=2, tie_word_embeddings=True)),
    "llama, untied, multi-head": (LlamaForCausalLM, LlamaConfig(**LLAMA, num_key_value_heads=4, tie_word_embeddings=False)),
    "llama, one KV head, biases": (
        LlamaForCausalLM,
        LlamaConfig(**LLAMA, num_key_value_heads=1, attention_bias=True, mlp_bias=True, head_dim=24),
    ),
    "llama, llama3 rope": (LlamaForCausalLM, LlamaConfig(**LLAMA, num_key_value_heads=2, rope_parameters=LLAMA3_ROPE)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**LLAMA, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True)),
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
        seq = Sequence(i, Request(str(i), prompt, SamplingParams(), max_num_tokens=1000))
        scheduled.append(ScheduledSequence(seq, len(prompt), list(range(next_block, next_block + num_blocks))[::-1]))
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
