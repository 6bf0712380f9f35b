"""All linear layers of a model in one compiled call, with nothing between them, for models whose layers are one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numba import njit

from minivllm.kernels.cpu.decoder_layer import like, multiply
from minivllm.kernels.cpu.launch import use_threads_of_torch
from minivllm.kernels.cpu.linear import padded_rows
from minivllm.models.llama import LlamaModel


@njit(error_model="numpy", nogil=True)
def _multiply_all(
    addresses, qkv, output, gate_up, down, hidden, attended, gated, qkv_out, hidden_out, gate_up_out, num_threads
):  # fmt: skip
    first = 1 + len(qkv) + len(output)  # the order of `LayerWeights.arrays`
    for layer in range(len(addresses)):
        at = addresses[layer]
        multiply(hidden, like(qkv, at, 1), qkv_out, num_threads)
        multiply(attended, like(output, at, 1 + len(qkv)), hidden_out, num_threads)
        multiply(hidden, like(gate_up, at, first + 3), gate_up_out, num_threads)
        multiply(gated, like(down, at, first + 3 + len(gate_up)), hidden_out, num_threads)


def compile_linear_layers(model: LlamaModel, rows: int) -> Callable[[], tuple[np.ndarray, ...]] | None:
    """A function that computes all linear layers of a model except the head, for this many random rows.

    It returns what the last layer's qkv, down, and gate and up gave. None if the engine does not run its layers in one compiled call.
    """
    layers = model._get_compiled_layers() if model.platform.runs_compiled_layers else None
    if layers is None:
        return None
    attention, mlp, weights = model.layers[0].self_attn, model.layers[0].mlp, layers.weights
    hidden, attended, gated = (
        torch.randn(rows, layer.in_features).numpy() for layer in (attention.qkv_proj, attention.o_proj, mlp.down_proj)
    )
    qkv_out, hidden_out, gate_up_out = (
        np.empty((padded_rows(rows), sum(layer.out_features)), np.float32)
        for layer in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj)
    )

    def call() -> tuple[np.ndarray, ...]:
        _multiply_all(
            layers.addresses, weights.attention.qkv, weights.attention.output, weights.mlp.gate_up, weights.mlp.down, hidden,
            attended, gated, qkv_out, hidden_out, gate_up_out, use_threads_of_torch(),
        )  # fmt: skip
        return qkv_out[:rows], hidden_out[:rows], gate_up_out[:rows]

    return call
