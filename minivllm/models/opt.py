"""OPT: learned positions, LayerNorm, biases everywhere, ReLU. Zhang et al., 2022 (arXiv:2205.01068).

Mirrors `vllm/model_executor/models/opt.py`.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.errors import ModelLoadError
from minivllm.layers.attention import AttentionBackend, AttentionMetadata, KVCache
from minivllm.layers.linear import Linear
from minivllm.models.base import CausalLM

POSITION_OFFSET = 2
"""OPT's position table begins two rows late (a relic of padding positions in fairseq)."""


class OPTAttention(nn.Module):
    """Multi-head self-attention without rotary positions."""

    def __init__(self, hidden_size: int, backend: AttentionBackend) -> None:
        super().__init__()
        self.qkv_proj = Linear(hidden_size, [hidden_size] * 3, bias=True)
        self.out_proj = Linear(hidden_size, hidden_size, bias=True)
        self.backend = backend

    def forward(self, x: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        q, k, v = self.qkv_proj(x).view(len(x), 3, -1, self.backend.head_dim).unbind(1)
        output = self.backend.forward(q.contiguous(), k, v, kv_cache, metadata)
        return self.out_proj(output.flatten(1))


class OPTDecoderLayer(nn.Module):
    """Attention and a ReLU MLP, each after a LayerNorm."""

    def __init__(self, config: dict[str, Any], backend: AttentionBackend) -> None:
        super().__init__()
        hidden_size = config["hidden_size"]
        self.self_attn_layer_norm = nn.LayerNorm(hidden_size)
        self.self_attn = OPTAttention(hidden_size, backend)
        self.final_layer_norm = nn.LayerNorm(hidden_size)
        self.fc1 = Linear(hidden_size, config["ffn_dim"], bias=True)
        self.fc2 = Linear(config["ffn_dim"], hidden_size, bias=True)

    def forward(self, x: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x), kv_cache, metadata)
        return x + self.fc2(F.relu(self.fc1(self.final_layer_norm(x))))


class OPTDecoder(nn.Module):
    """Token and position embeddings, decoder layers and the last norm."""

    def __init__(self, config: dict[str, Any], backend: AttentionBackend) -> None:
        super().__init__()
        hidden_size = config["hidden_size"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], hidden_size)
        self.embed_positions = nn.Embedding(config["max_position_embeddings"] + POSITION_OFFSET, hidden_size)
        self.layers = nn.ModuleList(OPTDecoderLayer(config, backend) for _ in range(config["num_hidden_layers"]))
        self.final_layer_norm = nn.LayerNorm(hidden_size)

    def forward(self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata) -> Tensor:
        x = self.embed_tokens(input_ids) + self.embed_positions(positions + POSITION_OFFSET)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x = layer(x, kv_cache, metadata)
        return self.final_layer_norm(x)


class OPTModel(nn.Module):
    """The decoder under the name that checkpoints give it."""

    def __init__(self, config: dict[str, Any], backend: AttentionBackend) -> None:
        super().__init__()
        self.decoder = OPTDecoder(config, backend)


class OPTForCausalLM(CausalLM):
    """OPT with its head, which is the embedding; the interface is LlamaForCausalLM's."""

    fused_layers = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)}

    def __init__(self, config: dict[str, Any], max_model_len: int, backend: AttentionBackend) -> None:
        super().__init__()
        wanted = {
            "do_layer_norm_before": True,
            "word_embed_proj_dim": config["hidden_size"],
            "activation_function": "relu",
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "tie_word_embeddings": True,
        }
        for name, value in wanted.items():
            if config.get(name, value) != value:
                raise ModelLoadError(
                    f"This OPT checkpoint has {name} = {config[name]!r}, which is not supported: only {value!r} is."
                )
        self.tie_word_embeddings = True
        self.model = OPTModel(config, backend)
        self.lm_head = Linear(config["hidden_size"], config["vocab_size"])
        self.lm_head.weight = self.model.decoder.embed_tokens.weight

    def forward(self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata) -> Tensor:
        return self.model.decoder(input_ids, positions, kv_caches, metadata)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)
