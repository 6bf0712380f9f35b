"""The attention backends, and which one runs where.

`torch` runs everywhere and gathers the cached blocks of a batch before it attends; `cpu` and `triton` walk the block tables.
"""

from __future__ import annotations

import logging
from functools import cache
from itertools import pairwise
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.errors import ConfigError, KernelError
from minivllm.kernels import reference
from minivllm.kernels.ops import has_cpu_kernels, load_platform_kernels, load_triton
from minivllm.layers.attention import AttentionBackend, AttentionMetadata, KVCache

logger = logging.getLogger(__name__)

MAX_GATHERED_TOKENS = 2**16
"""Cached tokens that the torch backend gathers at a time when it decodes."""
LONG_PROMPT = 768
"""Whole prompts of at least this many tokens are attended to by torch on a CPU: they need nothing from the cache, and torch is faster
there. With shorter ones it is slower, because its threads go on spinning afterwards, in the way of the other kernels' threads."""


class TorchAttentionBackend(AttentionBackend):
    """Plain torch."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        key_cache, value_cache = kv_cache
        self.ops.reshape_and_cache(key, value, key_cache, value_cache, metadata.slot_mapping)
        if metadata.is_decode:
            # A few sequences at a time, to bound the memory of the gathered blocks.
            rows = max(1, MAX_GATHERED_TOKENS // (metadata.block_tables.shape[1] * key_cache.shape[1]))
            parts = zip(query.split(rows), metadata.block_tables.split(rows), metadata.context_lens.split(rows), strict=True)
            outputs = [
                self.ops.paged_decode_attention(q, key_cache, value_cache, block_tables, context_lens, self.scale)
                for q, block_tables, context_lens in parts
            ]
            return torch.cat(outputs)
        return self.ops.paged_prefill_attention(
            query, key_cache, value_cache, metadata.block_tables, metadata.context_lens, metadata.query_start_loc, self.scale
        )


class CPUAttentionBackend(AttentionBackend):
    """Loops compiled by Numba.

    Decode steps of a Llama layer run `layers.compiled` instead of `forward`, also in a subclass that leaves `forward` as it
    is. A subclass with a `forward` of its own is called for every layer and step.
    """

    @classmethod
    def load_ops(cls) -> ModuleType:
        from minivllm.kernels import cpu  # here, because Numba may be missing

        return cpu

    def forward(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        if len(query) < LONG_PROMPT:
            return attend(self, query, key, value, kv_cache, metadata)
        starts, lengths = metadata.query_start_loc.tolist(), metadata.context_lens.tolist()
        new_tokens = [end - start for start, end in pairwise(starts)]
        is_long = [new == length >= LONG_PROMPT for new, length in zip(new_tokens, lengths, strict=True)]
        if not any(is_long):
            return attend(self, query, key, value, kv_cache, metadata)
        self.ops.reshape_and_cache(key, value, *kv_cache, metadata.slot_mapping)
        output = torch.zeros_like(query)
        for i in (i for i, long in enumerate(is_long) if long):
            start, end = starts[i : i + 2]
            # As the cache has them, which may be in fewer bits.
            keys, values = (new[start:end].to(kv_cache[0].dtype).to(new.dtype).transpose(0, 1) for new in (key, value))
            output[start:end] = reference.causal_attention(query[start:end], keys, values, self.scale)
        others = [i for i, long in enumerate(is_long) if not long]
        if others:
            rows = [row for i in others for row in range(starts[i], starts[i + 1])]
            query_start_loc = F.pad(metadata.query_start_loc.diff()[others].cumsum(0), (1, 0))
            output[rows] = self.ops.paged_prefill_attention(
                query[rows], *kv_cache, metadata.block_tables[others], metadata.context_lens[others], query_start_loc, self.scale
            )
        return output


class TritonAttentionBackend(AttentionBackend):
    """Triton kernels; on a CPU they are interpreted."""

    @classmethod
    def load_ops(cls) -> ModuleType:
        return load_triton()

    @classmethod
    def supports_cuda_graphs(cls) -> bool:
        return not cls.load_ops().INTERPRETED  # the interpreter copies tensors to the host

    def forward(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        return attend(self, query, key, value, kv_cache, metadata)


def attend(
    backend: AttentionBackend, query: Tensor, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
) -> Tensor:
    """Write to the cache and attend with kernels that walk the block tables; see `AttentionBackend.forward`."""
    ops, tables, lengths = backend.ops, metadata.block_tables, metadata.context_lens
    ops.reshape_and_cache(key, value, *kv_cache, metadata.slot_mapping)
    if metadata.is_decode:
        return ops.paged_decode_attention(query, *kv_cache, tables, lengths, backend.scale)
    return ops.paged_prefill_attention(query, *kv_cache, tables, lengths, metadata.query_start_loc, backend.scale)


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
        raise ConfigError(
            f"attention_backend is {backend!r}, but must be 'auto', one of {names}, or an AttentionBackend subclass."
        )
    if backend == "cpu":
        if device.type != "cpu":
            raise ConfigError(f"attention_backend is 'cpu', but the model is to run on {device.type}: use 'triton' or 'auto'.")
        if not has_cpu_kernels():
            logger.warning(
                "Numba is not installed, so attention_backend is 'torch' instead of 'cpu': `pip install numba` is faster."
            )
            return TorchAttentionBackend
    if backend == "triton":
        _check_triton(device)
    return BACKENDS[backend]


def _check_triton(device: torch.device) -> None:
    """Warn that interpreted kernels are slow, or raise a ConfigError that says why there are none for this device."""
    try:
        interpreted = TritonAttentionBackend.load_ops().INTERPRETED
    except KernelError as error:
        raise ConfigError(str(error)) from None
    if interpreted:
        _warn_of_interpreter()
    elif device.type != "cuda":
        raise ConfigError(
            "attention_backend is 'triton' on a CPU, but Triton's kernels were compiled for the GPU of this machine: use 'cpu', "
            "or set TRITON_INTERPRET=1 in the environment before Python starts."
        )


@cache
def _warn_of_interpreter() -> None:
    logger.warning("The Triton kernels run interpreted: correct, but very slow.")
