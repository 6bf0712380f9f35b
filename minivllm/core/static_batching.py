"""Static batching, as before Orca: fill a batch, run it to the end, fill the next.

The rest of the engine is the same, so running a workload under `Scheduler` and under `StaticBatchScheduler` compares only the policies.
Finished rows are dropped from the computation, where a batched `generate` call would go on computing padding for them: the comparison
favours static batching.
"""

from __future__ import annotations

from minivllm.core.scheduler import Scheduler
from minivllm.request import Sequence
from minivllm.scheduler_output import SchedulerOutput

MEMBER = float("-inf")
"""First part of the `order` of the batch's members: ahead of all other sequences."""


class StaticBatchScheduler(Scheduler):
    """No sequence joins a running batch: the next one is formed when its slowest member has finished."""

    def schedule(self) -> SchedulerOutput:
        """Form a new batch when the last one is done, then schedule as usual."""
        head = self.waiting.first()
        if head is not None and not self.running and not self.swapped and not self.may_join(head):
            self._form_batch()
        return super().schedule()

    def _form_batch(self) -> None:
        """Make as many sequences members as fit, from the head of the queue. They stay members when preempted."""
        num_seats, members = self.config.max_num_seqs, []
        while (seq := self.waiting.first()) is not None and 1 + seq.num_unforked_siblings <= num_seats:
            num_seats -= 1 + seq.num_unforked_siblings
            members.append(self.waiting.pop())
        for seq in members:
            seq.order = (MEMBER, *seq.order)
            self.waiting.add(seq)

    def may_join(self, seq: Sequence) -> bool:
        """Whether a waiting sequence is a member of the batch."""
        return bool(seq.order[0] == MEMBER)
