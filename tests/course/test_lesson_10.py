"""Lesson 10's checks: the solution passes, a stub fails, other right solutions pass, and a mistake fails where it belongs and is named.

Among the mistakes are those that other small engines made: see the names. `tests/support/mutate_lesson.py 10` makes many more, small ones.
"""

from __future__ import annotations

import pytest
from lesson_cells import Cell, edited, read_cells, run_cells, untouched, without_earlier_checks
from mutate_lesson import WANTED, find_survivors

CELLS = read_cells("10")
HASH, POOL = "a hash stands for everything up to the end of its block", "a free block keeps what it holds until it is needed"
MATCH, ROOM = (
    "the longest beginning that is known, and never the last token",
    "a free block that was found is not free for others",
)
TAKE, OFFER = "found blocks are taken before new ones are", "what is not computed is not offered"
RUNNING, ADMIT = (
    "decodes first, then chunks of prompts",
    "what was found is not computed again, and a try that fails leaves nothing",
)
DECISIONS = "the same decisions as the package's"

SHARE = "        for block in table:\n            self.gpu_allocator.share(block)\n"
NUM_CACHED = "        self.num_cached_blocks[seq.seq_id] = len(table)\n"
NEW = "        while len(table) < self.num_blocks_for(seq.num_tokens):\n            table.append(self.gpu_allocator.allocate())\n"
CHECKS = (
    "            if not self.block_manager.can_allocate(seq, cached, keep_watermark=bool(self.running)):\n                break\n"
)
FIRST = (
    "            if seq.num_output_tokens == 0 and seq.request.metrics.num_preemptions == 0:\n                seq.request.metrics"
)
WRONG = {
    "a hash of the block alone": (HASH, "repr((parent, list(token_ids[end - block_size : end])))", "repr((salt, list(token_ids[end - block_size : end])))"),
    "the first letter of a salt": (HASH, "hashes, parent = [], salt", "hashes, parent = [], salt and salt[0]"),
    "hashes that are no keys": (HASH, "parent = hashlib.sha256(data).digest()", "parent = list(hashlib.sha256(data).digest())"),
    "no salt": (HASH, "hashes, parent = [], salt", "hashes, parent = [], None"),
    "a salt of None is 'None'": (HASH, "hashes, parent = [], salt", "hashes, parent = [], str(salt)"),
    "the block at the end too": (HASH, "range(block_size, len(token_ids) + 1, block_size)", "range(block_size, len(token_ids) + block_size, block_size)"),
    "the last full block is lost": (HASH, "range(block_size, len(token_ids) + 1, block_size)", "range(block_size, len(token_ids), block_size)"),
    "digits that run together": (HASH, "repr((parent, list(token_ids[end - block_size : end]))).encode()", "(str(parent) + ''.join(map(str, token_ids[end - block_size : end]))).encode()"),
    "the order does not matter": (HASH, "repr((parent, list(token_ids[end - block_size : end])))", "repr((parent, sorted(token_ids[end - block_size : end])))"),
    "a set of tokens": (HASH, "repr((parent, list(token_ids[end - block_size : end])))", "repr((parent, sorted(set(token_ids[end - block_size : end]))))"),
    "one byte for a token": (HASH, "repr((parent, list(token_ids[end - block_size : end]))).encode()", "repr(parent).encode() + bytes(token % 256 for token in token_ids[end - block_size : end])"),
    "all tokens, not their hash": (HASH, "parent = hashlib.sha256(data).digest()", "parent = data"),
    "Python's own hash": (HASH, "parent = hashlib.sha256(data).digest()", "parent = hash(data)"),
    "Python's own hash as text": (HASH, "parent = hashlib.sha256(data).digest()", "parent = str(hash(data))"),
    "64 bits of a hash": (HASH, "hashlib.sha256(data).digest()", "hashlib.sha256(data).digest()[:8]"),
    "a few bits of a hash": (HASH, "hashlib.sha256(data).digest()", "hashlib.sha256(data).digest()[:1]"),
    "the last in line goes first": (POOL, "self.free.popitem(last=False)", "self.free.popitem()"),
    "what it held is still found": (POOL, "        if block in self.hash_of:\n            del self.block_of[self.hash_of.pop(block)]\n", ""),
    "forgotten when it is freed": (POOL, "            self.free[block] = None\n", "            self.free[block] = None\n            if block in self.hash_of:\n                del self.block_of[self.hash_of.pop(block)]\n"),
    "forgotten in one direction only": (POOL, "del self.block_of[self.hash_of.pop(block)]", "del self.block_of[self.hash_of[block]]"),
    "no reference after allocate": (POOL, "        self.ref_counts[block] = 1\n        return block", "        return block"),
    "None when nothing is free": (POOL, '            raise IndexError("no block is free")', "            return None"),
    "shared, and free nevertheless": (POOL, "        self.free.pop(block, None)\n        self.ref_counts[block] += 1", "        self.ref_counts[block] += 1"),
    "shared blocks are always free ones": (POOL, "self.free.pop(block, None)", "del self.free[block]"),
    "freed too early": (POOL, "        if self.ref_counts[block] == 0:\n            self.free[block] = None", "        if self.ref_counts[block] <= 1:\n            self.free[block] = None"),
    "freed to the front": (POOL, "            if block not in self.hash_of:\n                self.free.move_to_end", "            if True:\n                self.free.move_to_end"),
    "freed to the end": (POOL, "            if block not in self.hash_of:\n                self.free.move_to_end(block, last=False)\n", ""),
    "only free blocks are found": (POOL, "return self.block_of.get(block_hash)", "found = self.block_of.get(block_hash)\n        return found if found in self.free else None"),
    "the newest is found": (POOL, "if block not in self.hash_of and block_hash not in self.block_of:", "if block not in self.hash_of:"),
    "a block changes its hash": (POOL, "if block not in self.hash_of and block_hash not in self.block_of:", "if block_hash not in self.block_of:"),
    "nothing is left to compute (nano-vllm issue 144)": (MATCH, "(seq.num_tokens - 1) // self.block_size", "seq.num_tokens // self.block_size"),
    "the prompt only": (MATCH, "(seq.num_tokens - 1) // self.block_size", "(seq.num_prompt_tokens - 1) // self.block_size"),
    "a block too few": (MATCH, "(seq.num_tokens - 1) // self.block_size", "max(0, (seq.num_tokens - 1) // self.block_size - 1)"),
    "gaps are skipped": (MATCH, "                if block is None:\n                    break\n", "                if block is None:\n                    continue\n"),
    "also with caching turned off": (MATCH, "if self.enable_prefix_caching:\n            for", "if True:\n            for"),
    "matching takes a reference": (MATCH, "                blocks.append(block)\n", "                blocks.append(block)\n                self.gpu_allocator.share(block)\n"),
    "found blocks that are free count twice": (ROOM, "        num_needed += sum(self.gpu_allocator.ref_counts[block] == 0 for block in cached_blocks)\n", ""),
    "all found blocks are taken from the free": (ROOM, "num_needed += sum(self.gpu_allocator.ref_counts[block] == 0 for block in cached_blocks)", "num_needed += len(cached_blocks)"),
    "found blocks that are used count": (ROOM, "self.gpu_allocator.ref_counts[block] == 0", "self.gpu_allocator.ref_counts[block] > 0"),
    "what was found is needed anew": (ROOM, "self.num_blocks_for(seq.num_tokens) - len(cached_blocks)", "self.num_blocks_for(seq.num_tokens)"),
    "the caller's list is used up": (ROOM, "num_needed += sum(self.gpu_allocator.ref_counts[block] == 0 for block in cached_blocks)", "while cached_blocks:\n            num_needed += self.gpu_allocator.ref_counts[cached_blocks.pop()] == 0"),
    "the watermark is always kept": (ROOM, "(self.watermark_blocks if keep_watermark else 0)", "self.watermark_blocks"),
    "the watermark is never kept": (ROOM, "(self.watermark_blocks if keep_watermark else 0)", "0"),
    "a block too few without the watermark": (ROOM, "if keep_watermark else 0)", "if keep_watermark else -1)"),
    "one more than the watermark": (ROOM, "num_needed >= (self", "num_needed > (self"),
    "new blocks before found ones are held": (TAKE, SHARE + NUM_CACHED + NEW, "        found = list(table)\n" + NUM_CACHED + NEW + "        for block in found:\n            self.gpu_allocator.share(block)\n"),
    "found blocks are nobody's": (TAKE, SHARE, ""),
    "the table is the caller's list": (TAKE, "table = list(cached_blocks or [])", "table = cached_blocks if cached_blocks is not None else []"),
    "new blocks for everything": (TAKE, "while len(table) < self.num_blocks_for(seq.num_tokens):", "for _ in range(self.num_blocks_for(seq.num_tokens)):"),
    "the cache is said to know everything": (TAKE, NUM_CACHED + NEW, NEW + NUM_CACHED),
    "the cache is said to know nothing": (TAKE, NUM_CACHED, "        self.num_cached_blocks[seq.seq_id] = 0\n"),
    "offered before it is computed (nano-vllm issue 208)": (OFFER, "seq.num_computed_tokens // self.block_size", "seq.num_tokens // self.block_size"),
    "blocks that are not full": (OFFER, "seq.num_computed_tokens // self.block_size", "-(-seq.num_computed_tokens // self.block_size)"),
    "the prompt's blocks only": (OFFER, "seq.num_computed_tokens // self.block_size", "min(seq.num_computed_tokens, seq.num_prompt_tokens) // self.block_size"),
    "everything again in each step": (OFFER, "for i in range(first, num_full):", "for i in range(num_full):"),
    "the count is not kept": (OFFER, "            self.num_cached_blocks[seq.seq_id] = num_full\n", ""),
    "the first one only": (OFFER, "for i in range(first, num_full):", "for i in range(first, first + 1):"),
    "offered with caching turned off": (OFFER, "        if not self.enable_prefix_caching:\n            return\n", ""),
    "one with output decodes (nano-vllm issue 144)": (RUNNING, "if seq.num_uncomputed_tokens == 1:", "if seq.num_output_tokens > 0:"),
    "chunks are only for prompts": (RUNNING, "if seq.num_uncomputed_tokens > 1 and budget > 0:", "if seq.num_output_tokens == 0 and seq.num_uncomputed_tokens > 1 and budget > 0:"),
    "no slot for the newest token": (RUNNING, "                self.block_manager.append_slots(seq)\n", ""),
    "all decode": (RUNNING, "            if seq.num_uncomputed_tokens == 1:\n                if not", "            if True:\n                if not"),
    "the list shrinks under the loop": (RUNNING, "                if not self.make_room_for(seq, output):\n                    break\n", "                self.make_room_for(seq, output)\n"),
    "over the budget": (RUNNING, "min(seq.num_uncomputed_tokens, budget))\n                output", "seq.num_uncomputed_tokens)\n                output"),
    "the whole budget for each": (RUNNING, "            budget = self.config.max_num_batched_tokens - output.num_batched_tokens\n            if seq", "            budget = self.config.max_num_batched_tokens\n            if seq"),
    "an empty chunk": (RUNNING, "seq.num_uncomputed_tokens > 1 and budget > 0", "seq.num_uncomputed_tokens > 1 and budget >= 0"),
    "chunks are no prefills": (RUNNING, "                output.num_prefills += 1\n", ""),
    "chunks round down to nothing": (RUNNING, "if seq.num_uncomputed_tokens > 1 and budget > 0:", "if seq.num_uncomputed_tokens > 1 and budget >= seq.num_uncomputed_tokens:"),
    "counted before the match (nano-vllm 211, 233)": (ADMIT, "            cached = self.block_manager.find_cached_blocks(seq)\n", "            num_tokens = seq.num_tokens\n            cached = self.block_manager.find_cached_blocks(seq)\n", "min(seq.num_uncomputed_tokens, budget))\n            output.num_prefills += 1\n        ### END", "min(num_tokens, budget))\n            output.num_prefills += 1\n        ### END"),
    "a count kept from a try that failed (vLLM 18957)": (ADMIT, CHECKS, "            if not seq.num_computed_tokens:\n                seq.num_computed_tokens = len(cached) * self.block_manager.block_size\n" + CHECKS),
    "blocks kept of a try that failed (vLLM 18411)": (ADMIT, CHECKS, "            for block in cached:\n                self.block_manager.gpu_allocator.share(block)\n" + CHECKS + "            for block in cached:\n                self.block_manager.gpu_allocator.release(block)\n"),
    "what was found is computed again": (ADMIT, "            seq.num_computed_tokens = len(cached) * self.block_manager.block_size\n            if", "            seq.num_computed_tokens = 0\n            if"),
    "what was found is remembered": (ADMIT, "            cached = self.block_manager.find_cached_blocks(seq)\n", "            self.known = getattr(self, 'known', {})\n            cached = self.known.setdefault(seq.seq_id, self.block_manager.find_cached_blocks(seq))\n"),
    "found, but not taken": (ADMIT, "self.block_manager.allocate(seq, cached)", "self.block_manager.allocate(seq)"),
    "room without what was found": (ADMIT, "can_allocate(seq, cached, keep", "can_allocate(seq, [], keep"),
    "one preempted in its prompt tells of its hits": (ADMIT, " and seq.request.metrics.num_preemptions == 0:", ":"),
    "a preempted one tells of its hits": (ADMIT, FIRST, "            if True:\n                seq.request.metrics"),
    "one seat too many": (ADMIT, "if len(self.running) >= self.config.max_num_seqs", "if len(self.running) > self.config.max_num_seqs"),
    "nobody joins unless all of it fits": (ADMIT, "or budget == 0:", "or budget < seq.num_tokens:"),
    "an empty chunk for a newcomer": (ADMIT, " or budget == 0:", ":"),
    "one newcomer a step": (ADMIT, "budget))\n            output.num_prefills += 1\n", "budget))\n            output.num_prefills += 1\n            break\n"),
    "the watermark is kept for nobody": (ADMIT, "keep_watermark=bool(self.running)", "keep_watermark=True"),
    "newcomers are no prefills": (ADMIT, "budget))\n            output.num_prefills += 1\n", "budget))\n"),
    "newcomers before those that run": (ADMIT, "        self.schedule_decodes(output)\n        self.schedule_chunks(output)\n        if", "        self.admit(output)\n        self.schedule_decodes(output)\n        self.schedule_chunks(output)\n        if"),
    "chunks before decodes": (ADMIT, "        self.schedule_decodes(output)\n        self.schedule_chunks(output)\n        if", "        self.schedule_chunks(output)\n        self.schedule_decodes(output)\n        if"),
    "newcomers after a preemption": (ADMIT, "        if not output.preempted:\n            self.admit(output)\n", "        self.admit(output)\n"),
    "no chunks": (ADMIT, "        self.schedule_chunks(output)\n        if", "        if"),
}  # fmt: skip
"""For each mistake: the first check that fails, and what is replaced by what."""

