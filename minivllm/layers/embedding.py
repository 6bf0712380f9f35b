"""The embedding of tokens, and the head, which is often the same weight.

Mirrors `vllm/model_executor/layers/vocab_parallel_embedding.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.layers.linear import Linear

if TYPE_CHECKING:
    from minivllm.layers.platform import Platform
    from minivllm.layers.weights import CheckpointTensor

ROWS_AT_A_TIME = 1024
"""How much of a weight is loaded at once."""


class VocabEmbedding(nn.Module):
    """One row of the weight for each token.

    Args:
        vocab_size, hidden_size: Of the weight.
        platform: Says in which dtype the weight and the result are.

    Attributes:
        weight: `[vocab_size, hidden_size]`; None once a head that shares it has packed it. Rows are then read from there, so that memory
            holds the numbers once.
        heads: The head that shares the weight, if one does. In a tuple, so that it is no part of this module.
    """

    weight: nn.Parameter | None

    def __init__(self, vocab_size: int, hidden_size: int, platform: Platform) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=platform.dtype), requires_grad=False)
        self.activation_dtype = platform.activation_dtype
        self.heads: tuple[LMHead, ...] = ()
        self._packed: Any = None

    def load_weight(self, parameter: nn.Parameter, tensor: CheckpointTensor) -> None:
        """Copy the checkpoint's tensor, some rows at a time: it is the largest, and a second copy of it would be the peak of memory."""
        for start in range(0, len(parameter), ROWS_AT_A_TIME):
            rows = slice(start, min(start + ROWS_AT_A_TIME, len(parameter)))
            parameter.data[rows] = tensor.read(tuple(parameter.shape), rows)

    def process_weights_after_loading(self) -> None:
        """Let the head that shares the weight bring it into its form."""
        for head in self.heads:
            head.process_weights_after_loading()
            if head.method.packed is not None:
                self._packed, self.weight = head.method.packed, None

    def forward(self, input_ids: Tensor) -> Tensor:
        """`[num_tokens]` to `[num_tokens, hidden_size]`, in the dtype of the activations."""
        if self.weight is None:
            return self._packed.get_rows(input_ids)
        return F.embedding(input_ids, self.weight).to(self.activation_dtype)


class LMHead(Linear):
    """The layer that gives a logit to each token of the vocabulary.

    Args:
        tied_to: The embedding whose weight is the head's too.
    """

    def __init__(self, hidden_size: int, vocab_size: int, platform: Platform, tied_to: VocabEmbedding | None = None) -> None:
        super().__init__(hidden_size, vocab_size, bias=False, platform=platform)
        if tied_to is not None:
            self.weight, tied_to.heads = tied_to.weight, (self,)
