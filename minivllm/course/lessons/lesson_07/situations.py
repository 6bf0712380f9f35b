"""The same random situation in the package's scheduler and in a learner's, and comparisons of the two; for lesson 10, too.

A learner's queues are lists sorted by `order`; the package's are `SequenceQueue`s.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from minivllm.config import SchedulerConfig
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.course.observations import expect, fail, seeded
from minivllm.request import EngineCoreRequest, Request, Sequence, SequenceStatus
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler_output import SchedulerOutput

STOP_TOKEN = 7
"""The stop token in these checks."""
_QUEUES = ("waiting", "running", "swapped")
_USUAL = {"swapped": (0, 0), "running": (0, 0), "waiting": (0, 0), "spare": (0, 8), "host": (0, 4), "budget": (30, 60)}
"""Of a scene: how many sequences are in each queue, how many device and host blocks are free, and the limit of tokens."""
_LOOKS = {
    "preempted": "which one gives way, the last in self.running; and at output.preempted",
    "batch": "which sequences are in the step, and how many tokens each computes",
    "running": "who joins and who leaves, and whether the queue is kept sorted by `order`",
    "order": "seq.order: once set, it never changes, so that a preempted sequence comes before all that arrived later",
    "token_ids": "what changes token_ids: only `update` does",
    "num_computed_tokens": "num_computed_tokens: 0 where keys and values are lost, unchanged by a swap",
    "num_prefills": "output.num_prefills: each newcomer counts, and each chunk of a prompt",
    "blocks": "which blocks are taken and freed: append_slots makes room for the newest token before it is computed",
    "blocks_to_swap_out": "the pairs that the manager's swap_out returns",
    "blocks_to_swap_in": "the pairs that the manager's swap_in returns",
    "tables in the batch": "append_slots before add: `add` hands the block table to the model as it is at that moment",
    "requests": "self.requests",
    "preemptions": "request.metrics.num_preemptions",
}
"""Where to look, unless a check knows better."""


class _Blocks(BlockSpaceManager):
    """The package's manager, except that a block table is handed out as it is at that moment, not as the list that grows later."""

    def get_block_table(self, seq: Sequence) -> list[int]:
        return list(super().get_block_table(seq))


class Reference(Scheduler):
    """The package's decisions under the names of the lesson."""

    admit, preempt, swap_in = Scheduler._admit, Scheduler._preempt, Scheduler._swap_in

    def finish(self, seq: Sequence, status: SequenceStatus) -> None:
        """End a sequence."""
        self.abort_request(seq.request.request_id, status)


# -- random situations -------------------------------------------------------------------------------------------------


