"""Steps in which every running sequence gets its next token, and no other joins: most steps of a simulation. They are applied together.

    step          ┃ prefill │ decode │ decode │ decode │ decode, a new block │ decode │ decode, one ends │ prefill ┃
    simulated as  ┃ a step  │ quiet steps, applied at their end              │ quiet steps               │ a step  ┃

What the scheduler would decide in them is known beforehand, so all else than their times is computed once. The result is that of single steps,
which tests/bench/test_quiet_steps.py checks on random workloads.
"""

from __future__ import annotations

from bisect import bisect_left

from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.engine.core_messages import ReplicaLoad
from minivllm.engine.engine_core import EngineCore
from minivllm.executor.simulated import SimulatedExecutor, StepWork
from minivllm.request import Sequence, SequenceStatus


def can_skip_steps(core: EngineCore) -> bool:
    """Whether the quiet steps of an engine core are known beforehand: not those of another scheduler, or if each step is watched."""
    executor, scheduler = core.executor, core.scheduler
    return (
        type(scheduler) is Scheduler
        and type(core.block_manager) is BlockSpaceManager
        and type(executor) is SimulatedExecutor
        and executor.max_concurrent_batches == 1
        and executor.watch is None
        and core.trace is None
        and scheduler.speculation is None
        and scheduler.config.policy == "fcfs"
    )


class QuietSteps:
    """The next steps of an engine core that `can_skip_steps`, whose requests have one sequence each and end by their length.

    All running sequences decode in them; none is preempted, and none joins, though some may wait for a place. The replica's load changes with the
    last one only: there sequences end and blocks are allocated, and if more sequences wait than were reported, there is no other.

    Attributes:
        began: When the first of them begins, in seconds of the engine's clock.
        ends: When each of them ends.
        sequences: Those that get a token in each.
    """

    def __init__(
        self, core: EngineCore, began: float, num_steps: int, num_context_tokens: int, until_end: int, until_growth: int
    ) -> None:
        assert isinstance(core.executor, SimulatedExecutor)
        self._until_end, self._until_growth = until_end, until_growth
        self._core, self._executor, self._num_waiting = core, core.executor, len(core.scheduler.waiting)
        self.began, self.ends, self.sequences = began, [], list(core.scheduler.running)
        now, num_seqs = began, len(self.sequences)
        for _ in range(num_steps):
            now += core.executor.seconds_of(StepWork(0, 0, num_seqs, num_context_tokens))
            self.ends.append(now)
            num_context_tokens += num_seqs

    @classmethod
    def find(cls, core: EngineCore, now: float, num_waiting_before: int) -> QuietSteps | None:
        """The quiet steps that begin now; None if the next step is not quiet. `num_waiting_before` is what the step before has reported."""
        scheduler, manager = core.scheduler, core.block_manager
        running, tables, block_size = scheduler.running, manager.block_tables, manager.block_size
        if (
            not running
            or scheduler.config.window
            or len(scheduler.swapped)
            or (len(scheduler.waiting) and len(running) < scheduler.config.max_num_seqs)
        ):
            return None
        until_end = until_full = 2**62  # steps until a sequence has all its tokens, and until one has filled its blocks
        num_context_tokens = num_filling = 0
        for seq in running:
            num_tokens = len(seq.token_ids)
            if num_tokens - seq.num_computed_tokens > 1 or num_tokens == seq.num_prompt_tokens:
                return None  # in its prompt, or it recomputes what a preemption has lost
            num_context_tokens += num_tokens
            missing = seq.request.max_num_tokens - num_tokens
            if missing < until_end:
                until_end = missing
            room = len(tables[seq.seq_id]) * block_size - num_tokens + 1
            if room < until_full:
                until_full, num_filling = room, 1
            elif room == until_full:
                num_filling += 1
        # The step after a block is full needs another one, for the token that came with it.
        until_growth = until_full + 1
        num_steps = min(until_end, until_growth if num_filling <= manager.get_num_free_gpu_blocks() else until_full)
        if num_steps > 1 and len(scheduler.waiting) != num_waiting_before:
            num_steps = 1
        return cls(core, now, num_steps, num_context_tokens, until_end, until_growth) if num_steps > 0 else None

    def cut(self, now: float) -> bool:
        """Leave out the steps that begin after `now`. Returns whether there were any."""
        num_steps = bisect_left(self.ends, now) + 1
        if num_steps >= len(self.ends):
            return False
        del self.ends[num_steps:]
        return True

    def apply(self) -> ReplicaLoad:
        """Advance the scheduler, the block tables and the counts. Returns the load when the last step ends."""
        core, scheduler, manager, num_steps = self._core, self._core.scheduler, self._core.block_manager, len(self.ends)
        sequences, growing = self.sequences, []
        if num_steps == self._until_growth:  # the last step needs a block for the newest token before it
            sequences = []
            for seq in self.sequences:
                is_full = len(seq.token_ids) + num_steps - 1 > len(manager.block_tables[seq.seq_id]) * manager.block_size
                (growing if is_full else sequences).append(seq)
            self._advance(growing, num_steps - 1)
            for seq in growing:
                manager.append_slots(seq)
        if num_steps == self._until_end:  # in order, because that is how blocks are freed
            self._advance(sequences, num_steps - 1)
            for seq in self.sequences:
                self._advance([seq], 1)
                if len(seq.token_ids) >= seq.request.max_num_tokens:
                    scheduler.finish_sequence(seq, SequenceStatus.FINISHED_LENGTH)
                    seq.request.metrics.finished_time = self.ends[-1]
                    seq.request.sequences.clear()  # nobody needs them, and without the cycle they are freed at once
        else:
            self._advance(growing, 1)
            self._advance(sequences, num_steps)
        core.num_steps += num_steps
        core.outputs.num_generated_tokens += num_steps * len(self.sequences)
        num_used = manager.num_gpu_blocks - manager.get_num_free_gpu_blocks()
        return ReplicaLoad(self._num_waiting, len(scheduler.running), num_used / manager.num_gpu_blocks)

    def _advance(self, sequences: list[Sequence], num_tokens: int) -> None:
        tokens_after, manager = self._executor.tokens_after, self._core.block_manager
        for seq in sequences:
            seq.token_ids += tokens_after(seq.request.data, seq.index, len(seq.token_ids), num_tokens)
            seq.num_computed_tokens += num_tokens
            seq.num_reported_tokens += num_tokens
            if manager.enable_prefix_caching:
                manager.cache_full_blocks(seq)
