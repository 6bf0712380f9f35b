"""The first kernel of a CUDA graph: puts the inputs of a step where the graph's other kernels read them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.kernels.triton.launch import on_device

COLUMNS = 1024
"""Entries of a block table that a program copies at a time."""


def unpack_inputs(
    packed: Tensor, input_ids: Tensor, positions: Tensor, slot_mapping: Tensor, context_lens: Tensor, block_tables: Tensor,
    query_start_loc: Tensor,
) -> None:  # fmt: skip
    """Spread a packed step over rows: see `reference.unpack_inputs`. How many tokens and sequences there are, the kernel reads from memory, so
    that a graph replays it for any number."""
    token_rows, seq_rows = len(input_ids), len(context_lens)
    with on_device(packed):
        _unpack_inputs[(max(token_rows, seq_rows + 1),)](
            packed.view(torch.int64), packed.view(torch.int32), input_ids, positions, slot_mapping, context_lens, block_tables,
            query_start_loc, token_rows, seq_rows, block_tables.stride(0), BLOCK=COLUMNS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["token_rows", "seq_rows"])
def _unpack_inputs(
    packed64_ptr, packed32_ptr, input_ids_ptr, positions_ptr, slots_ptr, context_lens_ptr, tables_ptr, starts_ptr,
    token_rows, seq_rows, table_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token and one sequence, or padding. Each part of the packed step begins at a multiple of 16 bytes."""
    row = tl.program_id(0)
    num_tokens, num_seqs, width = tl.load(packed32_ptr), tl.load(packed32_ptr + 1), tl.load(packed32_ptr + 2)
    is_token, is_written = row < num_tokens, row < token_rows
    length = tl.cdiv(num_tokens, 2) * 2
    ids = packed64_ptr + 2
    tl.store(input_ids_ptr + row, tl.load(ids + row, mask=is_token, other=0), mask=is_written)
    tl.store(positions_ptr + row, tl.load(ids + length + row, mask=is_token, other=0), mask=is_written)
    tl.store(slots_ptr + row, tl.load(ids + 2 * length + row, mask=is_token, other=-1), mask=is_written)

    is_sequence = row < num_seqs
    lens = packed32_ptr + 4 + 6 * length
    tables = lens + tl.cdiv(num_seqs, 4) * 4
    starts = tables + tl.cdiv(num_seqs * width, 4) * 4
    tl.store(context_lens_ptr + row, tl.load(lens + row, mask=is_sequence, other=0), mask=row < seq_rows)
    tl.store(starts_ptr + row, tl.load(starts + tl.minimum(row, num_seqs)), mask=row <= seq_rows)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = is_sequence & (columns < width)
        blocks = tl.load(tables + row * width + columns, mask=inside)
        tl.store(tables_ptr + row.to(tl.int64) * table_stride + columns, blocks, mask=inside)
