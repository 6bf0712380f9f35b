"""SmolLM3: Llama in which every fourth layer has no positions (NoPE, arXiv:2501.18795).

Mirrors `SmolLM3ForCausalLM` of transformers, which vLLM runs as it is.
"""

from __future__ import annotations

from dataclasses import replace

from minivllm.config import ModelConfig
from minivllm.errors import ModelLoadError
from minivllm.layers.platform import Platform
from minivllm.layers.rotary import RotaryEmbedding
from minivllm.models.llama import LlamaForCausalLM
from minivllm.models.stages import own_layers

DEFAULTS = {"tie_word_embeddings": True, "rope_theta": 2e6}
"""What config.json leaves out: SmolLM3-3B's does not say that the head is the embedding."""


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """A layer without positions rotates by angles of 0: its numbers are as if it did not, and it runs in the same kernels as the others."""

    supports_tensor_parallel = True
    supports_pipeline_parallel = True
    supports_windows = True

    def __init__(self, config: ModelConfig, platform: Platform) -> None:
        super().__init__(replace(config, hf_config=DEFAULTS | config.hf_config), platform)
        no_positions = RotaryEmbedding(
            config.head_dim, config.max_model_len, {"rope_type": "default", "rope_theta": 1e4}, platform.ops
        )
        no_positions.cos.fill_(1.0)
        no_positions.sin.fill_(0.0)
        own = platform.stage.layers(config.num_layers)
        for layer, has_positions in zip(own_layers(self.model.layers), have_positions(config)[own.start : own.stop], strict=True):
            if not has_positions:
                layer.self_attn.rotary = no_positions


def have_positions(config: ModelConfig) -> list[bool]:
    """For each layer, whether queries and keys are rotated. Raises a ModelLoadError that names a setting that does not say so."""
    layers, interval = config.hf_config.get("no_rope_layers"), config.hf_config.get("no_rope_layer_interval", 4)
    if layers is None and isinstance(interval, int) and interval > 0:
        return [(i + 1) % interval != 0 for i in range(config.num_layers)]
    if layers is None:
        raise ModelLoadError(f"{config.name} has no_rope_layer_interval = {interval!r}, but it must be a whole number above 0.")
    if not isinstance(layers, list) or len(layers) < config.num_layers or not all(x in (0, 1) for x in layers):
        raise ModelLoadError(
            f"{config.name} has no_rope_layers = {layers!r}, but needs 0 or 1 for each of {config.num_layers} layers."
        )
    return [x == 1 for x in layers[: config.num_layers]]
