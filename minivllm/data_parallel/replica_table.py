"""Which replicas there are, and which request is where: what a frontend knows of its replicas, without the sockets."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from minivllm.data_parallel.routing import Router
from minivllm.engine.core_messages import EngineCoreOutput, ReplicaLoad, StoppedSequence
from minivllm.request import EngineCoreRequest


@dataclass
class _Placed:
    """An unfinished request: its number, its replica, and which of its sequences are unfinished."""

    number: int
    replica: int
    sequences: set[int]


class ReplicaTable:
    """Which request is at which replica. A request is at one replica, or at none.

    A replica takes requests while it is open. When it is closed, it still has those that it had.

    Args:
        router: Chooses among the open ones.
        block_size: Tokens of a cache block.

    Attributes:
        num_gpu_blocks: Blocks of the open replica that has fewest; 0 if none is open.
    """

    def __init__(self, router: Router, block_size: int) -> None:
        self._router, self._block_size = router, block_size
        self._num_gpu_blocks: dict[int, int] = {}
        """Of the open ones."""
        self.num_gpu_blocks = 0
        self._placed: dict[str, _Placed] = {}

    @property
    def open(self) -> list[int]:
        """The replicas that take requests."""
        return list(self._num_gpu_blocks)

    def take_in(self, index: int, num_gpu_blocks: int) -> None:
        """A replica takes requests from now on. It has none."""
        self._num_gpu_blocks[index] = num_gpu_blocks
        self.num_gpu_blocks = min(self._num_gpu_blocks.values())
        self._router.open(index, num_gpu_blocks * self._block_size)

    def close(self, index: int) -> None:
        """A replica gets no more requests."""
        if self._num_gpu_blocks.pop(index, None) is not None:
            self.num_gpu_blocks = min(self._num_gpu_blocks.values(), default=0)
            self._router.close(index)

    def stop_reports(self) -> None:
        """The coordinator is gone."""
        self._router.stop_reports()

    def remove(self, index: int) -> list[tuple[str, int]]:
        """A replica is lost. Returns the requests that were there, each with its number."""
        self.close(index)
        lost = [(request_id, self._placed[request_id].number) for request_id in self.requests_at(index)]
        for request_id, _ in lost:
            del self._placed[request_id]
        return lost

    def update_loads(self, loads: dict[int, ReplicaLoad]) -> None:
        """The coordinator has published."""
        self._router.has_reports = True
        for index in self._num_gpu_blocks.keys() & loads.keys():
            self._router.update(index, loads[index])

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: EngineCoreRequest, avoid: Collection[int] = ()) -> int:
        """Choose the replica of a request: the one that it asks for if that is open, else the router's choice.

        Args:
            request: The request.
            avoid: Replicas that it must not go to.

        Raises:
            EngineDeadError: No other replica is open, or none of them has a cache that is large enough.
        """
        num_blocks = -(-(request.max_num_tokens - 1) // self._block_size)  # the last token is never fed back
        if num_blocks > self.num_gpu_blocks:
            avoid = {*avoid, *(index for index, size in self._num_gpu_blocks.items() if size < num_blocks)}
        wanted = request.data_parallel_rank
        if wanted in self._num_gpu_blocks and wanted not in avoid:
            index = self._router.assign(wanted)
        else:
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
