"""Which replicas there are, and which request is where: what a frontend knows of its replicas, without the sockets."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from minivllm.core.routing import ReplicaLoad, Router
from minivllm.engine.core_messages import EngineCoreOutput, StoppedSequence
from minivllm.request import EngineCoreRequest


@dataclass
class _Placed:
    """An unfinished request: its number, its replica, and which of its sequences are unfinished."""

    number: int
    replica: int
    sequences: set[int]


class ReplicaTable:
    """A replica is open (it takes requests), leaving (it finishes those it has), or not there. A request is at one replica.

    Args:
        router: Chooses among the open ones.
        block_size: Tokens of a cache block.
    """

    def __init__(self, router: Router, block_size: int) -> None:
        self._router, self._block_size = router, block_size
        self._num_gpu_blocks: dict[int, int] = {}
        self._leaving: set[int] = set()
        self._placed: dict[str, _Placed] = {}

    @property
    def open(self) -> list[int]:
        """The replicas that take requests."""
        return list(self._num_gpu_blocks)

    @property
    def is_empty(self) -> bool:
        """Whether no replica is open or leaving."""
        return not self._num_gpu_blocks and not self._leaving

    @property
    def num_gpu_blocks(self) -> int:
        """Those of the open replica that has fewest; 0 if none is open."""
        return min(self._num_gpu_blocks.values(), default=0)

    def take_in(self, index: int, num_gpu_blocks: int) -> None:
        """A replica takes requests from now on. It has none."""
        self._num_gpu_blocks[index] = num_gpu_blocks
        self._leaving.discard(index)
        self._router.open(index, num_gpu_blocks * self._block_size)

    def state_of(self, index: int) -> str:
        """ "ready", "leaving" (it finishes what it has), or "gone"."""
        if index in self._num_gpu_blocks:
            return "ready"
        return "leaving" if index in self._leaving else "gone"

    def let_leave(self, index: int) -> None:
        """An open replica gets no more requests."""
        if self._num_gpu_blocks.pop(index, None) is not None:
            self._leaving.add(index)
            self._router.close(index)

    def reopen(self, index: int, num_gpu_blocks: int) -> None:
        """A leaving replica takes requests again: it had only seemed to be out of reach."""
        self._leaving.discard(index)
        self._num_gpu_blocks[index] = num_gpu_blocks
        self._router.reopen(index)

    def stop_reports(self) -> None:
        """The coordinator is gone."""
        self._router.stop_reports()

    @property
    def members(self) -> list[int]:
        """The replicas that are open or leaving."""
        return [*self._num_gpu_blocks, *self._leaving]

    def remove(self, index: int) -> list[str]:
        """A replica is gone. Returns the requests that went with it."""
        if self._num_gpu_blocks.pop(index, None) is not None:
            self._router.close(index)
        self._leaving.discard(index)
        lost = self.requests_at(index)
        for request_id in lost:
            del self._placed[request_id]
        return lost

    def update_loads(self, loads: dict[int, ReplicaLoad]) -> None:
        """The coordinator has published."""
        self._router.has_reports = True
        for index in self._num_gpu_blocks.keys() & loads.keys():
            self._router.update(index, loads[index])

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: EngineCoreRequest, avoid: Collection[int] = ()) -> int:
        """Choose the replica of a request.

        Args:
            request: The request.
            avoid: Replicas that it must not go to.

        Raises:
            EngineDeadError: No other replica is open.
        """
        index = self._router.route(request.prompt_token_ids, request.cache_salt, avoid)
        sequences = set(request.resumption.output_token_ids if request.resumption else range(request.sampling_params.n))
        self._placed[request.request_id] = _Placed(request.number, index, sequences)
        return index

    def abort(self, request_id: str) -> int | None:
        """Nobody waits for a request any more. Returns where it is, if it is unfinished."""
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return None
        self._router.finish(placed.replica)
        return placed.replica

    def stop(self, stopped: StoppedSequence) -> int | None:
        """A stop string was found in a sequence: the replica will not say so when it was the request's last. Returns where it is."""
        placed = self._placed.get(stopped.request_id)
        if placed is None or placed.number != stopped.number:
            return None
        self._finish_sequences(stopped.request_id, placed, {stopped.index})
        return placed.replica

    def take_output(self, replica: int, output: EngineCoreOutput) -> bool:
        """A replica has sent something for a request. Returns whether the request is there: it may have been aborted meanwhile."""
        placed = self._placed.get(output.request_id)
        if placed is None or (placed.number, placed.replica) != (output.number, replica):
            return False
        finished = {sequence.index for sequence in output.sequences if sequence.finish_reason is not None}
        self._finish_sequences(output.request_id, placed, placed.sequences if output.finished else finished)
        return True

    def requests_at(self, replica: int) -> list[str]:
        """The unfinished requests of a replica."""
        return [request_id for request_id, placed in self._placed.items() if placed.replica == replica]

    def _finish_sequences(self, request_id: str, placed: _Placed, sequences: set[int]) -> None:
        placed.sequences = placed.sequences - sequences
        if not placed.sequences:
            self.abort(request_id)
