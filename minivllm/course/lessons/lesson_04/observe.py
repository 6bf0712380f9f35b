"""Observes a learner's classes from outside: random calls, and everything visible after each.

The grader runs this in the learner's process and, with the same seed, on the lesson's own solution, and compares the two. Nothing here
compares anything, so a notebook that tampers with its checks gains nothing. Block numbers are replaced by the order in which they
occur, because some methods may take blocks in any order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from operator import index
from typing import Any

from minivllm.course.lessons.block_tables import add_tokens, fork_sequence, make_sequence
from minivllm.course.lessons.lesson_04.engine import Crowd, run_simulated
from minivllm.course.lessons.lesson_04.tables import next_blocks
from minivllm.request import Sequence

_ROUNDS, _CALLS = 12, 40


def _observe_pool(pool_class: type, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for num_blocks in range(1, _ROUNDS + 1):
        pool, taken = pool_class(num_blocks), [0] * num_blocks
        for _ in range(_CALLS):
            used = [block for block, count in enumerate(taken) if count]
            some = rng.sample(used, rng.randrange(min(len(used), 4) + 1))
            action = rng.choice(["allocate", "allocate", "share", "release", "release", "refuse"])
            answer: Any = None
            if action == "allocate":
                answer = [index(block) for block in pool.allocate(rng.randrange(min(num_blocks - len(used), 5) + 1))]
                for block in answer:
                    taken[block] += 1
            elif action == "refuse":
                with suppress(ValueError):
                    pool.allocate(num_blocks - len(used) + 1)
                    answer = "no ValueError"
            else:
                getattr(pool, action)(list(some))
                for block in some:
                    taken[block] += 1 if action == "share" else -1
            counts = [index(pool.ref_counts[block]) for block in range(num_blocks)]
            observations.append([action, answer, index(pool.num_free), counts, next_blocks(pool)])
    return observations


class _Manager:
    """A learner's manager, the sequences in it, and the observations so far."""

    def __init__(self, manager_class: type, methods: set[str], rng: random.Random, observations: list[Any], number: int) -> None:
        sizes = (1, 2, 3, 4, 16) if "fork" not in methods else (2, 3, 4, 16)
        block_size = sizes[number % len(sizes)]
        self.manager = manager_class(
            block_size, rng.randrange(8, 40), rng.randrange(4, 20), watermark=rng.choice((0.0, 0.1, 0.25))
        )
        self.methods, self.rng, self.observations = methods, rng, observations
        self.running: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.forkable: list[Sequence] = []

    def call(self) -> None:
        """One random call, if there is room for it."""
        rng, manager, running = self.rng, self.manager, self.running
        free, host = manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()
        action = rng.choice(
            sorted(self.methods & {"allocate", "free", "fork", "append_slots", "can_append_slots", "swap_out", "swap_in"})
        )
        answer: Any = None
        if action == "allocate":
            seq = make_sequence("a", rng.randrange(1, 6 * manager.block_size))
            self.ask("num_blocks_for", seq.num_tokens)
            self.ask_with_watermark("can_allocate", seq)
            if self.blocks(seq.num_tokens) <= free:
                manager.allocate(seq)
                running.append(seq)
                self.forkable.append(seq)
        elif action == "fork" and self.forkable:
            parent = rng.choice(self.forkable)
            child = fork_sequence(parent)
            manager.fork(parent, child)
            running.append(child)
            self.forkable.append(child)
        elif action in ("append_slots", "can_append_slots") and running:
            answer = self.grow(rng.choice(running), rng.choice((1, 1, 2, manager.block_size + 1)), free)
        elif action == "free" and running + self.swapped:
            seq = rng.choice(running + self.swapped)
            manager.free(seq)
            self.forget(seq)
        elif action == "swap_out" and running:
            seq = rng.choice(running)
            self.ask("can_swap_out", seq)
            table = list(manager.get_block_table(seq))
            if len(table) <= host:
                pairs = [tuple(map(index, pair)) for pair in manager.swap_out(seq)]
                answer = pairs == list(zip(table, manager.swapped_tables[seq.seq_id], strict=True))
                self.forget(seq)
                self.swapped.append(seq)
        elif action == "swap_in" and self.swapped:
            seq = rng.choice(self.swapped)
            self.ask_with_watermark("can_swap_in", seq)
            table = list(manager.swapped_tables[seq.seq_id])
            if self.blocks(seq.num_tokens) <= free:
                pairs = [tuple(map(index, pair)) for pair in manager.swap_in(seq)]
                answer = pairs == list(zip(table, manager.get_block_table(seq), strict=True))
                self.swapped.remove(seq)
                running.append(seq)
        self.observations.append([action, answer, *self.look()])

    def grow(self, seq: Sequence, num_new: int, free: int) -> Any:
        """Append tokens, and make room for them if there are blocks; otherwise remove the tokens again."""
        manager, table = self.manager, list(self.manager.get_block_table(seq))
        before = len(seq.token_ids), seq.num_computed_tokens
        add_tokens(seq, num_new)
        self.ask("must_copy", seq)
        self.ask("can_append_slots", seq)
        place = seq.num_computed_tokens // manager.block_size
        shared = place < len(table) and manager.gpu_pool.ref_counts[table[place]] > 1
        if "append_slots" not in self.methods or self.blocks(seq.num_tokens) - len(table) + shared > free:
            del seq.token_ids[before[0] :]
            seq.num_computed_tokens = before[1]
            return None
        copied = manager.append_slots(seq)
        if seq in self.forkable:
            self.forkable.remove(seq)
        return copied is not None and tuple(copied) == (table[place], manager.get_block_table(seq)[place])

    def ask(self, question: str, *arguments: Any, **options: Any) -> None:
        """Record the answer to a question, if this stage has it."""
        if question in self.methods:
            answer = getattr(self.manager, question)(*arguments, **options)
            self.observations.append([question, answer if question == "num_blocks_for" else bool(answer)])

    def ask_with_watermark(self, question: str, seq: Sequence) -> None:
        """Ask with and without keeping the watermark."""
        for options in ({"keep_watermark": True}, {"keep_watermark": False}, {}):
            self.ask(question, seq, **options)

    def blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.manager.block_size)

    def forget(self, seq: Sequence) -> None:
        for group in (self.running, self.swapped, self.forkable):
            if seq in group:
                group.remove(seq)

    def look(self) -> list[Any]:
        """The tables, how many contain each of their blocks, and how many blocks are free."""
        manager = self.manager
        seen = []
        for tables, sequences, pool in (
            (manager.block_tables, self.running, manager.gpu_pool),
            (manager.swapped_tables, self.swapped, manager.cpu_pool),
        ):
            names: dict[int, int] = {}
            kept = [[names.setdefault(index(block), len(names)) for block in tables[seq.seq_id]] for seq in sequences]
            seen.append([kept, [index(pool.ref_counts[block]) for block in names], index(pool.num_free), len(tables)])
        return seen


