"""The numbers of a Llama-like model, read from its config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model's parts.

    Attributes:
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the MLP.
        num_layers: Decoder layers.
        num_heads, num_kv_heads: Query heads, and the heads of keys and values that they share.
        head_dim: Channels of a head.
        rotary_dim: How many of them are rotated; the rest are unchanged.
        rope_theta: The base of the rotary frequencies.
        max_position: Positions are 0 .. max_position - 1.
        vocab_size: Tokens.
        rms_norm_eps: Added to the mean square in a norm.
        qk_norm: Whether queries and keys are normalized, as in Qwen3.
        tie_word_embeddings: Whether the head is the embedding.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    max_position: int
    vocab_size: int
    rms_norm_eps: float
    qk_norm: bool
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, config: dict[str, Any], max_position: int | None = None) -> ModelShape:
        """Read the content of a config.json.

        Args:
            config: Of a Llama or Qwen3 model.
            max_position: A limit on positions, if fewer than the model was trained for are enough.
        """
        from minivllm.layers.rotary import rope_parameters

        rope = rope_parameters(config)
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return cls(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            head_dim=head_dim,
            rotary_dim=int(head_dim * rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))),
            rope_theta=rope["rope_theta"],
            max_position=max_position or config["max_position_embeddings"],
            vocab_size=config["vocab_size"],
            rms_norm_eps=config["rms_norm_eps"],
            qk_norm="Qwen3ForCausalLM" in (config.get("architectures") or []),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
        )
