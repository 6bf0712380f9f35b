"""A step as the model takes it: flat tensors, one sequence after another."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minivllm.layers.attention import AttentionMetadata


@dataclass
class ModelInput:
    """A step's tokens, one sequence after another.

    Attributes:
        input_ids: `[num_tokens]`.
        positions: `[num_tokens]`, each token's place in its sequence.
        metadata: Where keys and values go and come from.
        sampled_rows: Row of the last token of each sequence that needs a new one, and the rows of its draft tokens.
    """

    input_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    sampled_rows: list[int]
