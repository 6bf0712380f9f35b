"""Scheduling for pipeline stages: a batch for each stage, of disjoint sequences, and all of about the same size.

    stage 0   A0 │ B0 │ A1 │ B1 │ …      a step passes through the stages one after another, and a stage that has
    stage 1      │ A0 │ B0 │ A1 │ …      nothing to compute waits: a bubble

The token that a sequence's next step begins with comes from the last stage, so a sequence is in one step at a time, and it takes as many
batches as there are stages to keep all of them busy. They must be alike: stages that work at the same time wait for the slowest. With vLLM the
first batch takes all sequences that there are, and the other stages wait (https://github.com/vllm-project/vllm/issues/41682); here none takes more than its share.
"""

from __future__ import annotations

from dataclasses import replace

from minivllm.config import SchedulerConfig
from minivllm.core.async_scheduler import AsyncScheduler
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.request import Sequence, SequenceStatus
from minivllm.scheduler_output import SchedulerOutput


class PipelineScheduler(AsyncScheduler):
    """`AsyncScheduler` for `pipeline_parallel_size` stages."""

    def __init__(self, config: SchedulerConfig, block_manager: BlockSpaceManager) -> None:
        super().__init__(config, block_manager)
        self._may_decode = self._may_begin = 0
        """How many sequences may still decode, or begin, in the step that is being scheduled."""

    def schedule(self) -> SchedulerOutput:
        """Decide the next step, of sequences that are in no other, and of no more than its share. None may be ready."""
        num_decoding = sum(seq.num_uncomputed_tokens <= 1 for seq in self.running) + len(self.swapped)
        in_flight = [seq for seq in self.running if seq.num_tokens_in_flight]
        num_beginning = sum(len(seq.token_ids) == seq.num_prompt_tokens for seq in in_flight)
        num_free_seats = self.config.max_num_seqs - self.num_running
        self._may_decode = self._share(num_decoding)
        self._may_begin = self._share(num_beginning + min(len(self.waiting), num_free_seats))
        return super().schedule()

    def _share(self, num_seqs: int) -> int:
        """The size of the largest batch when so many sequences are divided among the stages."""
        return max(1, -(-num_seqs // self.config.pipeline_parallel_size))

    def needs_known_tokens(self, seq: Sequence) -> bool:
        """Each sequence waits for its own newest token, whatever it needs it for; no group of sequences waits together."""
        return False

    def is_ready(self, seq: Sequence) -> bool:
        """Whether a sequence can be in this step: its newest token is known, and the step has not got its share.

        The chunks of a prompt follow each other in successive steps, as they need no token that has to be sampled.
        """
        if seq.num_placeholders:
            return False
        if seq.status is not SequenceStatus.WAITING and seq.num_uncomputed_tokens <= 1 and self._may_decode <= 0:
            return False
        return super().is_ready(seq)

    def may_join(self, seq: Sequence) -> bool:
        """Whether a waiting sequence may join the running ones in this step."""
        return self._may_begin > 0 and super().may_join(seq)

    def _preempt(self, seq: Sequence, output: SchedulerOutput) -> None:
        if self.speculation is not None and seq.num_tokens_in_flight and seq.num_uncomputed_tokens <= 1:
            self.block_manager.free_draft_slots(seq)  # of drafts in flight, of which none will be kept
        super()._preempt(seq, output)

    def _join_running(self, seq: Sequence) -> None:
        super()._join_running(seq)
        self._may_begin -= 1

    def _add(self, output: SchedulerOutput, seq: Sequence, num_tokens: int) -> None:
        if seq.num_uncomputed_tokens <= 1:
            self._may_decode -= 1
        super()._add(output, seq, num_tokens)


def choose_scheduler(config: SchedulerConfig) -> type[Scheduler]:
    """The scheduler of a config whose user has not chosen one."""
    if config.pipeline_parallel_size > 1:
        return PipelineScheduler
    return AsyncScheduler if config.async_scheduling else Scheduler


def settle_window(scheduler_cls: type[Scheduler], config: SchedulerConfig, block_manager: BlockSpaceManager) -> SchedulerConfig:
    """The config with which a scheduler can take the place of another: one of the user's own need not know of blocks that are freed early."""
    if hasattr(block_manager, "use_window"):
        block_manager.use_window(0)  # the package's schedulers turn it on again
    return config if scheduler_cls.__module__.startswith("minivllm.core.") else replace(config, window=0)
