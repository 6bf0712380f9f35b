"""What every model gives the engine."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor, nn

from minivllm.layers.attention import AttentionMetadata, KVCache


class CausalLM(nn.Module):
    """A language model that computes ragged batches over a paged KV cache.

    Subclasses are made with the content of a config.json, the most tokens that a sequence may have, and an attention
    backend. Their parameters are named as in the checkpoint, but for fused layers.
    """

    fused_layers: ClassVar[dict[str, tuple[str, int]]] = {}
    """Checkpoint layer to the fused layer that holds it, and its number there."""
    ignored_weights: ClassVar[tuple[str, ...]] = ()
    """Endings of checkpoint names that the model does without."""
    tie_word_embeddings: bool = False
    """Whether the head is the embedding, so that a checkpoint's `lm_head.weight` is not needed."""

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata) -> Tensor:
        """Hidden states of a ragged batch.

        Args:
            input_ids, positions: `[num_tokens]`.
            kv_caches: One per layer, changed in place.
            metadata: Where the tokens belong.

        Returns:
            `[num_tokens, hidden_size]`.
        """

    def compile_decode(self) -> None:
        """Called when the weights are in their final form: prepare to compute decode steps with fewer calls, if there is a way."""

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden_size]` to `[rows, vocab_size]`."""
