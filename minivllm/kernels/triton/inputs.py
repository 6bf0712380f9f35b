"""The first kernel of a CUDA graph: puts the inputs of a decode step where the graph's other kernels read them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.kernels.triton.launch import on_device

COLUMNS = 1024
"""Entries of a block table that a program copies at a time."""


def unpack_decode_inputs(
    packed: Tensor, input_ids: Tensor, positions: Tensor, slot_mapping: Tensor, context_lens: Tensor, block_tables: Tensor
) -> None:
    """Spread a packed step over rows: see `reference.unpack_decode_inputs`.

    How many sequences there are, the kernel reads from memory, so that a graph can replay it for any number.
    """
    with on_device(packed):
        _unpack_decode_inputs[(len(input_ids),)](
            packed.view(torch.int64), packed.view(torch.int32), input_ids, positions, slot_mapping, context_lens, block_tables,
            block_tables.stride(0), BLOCK=COLUMNS,
        )  # fmt: skip


@triton.jit
def _unpack_decode_inputs(
    packed64_ptr, packed32_ptr, input_ids_ptr, positions_ptr, slots_ptr, context_lens_ptr, tables_ptr, table_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: a sequence, or padding. Each part of the packed step begins at a multiple of 16 bytes."""
    row = tl.program_id(0)
    num_seqs = tl.load(packed64_ptr).to(tl.int32)
    width = tl.load(packed64_ptr + 1).to(tl.int32)
    is_sequence = row < num_seqs
    length = tl.cdiv(num_seqs, 2) * 2
    ids = packed64_ptr + 2
    tl.store(input_ids_ptr + row, tl.load(ids + row, mask=is_sequence, other=0))
    tl.store(positions_ptr + row, tl.load(ids + length + row, mask=is_sequence, other=0))
    tl.store(slots_ptr + row, tl.load(ids + 2 * length + row, mask=is_sequence, other=-1))
    lens = packed32_ptr + 4 + 6 * length
    tl.store(context_lens_ptr + row, tl.load(lens + row, mask=is_sequence, other=0))
    tables = lens + tl.cdiv(num_seqs, 4) * 4
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = is_sequence & (columns < width)
        blocks = tl.load(tables + row * width + columns, mask=inside)
        tl.store(tables_ptr + row.to(tl.int64) * table_stride + columns, blocks, mask=inside)