RIGHT = {
    "another hash": ("hashlib.sha256(data).digest()", "hashlib.blake2b(data, digest_size=16).hexdigest()"),
    "numbers for hashes": ("parent = hashlib.sha256(data).digest()", "parent = int.from_bytes(hashlib.sha256(data).digest(), 'big')"),
    "a loop over whole blocks": (
        "    for end in range(block_size, len(token_ids) + 1, block_size):\n",
        "    for i in range(len(token_ids) // block_size):\n        end = (i + 1) * block_size\n",
    ),
    "the first of the free": ("block, _ = self.free.popitem(last=False)", "block = next(iter(self.free))\n        del self.free[block]"),
    "the cache by hash": ("        if block in self.hash_of:\n            del self.block_of[self.hash_of.pop(block)]\n", "        self.block_of.pop(self.hash_of.pop(block, None), None)\n"),
    "share looks first": ("        self.free.pop(block, None)\n", "        if self.ref_counts[block] == 0:\n            del self.free[block]\n"),
    "takewhile": (
        "            for block_hash in self.hashes(seq)[: (seq.num_tokens - 1) // self.block_size]:\n                block = self.gpu_allocator.find(block_hash)\n"
        "                if block is None:\n                    break\n                blocks.append(block)\n",
        "            import itertools\n            found = map(self.gpu_allocator.find, self.hashes(seq)[: (seq.num_tokens - 1) // self.block_size])\n"
        "            blocks.extend(itertools.takewhile(lambda block: block is not None, found))\n",
    ),
    "room by who is left": (
        "        return self.gpu_allocator.num_free - num_needed >= (self.watermark_blocks if keep_watermark else 0)",
        "        reserve = self.watermark_blocks * bool(keep_watermark)\n        return num_needed + reserve <= self.gpu_allocator.num_free",
    ),
    "a copy of those that run": (
        "        i = 0\n        while i < len(self.running):\n            seq = self.running[i]\n            if seq.num_uncomputed_tokens == 1:\n"
        "                if not self.make_room_for(seq, output):\n                    break\n                self.block_manager.append_slots(seq)\n                self.add(output, seq, 1)\n            i += 1\n",
        "        for seq in list(self.running):\n            if seq in self.running and seq.num_uncomputed_tokens == 1 and self.make_room_for(seq, output):\n"
        "                self.block_manager.append_slots(seq)\n                self.add(output, seq, 1)\n",
    ),
    "a helper with a common name": ("            if len(self.running) >= self.config.max_num_seqs or budget == 0:\n                break\n", "            if not self.may_join(seq, budget):\n                break\n", "    def admit(self, output):", "    def may_join(self, seq, budget=1):\n        return len(self.running) < self.config.max_num_seqs and budget > 0\n\n    def admit(self, output):"),
    "tokens counted by hand": ("self.add(output, seq, min(seq.num_uncomputed_tokens, budget))\n            output", "self.add(output, seq, min(seq.num_tokens - len(cached) * self.block_manager.block_size, budget))\n            output"),
}  # fmt: skip


