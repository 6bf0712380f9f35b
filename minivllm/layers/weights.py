"""Checkpoint tensors, read by slices, so that a rank reads no more than its part.

Mirrors `vllm/model_executor/model_loader/weight_utils.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from minivllm.errors import ModelLoadError

ROWS_AT_A_TIME = 1024
"""How much of a weight is read at once: a second copy of the largest would be the peak of memory."""


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint. What is not asked for is not read.

    Attributes:
        model_name, name: For messages.
        source: A slice of safetensors or a torch tensor.
    """

    model_name: str
    name: str
    source: Any

    def read(self, shape: tuple[int, ...], region: slice | tuple[slice, ...] = slice(None)) -> Tensor:
        """A region of the tensor, all of it if none is given.

        Args:
            shape: What the config says that the whole tensor has.
            region: The rows, or rows and columns.

        Raises:
            ModelLoadError: The tensor has another shape, or is not of floats.
        """
        source = self.source
        found = source.shape if isinstance(source, Tensor) else source.get_shape() if hasattr(source, "get_shape") else None
        if found is not None and tuple(found) != shape:
            raise ModelLoadError(
                f"The weights of {self.model_name} do not fit its config: {self.name} has shape {list(found)}, "
                f"but the config asks for {list(shape)}."
            )
        tensor = None if found is None else source[region]
        if tensor is None or not tensor.is_floating_point():
            kind = type(source).__name__ if tensor is None else str(tensor.dtype).removeprefix("torch.")
            raise ModelLoadError(
                f"The weights of {self.model_name} hold {self.name} as {kind}, which is not supported: only floats are."
            )
        return tensor


@dataclass(frozen=True)
class TensorPart:
    """The rows and columns of a checkpoint tensor that one rank holds: all of them if there is one rank.

    Attributes:
        tensor: The checkpoint's.
        whole: What the config says that its shape is.
        rows: Those of the part.
        columns: Those of the part; None for all, or for a bias.
    """

    tensor: CheckpointTensor
    whole: tuple[int, ...]
    rows: range
    columns: range | None = None

    def read_rows(self) -> Iterator[tuple[int, Tensor]]:
        """Some rows at a time, each with the number of its first row in the part. Raises like `CheckpointTensor.read`."""
        rows = self.rows
        for start in range(rows.start, rows.stop, ROWS_AT_A_TIME):
            some = slice(start, min(start + ROWS_AT_A_TIME, rows.stop))
            region = some if self.columns is None else (some, slice(self.columns.start, self.columns.stop))
            yield start - rows.start, self.tensor.read(self.whole, region)


def copy_rows(target: Tensor, part: TensorPart) -> None:
    """Copy a part into a tensor of the same shape. Raises like `CheckpointTensor.read`."""
    for start, rows in part.read_rows():
        target[start : start + len(rows)] = rows
