"""Mistral 7B, Mistral Nemo and their kin: Llama, with sliding windows in the first one (arXiv:2310.06825).

Mirrors `vllm/model_executor/models/mistral.py`.
"""

from __future__ import annotations

from minivllm.config import ModelConfig
from minivllm.layers.platform import Platform
from minivllm.models.llama import LlamaForCausalLM
from minivllm.models.window_check import refuse_windows


class MistralForCausalLM(LlamaForCausalLM):
    """Windows, where `sliding_window` is not null, are those of all layers."""

    supports_tensor_parallel = True
    supports_pipeline_parallel = True

    def __init__(self, config: ModelConfig, platform: Platform) -> None:
        refuse_windows(config)
        super().__init__(config, platform)
