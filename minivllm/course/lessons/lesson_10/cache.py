"""The checks of lesson 10 for hashes that chain, and for a pool that remembers."""

from __future__ import annotations

import itertools
import random
from typing import Any

from minivllm.core.block_allocator import BlockAllocator
from minivllm.course.observations import expect, fail, require, rounds, see, seeded

# -- hashes ----------------------------------------------------------------------------------------------------------

Text = tuple[list[int], str | None]
"""Tokens, and a salt."""


def make_texts(rng: random.Random, block_size: int) -> list[Text]:
    """Similar texts: the same prefix, one different token, blocks in another order, digits that run together, salts."""
    size = block_size
    base = [rng.randrange(1, 200) for _ in range(rng.randint(2, 4) * size + rng.randrange(size))]
    changed = list(base)
    changed[rng.randrange(size)] += 1
    later = list(base)
    later[size + rng.randrange(size)] += 1
    swapped = base[size : 2 * size] + base[:size] + base[2 * size :]
    longer = [*base, *(rng.randrange(200) for _ in range(rng.randint(1, 2 * size)))]
    repeated = base[:size] * 3
    joined = [1, 23, *base[2:]] if size > 1 else base
    other = [12, 3, *base[2:]] if size > 1 else changed
    large = [token + 256 for token in base]
    larger = [token + 65536 for token in base]
    reversed_first = base[:size][::-1] + base[size:]
    texts: list[Text] = [
        (tokens, None)
        for tokens in (base, changed, later, swapped, longer, repeated, joined, other, large, larger, reversed_first)
    ]
    texts += [(base, salt) for salt in ("a", "A", "b", "ab", "ba", "None", "é", "a" * 40, "a" * 40 + "b")]
    texts += [(base[size:], str(base[:size])), (base[size:], repr((None, base[:size]))), (base[size:], repr(base[:size]))]
    texts += [(changed, "a"), (longer, "a"), (base[:size], None), (base[: size - 1], None), ([], "a")]
    return texts


