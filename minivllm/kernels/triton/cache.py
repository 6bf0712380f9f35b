"""Writing to the KV cache: new tokens to their slots, and whole blocks from place to place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.errors import KernelError
from minivllm.kernels import checks
from minivllm.kernels.triton.launch import check_launch, on_device

COPY_BLOCK = 2048
"""Numbers that a program copies."""


@checks.RESHAPE_AND_CACHE
def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write new keys and values to their slots: see `reference.reshape_and_cache`."""
    num_tokens, num_kv_heads, head_dim = key.shape
    check_launch(key_cache, head_dim)
    if num_tokens > 0:
        with on_device(key):
            _reshape_and_cache[(num_tokens,)](
                key, value, key_cache, value_cache, slot_mapping, num_kv_heads,
                *key.stride()[:2], *value.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3],
                BLOCK_SIZE=key_cache.shape[1], HEAD_DIM=head_dim,
                HEADS=triton.next_power_of_2(num_kv_heads), CHANNELS=triton.next_power_of_2(head_dim),
            )  # fmt: skip


@triton.jit
def _reshape_and_cache(
    key_ptr, value_ptr, key_cache_ptr, value_cache_ptr, slots_ptr, num_kv_heads,
    key_stride, key_head_stride, value_stride, value_head_stride,
    key_cache_block_stride, key_cache_slot_stride, key_cache_head_stride,
    value_cache_block_stride, value_cache_slot_stride, value_cache_head_stride,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One token: all its heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    heads = tl.arange(0, HEADS)[:, None]
    channels = tl.arange(0, CHANNELS)[None, :]
    inside = (heads < num_kv_heads) & (channels < HEAD_DIM) & (slot >= 0)
    key = tl.load(key_ptr + token * key_stride + heads * key_head_stride + channels, mask=inside)
    value = tl.load(value_ptr + token * value_stride + heads * value_head_stride + channels, mask=inside)
    key_slot = key_cache_ptr + block * key_cache_block_stride + offset * key_cache_slot_stride
    value_slot = value_cache_ptr + block * value_cache_block_stride + offset * value_cache_slot_stride
    tl.store(key_slot + heads * key_cache_head_stride + channels, key, mask=inside)
    tl.store(value_slot + heads * value_cache_head_stride + channels, value, mask=inside)


def copy_blocks(source: Tensor, destination: Tensor, pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks, all caches in one launch: see `reference.copy_blocks`."""
    checks.check_block_pairs(source, destination, pairs)
    check_launch(source)
    for blocks in (source, destination):
        if blocks.numel() and not blocks[0, 0].is_contiguous():
            raise KernelError(f"A block of the cache has the strides {blocks.stride()[2:]}, but must be contiguous to be copied.")
    if not pairs:
        return
    overwritten = {block for _, block in pairs}
    if source.data_ptr() == destination.data_ptr() and any(block in overwritten for block, _ in pairs):
        # The programs run in any order, so if a block is both read and overwritten, all are staged first.
        staged = source.new_empty((source.shape[0], len(pairs), *source.shape[2:]))
        _launch_copy(source, staged, [(block, i) for i, (block, _) in enumerate(pairs)])
        source, pairs = staged, [(i, block) for i, (_, block) in enumerate(pairs)]
    _launch_copy(source, destination, pairs)


def _launch_copy(source: Tensor, destination: Tensor, pairs: list[tuple[int, int]]) -> None:
    size = source[0, 0].numel()
    # From pinned memory, so that the host does not wait until the GPU has come so far.
    table = torch.tensor(pairs, dtype=torch.int64, pin_memory=source.is_cuda).to(source.device, non_blocking=True)
    with on_device(source):
        _copy_blocks[(len(pairs), triton.cdiv(size, COPY_BLOCK), source.shape[0])](
            source, destination, table, size, *source.stride()[:2], *destination.stride()[:2], BLOCK=COPY_BLOCK
        )


@triton.jit
def _copy_blocks(
    source_ptr, destination_ptr, pairs_ptr, size,
    source_cache_stride, source_block_stride, destination_cache_stride, destination_block_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A piece of one block, in one cache."""
    pair = tl.program_id(0)
    numbers = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    cache = tl.program_id(2).to(tl.int64)
    source = cache * source_cache_stride + tl.load(pairs_ptr + 2 * pair) * source_block_stride
    destination = cache * destination_cache_stride + tl.load(pairs_ptr + 2 * pair + 1) * destination_block_stride
    piece = tl.load(source_ptr + source + numbers, mask=numbers < size)
    tl.store(destination_ptr + destination + numbers, piece, mask=numbers < size)
