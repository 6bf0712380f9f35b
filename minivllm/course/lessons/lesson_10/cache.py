"""The checks of lesson 10 for hashes that chain, and for a pool that remembers."""

from __future__ import annotations

import random
from typing import Any

from minivllm.core.block_allocator import BlockAllocator
from minivllm.course.observations import expect, fail, require, rounds, see

# -- hashes ----------------------------------------------------------------------------------------------------------

Text = tuple[list[int], str | None]
"""Tokens, and a salt."""


_CHANCE = "Look at where chance, or anything but salt and tokens, comes in."
_PARTS = "Look at what goes into a hash: the salt, the hash of the block before, and the block's tokens, each distinguishable from the next."
_CHAIN = "Look at what is kept of the block before: its hash, not all of its tokens."
_BITS = "Look at how the hash is made: hashlib's are long enough if they are kept whole; with 64 bits, as Python's own `hash` has, an attacker can find two texts with the same."


def make_texts(rng: random.Random, size: int) -> list[Text]:
    """Similar texts: the same prefix, one different token, blocks in another order, digits that run together, salts."""
    base = [rng.randrange(1, 200) for _ in range(rng.randint(2, 4) * size + rng.randrange(size))]
    changed, later = list(base), list(base)
    changed[rng.randrange(size)] += 1
    later[size + rng.randrange(size)] += 1
    longer = [*base, *(rng.randrange(200) for _ in range(rng.randint(1, 2 * size)))]
    swapped, repeated = base[size : 2 * size] + base[:size] + base[2 * size :], base[:size] * 3
    joined = [[1, 23, *base[2:]], [12, 3, *base[2:]]] if size > 1 else []
    shifted = [[token + by for token in base] for by in (256, 65536)]
    turned = base[:size][::-1] + base[size:]
    texts: list[Text] = [
        (tokens, None) for tokens in (base, changed, later, swapped, longer, repeated, *joined, *shifted, turned)
    ]
    texts += [(base, salt) for salt in ("a", "A", "b", "ab", "ba", "None", "é", "a" * 40, "a" * 40 + "b")]
    texts += [(base[size:], str(base[:size])), (base[size:], repr((None, base[:size])))]
    texts += [(changed, "a"), (longer, "a"), (base[:size], None), (base[: size - 1], None), ([], "a")]
    return texts


