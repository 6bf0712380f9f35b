"""Linear layers: fused into one matrix product where they share an input, and sharded across ranks.

A pair of layers needs one sum over the ranks. The first is split by its outputs (`ColumnParallelLinear`), so each rank has some channels of
what lies between; the second by its inputs (`RowParallelLinear`), so each rank has a part of every sum:

    x ──► W1 of rank 0 ──► its channels ──► W2 of rank 0 ──┐
      └─► W1 of rank 1 ──► its channels ──► W2 of rank 1 ──┴─► all-reduce

Shoeybi et al., 2019, "Megatron-LM" (arXiv:1909.08053), whose matrices are the transposes of these: hence the names. Mirrors
`vllm/model_executor/layers/linear.py`.
"""

from __future__ import annotations

from torch import Tensor, nn

from minivllm.distributed.partition import split, split_heads
from minivllm.layers.platform import Platform
from minivllm.layers.weights import CheckpointTensor, TensorPart


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
        self.group = platform.group
        self.method = platform.make_linear_method()
        self.method.create_weights(self, sum(self.out_features), self.in_features, bias)

    def load_weight(self, parameter: nn.Parameter, tensor: CheckpointTensor, shard_id: int = 0) -> None:
        """Fill the rows of `weight` or `bias` that belong to the fused layer `shard_id` with this rank's part of a checkpoint tensor."""
        self._load_rows(parameter, tensor, shard_id, self.whole_out_features[shard_id], self.rows[shard_id])

    def load_fused_weight(self, parameter: nn.Parameter, tensor: CheckpointTensor) -> None:
        """Fill all rows from a checkpoint that has the layers fused, too (Phi-3): there, the outputs of each are rows one below another."""
        for shard_id, rows in enumerate(self.rows):
            first = sum(self.whole_out_features[:shard_id])
            rows = range(first + rows.start, first + rows.stop)
            self._load_rows(parameter, tensor, shard_id, sum(self.whole_out_features), rows)

    def _load_rows(
        self, parameter: nn.Parameter, tensor: CheckpointTensor, shard_id: int, out_features: int, rows: range
    ) -> None:
        """Fill the rows of a fused layer with `rows` of a tensor that has `out_features`."""
        if parameter.dim() == 2:
            part = TensorPart(tensor, (out_features, self.whole_in_features), rows, self.columns)
        else:
            part = TensorPart(tensor, (out_features,), rows)
        self.method.load_weight(parameter, sum(self.out_features[:shard_id]), part)

    def process_weights_after_loading(self) -> None:
        """Call once, when all weights of this layer are loaded."""
        self.method.process_weights_after_loading(self)

    def forward(self, x: Tensor) -> Tensor:
        """`[num_tokens, in_features]` to `[num_tokens, sum(out_features)]`."""
        return self.method.apply(self, x)


class MergedColumnParallelLinear(Linear):
    """Fused column-parallel layers: each rank computes a slice of every output.

    A slice of the outputs is rows of the weight as it is stored, and columns of its transpose. The arguments are those of `Linear`.
    """

    def __init__(self, in_features: int, out_features: list[int], bias: bool, platform: Platform) -> None:
        world_size, rank = platform.group.world_size, platform.group.rank
        super().__init__(in_features, out_features, bias, platform, rows=[split(size, world_size, rank) for size in out_features])


class ColumnParallelLinear(MergedColumnParallelLinear):
    """One column-parallel layer."""

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
    """Split by input: each rank holds a slice, and an all-reduce sums the partial outputs.

    The arguments are those of `Linear`; without `columns`, inputs are divided as `ColumnParallelLinear` divides its outputs.
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
