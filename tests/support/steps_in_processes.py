"""Engines whose workers are processes with several steps in flight, and steps made by hand, for the tests of executors."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from minivllm import SamplingParams
from minivllm.config import EngineArgs
from minivllm.engine.llm_engine import LLMEngine
from minivllm.request import EngineCoreRequest
from minivllm.scheduler_output import ExecuteModelRequest, SequenceData

LAYOUTS = {
    "two ranks": {"tensor_parallel_size": 2, "async_scheduling": True},
    "two stages": {"pipeline_parallel_size": 2},
    "three stages": {"pipeline_parallel_size": 3},
    "two stages of two ranks": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
}
"""Ways to divide a model, each with several steps in flight."""


def save_tiny_model(folder) -> str:
    """Three layers whose logits are far enough apart that rounding decides nothing."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, eos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.4)
    model.save_pretrained(folder)
    return str(folder)


def load(folder, layout, **options) -> LLMEngine:
    """An engine; it ends its workers when it is no longer referenced."""
    defaults = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 60, "block_size": 8}
    return LLMEngine.from_engine_args(EngineArgs(folder, **defaults | layout | options))


def generate(engine, prompts, params):
    """The outputs of some requests, in their order."""
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id] = output
    return [outputs[str(i)] for i in range(len(prompts))]


def make_step(number, prompt=(5, 6, 7), block=None, **params) -> ExecuteModelRequest:
    """A whole prompt, in one block."""
    params = SamplingParams(**{"temperature": 0, "max_tokens": 5} | params)
    request = EngineCoreRequest(f"r{number}", list(prompt), params, 100, seed=params.seed or 0)
    table = [number if block is None else block]
    return ExecuteModelRequest([SequenceData(request, number, 0, list(prompt), 0, table, 0, [], 1, 0, False)])


def launch(executor, step, masks=None):
    """Launch a step; what is returned waits for its results."""
    executor.launch_model(step)
    return executor.sample_tokens(masks or {})
