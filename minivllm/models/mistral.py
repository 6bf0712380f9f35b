"""Mistral 7B, Mistral Nemo and their kin: Llama, with sliding windows in the first one (arXiv:2310.06825).

Mirrors `vllm/model_executor/models/mistral.py`.
"""

from __future__ import annotations

from minivllm.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Windows, where `sliding_window` is not null, are those of all layers: see `models/windows.py`."""
