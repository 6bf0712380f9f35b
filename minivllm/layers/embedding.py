"""A vector for each token, or for each position. Mirrors `vllm/model_executor/layers/vocab_parallel_embedding.py`."""

from __future__ import annotations

from torch import Tensor, nn

from minivllm.layers.platform import Platform


class Embedding(nn.Embedding):
    """Kept in the dtype of the weights, and looked up in that of the activations."""

    def __init__(self, num_embeddings: int, embedding_dim: int, platform: Platform) -> None:
        super().__init__(num_embeddings, embedding_dim, dtype=platform.dtype)
        self.activation_dtype = platform.activation_dtype

    def forward(self, ids: Tensor) -> Tensor:
        """`[num_tokens]` to `[num_tokens, embedding_dim]`."""
        return super().forward(ids).to(self.activation_dtype)
