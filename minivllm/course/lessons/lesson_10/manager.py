"""The checks of lesson 10 for a block manager that matches, counts, takes and offers."""

from __future__ import annotations

import random
from typing import Any

from minivllm.course.observations import expect, fail, rounds, seeded
from minivllm.request import EngineCoreRequest, Request, Sequence
from minivllm.sampling_params import SamplingParams

_ROUNDS = 120


def make_sequence(token_ids: list[int], number: int, num_outputs: int = 0) -> Sequence:
    """A sequence, some of whose tokens are output."""
    prompt = token_ids[: len(token_ids) - num_outputs]
    seq = Sequence(number, Request(EngineCoreRequest(f"r{number}", prompt, SamplingParams(temperature=0), max_num_tokens=10_000)))
    seq.token_ids = list(token_ids)
    return seq


class Scene:
    """A cache with parts of a text: some blocks in use, some free, perhaps with a gap; and a sequence that begins like the text.

    Attributes:
        manager: The learner's.
        seq: The sequence, without a table.
        known: The blocks that hold the text's blocks, by their number in the text.
        num_shared: Tokens that the sequence has in common with the text.
    """

    def __init__(self, cls: Any, seed: str) -> None:
        rng = seeded(seed)
        size, num_blocks = rng.choice((1, 2, 4, 4)), rng.randint(8, 24)
        self.manager = cls(size, num_blocks, 0, rng.choice((0.0, 0.1, 0.2)), rng.random() > 0.1)
        pool = self.manager.gpu_allocator
        text = [rng.randrange(50) for _ in range(size * rng.randint(1, 6) + rng.randrange(size))]
        others = [pool.allocate() for _ in range(rng.randint(0, num_blocks - len(text) // size - 1))]
        self.known: dict[int, int] = {}
        for i, block_hash in enumerate(self.manager.hashes(make_sequence(text, 0))):
            block = pool.allocate()
            if rng.random() < 0.9:
                pool.cache(block, block_hash)
                self.known[i] = block
            if rng.random() < 0.6:
                pool.release(block)
        for block in others[: rng.randint(0, len(others))]:
            pool.release(block)
        self.num_shared = rng.choice((len(text), len(text), rng.randint(0, len(text)), len(text) // size * size))
        tail = [rng.randrange(50, 99) for _ in range(rng.choice((0, 0, 1, rng.randint(1, 3 * size))))]
        tokens = text[: self.num_shared] + tail or [77]
        self.seq = make_sequence(tokens, 1, rng.choice((0, len(tokens) // 3)))

    def tighten(self, rng: random.Random) -> None:
        """Make the sequence so long that it just fits, or just does not."""
        wanted = self.num_blocks_left() - rng.choice((-1, -1, 0, 1))
        self.seq.token_ids += [rng.randrange(50, 99) for _ in range(wanted * self.manager.block_size)]

    def describe(self) -> str:
        """In words."""
        size, pool = self.manager.block_size, self.manager.gpu_allocator
        known = ", ".join(
            f"{i} in block {block}" + (" (free)" if pool.ref_counts[block] == 0 else "") for i, block in self.known.items()
        )
        return (
            f"Blocks of {size} tokens. In the cache are these blocks of a text: {known or 'none'}. A sequence of {self.seq.num_tokens} tokens begins with the first "
            f"{self.num_shared} of that text; enable_prefix_caching={self.manager.enable_prefix_caching}; {pool.num_free} blocks are free, watermark_blocks={self.manager.watermark_blocks}."
        )

    def matched(self) -> list[int]:
        """What should be found."""
        size, blocks = self.manager.block_size, []
        if self.manager.enable_prefix_caching:
            for i in range(min(self.num_shared, self.seq.num_tokens - 1) // size):
                if i not in self.known:
                    break
                blocks.append(self.known[i])
        return blocks

    def num_blocks_left(self) -> int:
        """How many blocks would be free if the sequence had its table; negative if there are too few."""
        pool, found = self.manager.gpu_allocator, self.matched()
        num_new = -(-self.seq.num_tokens // self.manager.block_size) - len(found)
        return int(pool.num_free - num_new - sum(pool.ref_counts[block] == 0 for block in found))

    def look(self) -> dict[str, Any]:
        """The observable state of the manager and the sequence."""
        manager, seq, pool = self.manager, self.seq, self.manager.gpu_allocator
        return {
            "table": list(manager.block_tables.get(seq.seq_id, [])),
            "num_cached_blocks": manager.num_cached_blocks.get(seq.seq_id, 0),
            "reference counts": [int(pool.ref_counts[block]) for block in range(manager.num_gpu_blocks)],
            "free blocks, in order": list(pool.get_free_blocks()),
            "blocks with contents": sorted(pool.get_cached_blocks()),
            "tokens of the sequence": list(seq.token_ids),
            "num_computed_tokens": seq.num_computed_tokens,
            "num_cached_tokens": seq.request.metrics.num_cached_tokens,
        }


def _expect_unchanged(said: str, before: dict[str, Any], scene: Scene, name: str) -> None:
    """A question changes nothing."""
    after = scene.look()
    for what, value in before.items():
        expect(said, f"{what} after {name}", value, after[what], f"what {name} changes: nothing")


def check_find_cached_blocks(cls: Any) -> None:
    """The longest known beginning, without the last token."""
    look = "where it stops (at the first block that is not known, and before the block with the last token), and what counts (all tokens, output too)"
    for number in range(2 * _ROUNDS):
        scene = Scene(cls, f"match {number}")
        said, before = scene.describe(), scene.look()
        got = scene.manager.find_cached_blocks(scene.seq)
        if not isinstance(got, list | tuple):
            fail(f"{said}\nExpected: a list of blocks\nGot: {got!r}\nLook at what is returned.")
        expect(said, "find_cached_blocks", scene.matched(), list(got), look)
        _expect_unchanged(said, before, scene, "find_cached_blocks")
        scene.manager.gpu_allocator.forget_all()
        said, again = (
            f"{said} find_cached_blocks was called; then the cache was emptied.",
            scene.manager.find_cached_blocks(scene.seq),
        )
        expect(
            said,
            "find_cached_blocks",
            [],
            list(again),
            "what is remembered: nothing, because blocks are evicted between two calls",
        )


def check_can_allocate(cls: Any) -> None:
    """Enough blocks for the rest, when found blocks that are free are taken too."""
    for number in range(3 * _ROUNDS):
        scene = Scene(cls, f"room {number}")
        if number % 2:
            scene.tighten(seeded(f"tight {number}"))
        manager, found, keep = scene.manager, scene.matched() if number % 4 >= 2 else scene.matched() or None, number % 3 != 0
        said, before, pool = (
            f"{scene.describe()} can_allocate(seq, {found}, keep_watermark={keep}).",
            scene.look(),
            manager.gpu_allocator,
        )
        left, taken = scene.num_blocks_left(), sum(pool.ref_counts[block] == 0 for block in found or [])
        given = found and list(found)
        got = manager.can_allocate(scene.seq, given, keep_watermark=keep)
        expect(said, "the caller's list afterwards", found, given, "what changes cached_blocks: nothing may")
        look = f"what is needed: {pool.num_free - left} of the free blocks, {taken} of which were among the found blocks"
        expect(said, "can_allocate", left >= (manager.watermark_blocks if keep else 0), bool(got), look)
        if not isinstance(got, bool) and not hasattr(got, "dtype"):
            fail(f"{said}\nExpected: True or False\nGot: {got!r}\nLook at what is returned.")
        _expect_unchanged(said, before, scene, "can_allocate")


_TAKEN = {
    "the caller's list afterwards": "the table: a new list",
    "table": "the order: share what was found, then allocate the rest",
    "reference counts": "which blocks get another reference: each block of the table",
    "free blocks, in order": "which blocks are no longer free",
    "num_cached_blocks": "self.num_cached_blocks: how many of the table the cache knows",
}


def check_allocate(cls: Any) -> None:
    """Found blocks are shared first; then new ones, the first in line."""
    for number in range(8 * _ROUNDS):
        scene = Scene(cls, f"take {number}")
        if scene.num_blocks_left() < 0:
            continue
        seq, found, before = scene.seq, scene.matched(), scene.look()
        said, given = f"{scene.describe()} allocate(seq, {found}).", list(found)
        num_new = -(-seq.num_tokens // scene.manager.block_size) - len(found)
        free = [block for block in before["free blocks, in order"] if block not in found]
        table = found + free[:num_new]
        expected = {
            "the caller's list afterwards": found,
            "table": table,
            "reference counts": [old + (block in table) for block, old in enumerate(before["reference counts"])],
            "free blocks, in order": free[num_new:],
            "num_cached_blocks": len(found),
        }
        scene.manager.allocate(seq, given if found or number % 2 else None)
        got = scene.look() | {"the caller's list afterwards": given}
        for what, look in _TAKEN.items():
            expect(said, what, expected[what], got[what], look)


def make_writers(cls: Any, rng: random.Random) -> tuple[Any, list[Sequence], list[tuple[int, Any]]]:
    """A manager, two sequences with the same prefix, and a list that grows by (block, hash) with each call of the pool's `cache`."""
    size = rng.choice((1, 2, 4))
    manager = cls(size, 60, 0, 0.0, rng.random() > 0.15)
    shared = [rng.randrange(50) for _ in range(rng.randint(0, 3 * size))]
    texts = [shared + [rng.randrange(50 * i, 50 * i + 50) for _ in range(rng.randint(1, 3 * size))] for i in (1, 2)]
    sequences = [make_sequence(text, i) for i, text in enumerate(texts)]
    for seq in sequences:
        manager.allocate(seq, manager.find_cached_blocks(seq))
        seq.num_computed_tokens = manager.num_cached_blocks[seq.seq_id] * size
    told, cache = list[tuple[int, Any]](), manager.gpu_allocator.cache

    def note(block: int, block_hash: Any) -> None:
        told.append((block, block_hash))
        cache(block, block_hash)

    manager.gpu_allocator.cache = note
    return manager, sequences, told


def _compute_some(manager: Any, seq: Sequence, rng: random.Random) -> str:
    """Let a step compute some tokens of a sequence, or a new one. In words."""
    if seq.num_uncomputed_tokens == 0:
        seq.token_ids.append(rng.randrange(50))
    manager.append_slots(seq)
    count = rng.randint(1, seq.num_uncomputed_tokens)
    seq.num_computed_tokens += count
    computed = f"{count} of its {seq.num_tokens} tokens, so {seq.num_computed_tokens} are computed"
    return f"{seq.request.request_id} computes {computed}"


def check_cache_full_blocks(cls: Any) -> None:
    """Full and computed blocks are offered after each step, no others, and each once."""
    look = "which blocks are offered: full ones (//), computed ones (num_computed_tokens, not num_tokens), from num_cached_blocks on, and only with prefix caching"
    for rng in rounds("offer", _ROUNDS):
        manager, sequences, told = make_writers(cls, rng)
        known, wanted, did = dict(manager.num_cached_blocks), list[tuple[int, Any]](), list[str]()
        for _ in range(rng.randint(3, 14)):
            seq = rng.choice(sequences)
            did.append(_compute_some(manager, seq, rng))
            manager.cache_full_blocks(seq)
            if manager.enable_prefix_caching:
                new = slice(known[seq.seq_id], seq.num_computed_tokens // manager.block_size)
                wanted += zip(manager.block_tables[seq.seq_id][new], manager.hashes(seq)[new], strict=True)
                known[seq.seq_id] = max(new.start, new.stop)
            said = f"Blocks of {manager.block_size} tokens, enable_prefix_caching={manager.enable_prefix_caching}. {'; '.join(did[-6:])}."
            blocks = ([block for block, _ in calls] for calls in (wanted, told))
            expect(said, "blocks of the calls cache(block, hash) so far", *blocks, look)
            expect(said, "hashes that were offered", [True] * len(wanted), [pair in wanted for pair in told], look)
            expect(said, "num_cached_blocks", known, dict(manager.num_cached_blocks), look)
