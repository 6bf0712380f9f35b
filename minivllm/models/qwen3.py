"""Qwen3: Llama with normalized queries and keys (arXiv:2505.09388). Mirrors `vllm/model_executor/models/qwen3.py`."""

from __future__ import annotations

from minivllm.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """The dense Qwen3 models."""

    supports_tensor_parallel = True
    supports_pipeline_parallel = True
    qk_norm = True
