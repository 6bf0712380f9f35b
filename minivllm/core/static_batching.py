"""Batching as it was before Orca: fill a batch, compute it to the end, fill the next.

The rest of the engine is the same, so running a workload under `Scheduler` and under `StaticBatchScheduler` compares
the two policies and nothing else. Rows that have finished are dropped from the computation here, where a batched
`generate` call would go on computing padding for them: the comparison is kind to static batching.
"""

from __future__ import annotations

from minivllm.config import SchedulerConfig
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler, SchedulerOutput
from minivllm.request import Sequence


class StaticBatchScheduler(Scheduler):
    """Nobody joins a batch that has begun, and nobody's place is reused until its slowest member has finished."""

    def __init__(self, config: SchedulerConfig, block_manager: BlockSpaceManager) -> None:
        super().__init__(config, block_manager)
        self._batch: set[str] = set()
        """Ids of the requests that make up the batch."""

    def schedule(self) -> SchedulerOutput:
        """Form a new batch when nothing runs and the next in the queue is no member, then schedule as usual."""
        head = self.waiting.first()
        if head is not None and not self.running and not self.swapped and not self._may_join(head):
            self._form_batch()
        return super().schedule()

    def _form_batch(self) -> None:
        """The first requests in the queue, as many as have places for all their sequences."""
        self._batch.clear()
        places = self.config.max_num_seqs
        for seq in self.waiting:
            places -= 1 + seq.num_unforked_siblings
            if places < 0:
                break
            self._batch.add(seq.request.request_id)

    def _may_join(self, seq: Sequence) -> bool:
        return seq.request.request_id in self._batch
