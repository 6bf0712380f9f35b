"""Qwen3: Llama with normalized queries and keys (arXiv:2505.09388). Mirrors `vllm/model_executor/models/qwen3.py`."""

from __future__ import annotations

from minivllm.config import ModelConfig
from minivllm.errors import ModelLoadError
from minivllm.layers.platform import Platform
from minivllm.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """The dense Qwen3 models."""

    supports_tensor_parallel = True
    supports_pipeline_parallel = True
    qk_norm = True

    def __init__(self, config: ModelConfig, platform: Platform) -> None:
        if config.hf_config.get("use_sliding_window"):
            raise ModelLoadError("This Qwen3 checkpoint uses sliding-window attention, which is not supported.")
        super().__init__(config, platform)