def test_an_untouched_exercise_fails_at_its_checks_and_nowhere_else():
    outcome = run_cells([Cell(cell.name, untouched(cell.source), cell.kind) for cell in CELLS])
    assert outcome.failed == list(outcome.checks) and outcome.broken == {} and outcome.points == 0
    assert {type(error) for error in outcome.checks.values()} == {NotImplementedError}


def test_there_are_20_points():
    outcome = run_cells(CELLS)
    assert outcome.failed == [] and outcome.broken == {}
    assert outcome.points == outcome.most_points == 18  # the two that need the model are run by nbval


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_solution_fails_where_it_is_wrong_and_hears_why(name):
    first, *edits = WRONG[name]
    outcome = run_cells(without_earlier_checks(CELLS, make_edits(CELLS, edits)), stop_at_failure=True)
    assert outcome.failed == [first]
    assert outcome.broken == {}
    error = outcome.checks[first]
    if isinstance(error, AssertionError):
        assert all(words in str(error) for words in ("Expected", "Got", "Look at"))


def combine(answers):
    """Notebooks with as many of the answers in each as do not touch the same lines: every run of the checks takes long."""
    notebooks = []
    for name, edits in answers.items():
        for names, cells in notebooks:
            try:
                changed = make_edits(cells[0], edits)
            except ValueError:
                continue
            names.append(name)
            cells[0] = changed
            break
        else:
            notebooks.append(([name], [make_edits(CELLS, edits)]))
    return {", ".join(names): cells for names, (cells,) in notebooks}


def make_edits(cells, edits):
    for old, new in zip(edits[::2], edits[1::2], strict=True):
        cells = edited(cells, old, new)
    return cells


ALSO_RIGHT = combine(RIGHT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [pytest.param(name, marks=() if place == 0 else pytest.mark.long) for place, name in enumerate(ALSO_RIGHT)]
)
def test_other_right_answers_pass(names):
    outcome = run_cells(ALSO_RIGHT[names])
    assert outcome.failed == [] and outcome.broken == {}


@pytest.mark.long
@pytest.mark.slow
def test_a_sample_of_small_mistakes_is_caught():
    count, survivors = find_survivors("10", every=7)
    assert count >= 12
    assert len(survivors) <= (1 - WANTED) * count, [mutant.change for mutant in survivors]


def test_all_checks_are_exported_and_used():
    from minivllm.course.lessons import lesson_10

    used = "\n".join(cell.source for cell in CELLS)
    assert all(f"lesson_10.{name}(" in used for name in lesson_10.__all__)
