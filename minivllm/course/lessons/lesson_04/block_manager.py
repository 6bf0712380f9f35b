"""The checks of lesson 04 for each part of a block manager.

Each takes a learner's class and calls it at random. Messages say what was expected, what was returned and where to look. A stage's check also
tries what the stage inherits and may have broken.
"""

from __future__ import annotations

import random
from numbers import Integral
from operator import index
from typing import Any

from minivllm.core.block_allocator import BlockAllocator
from minivllm.course.lessons.lesson_04.looks import ask, count, count_references, next_blocks, pool_state
from minivllm.course.lessons.lesson_04.walk import take_walks, walks
from minivllm.course.observations import fail, require, rounds

_SHARING_SIZES = (2, 3, 4, 16)
"""Block sizes with which a block can be partly full."""


def check_pool(pool_class: type) -> None:
    """`allocate`, `share` and `release`, compared with the package's pool; and calls that must be refused."""
    for rng in rounds("pool", 12):
        num_blocks = rng.randrange(1, 15)
        actions: list[str] = []
        pool, right = pool_class(num_blocks), BlockAllocator(num_blocks)
        for _ in range(40):
            used = [block for block in range(num_blocks) if right.ref_counts[block]]
            action = rng.choice(["allocate", "allocate", "share", "release", "release", "refuse"])
            if action == "refuse":
                _check_refusal(pool, rng, used, right.get_free_blocks(), _after(actions))
            elif action == "allocate":
                number = rng.randrange(min(right.num_free, 5) + 1)
                actions.append(f"allocate({number})")
                wanted, got = [right.allocate() for _ in range(number)], pool.allocate(number)
                got = got if got is None else list(map(index, got))
                said = f"{_after(actions)} expected {wanted}, the first blocks in the queue, in that order, but got {got}."
                require(wanted, got, said)
            else:
                some = rng.sample(used, rng.randrange(min(len(used), 4) + 1))
                actions.append(f"{action}({some})")
                for block in reversed(some):
                    getattr(right, action)(block)
                getattr(pool, action)(some)
            _compare_pools(pool, right, _after(actions))


def _after(actions: list[str]) -> str:
    """The last few actions, as text."""
    return f"After {'… ' if len(actions) > 4 else ''}{', '.join(actions[-4:]) or 'no call'}:"


def _compare_pools(pool: Any, right: BlockAllocator, after: str) -> None:
    free = f"{after} {count(right.num_free, 'block')} should be free, but num_free is {pool.num_free!r}."
    require(right.num_free, index(pool.num_free), f"{free} A block becomes free only when its last reference is released.")
    counts, order, got = count_references(pool, right.num_blocks), right.get_free_blocks(), next_blocks(pool)
    require(right.ref_counts, counts, f"{after} ref_counts should be {right.ref_counts}, but are {counts}.")
    queue = f"{after} the free blocks should be handed out in the order {order}, but would be in the order {got}."
    require(order, got, f"{queue} {_IN_FRONT}")


_IN_FRONT = "A block that becomes free goes to the front. The last block of a list is released first, so its first block is handed out first."


def _check_refusal(pool: Any, rng: random.Random, used: list[int], free: list[int], after: str) -> None:
    """An invalid call raises a ValueError and changes nothing."""
    method, why = rng.choice(["allocate", "share", "release"]) if free else "allocate", "fewer blocks are free"
    argument: Any = len(free) + 1
    if method != "allocate":
        argument, block = rng.sample(used, min(len(used), rng.randrange(3))), rng.choice(free)
        argument.insert(rng.randrange(len(argument) + 1), block)
        why = f"block {block} is free"
    before = pool_state("pool", pool, len(used) + len(free))
    said = f"{after} {method}({argument}) must raise a ValueError, because {why}"
    try:
        getattr(pool, method)(argument)
    except ValueError:
        pass
    except IndexError as error:
        fail(f"{said}, but raised an IndexError: {error}.")
    else:
        fail(f"{said}, but it raised nothing.")
    for what, now in pool_state("pool", pool, len(used) + len(free)).items():
        left = f"{said}, and must then leave the pool as it was: {what} was {before[what]}, but now is {now}."
        require(before[what], now, f"{left} Look before you change anything.")


def check_allocate(manager_class: type) -> None:
    """Tables as long as the prompt needs, of blocks in no other table, to the last block; and the cell's given code is still there."""
    for arguments, sizes in (({"num_cpu_blocks": 3, "watermark": 0.1}, (4, 40, 3, 3)), ({}, (0, 40, 0, 0))):
        manager = manager_class(4, 40, **arguments)
        free = manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()
        given = manager.watermark_blocks, *free, manager.num_cpu_blocks
        names = "watermark_blocks, the numbers of free device and host blocks, and num_cpu_blocks"
        said = f"In a new manager with 40 device blocks and {arguments}, {names} should be {sizes}, but are {given}"
        require(sizes, given, f"{said}: `__init__` and the methods that count blocks are given, leave them as they are.")
    for walk in walks("allocate", manager_class, most_tables=100):
        manager, size = walk.manager, walk.block_size
        for num_tokens in (1, size - 1, size, size + 1, walk.rng.randrange(2, 9) * size, walk.rng.randrange(20, 60)):
            wanted, got = (num_tokens + size - 1) // size, ask(manager, "num_blocks_for", num_tokens)
            needs = f"{count(num_tokens, 'token')} in blocks of {size} should need {count(wanted, 'block')}"
            whole = index(got) if isinstance(got, Integral) else repr(got)
            require(wanted, whole, f"{needs}, but num_blocks_for returned {got!r}.")
        while manager.get_num_free_gpu_blocks():
            walk.allocate()


def check_free(manager_class: type) -> None:
    """All blocks return to the pool once, the last one of a table first."""
    take_walks("free", manager_class, (20, "allocate allocate free"), (4, "free"))


def check_can_allocate(manager_class: type) -> None:
    """The answer just below and above the limit, with and without the watermark."""
    take_walks("can allocate", manager_class, (12, "allocate ask_newcomer"))


def check_append(manager_class: type) -> None:
    """The tables of several sequences that grow by one token or several, and share nothing."""
    take_walks("append", manager_class, (3, "allocate"), (25, "grow"))


def check_can_append(manager_class: type) -> None:
    """The answer for one token and for several, with just enough free blocks and with one too few, and nothing shared."""
    take_walks("can append", manager_class, (4, "allocate"), (12, "ask_growth"))


def check_fork(manager_class: type) -> None:
    """Siblings share the parent's blocks, each in its own list, and references are counted."""
    take_walks("fork", manager_class, (8, "allocate fork fork fork"), (12, "free free fork"))


def check_copy_on_write(manager_class: type) -> None:
    """Siblings that grow: the first write to a shared block copies it, full blocks stay shared, and sequences that share nothing grow as before."""
    check_append(manager_class)
    check_can_append(manager_class)
    for name, calls in (("copy", "grow"), ("room for a copy", "grow ask_growth")):
        take_walks(name, manager_class, (6, "allocate fork fork fork"), (25, calls), block_sizes=_SHARING_SIZES)


def check_swap(manager_class: type) -> None:
    """Swapping out and in: pairs in table order, blocks released on both sides, shared blocks, and the answers beforehand."""
    for name, calls in (("swap", "allocate"), ("swap siblings", "allocate fork fork fork")):
        take_walks(name, manager_class, (6, calls), (30, f"{calls} grow swap_out swap_out swap_in free"))
