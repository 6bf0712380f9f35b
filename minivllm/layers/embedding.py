"""The embedding of tokens, and the head, which is often the same weight.

Mirrors `vllm/model_executor/layers/vocab_parallel_embedding.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.distributed.partition import split
from minivllm.layers.linear import Linear
from minivllm.layers.linear_methods import LinearMethod
from minivllm.layers.platform import Platform
from minivllm.layers.weights import CheckpointTensor, TensorPart, copy_rows


class VocabParallelEmbedding(nn.Module):
    """One row of the weight for each token. A rank has the rows of some tokens; those of the others come from the other ranks.

    Args:
        vocab_size, hidden_size: Of the weight.
        platform: Says in which dtype the weight and the result are, and knows the rank.

    Attributes:
        token_ids: The tokens whose rows this rank has.
        weight: `[len(token_ids), hidden_size]`; None once a head that shares it has brought it into another form. Rows are then read from
            there, so that memory holds the numbers once. Token ids are checked when a request arrives.
        head: The head that shares the weight, if there is one.
    """

    weight: nn.Parameter | None

    def __init__(self, vocab_size: int, hidden_size: int, platform: Platform) -> None:
        super().__init__()
        self.group = platform.group
        self.vocab_size, self.token_ids = vocab_size, split(vocab_size, self.group.world_size, self.group.rank)
        self.weight = nn.Parameter(torch.empty(len(self.token_ids), hidden_size, dtype=platform.dtype), requires_grad=False)
        self.activation_dtype = platform.activation_dtype
        self._heads: tuple[ParallelLMHead, ...] = ()  # a tuple, so that it is no part of this module
        self._method: LinearMethod | None = None

    @property
    def head(self) -> ParallelLMHead | None:
        """See the attributes of the class."""
        return self._heads[0] if self._heads else None

    def tie(self, head: ParallelLMHead) -> None:
        """Share the weight of a head."""
        self.weight, self._heads = head.weight, (head,)

    def load_weight(self, parameter: nn.Parameter, tensor: CheckpointTensor) -> None:
        """Copy this rank's rows of the checkpoint's tensor, to where the head that shares the weight wants them."""
        if self.head is not None:
            self.head.load_weight(parameter, tensor)
        else:
            copy_rows(parameter.data, TensorPart(tensor, (self.vocab_size, parameter.shape[1]), self.token_ids))

    def process_weights_after_loading(self) -> None:
        """Let the head that shares the weight bring it into its form."""
        if self.head is not None:
            self.head.process_weights_after_loading()
            if self.head.weight is None:
                self._method, self.weight = self.head.method, None

    def forward(self, input_ids: Tensor) -> Tensor:
        """`[num_tokens]` to `[num_tokens, hidden_size]`, in the dtype of the activations."""
        if self.group.world_size == 1:
            return self._get_rows(input_ids)
        elsewhere = (input_ids < self.token_ids.start) | (input_ids >= self.token_ids.stop)
        rows = self._get_rows((input_ids - self.token_ids.start).masked_fill(elsewhere, 0))
        return self.group.all_reduce(rows.masked_fill_(elsewhere.unsqueeze(1), 0))

    def _get_rows(self, rows: Tensor) -> Tensor:
        if self._method is not None:
            return self._method.get_rows(rows)
        assert self.weight is not None
        return F.embedding(rows, self.weight).to(self.activation_dtype)


class ParallelLMHead(Linear):
    """The layer that gives a logit to each token of the vocabulary. A rank computes those of some tokens.

    Args:
        hidden_size, vocab_size, platform: As for the embedding.
        tied_to: The embedding whose weight is the head's too. One of torch's own, in a user's model, keeps its weight.
    """

    def __init__(
        self, hidden_size: int, vocab_size: int, platform: Platform, tied_to: VocabParallelEmbedding | nn.Embedding | None = None
    ) -> None:
        world_size, rank = platform.group.world_size, platform.group.rank
        super().__init__(hidden_size, vocab_size, bias=False, platform=platform, rows=[split(vocab_size, world_size, rank)])
        self.sizes = [len(split(vocab_size, world_size, other)) for other in range(world_size)]
        if isinstance(tied_to, VocabParallelEmbedding):
            tied_to.tie(self)
        elif tied_to is not None:
            self.weight = tied_to.weight

    def forward(self, x: Tensor) -> Tensor | None:
        """`[rows, hidden_size]` to `[rows, vocab_size]` on rank 0; None on the others, whose logits are among them."""
        return self.group.gather(self.method.apply(self, x), sizes=self.sizes)

    def choose(self, x: Tensor, choose_in_part: ChooseInPart) -> Tensor | None:
        """A token for each row, `[rows]`, on rank 0; None on the others. Each rank chooses among its tokens, and the best score wins: two numbers
        cross to rank 0 instead of a part of the vocabulary.

        Args:
            x: `[rows, hidden_size]`.
            choose_in_part: `worker.choice_in_parts.choose_in_part` for the rows.
        """
        scores, token_ids = choose_in_part(self.method.apply(self, x), self.rows[0].start)
        candidates = self.group.gather(torch.stack((scores, token_ids.double())).unsqueeze(0), dim=0)
        if candidates is None:
            return None
        scores, token_ids = candidates.unbind(1)  # each [ranks, rows]
        return token_ids.gather(0, scores.argmax(dim=0, keepdim=True)).squeeze(0).long()


ChooseInPart = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""From the logits of some tokens, `[rows, tokens]`, and the id of the first of them, to the score of the best one in each row,
float64, and its id."""
