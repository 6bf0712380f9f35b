"""The matrix products of one rank's step, without the rest of it: what lesson 12 predicts the time of a step from."""

from __future__ import annotations

import time

import torch

from minivllm.config import ModelConfig
from minivllm.distributed.parallel_state import GroupCoordinator, SingleRank
from minivllm.distributed.partition import split
from minivllm.layers.linear import Linear, MergedColumnParallelLinear, QKVParallelLinear
from minivllm.layers.platform import Platform

NUM_LAYERS = 8
"""As many layers' weights are held: more than the processor's cache, so that they come from memory, as in a step."""


class Products:
    """This rank's part of the weights of some layers and of the head, with made-up numbers, and their products. Their results are not summed.

    Args:
        config: Of the model.
        world_size, rank: How many ranks there would be, and which one this is.
    """

    def __init__(self, config: ModelConfig, world_size: int, rank: int) -> None:
        group = SingleRank()
        group.world_size, group.rank = world_size, rank
        self._num_layers = config.num_layers
        self._platform = Platform(torch.device("cpu"), torch.float32, group=group)
        hidden, width, head_dim = config.hf_config["hidden_size"], config.hf_config["intermediate_size"], config.head_dim
        self._layers: list[tuple[list[Linear], list[Linear]]] = []
        for _ in range(NUM_LAYERS):
            qkv = QKVParallelLinear(hidden, head_dim, config.num_heads, config.num_kv_heads, False, self._platform)
            out = Linear(config.num_heads * head_dim, hidden, False, self._platform, columns=qkv.query_channels)
            up = MergedColumnParallelLinear(hidden, [width, width], False, self._platform)
            down = Linear(width, hidden, False, self._platform, columns=split(width, world_size, rank))
            self._layers.append(([qkv, out], [up, down]))
        self._head = [Linear(hidden, config.vocab_size, False, self._platform, rows=[split(config.vocab_size, world_size, rank)])]
        for layer in [*(layer for halves in self._layers for half in halves for layer in half), *self._head]:
            layer.weight.data.fill_(0.01)
            layer.process_weights_after_loading()

    @torch.inference_mode()
    def run(self, rows: int, group: GroupCoordinator) -> float:
        """Seconds of all products of a step with so many rows. The ranks meet after each half of a layer, as in a step, but sum only one number."""
        inputs = {
            layer.in_features: torch.randn(rows, layer.in_features) for half in (*self._layers[0], self._head) for layer in half
        }
        one = torch.zeros(1)
        group.all_reduce(one)  # begin together
        start = time.perf_counter()
        for half in (half for halves in self._layers for half in halves):
            for layer in half:
                layer(inputs[layer.in_features])
            group.all_reduce(one)
        middle = time.perf_counter()
        self._head[0](inputs[self._head[0].in_features])
        group.all_reduce(one)
        return (middle - start) * self._num_layers / NUM_LAYERS + time.perf_counter() - middle
