"""From one pipeline stage to the next: what is sent, and the group of ranks that pass it on.

    Stage 0 ── IntermediateTensors ──► Stage 1 ── IntermediateTensors ──► Stage 2

Ranks are laid out as in vLLM: rank = stage * tensor_parallel_size + tensor-parallel rank. Those with the same tensor-parallel rank form a pipeline
group; each sends to its neighbour in the next stage. Mirrors the `pp` group of `vllm/distributed/parallel_state.py`.
"""

from __future__ import annotations

import contextlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minivllm.distributed.parallel_state import Communicator
from minivllm.distributed.partition import Stage
from minivllm.errors import DistributedError, StageError


@dataclass
class IntermediateTensors:
    """What a stage hands to the next one: a batch between two layers.

    Attributes:
        tensors: Each `[num_tokens, hidden_size]`. Llama has "hidden_states", which the last layer adds to the residual stream, and "residual", the
            stream.
    """

    tensors: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


class PipelineGroup(Communicator, ABC):
    """The stages of a pipeline, as one rank of one of them sees it. Within `step`, a stage calls `recv` once unless it is the first, and then `send` once
    unless it is the last.

    Args:
        stage: This rank's.
        ranks: The pipeline's ranks, one of each stage, for messages.

    Attributes:
        spans, num_bytes: As for all communicators, of each `recv` and `send`. Waiting for the stage before is in them.
        device: Where tensors arrive.
    """

    def __init__(self, stage: Stage, ranks: tuple[int, ...], device: torch.device | None = None) -> None:
        super().__init__(stage.rank, stage.world_size)
        self.stage, self.ranks, self.device = stage, ranks, device or torch.device("cpu")
        self._owes_recv = self._owes_send = False

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a stage's part of a step. If it fails, the next stage gets the failure in the place of its tensors, and leaves the step, too. What the
        stage before has sent is read in any case, so that all are ready for the next step.
        """
        self._owes_recv, self._owes_send = not self.stage.is_first, not self.stage.is_last
        try:
            yield
        except Exception as error:
            self._leave_step(error)
            raise

    def recv(self, like: IntermediateTensors) -> IntermediateTensors:
        """What the stage before has computed.

        Args:
            like: Tensors of the same names, shapes and dtypes, on this rank's device; they may be overwritten, and returned.

        Raises:
            StageError: A stage before this one has failed in this step.
            DistributedError: The rank before has ended, or does not come, or sends something else.
        """
        start = time.perf_counter()
        self._owes_recv = False  # whatever comes of it: a stage that does not come is waited for once
        header = self._recv_header()
        if "failure" in header:
            raise (StageError if header["is_ready"] else DistributedError)(header["failure"])
        if header != _describe(like):
            self._drop_tensors(header)
            raise DistributedError(
                f"{self.name(self.rank - 1)} sends {header['tensors']}, but {_describe(like)['tensors']} were expected."
            )
        self._recv_tensors(list(like.tensors.values()))
        self._note(start, *like.tensors.values())
        return like

    def send(self, tensors: IntermediateTensors) -> None:
        """Hand this to the next stage. The tensors must not be changed afterwards.

        Raises:
            DistributedError: The rank after has ended, or does not come.
        """
        start = time.perf_counter()
        self._owes_send = False
        self._send_header(_describe(tensors))
        self._send_tensors(list(tensors.tensors.values()))
        self._note(start, *tensors.tensors.values())

    def name(self, stage: int) -> str:
        """A stage's rank in this pipeline, in words."""
        return f"Stage {stage} of {self.world_size} (rank {self.ranks[stage]})"

    def _leave_step(self, error: Exception) -> None:
        failure = self._describe_failure(error)
        try:
            if self._owes_recv:
                self._owes_recv = False
                header = self._recv_header()
                if "failure" in header:
                    failure = header  # where it began
                else:
                    self._drop_tensors(header)
        finally:
            if self._owes_send:
                self._owes_send = False
                self._send_header(failure)

    def _describe_failure(self, error: Exception) -> dict[str, Any]:
        """What goes to the next stage, which is ready for another step afterwards, unless this one is not."""
        if isinstance(error, StageError):
            return {"failure": str(error), "is_ready": True}
        failure = f"{self.name(self.rank)} failed: {type(error).__name__}: {error}"
        return {"failure": failure, "is_ready": not isinstance(error, DistributedError)}

    def _drop_tensors(self, header: dict[str, Any]) -> None:
        """Read tensors that nobody needs, out of the way of the next step."""
        self._recv_tensors(
            [torch.empty(shape, dtype=getattr(torch, dtype), device=self.device) for _, dtype, shape in header["tensors"]]
        )

    def _send_header(self, header: dict[str, Any]) -> None:
        self._send_bytes(json.dumps(header).encode())

    def _recv_header(self) -> dict[str, Any]:
        header: dict[str, Any] = json.loads(self._recv_bytes())
        return header

    @abstractmethod
    def _send_bytes(self, data: bytes) -> None:
        """A short message to the next stage, before its tensors."""

    @abstractmethod
    def _recv_bytes(self) -> bytes: ...

    @abstractmethod
    def _send_tensors(self, tensors: list[Tensor]) -> None: ...

    @abstractmethod
    def _recv_tensors(self, tensors: list[Tensor]) -> None:
        """Fill these."""


def _describe(tensors: IntermediateTensors) -> dict[str, Any]:
    """What is announced before tensors are sent."""
    return {
        "tensors": [[name, str(x.dtype).removeprefix("torch."), list(x.shape)] for name, x in tensors.tensors.items()],
    }


class SingleStage(PipelineGroup):
    """A pipeline of one stage."""

    def __init__(self) -> None:
        super().__init__(Stage(), (0,))

    def _send_bytes(self, data: bytes) -> None:
        raise AssertionError("There is no next stage.")

    def _recv_bytes(self) -> bytes:
        raise AssertionError("There is no stage before.")

    def _send_tensors(self, tensors: list[Tensor]) -> None: ...

    def _recv_tensors(self, tensors: list[Tensor]) -> None: ...
