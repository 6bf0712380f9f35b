"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values (arXiv:2407.10671).

Mirrors `vllm/model_executor/models/qwen2.py`.
"""

from __future__ import annotations

from dataclasses import replace

from minivllm.config import ModelConfig
from minivllm.layers.platform import Platform
from minivllm.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Sliding windows count only with `use_sliding_window`: most checkpoints name a `sliding_window` without it."""

    supports_tensor_parallel = True
    supports_pipeline_parallel = True
    supports_windows = True

    def __init__(self, config: ModelConfig, platform: Platform) -> None:
        biases = {"qkv_bias": True, "attention_bias": False}  # `attention_bias` would be that of o_proj, too
        super().__init__(replace(config, hf_config=config.hf_config | biases), platform)
