"""A model runner's place in a pipeline: where its input comes from, and where its results go."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from minivllm.distributed.pipeline import IntermediateTensors, PipelineGroup


class PipelineStage:
    """The first stage computes from token ids, the others from what the one before has sent; all but the last send and sample nothing.

    Args:
        pipeline: The stages.
        names: Of the `IntermediateTensors`.
        hidden_size, dtype: Of each of them.
    """

    def __init__(self, pipeline: PipelineGroup, names: tuple[str, ...], hidden_size: int, dtype: torch.dtype) -> None:
        self._pipeline, self._names, self._hidden_size, self._dtype = pipeline, names, hidden_size, dtype
        self._is_alone = False

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within this, for measuring memory, inputs are made up, and nothing is sent."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def recv(self, num_tokens: int) -> IntermediateTensors | None:
        """What the stage before has computed of a batch; None on the first stage. Raises as `PipelineGroup.recv`."""
        pipeline = self._pipeline
        if pipeline.stage.is_first:
            return None
        make = torch.zeros if self._is_alone else torch.empty
        like = {name: make(num_tokens, self._hidden_size, dtype=self._dtype, device=pipeline.device) for name in self._names}
        return IntermediateTensors(like) if self._is_alone else pipeline.recv(IntermediateTensors(like))

    def send(self, tensors: IntermediateTensors) -> None:
        """Hand a batch to the next stage. Raises as `PipelineGroup.send`."""
        if not self._is_alone:
            self._pipeline.send(tensors)