def _observe_manager(methods: str) -> Callable[[type, random.Random], list[Any]]:
    def observe(manager_class: type, rng: random.Random) -> list[Any]:
        observations: list[Any] = []
        for number in range(_ROUNDS):
            manager = _Manager(manager_class, set(methods.split()), rng, observations, number)
            for _ in range(_CALLS):
                manager.call()
        return observations

    return observe


def _observe_engine(manager_class: type, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for mode in ("recompute", "swap", "swap"):
        crowd = Crowd(rng.randrange(2**30), mode, rng.choice((0.1, 0.15, 0.25)), rng.randrange(20, 26), rng.choice((6, 24, 40)))
        observations += run_simulated(manager_class, crowd)
    return observations


OBSERVERS: Mapping[str, tuple[str, Callable[[type, random.Random], list[Any]]]] = {
    "check-pool": ("BlockPool", _observe_pool),
    "check-allocate": ("Allocating", _observe_manager("allocate num_blocks_for")),
    "check-free": ("Allocating", _observe_manager("allocate free")),
    "check-can-allocate": ("Admitting", _observe_manager("allocate can_allocate")),
    "check-append": ("Growing", _observe_manager("allocate append_slots")),
    "check-can-append": ("Growing", _observe_manager("allocate can_append_slots")),
    "check-fork": ("Sharing", _observe_manager("allocate fork free")),
    "check-copy": ("Sharing", _observe_manager("allocate fork append_slots can_append_slots must_copy")),
    "check-swap": (
        "Swapping",
        _observe_manager("allocate free fork append_slots can_swap_out swap_out can_swap_in swap_in"),
    ),
    "check-engine": ("MyBlockSpaceManager", _observe_engine),
    "check-text": ("MyBlockSpaceManager", _observe_engine),
}
"""For each check, the class it tests, and how to observe it."""
