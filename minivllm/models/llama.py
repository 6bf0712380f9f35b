"""Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU. SmolLM2 is one of the family.

Touvron et al., 2023 (arXiv:2302.13971). Module names are those of the Hugging Face checkpoints, but for the fused
`qkv_proj` and `gate_up_proj`. Mirrors `vllm/model_executor/models/llama.py`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor, nn

from minivllm.errors import ModelLoadError
from minivllm.layers.attention import AttentionBackend, AttentionMetadata, KVCache
from minivllm.layers.compiled import CompiledDecoderLayer
from minivllm.layers.linear import Linear
from minivllm.layers.norm import RMSNorm
from minivllm.layers.rotary import RotaryEmbedding
from minivllm.models.base import CausalLM


class LlamaAttention(nn.Module):
    """Grouped-query self-attention with rotary positions; with `qk_norm`, queries and keys are normalized first."""

    def __init__(self, config: dict[str, Any], rotary: RotaryEmbedding, backend: AttentionBackend, qk_norm: bool) -> None:
        super().__init__()
        hidden_size = config["hidden_size"]
        bias = config.get("attention_bias", False)
        self.head_dim = backend.head_dim
        self.num_heads, self.num_kv_heads = backend.num_heads, backend.num_kv_heads
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = Linear(hidden_size, [q_size, kv_size, kv_size], bias)
        self.o_proj = Linear(q_size, hidden_size, bias)
        self.q_norm = RMSNorm(self.head_dim, config["rms_norm_eps"], backend.ops) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config["rms_norm_eps"], backend.ops) if qk_norm else None
        self.rotary = rotary
        self.backend = backend

    def forward(self, x: Tensor, positions: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary(positions, q, k)
        output = self.backend.forward(q, k, v, kv_cache, metadata)
        return self.o_proj(output.flatten(1))


class LlamaMLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`. Shazeer, 2020 (arXiv:2002.05202)."""

    def __init__(self, config: dict[str, Any], ops: ModuleType) -> None:
        super().__init__()
        self.ops = ops
        hidden_size, intermediate_size = config["hidden_size"], config["intermediate_size"]
        bias = config.get("mlp_bias", False)
        self.gate_up_proj = Linear(hidden_size, [intermediate_size, intermediate_size], bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.ops.silu_and_mul(self.gate_up_proj(x)))


class LlamaDecoderLayer(nn.Module):
    """Attention and MLP, each reading the normalized residual stream and adding to it."""

    def __init__(self, config: dict[str, Any], rotary: RotaryEmbedding, backend: AttentionBackend, qk_norm: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"], backend.ops)
        self.self_attn = LlamaAttention(config, rotary, backend, qk_norm)
        self.post_attention_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"], backend.ops)
        self.mlp = LlamaMLP(config, backend.ops)
        self.compiled: CompiledDecoderLayer | None = None

    def compile_decode(self) -> None:
        """Compute decode steps in one call from now on, where that can be done."""
        attention, mlp = self.self_attn, self.mlp
        if attention.q_norm is None:
            linears = [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]
            norms = [self.input_layernorm, self.post_attention_layernorm]
            self.compiled = CompiledDecoderLayer.make(linears, norms, attention.rotary, attention.backend)

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        if self.compiled is not None and residual is not None and self.compiled.takes(metadata):
            return self.compiled(x, residual, positions, kv_cache, metadata)
        x, residual = self.input_layernorm.add_and_norm(x, residual)
        x = self.self_attn(x, positions, kv_cache, metadata)
        x, residual = self.post_attention_layernorm.add_and_norm(x, residual)
        return self.mlp(x), residual


class LlamaModel(nn.Module):
    """Embedding, decoder layers and the last norm."""

    def __init__(self, config: dict[str, Any], max_model_len: int, backend: AttentionBackend, qk_norm: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        rotary = RotaryEmbedding(backend.head_dim, max_model_len, rope_parameters(config), backend.ops)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, rotary, backend, qk_norm) for _ in range(config["num_hidden_layers"])
        )
        self.norm = RMSNorm(config["hidden_size"], config["rms_norm_eps"], backend.ops)

    def forward(self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata) -> Tensor:
        x = self.embed_tokens(input_ids)
        residual = None
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x, residual = layer(x, residual, positions, kv_cache, metadata)
        return self.norm.add_and_norm(x, residual)[0]


class LlamaForCausalLM(CausalLM):
    """Llama with its head: tokens and positions in, hidden states out, and logits for the rows that are asked for."""

    fused_layers = {
        "q_proj": ("qkv_proj", 0),
        "k_proj": ("qkv_proj", 1),
        "v_proj": ("qkv_proj", 2),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }
    ignored_weights = ("rotary_emb.inv_freq",)
    qk_norm = False

    def __init__(self, config: dict[str, Any], max_model_len: int, backend: AttentionBackend) -> None:
        super().__init__()
        if config.get("hidden_act", "silu") != "silu":
            raise ModelLoadError(f"hidden_act {config['hidden_act']!r} is not supported for this family: only 'silu' is.")
        self.model = LlamaModel(config, max_model_len, backend, self.qk_norm)
        self.tie_word_embeddings = config.get("tie_word_embeddings", False)
        self.lm_head = Linear(config["hidden_size"], config["vocab_size"])
        if self.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata) -> Tensor:
        return self.model(input_ids, positions, kv_caches, metadata)

    def compile_decode(self) -> None:
        for layer in self.model.layers:
            layer.compile_decode()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings of a config.json, of transformers 5 or older."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    parameters.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    if "type" in parameters:  # the oldest spelling
        parameters.setdefault("rope_type", parameters["type"])
    return parameters