def check_hash_blocks(hash_blocks: Any) -> None:
    """Equal if and only if the salt and all tokens up to the end of the block are equal; full blocks only; of constant size, and not of a few bits."""
    longest = 0
    for rng in rounds("hash", 60):
        size = rng.choice((1, 2, 3, 4, 16))
        seen: dict[tuple[Any, ...], Any] = {}
        numbers: dict[Any, int] = {}
        for tokens, salt in make_texts(rng, size):
            said = f"hash_blocks({tokens}, block_size={size}, salt={salt!r})"
            given = list(tokens)
            got = hash_blocks(given, size, salt) if salt is not None else hash_blocks(given, size)
            expect(said, "tokens of the caller afterwards", tokens, given, "what changes the list that was given")
            if not isinstance(got, list | tuple):
                fail(f"{said}\nExpected: a list\nGot: {got!r}\nLook at what is returned.")
            expect(said, "hashes", len(tokens) // size, len(got), "which blocks are full: tokens that fill no block have no hash")
            for i, block_hash in enumerate(got):
                try:
                    hash(block_hash)
                except TypeError:
                    kinds = "hashes that can be keys of a dict"
                    look = "what a hash is made of: bytes, a string or a number will do"
                    fail(f"{said}\nExpected: {kinds}\nGot: {block_hash!r:.100}\nLook at {look}.")
                longest = max(longest, _num_bits(block_hash))
                first = seen.setdefault((salt, tuple(tokens[: (i + 1) * size])), block_hash)
                see(numbers.setdefault(block_hash, len(numbers)))
                look = "where chance, or anything but salt and tokens, comes in"
                another = f"{said}\nExpected hash {i}: the same as of the same tokens before\nGot: another one\nLook at {look}."
                require(True, first == block_hash, another)
        for (one, hash_of_one), (two, hash_of_two) in itertools.combinations(seen.items(), 2):
            if hash_of_one == hash_of_two:
                fail(
                    f"Blocks of {size} tokens.\nExpected: different hashes for the blocks that end {_show(one)} and {_show(two)}\nGot: the same hash\n"
                    "Look at what goes into a hash: the salt, the hash of the block before, and the block's tokens, each distinguishable from the next."
                )
    require(
        True, longest > 120,
        f"Hashes of a few thousand blocks.\nExpected: 128 bits or more\nGot: at most {longest} bits\n"
        "Look at how the hash is made: hashlib's are long enough if they are kept whole; with 64 bits, as Python's own `hash` has, an attacker can find two texts with the same.",
    )  # fmt: skip
    sizes = [len(repr(block_hash)) for block_hash in hash_blocks(list(range(100, 110)), 1)]
    require(
        True, max(sizes) < 1.5 * min(sizes) + 20,
        f"hash_blocks of ten blocks.\nExpected: hashes of a constant size\nGot: from {min(sizes)} to {max(sizes)} characters\n"
        "Look at what is kept of the block before: its hash, not all of its tokens.",
    )  # fmt: skip


def _num_bits(block_hash: Any) -> int:
    """How many bits a hash has; for numbers, up to the highest that is set."""
    if isinstance(block_hash, int):
        return block_hash.bit_length()
    if isinstance(block_hash, bytes):
        return 8 * len(block_hash)
    return 6 * len(repr(block_hash).strip("'"))  # text, of at most 64 characters that differ


def _show(key: tuple[Any, ...]) -> str:
    salt, tokens = key
    return f"{list(tokens)}" + (f" with the salt {salt!r}" if salt is not None else "")


# -- the pool --------------------------------------------------------------------------------------------------------

_HASHES = ("A", "B", "C", "D", "E", "F", "G")


def run_pool(pool: Any, rng: random.Random, num_blocks: int, num_calls: int) -> list[tuple[str, Any, dict[str, Any]]]:
    """Random calls of a pool: each call, what it returned, and the pool's state afterwards."""
    held: list[int] = []
    history = []
    for _ in range(num_calls):
        kind = rng.choice(("allocate", "allocate", "share", "release", "release", "cache", "cache", "find", "forget"))
        name = rng.choice(_HASHES)
        returned: Any = None
        if kind == "allocate":
            call = "allocate()"
            try:
                returned = pool.allocate()
                held.append(returned)
            except IndexError:
                returned = "an IndexError"
        elif kind == "share":
            found = pool.find(name)
            candidates = [found] if found is not None else held
            if not candidates:
                continue
            block = rng.choice(candidates)
            call, returned = f"share({block})", pool.share(block)
            held.append(block)
        elif kind == "forget":
            if rng.random() < 0.7:
                continue
            call, returned = "forget_all()", pool.forget_all()
        elif kind == "release" and held:
            block = held.pop(rng.randrange(len(held)))
            call, returned = f"release({block})", pool.release(block)
        elif kind == "cache" and held:
            block = rng.choice(held)
            call, returned = f"cache({block}, {name!r})", pool.cache(block, name)
        else:
            call, returned = f"find({name!r})", pool.find(name)
        history.append((call, returned if call.startswith(("allocate", "find")) else None, state_of(pool, num_blocks)))
    return history


def state_of(pool: Any, num_blocks: int) -> dict[str, Any]:
    """The observable state of a pool."""
    return {
        "reference counts": [int(pool.ref_counts[block]) for block in range(num_blocks)],
        "num_free": int(pool.num_free),
        "blocks with contents": sorted(pool.get_cached_blocks()),
        "free blocks, in order": [int(block) for block in pool.get_free_blocks()],
        "what is found": {name: pool.find(name) for name in _HASHES if pool.find(name) is not None},
    }


_LOOK = {
    "blocks with contents": "hash_of and block_of, which must agree",
    "reference counts": "who is counted",
    "num_free": "when a block is free, and when it is no longer",
    "free blocks, in order": "the order: a block that was just freed goes to the end if it has a hash, and to the front if not",
    "what is found": "when a hash is forgotten (only when its block is handed out), and which block is found if two hold the same (the first)",
}


def check_pool(cls: Any) -> None:
    """Random calls, the same as of the package's pool; a few at first, so that a counterexample is short."""
    for number in range(150):
        num_calls = 3 + number // 4
        num_blocks = seeded(f"size {number}").randint(1, 6)
        theirs = run_pool(BlockAllocator(num_blocks), seeded(f"pool {number}"), num_blocks, num_calls)
        pool = cls(num_blocks)
        mine: list[Any] = []
        try:
            mine = run_pool(pool, seeded(f"pool {number}"), num_blocks, num_calls)
        except (IndexError, KeyError, ValueError, TypeError, AttributeError) as error:
            calls = ", ".join(call for call, _, _ in theirs[:12])
            fail(
                f"A pool of {num_blocks} blocks. Calls like {calls} …\nExpected: no error, but for an IndexError of allocate() when no block is free\nGot: {error!r}\nLook at blocks that are free, or hold nothing, when a method is called."
            )
        for place, ((call, expected, state), (_, got, my_state)) in enumerate(zip(theirs, mine, strict=True)):
            before = ", ".join(call for call, _, _ in theirs[:place]) or "nothing"
            said = f"A pool of {num_blocks} blocks. Before: {before}. Now: {call}."
            expect(said, "return value", expected, got, "what is returned, or raised")
            for name, value in state.items():
                expect(said, name, value, my_state[name], _LOOK[name])
