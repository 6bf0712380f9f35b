"""The memory behind block numbers: each layer's KV cache on the device, and its swap space on the host.

Mirrors `vllm/worker/cache_engine.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.kernels.pages import zero_pages
from minivllm.layers.platform import Platform
from minivllm.worker.swap_stream import SwapStream


class CacheEngine:
    """Allocates the KV cache, and moves whole blocks as the scheduler decides.

    Args:
        config: The model's shape.
        block_size: Tokens in a block.
        num_gpu_blocks: Blocks on the device.
        num_cpu_blocks: Blocks in host memory.
        platform: Where the cache lies, in what dtype, and how blocks are copied.

    Attributes:
        gpu_blocks, cpu_blocks: On the device and on the host, `[2 * num_layers, num_blocks, block_size, num_kv_heads, head_dim]`:
            the keys of the first layer, its values, the keys of the second, and so on.
        gpu_cache: The same memory as `gpu_blocks`, as the keys and values of each layer.
    """

    def __init__(
        self, config: ModelConfig, block_size: int, num_gpu_blocks: int, num_cpu_blocks: int, platform: Platform
    ) -> None:
        self.ops = platform.ops
        num_caches, shape = 2 * config.num_layers, (block_size, config.num_kv_heads, config.head_dim)
        self.gpu_blocks = _zeros((num_caches, num_gpu_blocks, *shape), platform.dtype, platform.device)
        self.gpu_cache = list(zip(self.gpu_blocks[0::2], self.gpu_blocks[1::2], strict=True))
        # In host memory, what belongs to a block lies together, so that a block is swapped in one piece.
        swap_space = _zeros((num_cpu_blocks, num_caches, *shape), platform.dtype, torch.device("cpu"))
        self.cpu_blocks = swap_space.transpose(0, 1)
        is_apart = platform.device.type == "cuda" and num_cpu_blocks > 0
        self._stream = SwapStream(self.gpu_blocks, swap_space, self.ops) if is_apart else None

    @staticmethod
    def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block over all layers: keys and values of `block_size` tokens."""
        return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (device block, host block) pairs."""
        if self._stream is not None:
            self._stream.swap_out(pairs)
        elif pairs:
            self.ops.copy_blocks(self.gpu_blocks, self.cpu_blocks, pairs)

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (host block, device block) pairs."""
        if self._stream is not None:
            self._stream.swap_in(pairs)
        elif pairs:
            self.ops.copy_blocks(self.cpu_blocks, self.gpu_blocks, pairs)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (source, destination) pairs on the device."""
        if pairs:
            self.ops.copy_blocks(self.gpu_blocks, self.gpu_blocks, pairs)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, because unwritten slots are multiplied by zero, and zero times NaN would be NaN."""
    return zero_pages(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
