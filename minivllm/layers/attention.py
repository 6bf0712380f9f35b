"""Attention over a paged KV cache: what a step passes to it, and the interface of a backend.

Mirrors `vllm/v1/attention/backend.py`. The backends are in `attention_backends.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from minivllm.errors import KernelError
from minivllm.kernels import reference
from minivllm.kernels.checks import Checks
from minivllm.kernels.ops import Ops

KVCache = tuple[Tensor, Tensor]
"""A layer's keys and values, each `[num_blocks, block_size, num_kv_heads, head_dim]`."""


@dataclass
class AttentionMetadata:
    """Where the tokens of a ragged batch belong: the tokens of all sequences, one sequence after another.

    Attributes:
        is_decode: Whether every sequence has one new token, as in a pure decode step.
        slot_mapping: `[num_tokens]` int64, the cache slot of each new token; negative for padding.
        block_tables: `[num_seqs, max_blocks]` int32, padded with 0.
        context_lens: `[num_seqs]` int32, cached tokens of each sequence, including those of this step; 0 for padding.
        query_start_loc: `[num_seqs + 1]` int32, the first row of each sequence, and the end of the last one.

    In a step with prompts that a CUDA graph replays, sequences at the end are padding, without new tokens and cached ones, and so are rows after the
    last sequence: what attention returns for them is not used.
    """

    is_decode: bool
    slot_mapping: Tensor
    block_tables: Tensor
    context_lens: Tensor
    query_start_loc: Tensor


class AttentionBackend(ABC):
    """Computes attention for a layer; subclass it to plug in another.

    Args:
        num_heads: Query heads.
        num_kv_heads: Key and value heads; each serves `num_heads // num_kv_heads` query heads.
        head_dim: Channels of a head.
        scale: What the scores are multiplied by.

    Attributes:
        ops: The kernels of `load_ops`. They check shapes, but not the numbers in tables and lengths, which the model runner
            has validated for the whole step.
        window: The tokens that each token sees, itself included (sliding-window attention), as its layer says once the backend is made; 0 for
            all before it.
    """

    window: int = 0

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.ops = Ops(self.load_ops(), Checks.SHAPES)

    @classmethod
    def load_ops(cls) -> ModuleType:
        """The kernels that `forward` calls: those of `reference`."""
        return reference

    @classmethod
    def supports_cuda_graphs(cls) -> bool:
        """Whether a step, of decodes or with prompts, can be captured: nothing in `forward` waits for the GPU or reads a tensor back.

        A subclass of a backend that supports them must return `False` if its own `forward` prints or reads a tensor.
        """
        return False

    @classmethod
    def supports_windows(cls) -> bool:
        """Whether `forward` honours `window`. If not, models whose layers have windows are refused.

        What a backend says holds for its own `forward`: a subclass with another one must say it again.
        """
        return False

    @property
    def window_argument(self) -> tuple[int, ...]:
        """What attention kernels are given after all else: the window, or nothing where there is none, so that kernels without that argument do."""
        return (self.window,) if self.window else ()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        """`forward`, and a KernelError if it returns what the next layer cannot take: later kernels check nothing."""
        output = self.forward(query, key, value, kv_cache, metadata)
        if output.shape != query.shape or output.dtype != query.dtype or output.device != query.device:
            raise KernelError(
                f"{type(self).__name__}.forward returned {list(output.shape)} of {output.dtype} on {output.device}, but must "
                f"return what query is, {list(query.shape)} of {query.dtype} on {query.device}."
            )
        return output

    @abstractmethod
    def forward(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        """Write the new keys and values to the cache, then attend.

        Args:
            query: `[num_tokens, num_heads, head_dim]`.
            key, value: `[num_tokens, num_kv_heads, head_dim]`.
            kv_cache: The layer's cache, changed in place.
            metadata: Where the tokens belong.

        Returns:
            `[num_tokens, num_heads, head_dim]`.
        """
