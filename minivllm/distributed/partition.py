"""Which part of a weight belongs to which rank: the same arithmetic for loading, computing and pictures.

vLLM requires every size to be divisible by the number of ranks (`vllm/distributed/utils.py`, `divide`); here parts may be uneven.
`get_pp_indices` divides layers as in the same file there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

UNIT = 16
"""Parts are cut at multiples of this, if there are enough of them: the width of a panel of `kernels.cpu.native.panels`."""


def split(total: int, world_size: int, rank: int) -> range:
    """The rows or columns, of `total`, that belong to a rank. The first ranks have the larger parts.

    >>> [len(split(1536, 2, rank)) for rank in range(2)], [len(split(40, 3, rank)) for rank in range(3)]
    ([768, 768], [16, 16, 8])
    """
    unit = next(
        unit for unit in (UNIT, UNIT // 2, UNIT // 4, 2, 1) if total % unit == 0 and (total >= unit * world_size or unit == 1)
    )
    part = split_units(total // unit, world_size, rank)
    return range(part.start * unit, part.stop * unit)


def split_units(total: int, world_size: int, rank: int) -> range:
    """As `split`, cut anywhere."""
    size, larger = divmod(total, world_size)
    start = rank * size + min(rank, larger)
    return range(start, start + size + (rank < larger))


@dataclass(frozen=True)
class HeadSplit:
    """The query heads of one rank, and the KV heads that they read; these are shared with other ranks if there are more ranks than KV heads."""

    query: range
    kv: range


def split_heads(num_heads: int, num_kv_heads: int, world_size: int, rank: int) -> HeadSplit:
    """A rank's heads: KV heads with all their query heads or, if there are more ranks than KV heads, some query heads of one.

    >>> split_heads(9, 3, 2, 0), split_heads(9, 3, 2, 1)
    (HeadSplit(query=range(0, 6), kv=range(0, 2)), HeadSplit(query=range(6, 9), kv=range(2, 3)))
    >>> split_heads(8, 2, 4, 1)
    HeadSplit(query=range(2, 4), kv=range(0, 1))
    """
    group = num_heads // num_kv_heads
    if world_size <= num_kv_heads:
        kv = split_units(num_kv_heads, world_size, rank)
        return HeadSplit(range(kv.start * group, kv.stop * group), kv)
    for kv_head in range(num_kv_heads):
        ranks = split_units(world_size, num_kv_heads, kv_head)
        if rank in ranks:
            part = split_units(group, len(ranks), rank - ranks.start)
            return HeadSplit(range(kv_head * group + part.start, kv_head * group + part.stop), range(kv_head, kv_head + 1))
    raise ValueError(f"rank is {rank}, but there are {world_size} ranks.")


def get_pp_indices(num_hidden_layers: int, pp_rank: int, pp_size: int, partition: Sequence[int] | None = None) -> tuple[int, int]:
    """A pipeline stage's first layer, and the one after its last.

    Layers that are left over go to the stages before the last one, from behind: the last stage computes the logits and samples, and the first has the
    embedding.

    Args:
        num_hidden_layers: Of the whole model.
        pp_rank, pp_size: The stage, counted from 0, and the number of stages.
        partition: The number of layers of each stage; None divides them as evenly as can be.

    Raises:
        ValueError: `partition` has another number of stages or layers, or a stage would have none.

    >>> [get_pp_indices(30, rank, 4) for rank in range(4)]
    [(0, 7), (7, 15), (15, 23), (23, 30)]
    >>> get_pp_indices(30, 1, 2, [12, 18])
    (12, 30)
    """
    if partition is None:
        each, more = divmod(num_hidden_layers, pp_size)
        partition = [each + (pp_size - 1 - more <= rank < pp_size - 1) for rank in range(pp_size)]
    if len(partition) != pp_size:
        raise ValueError(f"it says how many layers each of {len(partition)} stages has, but there are {pp_size} stages")
    if sum(partition) != num_hidden_layers:
        raise ValueError(f"it adds up to {sum(partition)} layers, but there are {num_hidden_layers}")
    if min(partition) < 1:
        raise ValueError("each stage needs a layer")
    start = sum(partition[:pp_rank])
    return start, start + partition[pp_rank]


@dataclass(frozen=True)
class Stage:
    """A part of a model's layers, in order; the first stage also has the embedding, and the last one the last norm and the head.

    Attributes:
        rank: This one, counted from 0: vLLM's `pp_rank`.
        world_size: The number of stages.
        partition: The number of layers of each; None if they are divided evenly.
    """

    rank: int = 0
    world_size: int = 1
    partition: tuple[int, ...] | None = None

    @property
    def is_first(self) -> bool:
        """Whether it computes from token ids."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether it computes logits and samples."""
        return self.rank == self.world_size - 1

    def layers(self, num_layers: int) -> range:
        """Its layers, of a model's `num_layers`."""
        return range(*get_pp_indices(num_layers, self.rank, self.world_size, self.partition))
