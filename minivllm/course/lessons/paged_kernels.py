"""The basis of lesson 06: kernels over a paged cache in either of two languages, launched the same way.

A learner writes each kernel in Triton or as Numba loops. Both take the same data; only the form of the arguments differs. A Triton kernel is a program
that is launched once for each piece of the work, and takes addresses. Loops are one call that does all of the work, and take NumPy arrays.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from minivllm.errors import KernelError

TILE = 16
"""New tokens that a program of a Triton prefill kernel takes."""


class NoTriton(ModuleType):
    """A stand-in for Triton and its language where it is missing: kernels can be defined, and raise when launched."""

    constexpr = int

    def jit(self, function: Any) -> Any:
        """Return the function; launching it raises."""

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise KernelError("Triton is not available on this system: write the loops.")

        refuse.__name__ = function.__name__
        refuse.py_func = function  # type: ignore[attr-defined]
        return refuse


def find_triton() -> tuple[Any, Any]:
    """Triton and its language; where it is missing, as on macOS, a stand-in."""
    try:
        import triton
        import triton.language
    except ImportError:
        missing = NoTriton("triton")
        return missing, missing
    return triton, triton.language


def is_triton(kernel: Any) -> bool:
    """Whether a kernel is Triton's, compiled or interpreted, and not loops."""
    return type(kernel).__module__.split(".")[0] == "triton"


def written(*kernels: Any) -> Any:
    """The first of these that is no longer a stub; the first if all of them are."""
    return next((kernel for kernel in kernels if not _is_stub(kernel)), kernels[0])


def function_of(kernel: Any) -> Any:
    """The Python function behind a kernel made by Triton, by Numba, or neither."""
    return getattr(kernel, "fn", None) or getattr(kernel, "py_func", kernel)


def _is_stub(kernel: Any) -> bool:
    code = getattr(function_of(kernel), "__code__", None)
    return code is not None and "NotImplementedError" in code.co_names and "write this" in code.co_consts


def launch_write(kernel: Any, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write new keys and values to their slots, with a learner's kernel.

    Args:
        kernel: As the exercise specifies it.
        key, value, key_cache, value_cache, slot_mapping: See `reference.reshape_and_cache`.
    """
    if is_triton(kernel):
        size = key_cache.shape[2] * key_cache.shape[3]
        caches = key_cache, value_cache
        kernel[(len(key),)](*caches, key.contiguous(), value.contiguous(), slot_mapping, size, BLOCK=power_of_2(size))
        return
    arrays = [_as_array(cache) for cache in (key_cache, value_cache)]
    kernel(*arrays, _as_array(key), _as_array(value), _as_array(slot_mapping))
    for cache, array in zip((key_cache, value_cache), arrays, strict=True):
        if array.__array_interface__["data"][0] != cache.data_ptr():  # it was a copy
            cache.copy_(torch.from_numpy(array))


def launch_decode(
    kernel: Any,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    part_len: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of one new token per sequence, each context in parts, with a learner's kernel.

    Args:
        kernel: As the exercise specifies it.
        query, key_cache, value_cache, block_tables, context_lens, scale: See `reference.paged_decode_attention`.
        part_len: Tokens of a part, a multiple of the block size.

    Returns:
        `maxima`, `totals` `[num_seqs, num_heads, num_parts]` and `outputs` `[num_seqs, num_heads, num_parts, head_dim]`, all float32.

    Raises:
        KernelError: `part_len` is no such multiple.
    """
    num_seqs, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    if part_len < 1 or part_len % block_size:
        raise KernelError(f"part_len is {part_len}, but must be a multiple of the block size, {block_size}.")
    num_parts = max(1, -(-block_tables.shape[1] * block_size // part_len))
    maxima = torch.full((num_seqs, num_heads, num_parts), torch.nan, dtype=torch.float32, device=query.device)
    totals, outputs = maxima.clone(), maxima[..., None].repeat(1, 1, 1, head_dim)
    context = key_cache, value_cache, block_tables, context_lens
    if is_triton(kernel):
        group = num_heads // num_kv_heads
        kernel[(num_seqs, num_kv_heads, num_parts)](
            maxima, totals, outputs, query.contiguous(), *context, scale, block_tables.shape[1], part_len,
            NUM_KV_HEADS=num_kv_heads, GROUP=group, ROWS=power_of_2(group), HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        )  # fmt: skip
        return maxima, totals, outputs
    results = [_as_array(result) for result in (maxima, totals, outputs)]
    kernel(*results, _as_array(query), *map(_as_array, context), scale, part_len)
    maxima, totals, outputs = (torch.from_numpy(result).to(query.device) for result in results)
    return maxima, totals, outputs


def launch_prefill(
    kernel: Any,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> Tensor:
    """Causal attention of a ragged batch, with a learner's kernel.

    Args:
        kernel: As the exercise specifies it.
        query, key_cache, value_cache, block_tables, context_lens, query_start_loc, scale: See `reference.paged_prefill_attention`.

    Returns:
        `[num_tokens, num_heads, head_dim]`, of the query's dtype; zeros for padding.
    """
    _, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    context = key_cache, value_cache, block_tables, context_lens, query_start_loc
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    if is_triton(kernel):
        longest = int(query_start_loc.diff().max()) if len(context_lens) else 0
        kernel[(len(context_lens), -(-longest // TILE), num_heads)](
            output, query.contiguous(), *context, scale, block_tables.shape[1],
            NUM_HEADS=num_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, TILE=TILE,
        )  # fmt: skip
        return output
    result = _as_array(output)
    kernel(result, _as_array(query), *map(_as_array, context), scale)
    return torch.from_numpy(result).to(query)


def power_of_2(number: int) -> int:
    """The smallest power of 2 that is at least the number."""
    return 1 << max(0, number - 1).bit_length()


def _as_array(x: Tensor) -> Any:
    """The tensor for loops: itself where NumPy can see it, otherwise a copy. 16-bit numbers become float32."""
    x = x.detach().cpu().contiguous()
    return (x.float() if x.is_floating_point() else x).numpy()
