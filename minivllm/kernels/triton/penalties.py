"""Penalties for tokens that have occurred, from counts that stay on the device."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minivllm.kernels import checks
from minivllm.kernels.reference_sampling import IN_PROMPT
from minivllm.kernels.triton.launch import check_launch, on_device

TOKENS_PER_PROGRAM = 4096
"""Of a row."""
_IN_PROMPT = tl.constexpr(IN_PROMPT)


@checks.PENALIZE
def penalize(
    logits: Tensor, rows: Tensor, counts: Tensor, slots: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    """Make tokens that have occurred less likely, in place: see `reference.penalize`. One launch."""
    check_launch(logits)
    vocab_size = logits.shape[1]
    if len(rows):
        with on_device(logits):
            _penalize[(len(rows), triton.cdiv(vocab_size, TOKENS_PER_PROGRAM))](
                logits, rows, counts, slots, repetition, presence, frequency, vocab_size, logits.stride(0), counts.stride(0),
                BLOCK=TOKENS_PER_PROGRAM, num_warps=8,
            )  # fmt: skip


@triton.jit
def _penalize(
    logits_ptr, rows_ptr, counts_ptr, slots_ptr, repetition_ptr, presence_ptr, frequency_ptr, vocab_size, row_stride, slot_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Some tokens of one row."""
    i = tl.program_id(0)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab_size
    row_ptr = logits_ptr + tl.load(rows_ptr + i) * row_stride
    counts = tl.load(counts_ptr + tl.load(slots_ptr + i) * slot_stride + tokens, mask=inside, other=0)
    logits = tl.load(row_ptr + tokens, mask=inside)
    repetition = tl.load(repetition_ptr + i)
    less_likely = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
    logits = tl.where(counts != 0, less_likely, logits)
    times = counts & (_IN_PROMPT - 1)
    subtracted = tl.load(presence_ptr + i) + tl.load(frequency_ptr + i) * times.to(tl.float32)
    tl.store(row_ptr + tokens, tl.where(times > 0, logits - subtracted, logits), mask=inside & (counts != 0))
