"""Asynchronous scheduling: decide the next step while the device still computes the last one.

    schedule ─► launch ─► advance        the step is in flight; its sequences move on as if it were done
    schedule ─► launch ─► advance        the next one, with a placeholder for each token that is not known yet
                collect ─► update        the oldest one's results: known tokens take the places of placeholders

Tokens are those of one step at a time. What the host learns too late (a stop token, a stop string, an abort) costs a surplus step whose
result is dropped; what it must know in time makes a sequence wait (`AsyncScheduler.is_ready`). Mirrors
`vllm/v1/core/sched/async_scheduler.py`.
"""

from __future__ import annotations

from minivllm.config import SchedulerConfig
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.request import Sequence, SequenceStatus
from minivllm.scheduler_output import ScheduledSequence, SchedulerOutput, SequenceOutput


class AsyncScheduler(Scheduler):
    """`Scheduler` for several steps in flight: `schedule` may be called again before the results of earlier steps are in.

    `advance` is called with each step once it is launched, and `update` with the results of the oldest, in the order of launches. A step that
    fails gets no `update`: all its sequences must be aborted instead.

    Blocks are freed as soon as a sequence ends or is preempted, though a step in flight may still write to them. That is safe because the
    device runs steps, with their swaps and copies, in the order of launches: whoever gets the blocks next writes later.
    """

    def __init__(self, config: SchedulerConfig, block_manager: BlockSpaceManager) -> None:
        super().__init__(config, block_manager)
        self._sampled_last: list[Sequence] = []
        """Sequences that `needs_known_tokens`, of the last step that samples for any. At most one step in flight does."""
        self._awaits_tokens = False
        """Whether these tokens are still being sampled."""

    def schedule(self) -> SchedulerOutput:
        """Decide the next step, of the sequences that are ready. None may be: then a step in flight must be collected first."""
        self._awaits_tokens = any(seq.num_placeholders and not seq.finished for seq in self._sampled_last)
        return super().schedule()

    def needs_known_tokens(self, seq: Sequence) -> bool:
        """Whether the host must know all tokens of a sequence to prepare its next step.

        | what                                         | why                                                  |
        |----------------------------------------------|------------------------------------------------------|
        | structured outputs                           | the grammar advances by each token, and gives a mask |
        | penalties, bad words, logits processors      | they are computed from the output so far             |
        | speculative decoding                         | drafts are looked up in the text so far              |
        """
        return seq.grammar is not None or self.speculation is not None or seq.request.sampling_params.needs_output_tokens

    def is_ready(self, seq: Sequence) -> bool:
        """Whether the next step of a sequence can be launched now.

        | waits                                                             | until                                            |
        |-------------------------------------------------------------------|--------------------------------------------------|
        | a preempted sequence                                              | no step in flight computes anything for it       |
        | one that ends with the token being sampled, by its length         | it has ended                                     |
        | the first of n > 1, whose siblings are forked after its prompt    | they are forked                                  |
        | one that `needs_known_tokens`                                     | the tokens of all such sequences are known       |

        The last rule keeps these sequences in one batch: if each waited for its own token only, they would fall into groups that take
        turns, each in half of the steps.
        """
        if seq.num_tokens_in_flight and seq.status is not SequenceStatus.RUNNING:
            return False
        if seq.num_placeholders and (seq.num_tokens >= seq.request.max_num_tokens or seq.num_unforked_siblings):
            return False
        return not (self._awaits_tokens and self.needs_known_tokens(seq))

    def may_join(self, seq: Sequence) -> bool:
        """Whether the policy lets a waiting sequence join the running ones, and it is ready."""
        return super().may_join(seq) and self.is_ready(seq)

    def may_swap_out(self, seq: Sequence) -> bool:
        """Whether a sequence can be swapped out: not while a step in flight samples the first tokens of its siblings."""
        return not (seq.num_placeholders and seq.num_unforked_siblings) and super().may_swap_out(seq)

    def advance(self, output: SchedulerOutput) -> None:
        """A step has been launched: move its sequences on as if it were done. Drafts count when they have been verified."""
        sampled_last = []
        for item in output.scheduled:
            seq, num_tokens = item.seq, item.num_tokens - len(item.draft_token_ids)
            if item.needs_sampling:
                seq.num_placeholders += 1
                if self.needs_known_tokens(seq):
                    sampled_last.append(seq)
            seq.num_computed_tokens += num_tokens
            seq.num_tokens_in_flight += num_tokens
        self._sampled_last = sampled_last or self._sampled_last

    def _apply(self, scheduled: ScheduledSequence, result: SequenceOutput) -> list[Sequence]:
        """Apply a result to a sequence that has moved on: undo `advance`, and do what it foresaw."""
        seq, num_tokens = scheduled.seq, scheduled.num_tokens - len(scheduled.draft_token_ids)
        seq.num_tokens_in_flight -= num_tokens
        if result.token_ids:
            seq.num_placeholders -= 1
        if seq.status is SequenceStatus.RUNNING:
            seq.num_computed_tokens -= num_tokens
            return super()._apply(scheduled, result)
        return self._apply_preempted(scheduled, result)

    def _apply_preempted(self, scheduled: ScheduledSequence, result: SequenceOutput) -> list[Sequence]:
        """Apply a result to a sequence that was preempted while the step was in flight: its tokens count, its blocks are gone or swapped out.

        A prompt of which siblings were to be forked is computed again, and gives the same tokens again. Of drafts nothing is kept but the token
        that the model chose in the place of the first.
        """
        seq = scheduled.seq
        if not result.token_ids or seq.num_unforked_siblings:
            return []
        self._append_token(seq, result.token_ids[0])
        return [seq]

    def _append_token(self, seq: Sequence, token_id: int) -> None:
        status = seq.status
        super()._append_token(seq, token_id)
        if seq.finished and status is not SequenceStatus.RUNNING:
            (self.swapped if status is SequenceStatus.SWAPPED else self.waiting).remove(seq)
