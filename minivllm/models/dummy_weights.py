"""Random weights instead of a checkpoint: `load_format="dummy"`, for measuring where no model is at hand.

Each number is a hash of its weight's name, its row and its column. So a rank or a stage makes its own part alone, and all of them hold
parts of one and the same model, however it is divided, and on whatever device. Mirrors `initialize_dummy_weights` of
`vllm/model_executor/model_loader/weight_utils.py`.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minivllm.layers.embedding import VocabParallelEmbedding
from minivllm.layers.linear import Linear
from minivllm.layers.weights import CheckpointTensor, TensorPart, copy_rows
from minivllm.models.base import CausalLM

_32_BITS = 0xFFFFFFFF


@dataclass(frozen=True)
class RandomTensor(CheckpointTensor):
    """Stands for a tensor of a checkpoint. Numbers are uniformly distributed, and keep the size of what flows through the model:

    | weight                | mean | standard deviation |
    |-----------------------|------|--------------------|
    | matrix, embedding     | 0    | 1 / sqrt(columns)  |
    | of a norm: one row    | 1    | 0.1                |
    | bias: one row         | 0    | 0.1                |

    Attributes:
        device: Where the numbers are made.
    """

    device: torch.device

    def read(self, shape: tuple[int, ...], region: slice | tuple[slice, ...] = slice(None)) -> Tensor:
        """A region, in float32; see `CheckpointTensor.read`. It is the same whatever else is read."""
        rows, columns = region if isinstance(region, tuple) else (region, slice(None))
        num_columns = math.prod(shape[1:])
        values = self._uniform(range(shape[0])[rows], range(num_columns)[columns])
        if len(shape) == 1:
            return values.view(-1).mul_(0.1).add_(0 if self.name.endswith("bias") else 1)
        values.mul_(1 / math.sqrt(num_columns))
        return values if isinstance(region, tuple) else values.view(-1, *shape[1:])

    def _uniform(self, rows: range, columns: range) -> Tensor:
        """`[len(rows), len(columns)]`, with mean 0 and variance 1."""
        seed = int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=4).digest(), "little")
        row_keys, column_keys = (
            _mix(torch.arange(part.start, part.stop, device=self.device) ^ key)
            for part, key in ((rows, seed), (columns, seed ^ 0x5BD1E995))
        )
        bits = _mix(row_keys[:, None] ^ column_keys).bitwise_right_shift_(8)  # 24 bits: float32 has them exactly
        return bits.float().add_(0.5 - 2**23).mul_(math.sqrt(12) / 2**24)


def _mix(x: Tensor) -> Tensor:
    """Each number of 32 bits to another one, in place: a hash (the last step of MurmurHash3)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x2C1B3C6D)):
        x.bitwise_xor_(x >> shift).mul_(factor).bitwise_and_(_32_BITS)
    return x.bitwise_xor_(x >> 16)


def load_dummy_weights(model: CausalLM) -> None:
    """Fill all parameters of a model, or of this rank's and stage's part of it, with random numbers."""
    for name, parameter in list(model.named_parameters()):
        layer = model.get_submodule(name.rpartition(".")[0])
        if isinstance(layer, Linear):
            for shard_id in range(len(layer.whole_out_features)):
                layer.load_weight(parameter, _random(f"{shard_id}.{name}", parameter), shard_id)
        elif isinstance(layer, VocabParallelEmbedding):
            layer.load_weight(parameter, _random(name, parameter))
        else:
            data = parameter.data if parameter.dim() else parameter.data[None]
            copy_rows(data, TensorPart(_random(name, parameter), tuple(data.shape), range(len(data))))
    process_weights(model, {layer.head for layer in model.modules() if isinstance(layer, VocabParallelEmbedding) and layer.head})


def _random(name: str, parameter: nn.Parameter) -> RandomTensor:
    return RandomTensor("a dummy model", name, None, parameter.device)


def process_weights(model: CausalLM, processed: set[nn.Module]) -> None:
    """Let all modules bring their weights into the form that they compute with, except those that have: parts before what is made of them."""
    for module in reversed(list(model.modules())):
        if module not in processed and hasattr(module, "process_weights_after_loading"):
            module.process_weights_after_loading()
