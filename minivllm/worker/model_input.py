"""A step as the model takes it: flat tensors, one sequence after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from minivllm.layers.attention import AttentionMetadata
from minivllm.scheduler_output import FREED_BLOCK


class GraphSize(NamedTuple):
    """What a CUDA graph is for: up to so many tokens, one of each sequence (a decode step), or any number of each."""

    num_tokens: int
    is_decode: bool


@dataclass
class ModelInput:
    """A step's tokens, one sequence after another.

    Attributes:
        input_ids: `[num_tokens]`.
        positions: `[num_tokens]`, each token's place in its sequence.
        metadata: Where keys and values go and come from.
        sampled_rows: Row of the last token of each sequence that needs a new one, and the rows of its draft tokens.
        graph_size: That of the CUDA graph which replays the step; None if none does.
    """

    input_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    sampled_rows: list[int]
    graph_size: GraphSize | None = None


class BlockTables:
    """The block tables of a batch as one array, kept from step to step. Mirrors `vllm/v1/worker/block_table.py`.

    Only tables that have changed are written: in most steps, a sequence gets no new block.
    """

    def __init__(self) -> None:
        self._array = np.zeros((0, 0), np.int32)
        """A row for each place in the batch, padded with zeros."""
        self._written: list[list[int]] = []
        """The table that each row holds."""

    def update(self, tables: list[list[int]]) -> np.ndarray:
        """The tables of a step, `[len(tables), blocks of the longest]`, int32, padded with zeros, which also stand for freed blocks. The array belongs to
        the caller."""
        width = max(map(len, tables))
        self._make_room(len(tables), width)
        written = self._written
        for i, table in enumerate(tables):
            if written[i] != table:
                written[i] = []  # until it is complete: Ctrl-C may come
                row = self._array[i]
                row[: len(table)] = table
                if table[:1] == [FREED_BLOCK]:  # they are freed from the front; any others are a mistake, which is found later
                    num_freed = next((i for i, block in enumerate(table) if block != FREED_BLOCK), len(table))
                    row[:num_freed] = 0
                row[len(table) :] = 0
                written[i] = list(table)  # the scheduler's own list grows
        return self._array[: len(tables), :width].copy()

    def _make_room(self, num_rows: int, width: int) -> None:
        rows, columns = self._array.shape
        if num_rows > rows or width > columns:
            larger = np.zeros((max(num_rows, rows), max(width, 2 * columns if width > columns else columns)), np.int32)
            larger[:rows, :columns] = self._array
            self._written += [[] for _ in range(len(larger) - len(self._written))]
            self._array = larger
