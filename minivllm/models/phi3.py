"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama whose checkpoints have `qkv_proj` and `gate_up_proj` fused (arXiv:2404.14219).

Long contexts are of RoPE type "longrope"; Phi-4-mini rotates three quarters of each head. Mirrors `vllm/model_executor/models/phi3.py`.
"""

from __future__ import annotations

from minivllm.models.llama import LlamaForCausalLM


class Phi3ForCausalLM(LlamaForCausalLM):
    """Each rank takes its heads' rows of queries, keys and values out of the fused tensors: see `Linear.load_fused_weight`."""

    fused_layers = {}  # they are so in the checkpoint
