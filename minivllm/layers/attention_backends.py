"""The attention backends, and which one serves where.

`torch` runs everywhere and copies the cached blocks of a batch next to each other before it attends; `cpu` and `triton`
walk the block tables.
"""

from __future__ import annotations

import importlib.util
import logging
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.errors import ConfigError, KernelError
from minivllm.kernels import has_cpu_kernels, reference
from minivllm.layers.attention import AttentionBackend, AttentionMetadata, KVCache

logger = logging.getLogger(__name__)

MAX_GATHERED_TOKENS = 2**16
"""Cached tokens that the torch backend copies at a time when it decodes."""
OLDEST_CAPABILITY = (8, 0)
"""The compute capability (Ampere) from which on a GPU has the shared memory that the tiles of the Triton kernels take."""


class TorchAttentionBackend(AttentionBackend):
    """The reference in plain torch."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        key_cache, value_cache = kv_cache
        reference.reshape_and_cache(key, value, key_cache, value_cache, metadata.slot_mapping)
        if metadata.is_decode:
            # A few sequences at a time, so that the copies of their blocks stay within bounds.
            rows = max(1, MAX_GATHERED_TOKENS // (metadata.block_tables.shape[1] * key_cache.shape[1]))
            parts = zip(query.split(rows), metadata.block_tables.split(rows), metadata.context_lens.split(rows), strict=True)
            outputs = [
                reference.paged_decode_attention(q, key_cache, value_cache, block_tables, context_lens, self.scale)
                for q, block_tables, context_lens in parts
            ]
            return torch.cat(outputs)
        return reference.paged_prefill_attention(
            query, key_cache, value_cache, metadata.block_tables, metadata.context_lens, metadata.query_start_loc, self.scale
        )


class CPUAttentionBackend(AttentionBackend):
    """Loops compiled by Numba, for attention and for what goes on around it."""

    @classmethod
    def load_ops(cls) -> ModuleType:
        from minivllm.kernels import cpu  # here, because Numba may be missing

        return cpu

    def forward(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        if metadata.is_decode:
            return _attend(self.ops, query, key, value, kv_cache, metadata, self.scale)
        self.ops.reshape_and_cache(key, value, *kv_cache, metadata.slot_mapping)
        # Whole prompts need nothing from the cache, and torch's product of a prompt with itself is the faster one.
        starts, lengths = metadata.query_start_loc.tolist(), metadata.context_lens.tolist()
        output = torch.empty_like(query)
        cached = []
        for i, length in enumerate(lengths):
            start, end = starts[i : i + 2]
            if length > end - start:
                cached.append(i)
            elif length > 0:
                keys, values = key[start:end].transpose(0, 1), value[start:end].transpose(0, 1)
                output[start:end] = reference.causal_attention(query[start:end], keys, values, self.scale)
        if cached:
            rows = [row for i in cached for row in range(starts[i], starts[i + 1])]
            query_start_loc = F.pad(metadata.query_start_loc.diff()[cached].cumsum(0), (1, 0))
            output[rows] = self.ops.paged_prefill_attention(
                query[rows], *kv_cache, metadata.block_tables[cached], metadata.context_lens[cached], query_start_loc, self.scale
            )
        return output


class TritonAttentionBackend(AttentionBackend):
    """Triton kernels for attention and for all that goes on around it; on a CPU they are interpreted."""

    @classmethod
    def load_ops(cls) -> ModuleType:
        from minivllm.kernels import triton  # here, because Triton may be missing

        return triton

    @classmethod
    def supports_cuda_graphs(cls) -> bool:
        return not cls.load_ops().INTERPRETED  # the interpreter copies tensors to the host

    def forward(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        return _attend(self.ops, query, key, value, kv_cache, metadata, self.scale)


def _attend(
    kernels: ModuleType,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
) -> Tensor:
    key_cache, value_cache = kv_cache
    kernels.reshape_and_cache(key, value, key_cache, value_cache, metadata.slot_mapping)
    tables, lengths = metadata.block_tables, metadata.context_lens
    if metadata.is_decode:
        return kernels.paged_decode_attention(query, key_cache, value_cache, tables, lengths, scale)
    return kernels.paged_prefill_attention(query, key_cache, value_cache, tables, lengths, metadata.query_start_loc, scale)


BACKENDS: dict[str, type[AttentionBackend]] = {
    "torch": TorchAttentionBackend,
    "cpu": CPUAttentionBackend,
    "triton": TritonAttentionBackend,
}


def get_attention_backend(backend: str | type, device: torch.device) -> type[AttentionBackend]:
    """The backend class to use on a device.

    Args:
        backend: "auto", a name, or a class of one's own.
        device: Where the model lies. "auto" takes Triton on a GPU (if that is not too old) and Numba on a CPU, or torch
            where they are missing.

    Raises:
        ConfigError: There is no such backend, or it cannot serve here.
    """
    if isinstance(backend, type) and issubclass(backend, AttentionBackend):
        return backend
    if backend == "auto":
        backend = _choose_backend(device)
    if not isinstance(backend, str) or backend not in BACKENDS:
        names = ", ".join(map(repr, BACKENDS))
        raise ConfigError(
            f"attention_backend is {backend!r}, but must be 'auto', one of {names}, or an AttentionBackend subclass."
        )
    if backend == "cpu":
        return _get_cpu_backend(device)
    if backend == "triton":
        _check_triton(device)
    return BACKENDS[backend]


def _choose_backend(device: torch.device) -> str:
    """The name of the fastest backend that a device can have."""
    if device.type == "cpu":
        return "cpu" if has_cpu_kernels() else "torch"
    has_room = torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY
    return "triton" if importlib.util.find_spec("triton") and has_room else "torch"


def _get_cpu_backend(device: torch.device) -> type[AttentionBackend]:
    if device.type != "cpu":
        raise ConfigError(f"attention_backend is 'cpu', but the model is to run on {device.type}: use 'triton' or 'auto'.")
    if not has_cpu_kernels():
        logger.warning("Numba is not installed, so attention_backend 'torch' stands in for 'cpu': `pip install numba` is faster.")
        return TorchAttentionBackend
    return CPUAttentionBackend


_said_interpreted = False


def _check_triton(device: torch.device) -> None:
    """Say that interpreted kernels are slow, once, or why there are none for this device."""
    global _said_interpreted
    try:
        interpreted = TritonAttentionBackend.load_ops().INTERPRETED
    except KernelError as error:
        raise ConfigError(str(error)) from None
    if device.type != "cuda" and not interpreted:
        raise ConfigError(
            "attention_backend is 'triton' on a CPU, but Triton's kernels were compiled for the GPU of this machine: use 'cpu', "
            "or set TRITON_INTERPRET=1 in the environment before Python starts."
        )
    if interpreted and not _said_interpreted:
        _said_interpreted = True
        logger.warning("The Triton kernels run interpreted: correct, but very slow.")