def make_scene(
    cls: type, seed: str, mode: str = "recompute", prefill: bool = False, longest_prompt: int = 9, **ranges: tuple[int, int]
) -> Any:
    """A scheduler at work; `ranges` are as in `_USUAL`."""
    rng = seeded(seed)
    drawn = {name: rng.randint(*limits) for name, limits in (_USUAL | ranges).items()}
    queues = [queue for queue in ("swapped", "running", "waiting") for _ in range(drawn[queue])]
    sequences = [_make_sequence(rng, number, queue, longest_prompt) for number, queue in enumerate(queues)]
    block_size, policy = rng.choice((2, 3, 4)), rng.choice(("fcfs", "priority"))
    mode = rng.choice(("recompute", "swap", "swap")) if mode == "any" else mode
    places = max(1, drawn["running"] + rng.randint(0, 3))
    config = SchedulerConfig(places, max(places, drawn["budget"]), policy=policy, priority_preemption=False, preemption_mode=mode)
    taken = [-(-(seq.num_tokens - 1) // block_size) for seq in sequences]
    on_host, on_device = sum(taken[: drawn["swapped"]]), sum(taken[drawn["swapped"] : drawn["swapped"] + drawn["running"]])
    largest = max((-(-(seq.num_tokens + 2) // block_size) for seq in sequences), default=1)
    num_blocks, num_on_host = max(on_device + drawn["spare"], largest), on_host + drawn["host"]
    scheduler = cls(config, _Blocks(block_size, num_blocks, num_on_host, watermark=rng.choice((0.0, 0.2))))
    numbers = rng.sample(range(len(queues)), len(queues)) if policy == "priority" else range(len(queues))
    for seq, queue, number in zip(sequences, queues, numbers, strict=True):
        seq.order, seq.status = (number, 0), SequenceStatus(queue)
        scheduler.requests[seq.request.request_id] = seq.request
        line = getattr(scheduler, queue)
        insort(line, seq, key=lambda other: other.order) if isinstance(line, list) else line.add(seq)
        if queue != "waiting":
            _compute(scheduler.block_manager, seq)
            if queue == "swapped":
                scheduler.block_manager.swap_out(seq)
            elif prefill and rng.random() < 0.4:  # a prompt, or a recomputation: all tokens are computed in one step
                scheduler.block_manager.append_slots(seq)
                seq.num_computed_tokens = 0
    return scheduler


def _compute(manager: BlockSpaceManager, seq: Sequence) -> None:
    """Everything but its newest token is in the cache, which has no slot for that one yet."""
    newest = seq.token_ids.pop()
    manager.allocate(seq)
    seq.num_computed_tokens = seq.num_tokens
    seq.token_ids.append(newest)


def _make_sequence(rng: Any, number: int, queue: str, longest_prompt: int) -> Sequence:
    """A sequence for a queue: with output, except where it may never have run."""
    seq = Sequence(number, make_request(chr(ord("a") + number), rng.randint(1, longest_prompt), rng.randint(1, 5)))
    seq.request.sequences.append(seq)
    if queue != "waiting":
        seq.request.metrics.num_preemptions = seq.num_prompt_tokens % 3  # it may have been preempted before
    if queue != "waiting" or rng.random() < 0.3:
        seq.token_ids += [1] * rng.randint(1, max(1, seq.request.max_num_tokens - seq.num_tokens - 1))
    return seq


def make_request(name: str, prompt_len: int, output_len: int, priority: int = 0, arrival: float = 0.0) -> Request:
    """A request with a length limit, which a stop token may end earlier, from its second output token on."""
    params = SamplingParams(max_tokens=output_len, min_tokens=min(2, output_len), stop_token_ids=[STOP_TOKEN])
    prompt, longest = list(range(100, 100 + prompt_len)), prompt_len + output_len + 1
    return Request(EngineCoreRequest(name, prompt, params, max_num_tokens=longest, arrival_time=arrival, priority=priority))


def take_blocks(scheduler: Any, num_left: int) -> None:
    """Take free device blocks away until at most `num_left` are left."""
    manager = scheduler.block_manager
    while manager.get_num_free_gpu_blocks() > max(num_left, 0):
        manager.gpu_allocator.allocate()


# -- two schedulers ----------------------------------------------------------------------------------------------------


class Twins:
    """The package's scheduler and a learner's in the same situation, and the step that each is building.

    Attributes:
        theirs, mine: The package's and the learner's; the methods have the lesson's names in both.
        outputs: Their steps.
        said: The situation and what was done then, for messages.
    """

    def __init__(self, theirs: Any, mine: Any) -> None:
        self.theirs, self.mine = theirs, mine
        self.outputs = [SchedulerOutput(), SchedulerOutput()]
        self.said = ""

    def __iter__(self) -> Iterator[tuple[Any, SchedulerOutput]]:
        return zip((self.theirs, self.mine), self.outputs, strict=True)

    def say(self, more: str) -> None:
        """Describe the situation before something is done with it."""
        self.said = f"{describe(self.theirs, self.outputs[0])} {more}"

    def call(self, method: str) -> None:
        """Call a method that takes the step."""
        self.say(f"Then {method}(output).")
        for scheduler, output in self:
            getattr(scheduler, method)(output)

    def schedule(self, call: str = "schedule()") -> None:
        """Let both decide a step."""
        self.outputs = [SchedulerOutput(), SchedulerOutput()]
        self.say(f"Then {call}.")
        self.outputs = [scheduler.schedule() for scheduler, _ in self]
        if not isinstance(self.outputs[1], SchedulerOutput):
            fail(f"{self.said}\nExpected: a SchedulerOutput\nGot: {self.outputs[1]!r}\nLook at what schedule returns.")

    def compare(
        self, looks: Mapping[str, str | Callable[[Twins], str]] = MappingProxyType({}), skip: Collection[str] = ()
    ) -> None:
        """Raise an AssertionError about the first difference, if there is one."""
        expected, got = (picture_of(*pair) for pair in self)
        for name, value in expected.items():
            look = looks.get(name) or _LOOKS.get(name, f"what changes {name}")
            if name not in skip:
                expect(self.said, name, value, got[name], look if isinstance(look, str) else partial(look, self))


def make_twins(cls: type, seed: str, **options: Any) -> Twins:
    """The same scene for the package's scheduler and a learner's."""
    return Twins(make_scene(Reference, seed, **options), make_scene(cls, seed, **options))


def names_of(queue: Iterable[Sequence]) -> list[str]:
    """The ids of the requests in a queue, in order."""
    return [seq.request.request_id for seq in queue]


def count_tokens(number: int) -> str:
    """The number with its word: "1 token", "3 tokens"."""
    return f"{number} token" + ("" if number == 1 else "s")


def picture_of(scheduler: Any, output: SchedulerOutput) -> dict[str, Any]:
    """The observable state of a scheduler and its step, by name, the most important first. Nothing in it changes later."""
    manager, parts = scheduler.block_manager, output.scheduled
    sequences = [seq for queue in _QUEUES for seq in getattr(scheduler, queue)]
    names = {seq.seq_id: seq.request.request_id for seq in sequences}

    def by_name(tables: Mapping[int, list[int]]) -> dict[str, list[int]]:
        return {names.get(number, "a finished sequence"): list(table) for number, table in tables.items()}

    def of_each(value: Callable[[Sequence], Any]) -> dict[str, Any]:
        return {seq.request.request_id: value(seq) for seq in sequences}

    return {
        "phase": output.phase,
        "preempted": names_of(output.preempted),
        "swapped_in": names_of(output.swapped_in),
        "batch": {part.seq.request.request_id: count_tokens(part.num_tokens) for part in parts},
        "order of the batch": names_of(part.seq for part in parts),
        **{queue: names_of(getattr(scheduler, queue)) for queue in _QUEUES},
        "status": of_each(lambda seq: seq.status.value),
        "order": of_each(lambda seq: seq.order),
        "token_ids": of_each(lambda seq: list(seq.token_ids)),
        "num_computed_tokens": of_each(lambda seq: seq.num_computed_tokens),
        "num_cached_tokens": of_each(lambda seq: seq.request.metrics.num_cached_tokens),
        "num_batched_tokens": output.num_batched_tokens,
        "num_prefills": output.num_prefills,
        "blocks": by_name(manager.block_tables),
        "host blocks": by_name(manager.swapped_tables),
        **{name: list(getattr(output, name)) for name in ("blocks_to_swap_out", "blocks_to_swap_in", "blocks_to_copy")},
        "tables in the batch": {part.seq.request.request_id: list(part.block_table) for part in parts},
        "free blocks": (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()),
        "requests": sorted(scheduler.requests),
        "preemptions": of_each(lambda seq: seq.request.metrics.num_preemptions),
    }


def describe(scheduler: Any, output: SchedulerOutput) -> str:
    """A situation in a few lines."""
    config, manager = scheduler.config, scheduler.block_manager
    queues = []
    for queue in _QUEUES:
        line = list(getattr(scheduler, queue))
        shown = [_describe_sequence(scheduler, seq) for seq in line[:6]] + [f"{len(line) - 6} more"] * (len(line) > 6)
        queues.append(f"{queue}: {', '.join(shown) or 'empty'}")
    said = (
        f"{'; '.join(queues)}. Policy {config.policy!r}, preemption_mode {config.preemption_mode!r}, max_num_seqs {config.max_num_seqs}, "
        f"max_num_batched_tokens {config.max_num_batched_tokens}; {manager.get_num_free_gpu_blocks()} of {manager.num_gpu_blocks} "
        f"blocks of {manager.block_size} tokens are free, watermark {manager.watermark_blocks}."
    )
    if not output.num_batched_tokens:
        return said
    parts = [f"{part.seq.request.request_id} ({count_tokens(part.num_tokens)})" for part in output.scheduled]
    return f"{said} The step has {count_tokens(output.num_batched_tokens)} so far" + (f": {', '.join(parts)}." if parts else ".")


def _describe_sequence(scheduler: Any, seq: Sequence) -> str:
    manager, words = scheduler.block_manager, [count_tokens(seq.num_tokens)]
    if seq.status is SequenceStatus.RUNNING and seq.num_uncomputed_tokens > 1:
        words.append(f"{seq.num_uncomputed_tokens} to compute")
    if seq.status is SequenceStatus.WAITING:
        num_cached = len(manager.find_cached_blocks(seq)) * manager.block_size
        words += [f"{num_cached} of them in the cache"] * (num_cached > 0)
        words += ["preempted before"] * (seq.request.metrics.num_preemptions > 0)
    return f"{seq.request.request_id} ({', '.join(words)})"


def explain_turn(
    twins: Twins, queue: str, right: list[str], wrong: list[str], explain: Callable[[Any, SchedulerOutput, Sequence], str]
) -> str | None:
    """Where to look when not the right sequences have left a queue: whose turn it was, or what decides about that one.

    Args:
        queue: Its name.
        right, wrong: Who has left it in the package's scheduler and in the learner's, in order.
        explain: Says what lets the sequence join, or keeps it waiting, in the scheduler that has stopped at its turn and in its step.
    """
    if right == wrong:
        return None
    turn = next((i for i, pair in enumerate(zip(right, wrong, strict=False)) if pair[0] != pair[1]), min(len(right), len(wrong)))
    name = right[turn] if turn < len(right) else next(iter(names_of(getattr(twins.theirs, queue))), "")
    if turn < len(wrong) and wrong[turn] != name:
        if wrong[turn] in wrong[:turn]:
            return f"how a sequence leaves self.{queue}: {wrong[turn]!r} has left it twice"
        return f"whose turn it is: {name!r} is the first in self.{queue}, and {wrong[turn]!r} must not overtake it"
    scheduler, output = list(twins)[turn < len(right)]
    return explain(scheduler, output, scheduler.requests[name].sequences[0])
