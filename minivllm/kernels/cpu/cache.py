"""Writing new keys and values to the cache."""

from __future__ import annotations

import numpy as np
from numba import njit
from torch import Tensor

from minivllm.kernels import checks
from minivllm.kernels.cpu.launch import as_numpy, check_launch, store


@checks.RESHAPE_AND_CACHE
def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write new keys and values to their slots: see `reference.reshape_and_cache`."""
    check_launch(key_cache)
    # One layout to compile for; copied by numpy, because threads of torch would go on spinning in the way of the kernels' own.
    key_rows, value_rows = np.ascontiguousarray(as_numpy(key)), np.ascontiguousarray(as_numpy(value))
    _write(key_rows, value_rows, as_numpy(key_cache), as_numpy(value_cache), slot_mapping.numpy())


@njit(cache=True)
def _write(key, value, key_cache, value_cache, slot_mapping):
    num_tokens, num_kv_heads, head_dim = key.shape
    block_size = key_cache.shape[1]
    for token in range(num_tokens):
        slot = slot_mapping[token]
        if slot >= 0:
            block, offset = slot // block_size, slot % block_size
            for head in range(num_kv_heads):
                for d in range(head_dim):
                    key_cache[block, offset, head, d] = store(key[token, head, d], key_cache[0, 0, 0, 0])
                    value_cache[block, offset, head, d] = store(value[token, head, d], value_cache[0, 0, 0, 0])
