"""The attention backends, and which one runs where.

`torch` runs everywhere and gathers the cached blocks of a batch before it attends; `cpu` and `triton` walk the block tables.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from minivllm.errors import ConfigError, KernelError
from minivllm.kernels.ops import has_cpu_kernels, load_platform_kernels, load_triton
from minivllm.layers.attention import AttentionBackend, AttentionMetadata, KVCache

logger = logging.getLogger(__name__)

MAX_GATHERED_TOKENS = 2**16
"""Cached tokens that the torch backend gathers at a time when it decodes."""


class TorchAttentionBackend(AttentionBackend):
    """Plain torch."""

    @classmethod
    def supports_windows(cls) -> bool:
        return True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        key_cache, value_cache = kv_cache
        self.ops.reshape_and_cache(key, value, key_cache, value_cache, metadata.slot_mapping)
        if metadata.is_decode:
            # A few sequences at a time, to bound the memory of the gathered blocks.
            num_gathered = metadata.block_tables.shape[1] * key_cache.shape[1]
            rows = max(1, MAX_GATHERED_TOKENS // min(num_gathered, (self.window or num_gathered) + 2 * key_cache.shape[1]))
            parts = zip(query.split(rows), metadata.block_tables.split(rows), metadata.context_lens.split(rows), strict=True)
            outputs = [
                self.ops.paged_decode_attention(
                    q, key_cache, value_cache, block_tables, context_lens, self.scale, *self.window_argument
                )
                for q, block_tables, context_lens in parts
            ]
            return torch.cat(outputs)
        return self.ops.paged_prefill_attention(
            query, key_cache, value_cache, metadata.block_tables, metadata.context_lens, metadata.query_start_loc, self.scale,
            *self.window_argument,
        )  # fmt: skip


class CPUAttentionBackend(AttentionBackend):
    """Loops compiled by Numba.

    In a Llama model, `models.compiled_llama` does the work of `forward`, unless a subclass overrides it: then it is called for every
    layer and step.
    """

    @classmethod
    def load_ops(cls) -> ModuleType:
        from minivllm.kernels import cpu  # here, because Numba may be missing

        return cpu

    @classmethod
    def supports_windows(cls) -> bool:
        return True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        return attend(self, query, key, value, kv_cache, metadata)


class TritonAttentionBackend(AttentionBackend):
    """Triton kernels; on a CPU they are interpreted."""

    @classmethod
    def load_ops(cls) -> ModuleType:
        return load_triton()

    @classmethod
    def supports_cuda_graphs(cls) -> bool:
        return not cls.load_ops().INTERPRETED  # the interpreter copies tensors to the host

    @classmethod
    def supports_windows(cls) -> bool:
        return True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        return attend(self, query, key, value, kv_cache, metadata)


def attend(
    backend: AttentionBackend, query: Tensor, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
) -> Tensor:
    """Write to the cache and attend with kernels that walk the block tables; see `AttentionBackend.forward`."""
    ops, tables, lengths, window = backend.ops, metadata.block_tables, metadata.context_lens, backend.window_argument
    ops.reshape_and_cache(key, value, *kv_cache, metadata.slot_mapping)
    if metadata.is_decode:
        return ops.paged_decode_attention(query, *kv_cache, tables, lengths, backend.scale, *window)
    return ops.paged_prefill_attention(query, *kv_cache, tables, lengths, metadata.query_start_loc, backend.scale, *window)


BACKENDS: dict[str, type[AttentionBackend]] = {
    "torch": TorchAttentionBackend,
    "cpu": CPUAttentionBackend,
    "triton": TritonAttentionBackend,
}


def get_attention_backend(backend: str | type, device: torch.device) -> type[AttentionBackend]:
    """The backend class to use on a device.

    Args:
        backend: "auto", a name, or a class of the user's own.
        device: Where the model lies. "auto" takes the backend whose kernels are the fastest there.

    Raises:
        ConfigError: There is no such backend, or it cannot run here.
    """
    if isinstance(backend, type) and issubclass(backend, AttentionBackend):
        return backend
    if backend == "auto":
        implementation = load_platform_kernels(device).__name__.rpartition(".")[2]
        return BACKENDS.get(implementation, TorchAttentionBackend)
    if not isinstance(backend, str) or backend not in BACKENDS:
        names = ", ".join(map(repr, BACKENDS))
        raise ConfigError(f"attention_backend is {backend!r}, but must be 'auto', one of {names}, or an AttentionBackend class.")
    if backend == "cpu":
        if device.type != "cpu":
            raise ConfigError(f"attention_backend is 'cpu', but the model is to run on {device.type}: use 'triton' or 'auto'.")
        if not has_cpu_kernels():
            logger.warning("Numba is not installed, so attention_backend is 'torch' instead of 'cpu': run `pip install numba`.")
            return TorchAttentionBackend
    if backend == "triton":
        _check_triton(device)
    return BACKENDS[backend]


def honours_windows(backend: type[AttentionBackend]) -> bool:
    """Whether a backend says so of the `forward` that it has, not of one that it has inherited from and replaced."""
    declares_in, computes_in = (next(c for c in backend.__mro__ if name in vars(c)) for name in ("supports_windows", "forward"))
    return backend.supports_windows() and issubclass(declares_in, computes_in)


def _check_triton(device: torch.device) -> None:
    """Warn that interpreted kernels are slow, or raise a ConfigError that says why there are none for this device."""
    try:
        interpreted = TritonAttentionBackend.load_ops().INTERPRETED
    except KernelError as error:
        raise ConfigError(str(error)) from None
    if interpreted:
        _warn_once("The Triton kernels run interpreted: correct, but very slow.")
    elif device.type != "cuda":
        raise ConfigError(
            "attention_backend is 'triton' on a CPU, but Triton's kernels were compiled for the GPU of this machine: use 'cpu', "
            "or set TRITON_INTERPRET=1 in the environment before Python starts."
        )


_warn_once = cache(logger.warning)
