"""The layers of a Llama model: each half of a layer as one call, or all layers.

A small model's decode step is hundreds of short kernels, and between two of them Python prepares the next one: some
microseconds if its own code and data are in the processor's cache, and several times as many after a linear layer has sent
megabytes of weights through it. On a GPU a CUDA graph takes Python out of the step; on a CPU, these functions do. They are
`LlamaDecoderLayer.forward`, line by line, and call the same kernels. Each half, attention up to `o_proj` and the MLP up to `down_proj`,
ends where tensor parallelism sums the partial results of all ranks; a single rank runs all layers in one call, or all those of its pipeline stage.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit, types
from numba.extending import overload
from torch import Tensor

from minivllm.kernels.cpu.decode_attention import _decode
from minivllm.kernels.cpu.launch import as_numpy, constant, use_threads_of_torch
from minivllm.kernels.cpu.linear import multiply_float32, padded_rows
from minivllm.kernels.cpu.linear_bfloat16 import multiply_bfloat16
from minivllm.kernels.cpu.linear_int8 import multiply_int8
from minivllm.kernels.cpu.native.memory import address, keep, pointer_to
from minivllm.kernels.cpu.prefill_attention import _prefill
from minivllm.kernels.cpu.rows import PARALLEL_ROWS, _gate, _norm, _rotate, _write_to_cache

TOKENS_AT_A_TIME = 504
"""Tokens that go through an MLP together: a multiple of `SMALL_TILE` and of `LARGE_TILE`."""
PackedArrays = tuple[np.ndarray, ...]
"""The `arrays` of a packed weight whose number of outputs is a multiple of `PANEL`."""


class AttentionWeights(NamedTuple):
    """What the attention half computes with."""

    norm: np.ndarray
    qkv: PackedArrays
    output: PackedArrays
    cos: np.ndarray
    sin: np.ndarray


class MLPWeights(NamedTuple):
    """What the MLP half computes with."""

    norm: np.ndarray
    gate_up: PackedArrays
    down: PackedArrays


class LayerWeights(NamedTuple):
    """What a layer computes with."""

    attention: AttentionWeights
    mlp: MLPWeights

    def arrays(self) -> list[np.ndarray]:
        """All of them, in the order in which `_decoder_layers` takes them."""
        attention, mlp = self
        return [
            attention.norm, *attention.qkv, *attention.output, attention.cos, attention.sin, mlp.norm, *mlp.gate_up, *mlp.down,
        ]  # fmt: skip


def attention_block(
    weights: AttentionWeights,
    x: Tensor,
    residual: Tensor | None,
    positions: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    metadata: Any,
    group: int,
    scale: float,
    window: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Norm, attention and output projection for the new tokens of all sequences.

    Args:
        weights: The layer's.
        x, residual: `[num_tokens, hidden_size]`, float32: what the layer before adds to the residual stream, and the stream; or the
            embeddings and None.
        positions: `[num_tokens]`.
        kv_cache: The layer's.
        metadata: The `layers.attention.AttentionMetadata` of the batch; not checked.
        group: Query heads that share a KV head.
        scale, window, eps: Of attention, and of the norm.

    Returns:
        What attention adds to the residual stream, and the stream, `x` added.
    """
    num_tokens = len(x)
    out, total = x.new_empty(padded_rows(num_tokens), x.shape[1]), x.new_empty(x.shape)
    _attention_block(
        x.contiguous().numpy(), _stream(x, residual), *_as_arrays(positions, kv_cache, metadata), *weights, np.float32(scale),
        window, np.float32(eps), out.numpy(), total.numpy(), *_num_threads(num_tokens), *_sizes(kv_cache, group),
    )  # fmt: skip
    return out[:num_tokens], total


