"""Iteration-level scheduling: before every step, which sequences compute how many tokens?

The batch is recomposed after every token (continuous batching; Orca, OSDI 2022). Sequences are in one of three queues:

    waiting ──admit──► running ──finish──►
       ▲                 │  ▲
       └──recompute──────┤  │
                     swap out  swap in
                         ▼  │
                       swapped

Everything else follows from one rule: a step advances a sequence's `num_computed_tokens`, and a sequence whose
tokens are all computed gets a new one. Mirrors `vllm/core/scheduler.py` (prefill or decode) and
`vllm/v1/core/sched/scheduler.py` (one token budget).
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Collection
from operator import attrgetter

from minivllm.config import SchedulerConfig
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.sequence_queue import SequenceQueue
from minivllm.core.speculation import SpeculativeDecoding
from minivllm.request import Request, Resumption, Sequence, SequenceStatus
from minivllm.scheduler_output import ScheduledSequence, SchedulerOutput, SequenceOutput

_by_order = attrgetter("order")


class Scheduler:
    """First come, first served (or by priority and then arrival), recomposing the batch at every step.

    By default a step is either prefill or decode, prefill first. With `enable_chunked_prefill` one token budget is
    filled with decodes first, then with (chunks of) prompts. When cache blocks run out, the latest arrival is
    preempted: its blocks are freed and its tokens recomputed later, or its blocks are swapped to the host. By priority, sequences are
    also preempted for more urgent ones.
    """

    def __init__(self, config: SchedulerConfig, block_manager: BlockSpaceManager) -> None:
        self.config = config
        self.block_manager = block_manager
        self.waiting = SequenceQueue()
        self.swapped = SequenceQueue()
        self.running: list[Sequence] = []
        """Sorted by `order`: the earliest arrival first."""
        self.requests: dict[str, Request] = {}
        """Requests that have not finished, by id."""
        self._seq_ids = itertools.count()
        self._arrivals, self._resumptions = itertools.count(), itertools.count(-(2**62))
        if config.window:
            block_manager.use_window(config.window, config.max_num_batched_tokens if config.enable_chunked_prefill else None)
        self.speculation = SpeculativeDecoding(config, block_manager) if config.num_speculative_tokens > 0 else None

    # -- requests come and go ------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request. The InputProcessor has validated it."""
        seq = Sequence(next(self._seq_ids), request)
        seq.grammar = request.grammar and request.grammar.fork()
        seq.num_unforked_siblings = request.sampling_params.n - 1
        self._queue(request, [seq], next(self._arrivals))

    def resume_request(self, request: Request, resumption: Resumption) -> None:
        """Queue a request that another engine core has started, as if its sequences had been preempted here for recompute.

        It has waited before, so it goes ahead of new requests.
        """
        sequences = []
        for index, token_ids in resumption.output_token_ids.items():
            seq = Sequence(next(self._seq_ids), request, index)
            seq.token_ids += token_ids
            seq.num_reported_tokens = len(token_ids)
            if request.grammar is not None:
                seq.grammar = request.grammar.fork()
                for token_id in token_ids:
                    seq.grammar.accept_token(token_id)
            sequences.append(seq)
        self._queue(request, sequences, next(self._resumptions))

    def _queue(self, request: Request, sequences: list[Sequence], arrival: int) -> None:
        self.requests[request.request_id] = request
        request.sequences.extend(sequences)
        for seq in sequences:
            seq.order = (arrival, seq.index)
            if self.config.policy == "priority":
                seq.order = (request.priority, request.metrics.arrival_time, *seq.order)
            self.waiting.add(seq)

    def abort_request(self, request_id: str, status: SequenceStatus = SequenceStatus.FINISHED_ABORTED) -> None:
        """Finish a request's sequences, whichever queue they are in, and free their blocks. Unknown ids are ignored."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        for seq in request.sequences:
            if not seq.finished:
                self._leave_queue(seq)
                self._finish(seq, status)

    def finish_sequence(self, seq: Sequence, status: SequenceStatus, stop_reason: int | str | None = None) -> None:
        """Finish one sequence from outside, because the frontend found a stop string in its text."""
        if not seq.finished:
            self._leave_queue(seq)
            self._finish(seq, status, stop_reason)
            self._forget_if_finished(seq.request)

    def has_unfinished_requests(self) -> bool:
        """Whether any request waits, runs or is swapped out."""
        return bool(self.requests)

    @property
    def num_running(self) -> int:
        """Sequences that count towards `max_num_seqs`: the running ones, and those still to be forked from them."""
        return len(self.running) + sum(seq.num_unforked_siblings for seq in self.running)

    # -- one step's decisions ------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Decide the next step. Changes queues and block tables; computes nothing."""
        output = SchedulerOutput()
        num_preempted = self._preempt_for_urgent(output)
        if self.config.enable_chunked_prefill:
            self._schedule_decodes(output)
            if len(output.preempted) == num_preempted:
                self._swap_in(output)
            self._schedule_prefill_chunks(output)
            if len(output.preempted) == num_preempted:
                self._admit(output)
        else:
            self._admit(output)
            if not output.scheduled:
                self._schedule_decodes(output)
                if len(output.preempted) == num_preempted:
                    self._swap_in(output)
        if self.speculation is not None:
            self.speculation.add_drafts(output)
        return output

    def _preempt_for_urgent(self, output: SchedulerOutput) -> int:
        """Under "priority", let the first waiting sequence have the places and blocks of running ones whose priority is strictly lower.

        The least urgent give way first, no more of them than needed, and none if that would not be enough. The rule is that of vLLM's first
        scheduler (`_schedule_priority_preemption`); its second one preempts only where running sequences grow.

        Returns:
            How many have given way.
        """
        seq = self.waiting.first()
        if seq is None or self.config.policy != "priority" or not self.config.priority_preemption or not self.may_join(seq):
            return 0
        lower = [other for other in self.running if other.request.priority > seq.request.priority]
        if lower and self._has_room(seq, without=lower):
            for victim in reversed(lower):
                if self._has_room(seq):
                    break
                self._preempt(victim, output)
        return len(output.preempted)

    def _has_room(self, seq: Sequence, without: Collection[Sequence] = ()) -> bool:
        """Whether there are a place and blocks for a waiting sequence, once the running ones in `without` have given theirs up."""
        num_running = self.num_running - sum(1 + other.num_unforked_siblings for other in without)
        if num_running + 1 + seq.num_unforked_siblings > self.config.max_num_seqs:
            return False
        cached_blocks, keep_watermark = self.block_manager.find_cached_blocks(seq), len(without) < len(self.running)
        return self.block_manager.can_allocate(seq, cached_blocks, keep_watermark, without)

    def _admit(self, output: SchedulerOutput) -> None:
        """Move sequences from waiting to running, in order, while there are seats, tokens and blocks.

        Admission stops at the first one that does not fit, so no sequence overtakes another.
        """
        while (seq := self.waiting.first()) is not None and self.may_join(seq):
            swapped = self.swapped.first()
            if swapped is not None and swapped.order < seq.order:
                break
            if self.num_running + 1 + seq.num_unforked_siblings > self.config.max_num_seqs:
                break
            cached_blocks = self.block_manager.find_cached_blocks(seq)
            num_cached = len(cached_blocks) * self.block_manager.block_size
            num_tokens = seq.num_tokens - num_cached
            budget = self.config.max_num_batched_tokens - output.num_batched_tokens
            if num_tokens > budget:
                if not self.config.enable_chunked_prefill or budget == 0:
                    break
                num_tokens = budget
            # The watermark is for running sequences to grow into; it does not matter when none runs.
            if not self.block_manager.can_allocate(seq, cached_blocks, keep_watermark=bool(self.running)):
                break
            self.waiting.pop()
            self.block_manager.allocate(seq, cached_blocks)
            seq.num_computed_tokens = num_cached
            if seq.num_output_tokens == 0 and seq.request.metrics.num_preemptions == 0:
                seq.request.metrics.num_cached_tokens = num_cached
            self._join_running(seq)
            self._add(output, seq, num_tokens)
            output.num_prefills += 1

    def may_join(self, seq: Sequence) -> bool:
        """Whether the policy lets a waiting sequence join the running ones. Continuous batching always does."""
        return True

    def is_ready(self, seq: Sequence) -> bool:
        """Whether all is known that the next step of a sequence needs. With one step in flight, it always is."""
        return True

    def _schedule_decodes(self, output: SchedulerOutput) -> None:
        """Decode every running sequence whose prompt is computed; preempt the latest arrivals when blocks run out."""
        running = self.running
        manager = self.block_manager
        i = 0
        while i < len(running):
            seq = running[i]
            if seq.num_uncomputed_tokens > 1 or not self.is_ready(seq):
                i += 1  # in the middle of its prompt, or waiting for its newest token
                continue
            if not self._make_room_for(seq, output):
                break  # it was the latest arrival itself
            copy = manager.append_slots(seq)
            if copy is not None:
                output.blocks_to_copy.append(copy)
            self._add(output, seq, 1)
            i += 1

    def _make_room_for(self, seq: Sequence, output: SchedulerOutput) -> bool:
        """Preempt the latest arrivals until the sequence's next token has a slot. False if it had to be preempted itself."""
        while not self.block_manager.can_append_slots(seq):
            victim = self.running[-1]
            self._preempt(victim, output)
            if victim is seq:
                return False
        return True

    def _schedule_prefill_chunks(self, output: SchedulerOutput) -> None:
        """Continue prompts that earlier steps have started. Their blocks were allocated at admission; with a window, chunk by chunk."""
        for seq in self.running:
            num_tokens = seq.num_uncomputed_tokens
            budget = self.config.max_num_batched_tokens - output.num_batched_tokens
            if num_tokens > 1 and budget > 0 and self.is_ready(seq):
                num_tokens = min(num_tokens, budget)
                if self.config.window:
                    num_tokens = self.block_manager.append_chunk_slots(seq, num_tokens)
                if num_tokens > 0:
                    self._add(output, seq, num_tokens)
                    output.num_prefills += 1
        if self.config.window and self.running and not output.scheduled and not any(s.num_tokens_in_flight for s in self.running):
            self._preempt(self.running[-1], output)  # no prompt can go on, as the others have all blocks

    def _swap_in(self, output: SchedulerOutput) -> None:
        """Swap sequences back in, in order, and decode them in this step."""
        while (seq := self.swapped.first()) is not None and self.is_ready(seq):
            waiting = self.waiting.first()
            if waiting is not None and waiting.order < seq.order and self.may_join(waiting):
                break
            if self.num_running + 1 + seq.num_unforked_siblings > self.config.max_num_seqs:
                break
            if output.num_batched_tokens >= self.config.max_num_batched_tokens:
                break
            if not self.block_manager.can_swap_in(seq, keep_watermark=bool(self.running)):
                break
            self.swapped.pop()
            output.blocks_to_swap_in.extend(self.block_manager.swap_in(seq))
            output.swapped_in.append(seq)
            self._join_running(seq)
            if seq.num_uncomputed_tokens == 1:
                self.block_manager.append_slots(seq)
                self._add(output, seq, 1)

    def _add(self, output: SchedulerOutput, seq: Sequence, num_tokens: int) -> None:
        output.scheduled.append(ScheduledSequence(seq, num_tokens, self.block_manager.get_block_table(seq)))
        output.num_batched_tokens += num_tokens

    def _preempt(self, seq: Sequence, output: SchedulerOutput) -> None:
        """Take a running sequence's blocks away: by swap if configured and the host has room, else by recompute."""
        self._leave_queue(seq)
        seq.request.metrics.num_preemptions += 1
        output.preempted.append(seq)
        if self.config.preemption_mode == "swap" and self.may_swap_out(seq):
            output.blocks_to_swap_out.extend(self.block_manager.swap_out(seq))
            seq.status = SequenceStatus.SWAPPED
            self.swapped.add(seq)
        else:
            self.block_manager.free(seq)
            seq.num_computed_tokens = 0
            seq.status = SequenceStatus.WAITING
            self.waiting.add(seq)

    def may_swap_out(self, seq: Sequence) -> bool:
        """Whether a sequence can be swapped out rather than recomputed."""
        return self.block_manager.can_swap_out(seq)

    # -- one step's results --------------------------------------------------------------------------------------

    def update(self, output: SchedulerOutput, results: list[SequenceOutput]) -> list[tuple[Sequence, int]]:
        """Apply what the model computed: advance, append tokens, fork, finish, free.

        Args:
            output: The step, as `schedule()` returned it.
            results: One for each of `output.scheduled`, in the same order.

        Returns:
            The sequences with new tokens, each with the index of its result (forked siblings share one).
        """
        advanced: list[tuple[Sequence, int]] = []
        finished: list[Sequence] = []
        for i, (scheduled, result) in enumerate(zip(output.scheduled, results, strict=True)):
            if scheduled.seq.finished:  # aborted during the step
                continue
            for seq in self._apply(scheduled, result):
                advanced.append((seq, i))
                if seq.finished:
                    finished.append(seq)
        if finished:
            self.running = [seq for seq in self.running if not seq.finished]
            for seq in finished:
                self._forget_if_finished(seq.request)
        return advanced

    def _apply(self, scheduled: ScheduledSequence, result: SequenceOutput) -> list[Sequence]:
        """Apply what the model computed for one sequence. Returns those with new tokens: none, the sequence, or it and its new siblings."""
        seq = scheduled.seq
        if scheduled.draft_token_ids and self.speculation is not None:
            self.speculation.update(scheduled, result.token_ids, self._append_token)
            return [seq]
        seq.num_computed_tokens += scheduled.num_tokens
        self.block_manager.cache_full_blocks(seq)
        if self.config.window:
            self.block_manager.free_blocks_behind_window(seq)
        if not result.token_ids:  # a chunk in the middle of a prompt
            return []
        if not seq.num_unforked_siblings:
            (token_id,) = result.token_ids
            self._append_token(seq, token_id)
            return [seq]
        siblings = [seq, *self._fork_siblings(seq)]
        for sibling, token_id in zip(siblings, result.token_ids, strict=True):
            self._append_token(sibling, token_id)
        return siblings

    def _fork_siblings(self, parent: Sequence) -> list[Sequence]:
        """Once its prompt is computed, the first of a request's n sequences forks the others. They share its blocks."""
        children = []
        for index in range(1, parent.num_unforked_siblings + 1):
            child = parent.fork(next(self._seq_ids), index)
            child.order = (*parent.order[:-1], index)
            self.block_manager.fork(parent, child)
            parent.request.sequences.append(child)
            insort(self.running, child, key=_by_order)
            children.append(child)
        parent.num_unforked_siblings = 0
        return children

    def _append_token(self, seq: Sequence, token_id: int) -> None:
        """Append a sampled token, and finish the sequence if the token or the length says so."""
        seq.token_ids.append(token_id)
        request, num_tokens = seq.request, len(seq.token_ids)  # without tokens that are still being sampled
        if seq.grammar is not None and seq.grammar.error:
            self._finish(seq, SequenceStatus.FINISHED_ERROR)
        elif token_id in request.stop_reasons and num_tokens - seq.num_prompt_tokens >= request.sampling_params.min_tokens:
            self._finish(seq, SequenceStatus.FINISHED_STOPPED, request.stop_reasons[token_id])
        elif seq.grammar is not None and not seq.grammar.accept_token(token_id):
            self._finish(seq, SequenceStatus.FINISHED_ERROR if seq.grammar.error else SequenceStatus.FINISHED_STOPPED)
        elif num_tokens >= request.max_num_tokens:
            self._finish(seq, SequenceStatus.FINISHED_LENGTH)

    def _finish(self, seq: Sequence, status: SequenceStatus, stop_reason: int | str | None = None) -> None:
        self.block_manager.free(seq)
        if self.speculation is not None:
            self.speculation.proposer.forget(seq)
        seq.num_unforked_siblings = 0
        seq.status = status
        seq.stop_reason = stop_reason

    def _forget_if_finished(self, request: Request) -> None:
        if request.finished:
            self.requests.pop(request.request_id, None)

    # -- queues --------------------------------------------------------------------------------------------------

    def _join_running(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.RUNNING
        insort(self.running, seq, key=_by_order)

    def _leave_queue(self, seq: Sequence) -> None:
        """Take an unfinished sequence out of the queue that its status names."""
        if seq.status is SequenceStatus.RUNNING:
            if self.running[-1] is seq:
                self.running.pop()
            else:
                self.running.remove(seq)
        elif seq.status is SequenceStatus.SWAPPED:
            self.swapped.remove(seq)
        else:
            self.waiting.remove(seq)
