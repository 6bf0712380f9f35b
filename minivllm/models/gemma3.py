"""Gemma 3, its language model: Llama with norms before and after each half of a layer, and most layers see only a window.

Gemma Team, 2025 (arXiv:2503.19786). Mirrors `vllm/model_executor/models/gemma3.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.config import ModelConfig
from minivllm.errors import ConfigError, ModelLoadError
from minivllm.layers.attention import AttentionMetadata, KVCache
from minivllm.layers.embedding import VocabParallelEmbedding
from minivllm.layers.norm import RMSNorm
from minivllm.layers.platform import Platform
from minivllm.layers.rotary import RotaryEmbedding, rope_parameters
from minivllm.models.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP, LlamaModel
from minivllm.models.stages import here, make_layers
from minivllm.models.windows import FULL, SLIDING, layer_types


class GemmaRMSNorm(RMSNorm):
    """RMSNorm whose weight is what is added to 1, and whose product is rounded last."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, 1 + self.weight.float(), self.eps).to(x.dtype)

    def add_and_norm(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        residual = x if residual is None else x + residual
        return self(residual), residual


class Gemma3Embedding(VocabParallelEmbedding):
    """Rows are scaled by the root of their length, which is rounded to the dtype of the weights first."""

    def __init__(self, vocab_size: int, hidden_size: int, platform: Platform) -> None:
        super().__init__(vocab_size, hidden_size, platform)
        self.scale = torch.tensor(hidden_size**0.5, dtype=platform.dtype, device="cpu").item()

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * self.scale


class Gemma3Attention(LlamaAttention):
    """Attention with norms of queries and keys, and a scale that the config gives."""

    def __init__(self, config: ModelConfig, rotary: RotaryEmbedding, platform: Platform, layer: int) -> None:
        super().__init__(config, rotary, platform, False, layer)
        eps = config.hf_config["rms_norm_eps"]
        self.q_norm, self.k_norm = (GemmaRMSNorm(self.head_dim, eps, platform.ops) for _ in range(2))
        self.backend.scale = config.hf_config["query_pre_attn_scalar"] ** -0.5


class Gemma3MLP(LlamaMLP):
    """GeGLU: GELU, by its tanh approximation, where Llama has SiLU."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.gelu(gate, approximate="tanh") * up)


class Gemma3DecoderLayer(nn.Module):
    """Attention and MLP; what each adds to the residual stream is normalized, too."""

    def __init__(self, config: ModelConfig, rotary: RotaryEmbedding, platform: Platform, layer: int) -> None:
        super().__init__()
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            norm = GemmaRMSNorm(config.hf_config["hidden_size"], config.hf_config["rms_norm_eps"], platform.ops)
            self.add_module(f"{name}_layernorm", norm)
        self.self_attn = Gemma3Attention(config, rotary, platform, layer)
        self.mlp = Gemma3MLP(config.hf_config, platform)

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add_and_norm(x, residual)
        x = self.post_attention_layernorm(self.self_attn(x, positions, kv_cache, metadata))
        x, residual = self.pre_feedforward_layernorm.add_and_norm(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual


class Gemma3Model(LlamaModel):
    """Llama's way through the layers, with layers of its own; those with a window have other rotary frequencies."""

    def __init__(self, config: ModelConfig, platform: Platform, qk_norm: bool) -> None:
        nn.Module.__init__(self)
        hf_config, self.stage = config.hf_config, platform.stage
        hidden_size, eps = hf_config["hidden_size"], hf_config["rms_norm_eps"]
        is_here = self.stage.is_first or (self.stage.is_last and hf_config["tie_word_embeddings"])
        self.embed_tokens = here(is_here, lambda: Gemma3Embedding(config.vocab_size, hidden_size, platform))
        rotaries = {
            kind: RotaryEmbedding(
                config.head_dim, config.max_model_len, rope_parameters({"rope_parameters": parameters}), platform.ops
            )
            for kind, parameters in hf_config["rope_parameters"].items()
        }
        self.layers = make_layers(
            config.num_layers,
            self.stage,
            lambda i: Gemma3DecoderLayer(config, rotaries[hf_config["layer_types"][i]], platform, i),
        )
        self.norm = here(self.stage.is_last, lambda: GemmaRMSNorm(hidden_size, eps, platform.ops))


class Gemma3ForCausalLM(LlamaForCausalLM):
    """The language model of Gemma 3."""

    supports_tensor_parallel = True
    supports_pipeline_parallel = True
    supports_windows = True
    model_cls = Gemma3Model

    def __init__(self, config: ModelConfig, platform: Platform) -> None:
        if platform.dtype == torch.float16:
            raise ConfigError(
                "dtype is 'float16', in whose range the sums between Gemma 3's layers do not fit: use 'bfloat16' or 'float32'."
            )
        super().__init__(replace(config, hf_config=complete_config(config)), platform)


def complete_config(config: ModelConfig) -> dict[str, Any]:
    """A config.json with what it leaves to transformers' defaults, and in today's spelling.

    Raises:
        ModelLoadError: It asks for something that Gemma 3 does not have.
    """
    hf_config = {name: value for name, value in config.hf_config.items() if value is not None}
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if hf_config.get(name):
            raise ModelLoadError(f"{config.name} has {name} = {hf_config[name]!r} in its config.json, which is not supported.")
    if hf_config.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        activation = hf_config["hidden_activation"]
        raise ModelLoadError(f"{config.name} has hidden_activation = {activation!r}, but only 'gelu_pytorch_tanh' is supported.")
    thetas = {FULL: hf_config.get("rope_theta", 1e6), SLIDING: hf_config.get("rope_local_base_freq", 1e4)}
    found = hf_config.get("rope_parameters") or {FULL: hf_config.get("rope_scaling") or {}}
    ropes = {
        kind: {"rope_theta": theta, "max_position_embeddings": hf_config["max_position_embeddings"]} | (found.get(kind) or {})
        for kind, theta in thetas.items()
    }
    defaults = {"query_pre_attn_scalar": 256, "tie_word_embeddings": True, "sliding_window": 4096}
    return defaults | hf_config | {"layer_types": layer_types(config), "rope_parameters": ropes}