def mlp_block(weights: MLPWeights, x: Tensor, residual: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Norm, SwiGLU and down projection: as `attention_block`, for what attention adds to the residual stream, and the stream."""
    num_tokens = len(x)
    out, total = x.new_empty(padded_rows(num_tokens), x.shape[1]), x.new_empty(x.shape)
    _mlp_block(
        x.contiguous().numpy(), residual.contiguous().numpy(), *weights, np.float32(eps), out.numpy(), total.numpy(),
        *_num_threads(num_tokens),
    )  # fmt: skip
    return out[:num_tokens], total


def decoder_layers(
    weights: LayerWeights,
    addresses: np.ndarray,
    last_norm: np.ndarray | None,
    x: Tensor,
    residual: Tensor | None,
    positions: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    caches: np.ndarray,
    metadata: Any,
    group: int,
    scale: float,
    window: int,
    attention_eps: float,
    mlp_eps: float,
    last_eps: float,
) -> tuple[Tensor, Tensor | None]:
    """All layers and the norm after them, for the new tokens of all sequences.

    Args:
        weights: The first layer's. Those of all layers have the same shapes and dtypes.
        addresses: `[num_layers, arrays]`, int64: where the `LayerWeights.arrays` of each layer are.
        last_norm: The weight of the norm after the layers, contiguous; None where other layers follow, in the next pipeline stage.
        x, residual: `[num_tokens, hidden_size]`, float32: the embeddings and None; or what the layer before adds to the residual stream, and the
            stream.
        kv_cache, caches: The first layer's, and where each layer's are, `[num_layers, 2]`, int64. All are contiguous, and of one shape and
            dtype.
        positions, metadata, group, scale, window, attention_eps, mlp_eps: As for the halves.
        last_eps: Of the norm after the layers.

    Returns:
        The hidden states, `[num_tokens, hidden_size]`, and None. Without a norm, what the last layer adds to the residual stream, and the stream.
    """
    out, total = x.new_empty(x.shape), x.new_empty(x.shape if last_norm is None else (0, 0))
    attention, mlp = weights
    norm = np.empty(0, np.float32) if last_norm is None else last_norm
    _decoder_layers(
        x.contiguous().numpy(), _stream(x, residual), *_as_arrays(positions, kv_cache, metadata), addresses, caches, norm, *attention, *mlp,
        np.float32(scale), window, np.float32(attention_eps), np.float32(mlp_eps), np.float32(last_eps), out.numpy(), total.numpy(), padded_rows(len(x)),
        *_num_threads(len(x)), *_sizes(kv_cache, group),
    )  # fmt: skip
    return out, total if last_norm is None else None


def _stream(x: Tensor, residual: Tensor | None) -> np.ndarray:
    """The residual stream before a layer. At the first, zeros of NumPy's: torch's would wake its threads, which go on spinning in the
    way of these kernels' own.
    """
    return np.zeros(x.shape, np.float32) if residual is None else residual.contiguous().numpy()


def _as_arrays(positions: Tensor, kv_cache: tuple[Tensor, Tensor], metadata: Any) -> tuple:
    """A batch and the cache as compiled code takes them."""
    tables = (metadata.slot_mapping, metadata.block_tables, metadata.context_lens, metadata.query_start_loc)
    return (
        positions.long().contiguous().numpy(), *map(as_numpy, kv_cache), *(x.numpy() for x in tables), bool(metadata.is_decode),
    )  # fmt: skip


def _num_threads(num_tokens: int) -> tuple[int, int]:
    """The threads for products and attention, and those for rows."""
    num_threads = use_threads_of_torch()
    return num_threads, 1 if num_tokens < PARALLEL_ROWS else num_threads


def _sizes(kv_cache: tuple[Tensor, Tensor], group: int) -> tuple[tuple, ...]:
    """What compiled code knows as constants: the channels of a head, half of them, and the heads of a group."""
    head_dim = kv_cache[0].shape[3]
    return constant(head_dim), constant(head_dim // 2), constant(group)


def multiply(x, weight, out, num_threads):
    """`x` by a packed weight, whatever its words hold."""
    raise NotImplementedError("only within compiled functions")


@overload(multiply)
def _compile_multiply(x, weight, out, num_threads):
    kernel = {types.float32: multiply_float32, types.uint32: multiply_bfloat16, types.int32: multiply_int8}[weight[0].dtype]
    return lambda x, weight, out, num_threads: kernel(x, weight, out, num_threads)


@njit(error_model="numpy", cache=True, nogil=True)  # other threads of Python run meanwhile
def _attention_block(
    x, residual, positions, key_cache, value_cache, slot_mapping, block_tables, context_lens, starts, is_decode, norm, qkv_weight,
    output_weight, cos, sin, scale, window, eps, out, total, num_threads, row_threads, channels, half_head, group,
):  # fmt: skip
    num_tokens, hidden_size = x.shape
    num_kv_heads, head_dim = key_cache.shape[2], len(channels)
    num_heads = num_kv_heads * len(group)
    q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim

    normed = np.empty((num_tokens, hidden_size), np.float32)
    _norm(
        row_threads, num_tokens, hidden_size, address(x), address(residual), address(norm), eps, address(normed),
        address(total),
    )  # fmt: skip
    qkv = np.empty((len(out), q_size + 2 * kv_size), np.float32)
    multiply(normed, qkv_weight, qkv, num_threads)

    query = np.empty((num_tokens, num_heads, head_dim), np.float32)
    key = np.empty((num_tokens, num_kv_heads, head_dim), np.float32)
    stride = q_size + 2 * kv_size
    _rotate(
        row_threads, num_tokens, address(positions), half_head, address(cos), address(sin),
        address(qkv), stride, num_heads, address(query), address(qkv) + 4 * q_size, stride, num_kv_heads, address(key),
    )  # fmt: skip
    values = address(qkv) + 4 * (q_size + kv_size)
    _write_to_cache(num_tokens, key, address(key), kv_size, values, stride, key_cache, value_cache, slot_mapping)
    keep(qkv)
    attended = np.empty((num_tokens, num_heads, head_dim), np.float32)
    if is_decode:
        _decode(query, key_cache, value_cache, block_tables, context_lens, scale, window, num_threads, attended, channels, group)
    else:
        _prefill(
            query, key_cache, value_cache, block_tables, context_lens, starts, scale, window, num_threads, attended, channels, group
        )  # fmt: skip
    multiply(attended.reshape((num_tokens, q_size)), output_weight, out, num_threads)


@njit(error_model="numpy", cache=True, nogil=True)
def _mlp_block(x, residual, norm, gate_up_weight, down_weight, eps, out, total, num_threads, row_threads):
    """Takes `TOKENS_AT_A_TIME` tokens at a time, so that what lies between the two products stays in the cache."""
    num_tokens, hidden_size = x.shape
    intermediate_size = gate_up_weight[-1].shape[0] // 2
    most = min(len(out), TOKENS_AT_A_TIME)
    normed, gated = np.empty((most, hidden_size), np.float32), np.empty((most, intermediate_size), np.float32)
    gate_up = np.empty((most, 2 * intermediate_size), np.float32)
    for start in range(0, num_tokens, TOKENS_AT_A_TIME):
        count, skipped = min(num_tokens - start, TOKENS_AT_A_TIME), 4 * start * hidden_size
        part = out[start : min(len(out), start + TOKENS_AT_A_TIME)]  # with the rows that fill up the last tile
        _norm(
            row_threads, count, hidden_size, address(x) + skipped, address(residual) + skipped, address(norm), eps, address(normed),
            address(total) + skipped,
        )  # fmt: skip
        multiply(normed[:count], gate_up_weight, gate_up[: len(part)], num_threads)
        _gate(row_threads, count, intermediate_size, address(gate_up), address(gated))
        multiply(gated[:count], down_weight, part, num_threads)
    keep(x)
    keep(residual)
    keep(gate_up)


def like(arrays, addresses, first):
    """An array, or a tuple of arrays, of the same shapes and dtypes, at `addresses[first:]`."""
    raise NotImplementedError("only within compiled functions")


@overload(like)
def _compile_like(arrays, addresses, first):
    if isinstance(arrays, types.Array):
        pointer = pointer_to(arrays.dtype)
        return lambda arrays, addresses, first: carray(pointer(addresses[first]), arrays.shape)
    if len(arrays) == 2:
        return lambda arrays, addresses, first: (like(arrays[0], addresses, first), like(arrays[1], addresses, first + 1))
    return lambda arrays, addresses, first: (
        like(arrays[0], addresses, first), like(arrays[1], addresses, first + 1), like(arrays[2], addresses, first + 2),
        like(arrays[3], addresses, first + 3),
    )  # fmt: skip


@njit(error_model="numpy", cache=True, nogil=True)
def _decoder_layers(
    x, residual, positions, key_cache, value_cache, slot_mapping, block_tables, context_lens, starts, is_decode, addresses, caches, last_norm,
    attention_norm, qkv, output, cos, sin, mlp_norm, gate_up, down, scale, window, attention_eps, mlp_eps, last_eps, result, stream, num_rows, num_threads, row_threads,
    channels, half_head, group,
):  # fmt: skip
    num_tokens, hidden_size = x.shape
    out, total = np.empty((num_rows, hidden_size), np.float32), np.empty_like(x)
    attended, attended_total = np.empty_like(out), np.empty_like(total)
    for layer in range(len(addresses)):
        at, cache = addresses[layer], caches[layer]
        first = 1 + len(qkv) + len(output)
        _attention_block(
            x, residual, positions, like(key_cache, cache, 0), like(value_cache, cache, 1), slot_mapping, block_tables, context_lens,
            starts, is_decode, like(attention_norm, at, 0), like(qkv, at, 1), like(output, at, 1 + len(qkv)), like(cos, at, first),
            like(sin, at, first + 1), scale, window, attention_eps, attended, attended_total, num_threads, row_threads, channels, half_head, group,
        )  # fmt: skip
        _mlp_block(
            attended[:num_tokens], attended_total, like(mlp_norm, at, first + 2), like(gate_up, at, first + 3),
            like(down, at, first + 3 + len(gate_up)), mlp_eps, out, total, num_threads, row_threads,
        )  # fmt: skip
        x, residual = out[:num_tokens], total
    if len(last_norm):
        _norm(
            row_threads, num_tokens, hidden_size, address(x), address(residual), address(last_norm), last_eps, address(result),
            address(attended_total),
        )  # fmt: skip
    else:
        result[:], stream[:] = x, residual
    keep(out)
    keep(total)
    keep(attended_total)
