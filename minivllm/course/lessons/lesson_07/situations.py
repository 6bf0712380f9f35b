"""Sets up the same random situation in a learner's scheduler and in the package's, and compares the two.

A learner's queues are lists sorted by `order`; the package's are `SequenceQueue`s.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from typing import Any

from minivllm.config import SchedulerConfig
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.course.observations import Hint, expect, seeded
from minivllm.request import EngineCoreRequest, Request, Sequence, SequenceStatus
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler_output import ScheduledSequence, SchedulerOutput

STOP_TOKEN = 7
"""The stop token in these checks."""
_QUEUES = ("waiting", "running", "swapped")
Outputs = tuple[SchedulerOutput, SchedulerOutput]
"""A step as the package's scheduler decided it, and as the learner's did."""


class _Blocks(BlockSpaceManager):
    """The package's manager, except that a block table is handed out as it is at that moment, not as the list that grows later."""

    def get_block_table(self, seq: Sequence) -> list[int]:
        return list(super().get_block_table(seq))


def make_twins(cls: type, seed: str, **options: Any) -> tuple[Any, Any]:
    """Set up the same situation in a learner's scheduler and in the package's."""
    return make_scene(cls, seed, **options), make_scene(Scheduler, seed, **options)


def make_scene(
    cls: type,
    seed: str,
    *,
    running: tuple[int, int] = (0, 0),
    waiting: tuple[int, int] = (0, 0),
    swapped: tuple[int, int] = (0, 0),
    spare: tuple[int, int] = (0, 8),
    host: tuple[int, int] = (0, 4),
    budget: tuple[int, int] = (30, 60),
    mode: str = "recompute",
    prefill: bool = False,
    longest_prompt: int = 9,
) -> Any:
    """A scheduler at work. The pairs are ranges: of sequences in each queue, of free device and host blocks, of tokens."""
    rng = seeded(seed)
    counts = {"running": rng.randint(*running), "swapped": rng.randint(*swapped), "waiting": rng.randint(*waiting)}
    block_size, policy = rng.choice((2, 3, 4)), rng.choice(("fcfs", "priority"))
    mode = rng.choice(("recompute", "swap", "swap")) if mode == "any" else mode
    numbers = list(range(sum(counts.values())))
    if policy == "priority":
        rng.shuffle(numbers)
    sequences: list[tuple[str, Sequence, int]] = []
    for queue, count in counts.items():
        for _ in range(count):
            seq = Sequence(
                len(sequences), make_request(chr(ord("a") + len(sequences)), rng.randint(1, longest_prompt), rng.randint(1, 5))
            )
            has_output = queue != "waiting" or rng.random() < 0.3
            seq.token_ids += [1] * (rng.randint(1, max(1, seq.request.max_num_tokens - seq.num_tokens - 1)) if has_output else 0)
            sequences.append((queue, seq, numbers[len(sequences)]))
    taken = {queue: sum(-(-(seq.num_tokens - 1) // block_size) for q, seq, _ in sequences if q == queue) for queue in _QUEUES}
    growing = sum((seq.num_tokens - 1) % block_size == 0 for queue, seq, _ in sequences if queue == "running")
    num_blocks = taken["running"] + max(rng.randint(*spare), 0) + (rng.choice((0, growing // 2)) if spare[1] < 3 else 0)
    largest = max((-(-(seq.num_tokens + 2) // block_size) for _, seq, _ in sequences), default=1)
    manager = _Blocks(
        block_size, max(num_blocks, largest), taken["swapped"] + rng.randint(*host), watermark=rng.choice((0.0, 0.2))
    )
    places = max(1, counts["running"] + rng.randint(0, 3))
    config = SchedulerConfig(places, max(places, rng.randint(*budget)), policy=policy, preemption_mode=mode)
    scheduler = cls(config, manager)
    for queue, seq, number in sequences:
        if queue != "waiting":
            newest = seq.token_ids.pop()
            if queue == "swapped":  # its blocks were on the device before
                for _ in range(manager.num_blocks_for(seq.num_tokens)):
                    manager.swapped_tables.setdefault(seq.seq_id, []).append(manager.cpu_allocator.allocate())
            else:
                manager.allocate(seq)
            seq.num_computed_tokens = seq.num_tokens
            seq.token_ids.append(newest)
            if prefill and rng.random() < 0.4:  # a prompt, or a recomputation: all tokens are computed in one step
                manager.append_slots(seq)
                seq.num_computed_tokens = 0
        place(scheduler, queue, seq, (number, 0))
    return scheduler


def make_request(name: str, prompt_len: int, output_len: int, priority: int = 0, arrival: float = 0.0) -> Request:
    """A request with a length limit, which a stop token may end earlier, from its second output token on."""
    params = SamplingParams(max_tokens=output_len, min_tokens=min(2, output_len), stop_token_ids=[STOP_TOKEN])
    prompt = list(range(100, 100 + prompt_len))
    max_num_tokens = prompt_len + output_len + 1
    return Request(
        EngineCoreRequest(name, prompt, params, max_num_tokens=max_num_tokens, arrival_time=arrival, priority=priority)
    )


def place(scheduler: Any, queue: str, seq: Sequence, order: tuple[int, ...]) -> None:
    """Put a sequence into a queue of either scheduler."""
    seq.order, seq.status = order, SequenceStatus(queue)
    if seq not in seq.request.sequences:
        seq.request.sequences.append(seq)
    scheduler.requests[seq.request.request_id] = seq.request
    if queue != "waiting":
        seq.request.metrics.num_preemptions = len(seq.request.prompt_token_ids) % 3  # it may have been preempted before
    line = getattr(scheduler, queue)
    if isinstance(line, list):
        insort(line, seq, key=lambda other: other.order)
    else:
        line.add(seq)


def take_out(scheduler: Any, request_id: str) -> None:
    """Remove a waiting request from either scheduler, bypassing its methods."""
    del scheduler.requests[request_id]
    scheduler.waiting.remove(next(seq for seq in scheduler.waiting if seq.request.request_id == request_id))


def take_blocks(scheduler: Any, num_left: int) -> None:
    """Take free device blocks away until at most `num_left` are left."""
    manager = scheduler.block_manager
    while manager.get_num_free_gpu_blocks() > max(num_left, 0):
        manager.gpu_allocator.allocate()


def advance(output: SchedulerOutput) -> None:
    """Do to a step's sequences what `update` would: everything scheduled is computed, and each gets a token that ends nothing."""
    for part in output.scheduled:
        part.seq.num_computed_tokens += part.num_tokens
        part.seq.token_ids.append(1)


def make_batch(scheduler: Any) -> SchedulerOutput:
    """A step in which every running sequence computes all its uncomputed tokens."""
    output = SchedulerOutput()
    for seq in scheduler.running:
        if seq.num_uncomputed_tokens == 1:
            scheduler.block_manager.append_slots(seq)
        table = scheduler.block_manager.get_block_table(seq)
        output.scheduled.append(ScheduledSequence(seq, seq.num_uncomputed_tokens, table))
    return output


# -- comparing -------------------------------------------------------------------------------------------------------


def names_of(queue: Any) -> list[str]:
    """The ids of the requests in a queue, in order."""
    return [seq.request.request_id for seq in queue]


def picture_of(scheduler: Any, output: SchedulerOutput | None = None) -> dict[str, Any]:
    """The observable state of a scheduler and its step, by name, the most important first. Nothing in it changes later."""
    sequences = [seq for queue in _QUEUES for seq in getattr(scheduler, queue)]
    manager, observations = scheduler.block_manager, dict[str, Any]()
    names = {seq.seq_id: seq.request.request_id for seq in sequences}
    if output is not None:
        observations["phase"] = output.phase
        observations["preempted"], observations["swapped_in"] = names_of(output.preempted), names_of(output.swapped_in)
        observations["batch"] = {part.seq.request.request_id: count_tokens(part.num_tokens) for part in output.scheduled}
        observations["order of the batch"] = names_of(part.seq for part in output.scheduled)
    observations |= {queue: names_of(getattr(scheduler, queue)) for queue in _QUEUES}
    for name, attribute in (
        ("status", "status"),
        ("order", "order"),
        ("token_ids", "token_ids"),
        ("computed", "num_computed_tokens"),
    ):
        observations[name] = {seq.request.request_id: _plain(getattr(seq, attribute)) for seq in sequences}
    if output is not None:
        for name in ("num_batched_tokens", "num_prefills", "blocks_to_swap_out", "blocks_to_swap_in", "blocks_to_copy"):
            observations[name] = _plain(getattr(output, name))
    tables = ({names.get(i, "a finished sequence"): list(table) for i, table in kept.items()}
              for kept in (manager.block_tables, manager.swapped_tables))  # fmt: skip
    observations["blocks"], observations["host blocks"] = tables
    if output is not None:
        observations["tables in the batch"] = {part.seq.request.request_id: list(part.block_table) for part in output.scheduled}
    observations["free blocks"] = (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks())
    observations["requests"] = sorted(scheduler.requests)
    observations["preemptions"] = {seq.request.request_id: seq.request.metrics.num_preemptions for seq in sequences}
    return observations


def count_tokens(number: int) -> str:
    """The number with its word: "1 token", "3 tokens"."""
    return f"{number} token" + ("" if number == 1 else "s")


def _plain(value: Any) -> Any:
    """A value as it is now: a list that may grow is copied, a status is its word."""
    if isinstance(value, SequenceStatus):
        return value.value
    return list(value) if isinstance(value, list) else value


_ALWAYS = {
    "order": "seq.order: once set, it never changes",
    "token_ids": "what changes token_ids: only `update` does",
    "tables in the batch": "append_slots before add: `add` hands the block table to the model as it is at that moment",
}
"""Where to look for what is the same in every stage."""


def compare(said: str, theirs: Any, mine: Any, hints: Mapping[str, Hint], outputs: Outputs | None = None, skip: str = "") -> None:
    """Raise an AssertionError about the first difference between two schedulers, if there is one. One observation may be skipped."""
    expected, got = (picture_of(scheduler, outputs and outputs[i]) for i, scheduler in enumerate((theirs, mine)))
    for name, value in expected.items():
        if name != skip:
            expect(said, name, value, got[name], hints.get(name, _ALWAYS.get(name, f"what changes {name}")))


def describe(scheduler: Any) -> str:
    """Describe the situation in a few lines."""
    config, manager = scheduler.config, scheduler.block_manager
    queues = []
    for queue in _QUEUES:
        inside = ", ".join(f"{seq.request.request_id} ({count_tokens(seq.num_tokens)})" for seq in getattr(scheduler, queue))
        queues.append(f"{queue}: {inside or 'empty'}")
    return (
        f"{'; '.join(queues)}. Policy {config.policy!r}, preemption_mode {config.preemption_mode!r}, max_num_seqs {config.max_num_seqs}, "
        f"max_num_batched_tokens {config.max_num_batched_tokens}; {manager.get_num_free_gpu_blocks()} of {manager.num_gpu_blocks} "
        f"blocks of {manager.block_size} tokens are free, watermark {manager.watermark_blocks}."
    )