def _hash(hash_blocks: Any, said: str, tokens: list[int], size: int, salt: str | None) -> list[Any]:
    """The hashes of a text; raises an AssertionError unless they are a list of keys, one for each full block."""
    given = list(tokens)
    got = hash_blocks(given, size, salt) if salt is not None else hash_blocks(given, size)
    expect(said, "tokens of the caller afterwards", tokens, given, "what changes the list that was given")
    if not isinstance(got, list | tuple):
        fail(f"{said}\nExpected: a list\nGot: {got!r}\nLook at what is returned.")
    expect(said, "hashes", len(tokens) // size, len(got), "which blocks are full: tokens that fill no block have no hash")
    try:
        hash(tuple(got))
    except TypeError:
        look = "what a hash is made of: bytes, a string or a number will do"
        fail(f"{said}\nExpected: hashes that can be keys of a dict\nGot: {got[0]!r:.100}\nLook at {look}.")
    return list(got)


def check_hash_blocks(hash_blocks: Any) -> None:
    """Equal if and only if the salt and all tokens up to the end of the block are equal; full blocks only; of constant size, and not of a few bits."""
    bits = 0
    for rng in rounds("hash", 60):
        size = rng.choice((1, 2, 3, 4, 16))
        hash_of, begun_by = dict[str, Any](), dict[Any, str]()
        for tokens, salt in make_texts(rng, size):
            said = f"hash_blocks({tokens}, block_size={size}, salt={salt!r})"
            for i, block_hash in enumerate(_hash(hash_blocks, said, tokens, size, salt)):
                beginning = f"{tokens[: (i + 1) * size]}" + (f" with the salt {salt!r}" if salt is not None else "")
                first, text = hash_of.setdefault(beginning, block_hash), begun_by.setdefault(block_hash, beginning)
                see(list(begun_by).index(block_hash))
                another = f"Expected hash {i}: the same as of the same tokens before\nGot: another one\n{_CHANCE}"
                require(True, first == block_hash, f"{said}\n{another}")
                same = f"different hashes for the blocks that end {text} and {beginning}\nGot: the same hash\n{_PARTS}"
                require(True, text == beginning, f"Blocks of {size} tokens.\nExpected: {same}")
                bits = max(bits, _num_bits(block_hash))
    few = f"Expected: 128 bits or more\nGot: at most {bits} bits\n{_BITS}"
    require(True, bits > 120, f"Hashes of a few thousand blocks.\n{few}")
    sizes = [len(repr(block_hash)) for block_hash in hash_blocks(list(range(100, 110)), 1)]
    grows = f"Expected: hashes of a constant size\nGot: from {min(sizes)} to {max(sizes)} characters\n{_CHAIN}"
    require(True, max(sizes) < 1.5 * min(sizes) + 20, f"hash_blocks of ten blocks.\n{grows}")


def _num_bits(block_hash: Any) -> int:
    """How many bits a hash has; for numbers, up to the highest that is set."""
    if isinstance(block_hash, int):
        return block_hash.bit_length()
    if isinstance(block_hash, bytes):
        return 8 * len(block_hash)
    return 6 * len(repr(block_hash).strip("'"))  # text, of at most 64 characters that differ


# -- the pool --------------------------------------------------------------------------------------------------------

_HASHES = ("A", "B", "C", "D", "E", "F", "G")
_CALLS = ("allocate", "allocate", "share", "release", "release", "cache", "cache", "find", "forget")
_LOOKS = {
    "reference counts": "who is counted",
    "num_free": "when a block is free, and when it is no longer",
    "blocks with contents": "hash_of and block_of, which must agree",
    "free blocks, in order": "the order: a block that was just freed goes to the end if it has a hash, and to the front if not",
    "what is found": "when a hash is forgotten (only when its block is handed out), and which block is found if two hold the same (the first)",
}


def choose_call(pool: BlockAllocator, rng: random.Random) -> tuple[str, list[Any]]:
    """A random method of a pool, and arguments that it may be called with now."""
    held = [block for block, count in enumerate(pool.ref_counts) for _ in range(count)]
    name, call = rng.choice(_HASHES), rng.choice(_CALLS)
    found = pool.find(name)
    if call == "allocate":
        return call, []
    if call == "share" and found is not None:
        return call, [found]
    if call == "forget" and rng.random() < 0.3:
        return "forget_all", []
    if call in ("share", "release", "cache") and held:
        return call, [rng.choice(held), *([name] if call == "cache" else [])]
    return "find", [name]


def call_pool(pool: Any, method: str, arguments: list[Any], said: str) -> Any:
    """What a call of a pool returns; its only error is the IndexError of `allocate`."""
    try:
        return getattr(pool, method)(*arguments)
    except (IndexError, KeyError, ValueError, TypeError, AttributeError) as error:
        if method == "allocate" and isinstance(error, IndexError):
            return "an IndexError"
        look = "blocks that are free, or hold nothing, when a method is called"
        fail(
            f"{said}\nExpected: no error, but for an IndexError of allocate() when no block is free\nGot: {error!r}\nLook at {look}."
        )


def state_of(pool: Any) -> dict[str, Any]:
    """The observable state of a pool."""
    return {
        "reference counts": [int(pool.ref_counts[block]) for block in range(pool.num_blocks)],
        "num_free": int(pool.num_free),
        "blocks with contents": sorted(pool.get_cached_blocks()),
        "free blocks, in order": [int(block) for block in pool.get_free_blocks()],
        "what is found": {name: pool.find(name) for name in _HASHES if pool.find(name) is not None},
    }


def check_pool(cls: Any) -> None:
    """Random calls, the same as of the package's pool; a few at first, so that a counterexample is short."""
    for number, rng in enumerate(rounds("pool", 150)):
        num_blocks = rng.randint(1, 6)
        theirs, mine, did = BlockAllocator(num_blocks), cls(num_blocks), []
        for _ in range(3 + number // 4):
            method, arguments = choose_call(theirs, rng)
            call = f"{method}({', '.join(map(repr, arguments))})"
            said = f"A pool of {num_blocks} blocks. Before: {', '.join(did) or 'nothing'}. Now: {call}."
            expected, got = (call_pool(pool, method, arguments, said) for pool in (theirs, mine))
            if method in ("allocate", "find"):
                expect(said, "return value", expected, got, "what is returned, or raised")
            wanted, came = state_of(theirs), state_of(mine)
            for name, look in _LOOKS.items():
                expect(said, name, wanted[name], came[name], look)
            did.append(call)
