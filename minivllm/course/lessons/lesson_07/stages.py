"""Correct versions of the methods of earlier stages, so that one mistake of a learner fails one check."""

from __future__ import annotations

from bisect import insort
from typing import Any

from minivllm.request import Sequence, SequenceStatus
from minivllm.scheduler_output import SchedulerOutput


def isolate_stages(cls: type, stage: int) -> type:
    """The class, with the methods of earlier stages that a stage's check calls replaced by correct ones."""
    if stage == 6:
        methods: dict[str, Any] = {"finish": correct_finish}
    else:
        methods = {"fits": correct_fits} if stage == 4 else {"fits": correct_fits, "admit": correct_admit}
    return type(cls.__name__, (cls,), methods)


def correct_fits(self: Any, seq: Sequence, output: SchedulerOutput) -> bool:
    """Whether a prompt stays within the limits of the step and of the cache."""
    tokens = output.num_batched_tokens + seq.num_tokens
    if len(self.running) >= self.config.max_num_seqs or tokens > self.config.max_num_batched_tokens:
        return False
    return bool(self.block_manager.can_allocate(seq, keep_watermark=bool(self.running)))


def correct_admit(self: Any, output: SchedulerOutput) -> None:
    """Admit waiting prompts, in order, while they fit."""
    while self.waiting and self.fits(self.waiting[0], output):
        seq = self.waiting.pop(0)
        self.block_manager.allocate(seq)
        seq.status = SequenceStatus.RUNNING
        insort(self.running, seq, key=lambda other: other.order)
        self.add(output, seq, seq.num_tokens)
        output.num_prefills += 1


def correct_finish(self: Any, seq: Sequence, status: SequenceStatus) -> None:
    """Take a sequence out of its queue and free its blocks."""
    getattr(self, seq.status.value).remove(seq)
    self.block_manager.free(seq)
    seq.status = status
    self.requests.pop(seq.request.request_id, None)
