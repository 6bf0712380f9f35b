"""The checks of lesson 10 for a block manager that matches, counts, takes and offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minivllm.course.observations import expect, fail, seeded
from minivllm.request import EngineCoreRequest, Request, Sequence
from minivllm.sampling_params import SamplingParams

_ROUNDS = 120


@dataclass
class Scene:
    """A manager whose cache holds parts of a text, and a sequence that begins like it.

    Attributes:
        manager: The learner's.
        seq: The sequence, without a table.
        known: The blocks that hold the text's blocks, by their number in the text.
        num_shared: Tokens that the sequence has in common with the text.
        enabled: Whether prefix caching is on.
    """

    manager: Any
    seq: Sequence
    known: dict[int, int]
    num_shared: int
    enabled: bool

    def describe(self) -> str:
        """In words."""
        size, pool = self.manager.block_size, self.manager.gpu_allocator
        known = ", ".join(
            f"{i} in block {block}" + (" (free)" if pool.ref_counts[block] == 0 else "") for i, block in self.known.items()
        )
        return (
            f"Blocks of {size} tokens. In the cache are these blocks of a text: {known or 'none'}. A sequence of {self.seq.num_tokens} tokens begins with the first "
            f"{self.num_shared} of that text; enable_prefix_caching={self.enabled}; {pool.num_free} blocks are free, watermark_blocks={self.manager.watermark_blocks}."
        )

    def matched(self) -> list[int]:
        """What should be found."""
        size, blocks = self.manager.block_size, []
        if self.enabled:
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


def make_tight_scene(cls: Any, seed: str) -> Scene:
    """A scene whose sequence is so long that it just fits, or just does not."""
    scene, rng = make_scene(cls, seed), seeded(f"tight {seed}")
    wanted = scene.num_blocks_left() - rng.choice((-1, -1, 0, 1))
    scene.seq.token_ids += [rng.randrange(50, 99) for _ in range(wanted * scene.manager.block_size)]
    return scene


def make_sequence(token_ids: list[int], number: int, num_outputs: int = 0) -> Sequence:
    """A sequence, some of whose tokens are output."""
    prompt = token_ids[: len(token_ids) - num_outputs]
    seq = Sequence(number, Request(EngineCoreRequest(f"r{number}", prompt, SamplingParams(temperature=0), max_num_tokens=10_000)))
    seq.token_ids = list(token_ids)
    return seq


def make_scene(cls: Any, seed: str) -> Scene:
    """A cache with parts of a text: some blocks in use, some free, perhaps with a gap; and few blocks that are free."""
    rng = seeded(seed)
    size, num_blocks = rng.choice((1, 2, 4, 4)), rng.randint(8, 24)
    enabled = rng.random() > 0.1
    manager = cls(size, num_blocks, 0, rng.choice((0.0, 0.1, 0.2)), enabled)
    pool = manager.gpu_allocator
    text = [rng.randrange(50) for _ in range(size * rng.randint(1, 6) + rng.randrange(size))]
    others = [pool.allocate() for _ in range(rng.randint(0, num_blocks - len(text) // size - 1))]
    writer = make_sequence(text, 0)
    known = {}
    for i, block_hash in enumerate(manager.hashes(writer)):
        block = pool.allocate()
        if rng.random() < 0.9:
            pool.cache(block, block_hash)
            known[i] = block
        if rng.random() < 0.6:
            pool.release(block)
    for block in others[: rng.randint(0, len(others))]:
        pool.release(block)
    num_shared = rng.choice((len(text), len(text), rng.randint(0, len(text)), len(text) // size * size))
    tail = [rng.randrange(50, 99) for _ in range(rng.choice((0, 0, 1, rng.randint(1, 3 * size))))]
    tokens = text[:num_shared] + tail or [77]
    return Scene(manager, make_sequence(tokens, 1, rng.choice((0, len(tokens) // 3))), known, num_shared, enabled)


def observations_of(manager: Any) -> dict[str, Any]:
    """The observable state of a manager."""
    pool = manager.gpu_allocator
    return {
        "block tables": {number: list(table) for number, table in manager.block_tables.items()},
        "num_cached_blocks": dict(manager.num_cached_blocks),
        "reference counts": [int(pool.ref_counts[block]) for block in range(manager.num_gpu_blocks)],
        "free blocks, in order": list(pool.get_free_blocks()),
        "blocks with contents": sorted(pool.get_cached_blocks()),
    }


def expect_unchanged(said: str, before: dict[str, Any], manager: Any, name: str) -> None:
    """The manager is as it was."""
    after = observations_of(manager)
    for what, value in before.items():
        expect(said, f"{what} after {name}", value, after[what], f"what {name} changes: nothing")


def check_find_cached_blocks(cls: Any) -> None:
    """The longest known beginning, without the last token."""
    for number in range(2 * _ROUNDS):
        scene = make_scene(cls, f"match {number}")
        said, before = scene.describe(), observations_of(scene.manager)
        was = (list(scene.seq.token_ids), scene.seq.num_computed_tokens, scene.seq.request.metrics.num_cached_tokens)
        got = scene.manager.find_cached_blocks(scene.seq)
        now = (list(scene.seq.token_ids), scene.seq.num_computed_tokens, scene.seq.request.metrics.num_cached_tokens)
        expect(
            said,
            "tokens, num_computed_tokens and num_cached_tokens of the sequence afterwards",
            was,
            now,
            "what changes the sequence: finding does not",
        )
        if not isinstance(got, list | tuple):
            fail(f"{said}\nExpected: a list of blocks\nGot: {got!r}\nLook at what is returned.")
        look = "where it stops (at the first block that is not known, and before the block with the last token), and what counts (all tokens, output too)"
        expect(said, "find_cached_blocks", scene.matched(), list(got), look)
        expect_unchanged(said, before, scene.manager, "find_cached_blocks")
        scene.manager.gpu_allocator.forget_all()
        again = list(scene.manager.find_cached_blocks(scene.seq))
        look = "what is remembered: nothing, because blocks are evicted between two calls"
        expect(f"{said} find_cached_blocks was called; then the cache was emptied.", "find_cached_blocks", [], again, look)


def check_can_allocate(cls: Any) -> None:
    """Enough blocks for the rest, when found blocks that are free are taken too."""
    for number in range(3 * _ROUNDS):
        scene = (make_tight_scene if number % 2 else make_scene)(cls, f"room {number}")
        manager, seq = scene.manager, scene.seq
        found: list[int] | None = scene.matched()
        if not found and number % 4 < 2:
            found = None
        keep = number % 3 != 0
        said = f"{scene.describe()} can_allocate(seq, {found}, keep_watermark={keep})."
        before = observations_of(manager)
        pool = manager.gpu_allocator
        taken = sum(pool.ref_counts[block] == 0 for block in found or [])
        needed = pool.num_free - scene.num_blocks_left()
        expected = scene.num_blocks_left() >= (manager.watermark_blocks if keep else 0)
        given = None if found is None else list(found)
        got = manager.can_allocate(seq, given, keep_watermark=keep)
        expect(said, "the caller's list afterwards", found, given, "what changes cached_blocks: nothing may")
        look = f"what is needed: {needed} of the free blocks, {taken} of which were among the found blocks"
        expect(said, "can_allocate", expected, bool(got), look)
        if not isinstance(got, bool) and not hasattr(got, "dtype"):
            fail(f"{said}\nExpected: True or False\nGot: {got!r}\nLook at what is returned.")
        expect_unchanged(said, before, manager, "can_allocate")


def check_allocate(cls: Any) -> None:
    """Found blocks are shared first; then new ones, the first in line."""
    count = 0
    for number in range(8 * _ROUNDS):
        scene = make_scene(cls, f"take {number}")
        manager, seq, found = scene.manager, scene.seq, scene.matched()
        if scene.num_blocks_left() < 0:
            continue
        count += 1
        pool = manager.gpu_allocator
        said = f"{scene.describe()} allocate(seq, {found})."
        before = observations_of(manager)
        num_new = -(-seq.num_tokens // manager.block_size) - len(found)
        free = [block for block in before["free blocks, in order"] if block not in found]
        given = list(found)
        manager.allocate(seq, given if found or number % 2 else None)
        expect(said, "the caller's list afterwards", found, given, "the table: a new list")
        expected = found + free[:num_new]
        look = "the order: share what was found, then allocate the rest"
        expect(said, "table", expected, list(manager.block_tables.get(seq.seq_id, [])), look)
        counts = [old + (block in expected) for block, old in enumerate(before["reference counts"])]
        expect(
            said,
            "reference counts",
            counts,
            [int(pool.ref_counts[block]) for block in range(manager.num_gpu_blocks)],
            "which blocks get another reference: each block of the table",
        )
        expect(said, "free blocks, in order", free[num_new:], list(pool.get_free_blocks()), "which blocks are no longer free")
        expect(
            said,
            "num_cached_blocks",
            len(found),
            manager.num_cached_blocks.get(seq.seq_id),
            "self.num_cached_blocks: how many of the table the cache knows",
        )
    assert count > 100


def check_cache_full_blocks(cls: Any) -> None:
    """Full and computed blocks are offered after each step, no others, and each once."""
    for number in range(_ROUNDS):
        said, differences = run_offers(cls, f"offer {number}")
        for what, expected, got in differences:
            look = "which blocks are offered: full ones (//), computed ones (num_computed_tokens, not num_tokens), from num_cached_blocks on, and only with prefix caching"
            expect(said, what, expected, got, look)


def run_offers(cls: Any, seed: str) -> tuple[str, list[tuple[str, Any, Any]]]:
    """A prompt is computed in chunks and continues; alongside, another one with the same prefix. What was expected and what was offered."""
    rng = seeded(seed)
    size, enabled = rng.choice((1, 2, 4)), rng.random() > 0.15
    manager = cls(size, 60, 0, 0.0, enabled)
    shared = [rng.randrange(50) for _ in range(rng.randint(0, 3 * size))]
    texts = [shared + [rng.randrange(50 * i, 50 * i + 50) for _ in range(rng.randint(1, 3 * size))] for i in (1, 2)]
    sequences = [make_sequence(text, i) for i, text in enumerate(texts)]
    for seq in sequences:
        manager.allocate(seq, manager.find_cached_blocks(seq))
        seq.num_computed_tokens = manager.num_cached_blocks[seq.seq_id] * size
    told: list[tuple[int, Any]] = []
    pool_cache = manager.gpu_allocator.cache

    def note(block: int, block_hash: Any) -> None:
        told.append((block, block_hash))
        pool_cache(block, block_hash)

    manager.gpu_allocator.cache = note
    differences: list[tuple[str, Any, Any]] = []
    did: list[str] = []
    wanted: list[tuple[int, Any]] = []
    known = {seq.seq_id: manager.num_cached_blocks[seq.seq_id] for seq in sequences}
    for _ in range(rng.randint(3, 14)):
        seq = rng.choice(sequences)
        if seq.num_uncomputed_tokens == 0:
            seq.token_ids.append(rng.randrange(50))
        manager.append_slots(seq)
        count = rng.randint(1, seq.num_uncomputed_tokens)
        seq.num_computed_tokens += count
        did.append(
            f"{seq.request.request_id} computes {count} of its {seq.num_tokens} tokens, so {seq.num_computed_tokens} are computed"
        )
        manager.cache_full_blocks(seq)
        if enabled:
            hashes, table = manager.hashes(seq), manager.block_tables[seq.seq_id]
            num_full = seq.num_computed_tokens // size
            wanted += [(table[i], hashes[i]) for i in range(known[seq.seq_id], num_full)]
            known[seq.seq_id] = max(known[seq.seq_id], num_full)
        differences.append(
            ("calls of cache(block, hash) so far (the blocks)", [block for block, _ in wanted], [block for block, _ in told])
        )
        differences.append(("hashes that were offered", [True] * len(wanted), [pair in wanted for pair in told]))
        differences.append(("num_cached_blocks", dict(known), dict(manager.num_cached_blocks)))
        if any(expected != got for _, expected, got in differences):
            break
    return f"Blocks of {size} tokens, enable_prefix_caching={enabled}. " + "; ".join(did[-6:]) + ".", differences
