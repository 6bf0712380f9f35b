"""What every model gives the engine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar

from torch import Tensor, nn

from minivllm.config import ModelConfig
from minivllm.distributed.pipeline import IntermediateTensors
from minivllm.layers.attention import AttentionMetadata, KVCache
from minivllm.layers.embedding import ChooseInPart
from minivllm.layers.platform import Platform


def declares(model_cls: type, name: str) -> bool:
    """What the class says under a name, or the nearest base class, if the class changes nothing that depends on it."""
    for cls in model_cls.__mro__:
        if name in vars(cls):
            return bool(vars(cls)[name])
        if vars(cls).keys() & {"__init__", "forward", "compute_logits"}:
            return False
    return False


class CausalLM(nn.Module):
    """A language model that computes ragged batches over a paged KV cache.

    Subclasses are made with a `ModelConfig` and a `Platform`. Their parameters are named as in the checkpoint, except for
    fused layers.
    """

    fused_layers: ClassVar[dict[str, tuple[str, int]]] = {}
    """Checkpoint layer to the fused layer that holds it, and its index there."""
    ignored_weights: ClassVar[tuple[str, ...]] = ()
    """Suffixes of checkpoint names that the model does not need."""
    tie_word_embeddings: bool = False
    """Whether the head is the embedding, so that a checkpoint's `lm_head.weight` is not needed."""
    supports_tensor_parallel: ClassVar[bool] = False
    """Whether it is made of layers that know their rank, so that several workers can have a part of it each."""
    supports_pipeline_parallel: ClassVar[bool] = False
    """Whether several stages can have some of its layers each: it makes those of `platform.stage`, by `models.stages`, and `forward` takes and returns
    `IntermediateTensors`."""
    supports_windows: ClassVar[bool] = False
    """Whether its layers have the windows of `models.windows.layer_windows`, so that cache blocks that no layer looks at again may be freed."""
    intermediate_names: ClassVar[tuple[str, ...]] = ()
    """The names of these tensors, each `[num_tokens, hidden_size]` in the dtype of the activations."""
    choose: Callable[[Tensor, ChooseInPart], Tensor | None] | None = None
    """`ParallelLMHead.choose`, in a model that is divided among several ranks: a token for each row, with less to exchange than all logits."""
    load_weights: Callable[[Iterator[tuple[str, Tensor]]], None] | None = None
    """A method of the class that fills the parameters itself: it gets names and tensors of the checkpoint, one after another.
    Without one, the engine does it by the parameters' names."""

    def __init__(self, config: ModelConfig, platform: Platform) -> None:
        super().__init__()

    @abstractmethod
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        metadata: AttentionMetadata,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:
        """Hidden states of a ragged batch.

        Args:
            input_ids, positions: `[num_tokens]`.
            kv_caches: One per layer, changed in place.
            metadata: Where the tokens belong.
            intermediate_tensors: In a pipeline, what the stage before has computed; not given to the first stage.

        Returns:
            `[num_tokens, hidden_size]`; in a pipeline, what the next stage gets.
        """

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        """`[rows, hidden_size]` to `[rows, vocab_size]`; with several ranks, on rank 0, which samples, and None on the others."""
