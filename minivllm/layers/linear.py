"""Linear layers, several of them fused into one matrix product, cut into parts for several ranks, and the methods that compute them.

A pair of layers needs one sum over the ranks. The first is cut by its outputs (`ColumnParallelLinear`), so each rank has some channels of
what lies between; the second by its inputs (`RowParallelLinear`), so each rank has a part of every sum:

    x ──► W1 of rank 0 ──► its channels ──► W2 of rank 0 ──┐
      └─► W1 of rank 1 ──► its channels ──► W2 of rank 1 ──┴─► all-reduce

Shoeybi et al., 2019, "Megatron-LM" (arXiv:1909.08053), whose matrices stand the other way round: hence the names. Mirrors `vllm/model_executor/layers/linear.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.distributed.partition import split, split_heads
from minivllm.kernels.pages import zero_pages
from minivllm.layers.weights import CheckpointTensor, TensorPart, copy_rows

if TYPE_CHECKING:
    from minivllm.layers.platform import Platform

TRANSPOSED_ROWS = range(8, 48)
"""Batch sizes at which the CPU computes `(W @ x.T).T` with a weight that is not packed. Some processors are much faster with
it there than with `F.linear`, others a little slower."""


class LinearMethod(ABC):
    """How a linear layer is computed: chosen when the layer is made, one object for each layer.

    Mirrors `LinearMethodBase` of vLLM.

    Attributes:
        packed: The weight in the form that compiled blocks read (`layers.compiled`), if the method has it.
    """

    packed: Any = None

    def create_weights(self, layer: Linear) -> None:
        """Allocate the parameters that the checkpoint fills: `weight` and, if the layer has one, `bias`."""
        out_features = sum(layer.out_features)
        layer.weight = nn.Parameter(torch.empty(out_features, layer.in_features), requires_grad=False)
        layer.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if layer.has_bias else None

    def load_weight(self, parameter: nn.Parameter, first_row: int, part: TensorPart) -> None:
        """Copy a part of a checkpoint tensor into `weight` or `bias`, from a row on."""
        copy_rows(parameter.data[first_row : first_row + len(part.rows)], part)

    @abstractmethod
    def process_weights_after_loading(self, layer: Linear) -> None:
        """Bring the loaded weights into the form that `apply` reads, and release what it does not."""

    @abstractmethod
    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        """`[num_tokens, in_features]` to `[num_tokens, sum(out_features)]`."""

    def get_rows(self, outputs: Tensor) -> Tensor:
        """Rows of the weight, for an embedding that is the head as well: `[n]` to `[n, in_features]`. Only of a method that has taken the
        weight from the layer."""
        raise NotImplementedError


class Linear(nn.Module):
    """`x @ W.T + b`, all of it on every rank.

    Args:
        in_features: Width of the input.
        out_features: Width of the output, or the widths of several layers that read the same input and are fused
            into one product (`qkv_proj`, `gate_up_proj`). The output is theirs side by side.
        bias: Whether there is a bias.
        platform: Chooses the method, and knows the rank.
        rows: The outputs of each fused layer that this rank computes; all if None.
        columns: The inputs that this rank has; all if None.

    Attributes:
        in_features, out_features: Of this rank's part.
        group: The ranks.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int | list[int],
        bias: bool,
        platform: Platform,
        *,
        rows: list[range] | None = None,
        columns: range | None = None,
    ) -> None:
        super().__init__()
        self.whole_in_features = in_features
        self.whole_out_features = [out_features] if isinstance(out_features, int) else out_features
        self.rows = rows or [range(size) for size in self.whole_out_features]
        self.columns = columns
        self.in_features = in_features if columns is None else len(columns)
        self.out_features = [len(part) for part in self.rows]
        self.has_bias = bias
        self.group = platform.group
        self.method = platform.get_linear_method(self)
        self.method.create_weights(self)

    def load_weight(self, parameter: nn.Parameter, tensor: CheckpointTensor, shard_id: int = 0) -> None:
        """Fill the rows of `weight` or `bias` that belong to the fused layer `shard_id` with this rank's part of a checkpoint tensor."""
        out_features, rows = self.whole_out_features[shard_id], self.rows[shard_id]
        if parameter.dim() == 2:
            part = TensorPart(tensor, (out_features, self.whole_in_features), rows, self.columns)
        else:
            part = TensorPart(tensor, (out_features,), rows)
        self.method.load_weight(parameter, sum(self.out_features[:shard_id]), part)

    def process_weights_after_loading(self) -> None:
        """To be called once, when all weights of this layer are loaded."""
        self.method.process_weights_after_loading(self)

    def forward(self, x: Tensor) -> Tensor:
        """`[num_tokens, in_features]` to `[num_tokens, sum(out_features)]`."""
        return self.method.apply(self, x)


class MergedColumnParallelLinear(Linear):
    """Fused layers, of each of which a rank computes some outputs: rows of the weight as it is stored, columns of its transpose.

    Args:
        in_features, out_features, bias, platform: As for `Linear`.
    """

    def __init__(self, in_features: int, out_features: list[int], bias: bool, platform: Platform) -> None:
        world_size, rank = platform.group.world_size, platform.group.rank
        super().__init__(in_features, out_features, bias, platform, rows=[split(size, world_size, rank) for size in out_features])


