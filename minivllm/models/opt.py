"""OPT: learned positions, LayerNorm, biases everywhere, ReLU. Zhang et al., 2022 (arXiv:2205.01068).

Mirrors `vllm/model_executor/models/opt.py`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.config import ModelConfig
from minivllm.distributed.pipeline import IntermediateTensors
from minivllm.errors import ModelLoadError
from minivllm.layers.attention import AttentionMetadata, KVCache
from minivllm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from minivllm.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from minivllm.layers.platform import Platform
from minivllm.models.base import CausalLM
from minivllm.models.stages import here, make_layers, own_layers

POSITION_OFFSET = 2
"""OPT's position table begins two rows late (a relic of padding positions in fairseq)."""


class OPTAttention(nn.Module):
    """Multi-head self-attention without rotary positions."""

    def __init__(self, config: ModelConfig, platform: Platform) -> None:
        super().__init__()
        hidden_size = config.hf_config["hidden_size"]
        qkv = QKVParallelLinear(hidden_size, config.head_dim, config.num_heads, config.num_heads, True, platform)
        self.qkv_proj = qkv
        self.out_proj = RowParallelLinear(hidden_size, hidden_size, True, platform, qkv.query_channels)
        self.backend = platform.make_attention(qkv.num_heads, qkv.num_kv_heads, config.head_dim)

    def forward(self, x: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        q, k, v = self.qkv_proj(x).view(len(x), 3, -1, self.backend.head_dim).unbind(1)
        output = self.backend(q.contiguous(), k, v, kv_cache, metadata)
        return self.out_proj(output.flatten(1))


class OPTDecoderLayer(nn.Module):
    """Attention and a ReLU MLP, each after a LayerNorm."""

    def __init__(self, config: ModelConfig, platform: Platform) -> None:
        super().__init__()
        hidden_size, ffn_dim = config.hf_config["hidden_size"], config.hf_config["ffn_dim"]
        self.self_attn_layer_norm = nn.LayerNorm(hidden_size)
        self.self_attn = OPTAttention(config, platform)
        self.final_layer_norm = nn.LayerNorm(hidden_size)
        self.fc1 = ColumnParallelLinear(hidden_size, ffn_dim, bias=True, platform=platform)
        self.fc2 = RowParallelLinear(ffn_dim, hidden_size, bias=True, platform=platform)

    def forward(self, x: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x), kv_cache, metadata)
        return x + self.fc2(F.relu(self.fc1(self.final_layer_norm(x))))


class OPTDecoder(nn.Module):
    """Token and position embeddings, decoder layers and the last norm: all of them, or those of a pipeline stage."""

    def __init__(self, config: ModelConfig, platform: Platform) -> None:
        super().__init__()
        hidden_size, stage = config.hf_config["hidden_size"], platform.stage
        self.embed_tokens = here(
            stage.is_first or stage.is_last, lambda: VocabParallelEmbedding(config.vocab_size, hidden_size, platform)
        )
        num_positions = config.hf_config["max_position_embeddings"] + POSITION_OFFSET
        self.embed_positions = here(stage.is_first, lambda: nn.Embedding(num_positions, hidden_size, dtype=platform.dtype))
        self.layers = make_layers(config.num_layers, stage, lambda i: OPTDecoderLayer(config, platform))
        self.final_layer_norm = here(stage.is_last, lambda: nn.LayerNorm(hidden_size))
        self.stage = stage

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:  # fmt: skip
        if intermediate_tensors is None:
            x = self.embed_tokens(input_ids) + self.embed_positions(positions + POSITION_OFFSET)
        else:
            x = intermediate_tensors["hidden_states"]
        for layer, kv_cache in zip(own_layers(self.layers), kv_caches, strict=True):
            x = layer(x, kv_cache, metadata)
        return self.final_layer_norm(x) if self.stage.is_last else IntermediateTensors({"hidden_states": x})  # type: ignore[no-any-return]


class OPTModel(nn.Module):
    """The decoder under the name that checkpoints give it."""

    def __init__(self, config: ModelConfig, platform: Platform) -> None:
        super().__init__()
        self.decoder = OPTDecoder(config, platform)


class OPTForCausalLM(CausalLM):
    """OPT with its head, which is the embedding; the interface is LlamaForCausalLM's."""

    fused_layers = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)}
    supports_tensor_parallel = True
    supports_pipeline_parallel = True
    intermediate_names = ("hidden_states",)

    def __init__(self, config: ModelConfig, platform: Platform) -> None:
        super().__init__(config, platform)
        hf_config = config.hf_config
        supported = {
            "do_layer_norm_before": True,
            "word_embed_proj_dim": hf_config["hidden_size"],
            "activation_function": "relu",
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "tie_word_embeddings": True,
        }
        for name, value in supported.items():
            if hf_config.get(name, value) != value:
                raise ModelLoadError(f"This OPT checkpoint has {name} = {hf_config[name]!r}: only {value!r} is supported.")
        self.tie_word_embeddings = True
        self.model = OPTModel(config, platform)
        hidden_size, tied_to, stage = hf_config["hidden_size"], self.model.decoder.embed_tokens, platform.stage
        has_head = stage.is_last or stage.is_first  # the embedding's rows are read from it
        self.lm_head = here(has_head, lambda: ParallelLMHead(hidden_size, config.vocab_size, platform, tied_to))
        if stage.is_last and platform.group.world_size > 1 and type(self).compute_logits is OPTForCausalLM.compute_logits:
            self.choose = self.lm_head.choose

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:  # fmt: skip
        return self.model.decoder(input_ids, positions, kv_caches, metadata, intermediate_tensors)

    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        return self.lm_head(hidden)
