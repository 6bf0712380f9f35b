"""The basis of lesson 10's scheduler: the package's, with names for the methods a learner uses."""

from __future__ import annotations

from minivllm.core.scheduler import Scheduler
from minivllm.request import Sequence
from minivllm.scheduler_output import SchedulerOutput


class BudgetScheduler(Scheduler):
    """The package's scheduler without its decisions: queues, preemption and updates are there, `schedule` is yours."""

    def make_room_for(self, seq: Sequence, output: SchedulerOutput) -> bool:
        """Preempt the latest sequences until there is a slot for the newest token of `seq`. False if `seq` itself was preempted."""
        return self._make_room_for(seq, output)

    def add(self, output: SchedulerOutput, seq: Sequence, num_tokens: int) -> None:
        """Put a sequence into the step: it computes `num_tokens` of its tokens."""
        self._add(output, seq, num_tokens)

    def join(self, seq: Sequence) -> None:
        """Put a sequence into `running`, at its place."""
        self._join_running(seq)
