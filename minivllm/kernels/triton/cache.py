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


def copy_blocks(cache: Tensor, pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks within a cache: see `reference.copy_blocks`."""
    checks.check_block_pairs(cache, cache, pairs)
    check_launch(cache)
    if {source for source, _ in pairs} & {destination for _, destination in pairs}:
        # The programs run in any order, so a block that is both read and overwritten is staged first.
        staged = torch.empty((len(pairs), *cache.shape[1:]), dtype=cache.dtype, device=cache.device)
        _copy(cache, staged, [(source, i) for i, (source, _) in enumerate(pairs)])
        _copy(staged, cache, [(i, destination) for i, (_, destination) in enumerate(pairs)])
    else:
        _copy(cache, cache, pairs)


def swap_blocks(source_cache: Tensor, destination_cache: Tensor, pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks between two caches: see `reference.swap_blocks`.

    Between a GPU and the host, the blocks are gathered on the GPU and cross over in one piece.
    """
    checks.check_block_pairs(source_cache, destination_cache, pairs)
    if not pairs:
        return
    sources, destinations = (list(blocks) for blocks in zip(*pairs, strict=True))
    if source_cache.data_ptr() == destination_cache.data_ptr():
        copy_blocks(source_cache, pairs)  # where one copy may overwrite the source of another
    elif source_cache.device == destination_cache.device:
        _copy(source_cache, destination_cache, pairs)
    elif source_cache.device.type == "cuda":
        staged = torch.empty((len(pairs), *source_cache.shape[1:]), dtype=source_cache.dtype, device=source_cache.device)
        _copy(source_cache, staged, [(source, i) for i, source in enumerate(sources)])
        destination_cache[destinations] = staged.to(destination_cache.device)
    else:
        staged = source_cache[sources].to(destination_cache.device)
        _copy(staged, destination_cache, [(i, destination) for i, destination in enumerate(destinations)])


def _copy(source: Tensor, destination: Tensor, pairs: list[tuple[int, int]]) -> None:
    check_launch(source)
    for cache in (source, destination):
        if cache.shape[0] > 0 and not cache[0].is_contiguous():
            raise KernelError(f"A block of the cache has the strides {cache.stride()[1:]}, but must be contiguous to be copied.")
    if not pairs:
        return
    size = source[0].numel()
    # From pinned memory, so that the host does not wait until the GPU has come so far.
    table = torch.tensor(pairs, dtype=torch.int64, pin_memory=source.is_cuda).to(source.device, non_blocking=True)
    with on_device(source):
        _copy_blocks[(len(pairs), triton.cdiv(size, COPY_BLOCK))](
            source, destination, table, size, source.stride(0), destination.stride(0), BLOCK=COPY_BLOCK
        )


@triton.jit
def _copy_blocks(source_ptr, destination_ptr, pairs_ptr, size, source_stride, destination_stride, BLOCK: tl.constexpr):
    """A piece of one block."""
    pair = tl.program_id(0)
    numbers = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(pairs_ptr + 2 * pair) * source_stride
    destination = tl.load(pairs_ptr + 2 * pair + 1) * destination_stride
    piece = tl.load(source_ptr + source + numbers, mask=numbers < size)
    tl.store(destination_ptr + destination + numbers, piece, mask=numbers < size)
