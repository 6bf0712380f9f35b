"""The memory behind block numbers: each layer's KV cache on the device, and its swap space on the host.

Mirrors `vllm/worker/cache_engine.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.kernels.pages import zero_pages
from minivllm.layers.attention import KVCache
from minivllm.layers.platform import Platform


class CacheEngine:
    """Allocates the KV cache, and moves whole blocks as the scheduler decides.

    Args:
        config: The model's shape.
        block_size: Tokens in a block.
        num_gpu_blocks: Blocks on the device.
        num_cpu_blocks: Blocks in host memory.
        platform: Where the cache lies, in what dtype, and how blocks are copied.
    """

    def __init__(
        self, config: ModelConfig, block_size: int, num_gpu_blocks: int, num_cpu_blocks: int, platform: Platform
    ) -> None:
        def make(num_blocks: int, device: torch.device) -> list[KVCache]:
            shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
            return [
                (_zeros(shape, platform.dtype, device), _zeros(shape, platform.dtype, device)) for _ in range(config.num_layers)
            ]

        self.ops = platform.ops
        self.gpu_cache = make(num_gpu_blocks, platform.device)
        self.cpu_cache = make(num_cpu_blocks, torch.device("cpu"))

    @staticmethod
    def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block over all layers: keys and values of `block_size` tokens."""
        return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (device block, host block) pairs."""
        self._swap(self.gpu_cache, self.cpu_cache, pairs)

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (host block, device block) pairs."""
        self._swap(self.cpu_cache, self.gpu_cache, pairs)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (source, destination) pairs on the device."""
        if pairs:
            for key_cache, value_cache in self.gpu_cache:
                self.ops.copy_blocks(key_cache, pairs)
                self.ops.copy_blocks(value_cache, pairs)

    def _swap(self, source: list[KVCache], destination: list[KVCache], pairs: list[tuple[int, int]]) -> None:
        if pairs:
            for (source_key, source_value), (key, value) in zip(source, destination, strict=True):
                self.ops.swap_blocks(source_key, key, pairs)
                self.ops.swap_blocks(source_value, value, pairs)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, because unwritten slots are multiplied by zero, and zero times NaN would be NaN."""
    return zero_pages(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
