"""Batching as it was before Orca: fill a batch, compute it to the end, fill the next.

The rest of the engine is the same, so running a workload under `Scheduler` and under `StaticBatchScheduler` compares
the two policies and nothing else. Rows that have finished are dropped from the computation here, where a batched
`generate` call would go on computing padding for them: the comparison is kind to static batching.
"""

from __future__ import annotations

from minivllm.core.scheduler import Scheduler
from minivllm.request import Sequence
from minivllm.scheduler_output import SchedulerOutput

MEMBER = float("-inf")
"""First part of the `order` of a batch's members: before everybody who is none."""


class StaticBatchScheduler(Scheduler):
    """Nobody joins a batch that has begun, and nobody's place is reused until its slowest member has finished."""

    def schedule(self) -> SchedulerOutput:
        """Form a new batch when nothing runs and the next in the queue is no member, then schedule as usual."""
        head = self.waiting.first()
        if head is not None and not self.running and not self.swapped and not self._may_join(head):
            self._form_batch()
        return super().schedule()

    def _form_batch(self) -> None:
        """Make members of the first in the queue, as many as there are places for. They stay so when preempted."""
        places, members = self.config.max_num_seqs, []
        while (seq := self.waiting.first()) is not None and 1 + seq.num_unforked_siblings <= places:
            places -= 1 + seq.num_unforked_siblings
            members.append(self.waiting.pop())
        for seq in members:
            seq.order = (MEMBER, *seq.order)
            self.waiting.add(seq)

    def _may_join(self, seq: Sequence) -> bool:
        return seq.order[0] == MEMBER