class ColumnParallelLinear(MergedColumnParallelLinear):
    """One layer, of which a rank computes some outputs."""

    def __init__(self, in_features: int, out_features: int, bias: bool, platform: Platform) -> None:
        super().__init__(in_features, [out_features], bias, platform)


class QKVParallelLinear(Linear):
    """Queries, keys and values of a rank's heads.

    Args:
        hidden_size: Width of the input.
        head_dim: Channels of a head.
        num_heads, num_kv_heads: Of all ranks together.
        bias, platform: As for `Linear`.

    Attributes:
        num_heads, num_kv_heads: This rank's.
        query_channels: Which channels of all queries these are.
    """

    def __init__(
        self, hidden_size: int, head_dim: int, num_heads: int, num_kv_heads: int, bias: bool, platform: Platform
    ) -> None:
        heads = split_heads(num_heads, num_kv_heads, platform.group.world_size, platform.group.rank)
        query, kv = (range(part.start * head_dim, part.stop * head_dim) for part in (heads.query, heads.kv))
        sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        super().__init__(hidden_size, sizes, bias, platform, rows=[query, kv, kv])
        self.num_heads, self.num_kv_heads = len(heads.query), len(heads.kv)
        self.query_channels = query


class RowParallelLinear(Linear):
    """A layer of whose inputs a rank has some, so that the ranks' results are summed.

    Args:
        in_features, out_features, bias, platform: As for `Linear`.
        columns: The inputs that this rank has; None divides them as `ColumnParallelLinear` divides its outputs.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, platform: Platform, columns: range | None = None) -> None:
        columns = columns or split(in_features, platform.group.world_size, platform.group.rank)
        super().__init__(in_features, out_features, bias, platform, columns=columns)

    def load_weight(self, parameter: nn.Parameter, tensor: CheckpointTensor, shard_id: int = 0) -> None:
        """As for any linear layer; the bias is added once, by rank 0."""
        super().load_weight(parameter, tensor, shard_id)
        if parameter is self.bias and self.group.rank > 0:
            parameter.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """`[num_tokens, in_features]` to `[num_tokens, out_features]`, the same on all ranks."""
        return self.group.all_reduce(self.method.apply(self, x))


class UnquantizedLinearMethod(LinearMethod):
    """The weight as it is loaded, by torch."""

    def process_weights_after_loading(self, layer: Linear) -> None:
        """Nothing to do."""

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        weight, bias = layer.weight, layer.bias
        assert weight is not None
        if x.device.type == "cpu" and x.shape[0] in TRANSPOSED_ROWS:
            output = (weight @ x.t()).t().contiguous()
            return output if bias is None else output.add_(bias)
        return F.linear(x, weight, bias)


class PackedLinearMethod(LinearMethod):
    """The weight in the order in which `kernels.cpu.packed_linear` reads it.

    Args:
        packed_linear: The product.
        packed_weight: `PackedWeight`, `PackedBfloat16Weight` or `PackedInt8Weight` of `kernels.cpu`, which cannot be imported
            where Numba is missing.
    """

    def __init__(self, packed_linear: Callable[..., Tensor], packed_weight: Any) -> None:
        self.packed_linear, self.packed_weight = packed_linear, packed_weight

    def create_weights(self, layer: Linear) -> None:
        """As for any method, but in memory that is not taken as long as nobody writes to it: `load_weight` does not."""
        super().create_weights(layer)
        assert layer.weight is not None
        dtype = self.packed_weight.number_dtype
        layer.weight.data = zero_pages(tuple(layer.weight.shape), dtype if dtype.is_floating_point else torch.float32)

    def load_weight(self, parameter: nn.Parameter, first_row: int, part: TensorPart) -> None:
        """Rows of the weight go straight into the packed form, and not into the parameter."""
        if parameter.dim() == 1:
            super().load_weight(parameter, first_row, part)
            return
        if self.packed is None:
            self.packed = self.packed_weight(*parameter.shape)
            # From now on nobody can write to the parameter: it would be lost.
            parameter.data = parameter.data.new_zeros(1).expand(parameter.shape)
        for start, rows in part.read_rows():
            self.packed.set_rows(first_row + start, rows)

    def process_weights_after_loading(self, layer: Linear) -> None:
        weight, bias = take_weights(layer)
        if self.packed is None:  # something else has filled the parameter
            self.packed = self.packed_weight.of(weight, bias)
        elif bias is not None:
            self.packed.set_bias(bias)

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        return self.packed_linear(self.packed, x)

    def get_rows(self, outputs: Tensor) -> Tensor:
        rows: Tensor = self.packed.get_rows(outputs)
        return rows


def take_weights(layer: Linear) -> tuple[Tensor, Tensor | None]:
    """The loaded weight and bias, which the layer then lets go of."""
    assert layer.weight is not None
    weight, bias = layer.weight.data, None if layer.bias is None else layer.bias.data
    layer.weight = layer.bias = None
    return weight, bias
