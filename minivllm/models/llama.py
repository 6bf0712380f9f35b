"""Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU. SmolLM2 is one of the family.

Touvron et al., 2023 (arXiv:2302.13971). Modules are named as in Hugging Face checkpoints, except for the fused
`qkv_proj` and `gate_up_proj`. Mirrors `vllm/model_executor/models/llama.py`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from minivllm.config import ModelConfig
from minivllm.distributed.pipeline import IntermediateTensors
from minivllm.errors import ModelLoadError
from minivllm.layers.attention import AttentionMetadata, KVCache
from minivllm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from minivllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from minivllm.layers.norm import RMSNorm
from minivllm.layers.platform import Platform
from minivllm.layers.rotary import RotaryEmbedding, rope_parameters
from minivllm.models.base import CausalLM
from minivllm.models.stages import here, make_layers, own_layers
from minivllm.models.windows import layer_windows


class LlamaAttention(nn.Module):
    """Grouped-query self-attention with rotary positions; with `qk_norm`, queries and keys are normalized first."""

    def __init__(self, config: ModelConfig, rotary: RotaryEmbedding, platform: Platform, qk_norm: bool, layer: int) -> None:
        super().__init__()
        hidden_size, eps = config.hf_config["hidden_size"], config.hf_config["rms_norm_eps"]
        bias = config.hf_config.get("attention_bias", False)
        qkv_bias = config.hf_config.get("qkv_bias", bias)
        self.head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(hidden_size, self.head_dim, config.num_heads, config.num_kv_heads, qkv_bias, platform)
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads  # this rank's
        q_size = config.num_heads * self.head_dim
        self.o_proj = RowParallelLinear(q_size, hidden_size, bias, platform, self.qkv_proj.query_channels)
        self.q_norm = RMSNorm(self.head_dim, eps, platform.ops) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps, platform.ops) if qk_norm else None
        self.rotary = rotary
        self.backend = platform.make_attention(self.num_heads, self.num_kv_heads, self.head_dim, layer_windows(config)[layer])

    def forward(self, x: Tensor, positions: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary(positions, q, k)
        output = self.backend(q, k, v, kv_cache, metadata)
        return self.o_proj(output.flatten(1))


class LlamaMLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`. Shazeer, 2020 (arXiv:2002.05202)."""

    def __init__(self, config: dict[str, Any], platform: Platform) -> None:
        super().__init__()
        hidden_size, intermediate_size = config["hidden_size"], config["intermediate_size"]
        bias = config.get("mlp_bias", False)
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [intermediate_size, intermediate_size], bias, platform)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias, platform)
        self.ops = platform.ops

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.ops.silu_and_mul(self.gate_up_proj(x)))


class LlamaDecoderLayer(nn.Module):
    """Attention and MLP, each reading the normalized residual stream and adding to it."""

    def __init__(self, config: ModelConfig, rotary: RotaryEmbedding, platform: Platform, qk_norm: bool, layer: int) -> None:
        super().__init__()
        hidden_size, eps = config.hf_config["hidden_size"], config.hf_config["rms_norm_eps"]
        self.input_layernorm = RMSNorm(hidden_size, eps, platform.ops)
        self.self_attn = LlamaAttention(config, rotary, platform, qk_norm, layer)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, platform.ops)
        self.mlp = LlamaMLP(config.hf_config, platform)

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add_and_norm(x, residual)
        x = self.self_attn(x, positions, kv_cache, metadata)
        x, residual = self.post_attention_layernorm.add_and_norm(x, residual)
        return self.mlp(x), residual


class LlamaModel(nn.Module):
    """Embedding, decoder layers and the last norm: all of them, or those of a pipeline stage."""

    def __init__(self, config: ModelConfig, platform: Platform, qk_norm: bool) -> None:
        super().__init__()
        hidden_size, eps, stage = config.hf_config["hidden_size"], config.hf_config["rms_norm_eps"], platform.stage
        is_head = stage.is_last and config.hf_config.get("tie_word_embeddings", False)
        self.embed_tokens = here(
            stage.is_first or is_head, lambda: VocabParallelEmbedding(config.vocab_size, hidden_size, platform)
        )
        rotary = RotaryEmbedding(config.head_dim, config.max_model_len, rope_parameters(config.hf_config), platform.ops)
        self.layers = make_layers(config.num_layers, stage, lambda i: LlamaDecoderLayer(config, rotary, platform, qk_norm, i))
        self.norm = here(stage.is_last, lambda: RMSNorm(hidden_size, eps, platform.ops))
        self.stage = stage

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:  # fmt: skip
        if intermediate_tensors is None:
            x, residual = self.embed_tokens(input_ids), None
        else:
            x, residual = intermediate_tensors["hidden_states"], intermediate_tensors["residual"]
        for layer, kv_cache in zip(own_layers(self.layers), kv_caches, strict=True):
            x, residual = layer(x, residual, positions, kv_cache, metadata)
        if not self.stage.is_last:
            return IntermediateTensors({"hidden_states": x, "residual": residual})
        return self.norm.add_and_norm(x, residual)[0]


class LlamaForCausalLM(CausalLM):
    """Llama with its head: tokens and positions in, hidden states out, and logits for the rows that need them."""

    fused_layers = {
        "q_proj": ("qkv_proj", 0),
        "k_proj": ("qkv_proj", 1),
        "v_proj": ("qkv_proj", 2),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }
    ignored_weights = ("rotary_emb.inv_freq",)
    supports_tensor_parallel = True
    supports_pipeline_parallel = True
    supports_windows = True
    intermediate_names = ("hidden_states", "residual")
    qk_norm = False
    model_cls = LlamaModel

    def __init__(self, config: ModelConfig, platform: Platform) -> None:
        super().__init__(config, platform)
        hf_config = config.hf_config
        if hf_config.get("hidden_act", "silu") != "silu":
            raise ModelLoadError(f"hidden_act {hf_config['hidden_act']!r} is not supported for this family: only 'silu' is.")
        self.model = self.model_cls(config, platform, self.qk_norm)
        self.tie_word_embeddings = hf_config.get("tie_word_embeddings", False)
        tied_to = self.model.embed_tokens if self.tie_word_embeddings else None
        stage = platform.stage
        has_head = stage.is_last or (stage.is_first and self.tie_word_embeddings)  # the embedding's rows are read from it
        self.lm_head = here(has_head, lambda: ParallelLMHead(hf_config["hidden_size"], config.vocab_size, platform, tied_to))
        if stage.is_last and platform.group.world_size > 1 and type(self).compute_logits is LlamaForCausalLM.compute_logits:
            self.choose = self.lm_head.choose

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:  # fmt: skip
        return self.model(input_ids, positions, kv_caches, metadata, intermediate_tensors)

    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        return self.lm_head(hidden)
