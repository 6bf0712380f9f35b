"""The embedding of tokens, and the head, which is often the same weight.

Mirrors `vllm/model_executor/layers/vocab_parallel_embedding.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.layers.linear import Linear, LinearMethod
from minivllm.layers.weights import CheckpointTensor, copy_rows

if TYPE_CHECKING:
    from minivllm.layers.platform import Platform


class VocabEmbedding(nn.Module):
    """One row of the weight for each token.

    Args:
        vocab_size, hidden_size: Of the weight.
        platform: Says in which dtype the weight and the result are.

    Attributes:
        weight: `[vocab_size, hidden_size]`; None once a head that shares it has brought it into another form. Rows are then read from
            there, so that memory holds the numbers once. Token ids are checked when a request arrives, not here.
        heads: Those that share the weight: one, or none. In a tuple, so that they are no parts of this module.
    """

    weight: nn.Parameter | None

    def __init__(self, vocab_size: int, hidden_size: int, platform: Platform) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=platform.dtype), requires_grad=False)
        self.activation_dtype = platform.activation_dtype
        self.heads: tuple[LMHead, ...] = ()
        self._method: LinearMethod | None = None

    def load_weight(self, parameter: nn.Parameter, tensor: CheckpointTensor) -> None:
        """Copy the checkpoint's tensor, to where the head that shares the weight wants it."""
        for head in self.heads:
            head.load_weight(parameter, tensor)
        if not self.heads:
            copy_rows(parameter.data, tensor)

    def process_weights_after_loading(self) -> None:
        """Let the head that shares the weight bring it into its form."""
        for head in self.heads:
            head.process_weights_after_loading()
            if head.weight is None:
                self._method, self.weight = head.method, None

    def forward(self, input_ids: Tensor) -> Tensor:
        """`[num_tokens]` to `[num_tokens, hidden_size]`, in the dtype of the activations."""
        if self._method is not None:
            return self._method.get_rows(input_ids)
        assert self.weight is not None
        return F.embedding(input_ids, self.weight).to(self.activation_dtype)


class LMHead(Linear):
    """The layer that gives a logit to each token of the vocabulary.

    Args:
        tied_to: The embedding whose weight is the head's too. Torch's own, in a model of somebody else's, keeps its weight.
    """

    def __init__(
        self, hidden_size: int, vocab_size: int, platform: Platform, tied_to: VocabEmbedding | nn.Embedding | None = None
    ) -> None:
        super().__init__(hidden_size, vocab_size, bias=False, platform=platform)
        self.is_tied = isinstance(tied_to, VocabEmbedding)
        if isinstance(tied_to, VocabEmbedding):
            tied_to.weight, tied_to.heads = self.weight, (self,)
        elif tied_to is not None:
            self.weight = tied_to.weight
