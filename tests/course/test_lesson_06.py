"""Lesson 06's checks, in both languages: the solution passes, an untouched exercise fails at each, other right solutions pass, mistakes fail where they belong.

`tests/support/mutate_lesson.py 06` makes many more mistakes, small ones.
"""

from __future__ import annotations

import linecache
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import assert_close, attention_cases
from lesson_cells import Cell, edited, in_language, read_cells, run_cells, untouched
from mutate_lesson import WANTED, find_survivors

pytest.importorskip("numba")
pytest.importorskip("triton")  # there is none for macOS; what a learner does then is tested below

from minivllm.course.lessons import lesson_06
from minivllm.course.lessons.paged_kernels import launch_decode, launch_prefill, launch_write
from minivllm.kernels import reference

CELLS = read_cells("06")
PIECES, MERGE, WRITE, DECODE, PREFILL, BACKEND = "pieces", "merge", "write", "decode", "prefill", "backend"
NAMES = {
    PIECES: "each piece is seen once, and the state is that of the whole context",
    MERGE: "parts count by their own maximum and total",
    WRITE: "new keys and values are in their slots, and nothing else is touched",
    DECODE: "each query walks over its own blocks, to its own end",
    PREFILL: "each new token sees its context up to itself",
    BACKEND: "a layer's call: written first, then attended",
}
"""The checks, by the cell of the answer."""
ENGINE = "the engine writes the same on your backend"
LOOPS, KERNEL = "numba", "triton"

_LAST = "last = tl.minimum(first + part_len, tl.load(context_lens_ptr + seq))"
_TILE_LAST = (
    "last = tl.where(tile * TILE < end - begin, tl.minimum(context_len, context_len - (end - begin) + (tile + 1) * TILE), 0)"
)

WRONG_PIECES = {
    "the maximum begins with 0": (PIECES, "-np.inf, 0.0", "0.0, 0.0", "Expected maximum"),
    "the total is not corrected": (PIECES, "total * correction + weights.sum()", "total + weights.sum()", "Expected total"),
    "the output is not corrected": (PIECES, "output * correction + weights @ values", "output + weights @ values", "Expected output"),
    "corrected the wrong way": (PIECES, "np.exp(maximum - new_maximum)", "np.exp(new_maximum - maximum)", "Expected total"),
    "no maximum at all": (PIECES, "np.exp(scores - new_maximum)", "np.exp(scores)", "Expected total"),
    "the scale is forgotten": (PIECES, "keys @ query * scale", "keys @ query", "Expected maximum"),
    "the scale comes twice": (PIECES, "keys @ query * scale", "keys @ query * scale * scale", "Expected maximum"),
    "divided too early": (PIECES, "return maximum, total, output", "return maximum, total, output / total", "do not divide"),
    "the piece's maximum only": (PIECES, "max(maximum, scores.max())", "scores.max()", "Expected"),
    "the old maximum is kept": (PIECES, "        maximum = new_maximum\n", "", "Expected"),
    "keys in place of values": (PIECES, "weights @ values", "weights @ keys", "Expected output"),
    "twice over the pieces": (PIECES, "    maximum, total, output =", "    list(pieces)\n    maximum, total, output =", "second time"),
    "all pieces at once": (PIECES, "for keys, values in pieces:", "for keys, values in list(pieces):", "Expected maximum"),
    "merge: plain sum": (MERGE, "(maxima - maximum).exp()", "torch.ones_like(maxima)", "Expected output"),
    "everything is kept": (PIECES, "    for keys, values in pieces:\n", "    kept, pieces = [], iter(pieces)\n    for keys, values in pieces:\n        kept.append((keys.copy(), values.copy()))\n", "Keep the state, not the pieces"),
    "the maximum begins with -3000": (PIECES, "-np.inf, 0.0", "-3000.0, 0.0", "Expected maximum"),
    "an output of two dimensions": (PIECES, "np.zeros(len(query))", "np.zeros((1, len(query)))", "of shape"),
    "merge: the mean of the parts": (MERGE, "(totals * weights).sum(dim=2)", "(totals > 0).float().sum(dim=2)", "Expected output"),
    "merge: not divided": (MERGE, "output / total[..., None], 0.0", "output, 0.0", "Expected output"),
    "merge: NaN for padding": (MERGE, "torch.where(total[..., None] > 0, output / total[..., None], 0.0)", "output / total[..., None]", "where there is no token at all"),
    "merge: exp of the maximum": (MERGE, "(maxima - maximum).exp()", "maxima.exp()", "Expected output"),
    "merge: in place": (MERGE, "    maximum = maxima.amax(dim=2, keepdim=True)", "    totals += 0.5\n    maximum = maxima.amax(dim=2, keepdim=True)", ""),
    "merge: over heads": (MERGE, "maxima.amax(dim=2, keepdim=True)", "maxima.amax(dim=1, keepdim=True)", ""),
}  # fmt: skip

WRONG_LOOPS = {
    "write: padding too": (WRITE, "if slots[token] >= 0:", "if True:", "is out of bounds"),
    "write: slot 0 is taken for padding": (WRITE, "slots[token] >= 0", "slots[token] > 0", "slot 0 of key_cache"),
    "write: block and offset swapped": (WRITE, "slots[token] // block_size, slots[token] % block_size", "slots[token] % block_size, slots[token] // block_size", ""),
    "write: the key twice": (WRITE, "value_cache[block, offset] = value[token]", "value_cache[block, offset] = key[token]", "value_cache"),
    "write: no values": (WRITE, "value_cache[block, offset] = value[token]", "pass", "value_cache"),
    "write: always token 0": (WRITE, "key_cache[block, offset] = key[token]", "key_cache[block, offset] = key[0]", "key_cache"),
    "write: only -1 is padding": (WRITE, "slots[token] >= 0", "slots[token] != -1", ""),
    "decode: the last block whole, but what is NaN": (
        DECODE,
        "min(first + part_len, context_lens[seq])):\n                    block, offset = block_tables[seq, position // block_size], position % block_size\n",
        "min(first + part_len, -(-context_lens[seq] // block_size) * block_size)):\n                    block, offset = block_tables[seq, position // block_size], position % block_size\n                    if np.isnan(key_cache[block, offset, 0, 0]):\n                        continue\n",
        "",
    ),
    "decode: no maximum": (DECODE, "np.exp(maximum - new_maximum), np.exp(score - new_maximum)", "1.0, np.exp(min(score, 700.0))", ""),
    "decode: the cache is cleared": (DECODE, "    for seq in range(len(query)):", "    value_cache[block_tables[0, 0], 0] += 1\n    for seq in range(len(query)):", "changed value_cache"),
    "decode: no more than 40 tokens": (DECODE, "min(first + part_len, context_lens[seq])", "min(first + part_len, context_lens[seq], 40)", ""),
    "decode: 5 bits of a block's number": (DECODE, "block_tables[seq, position // block_size]", "block_tables[seq, position // block_size] & 31", ""),
    "decode: bounds are not checked": (DECODE, "@njit(boundscheck=True)\ndef decode", "@njit\ndef decode", "Keep the line"),
    "prefill: no more than 40 tokens": (PREFILL, "range(own + 1)", "range(min(own + 1, 40))", ""),
    "decode: the maximum begins with 0": (DECODE, "maximum, total, output = -np.inf,", "maximum, total, output = 0.0,", "Expected maxima"),
    "decode: no scale": (DECODE, ".sum() * scale", ".sum()", "Expected maxima"),
    "decode: scale twice": (DECODE, ".sum() * scale", ".sum() * scale * scale", "Expected maxima"),
    "decode: the total is not corrected": (DECODE, "total * correction + weight", "total + weight", "Expected totals"),
    "decode: the output is not corrected": (DECODE, "output * correction + weight", "output + weight", "Expected outputs"),
    "decode: corrected the wrong way": (DECODE, "np.exp(maximum - new_maximum)", "np.exp(new_maximum - max(maximum, -1e30))", ""),
    "decode: another text's table": (DECODE, "block_tables[seq, position", "block_tables[0, position", ""),
    "decode: the wrong head of keys": (DECODE, "key_cache[block, offset, head // group]).sum()", "key_cache[block, offset, head % key_cache.shape[2]]).sum()", "Expected maxima"),
    "decode: the wrong head of values": (DECODE, "weight * value_cache[block, offset, head // group]", "weight * value_cache[block, offset, 0]", "Expected outputs"),
    "decode: the last block whole": (DECODE, "min(first + part_len, context_lens[seq])", "min(first + part_len, -(-context_lens[seq] // block_size) * block_size)", "Expected"),
    "decode: one token too few": (DECODE, "min(first + part_len, context_lens[seq])", "min(first + part_len, context_lens[seq] - 1)", "Expected"),
    "decode: parts overlap": (DECODE, "min(first + part_len, context_lens[seq])", "min(first + part_len + 1, context_lens[seq])", "Expected"),
    "decode: every part is the first": (DECODE, "first = part * part_len", "first = 0 * part_len", "Expected"),
    "decode: keys for values": (DECODE, "weight * value_cache[block", "weight * key_cache[block", "Expected outputs"),
    "decode: blocks in order": (DECODE, "block_tables[seq, position // block_size], position % block_size", "position // block_size, position % block_size", ""),
    "decode: offset within the part": (DECODE, "position % block_size\n", "(position - first) % part_len\n", "out of bounds"),
    "decode: one block further": (DECODE, "block_tables[seq, position // block_size]", "block_tables[seq, position // block_size + 1]", ""),
    "decode: divided": (DECODE, "outputs[seq, head, part] = output", "outputs[seq, head, part] = output / max(total, 1e-30)", "do not divide"),
    "decode: the first head's query": (DECODE, "(query[seq, head] * key", "(query[seq, 0] * key", "Expected maxima"),
    "decode: only the last token of a part": (DECODE, "                    maximum = new_maximum\n", "                    pass\n", "Expected"),
    "prefill: no mask": (PREFILL, "range(own + 1)", "range(context_lens[seq])", "Expected output"),
    "prefill: against the chunk, not the context": (PREFILL, "own = context_lens[seq] - starts[seq + 1] + row", "own = row - starts[seq]", "Expected output"),
    "prefill: not itself": (PREFILL, "range(own + 1)", "range(own)", ""),
    "prefill: the next one, too": (PREFILL, "range(own + 1)", "range(min(own + 2, context_lens[seq]))", "Expected output"),
    "prefill: not divided": (PREFILL, "result / total", "result", "Expected output"),
    "prefill: row of the batch as position": (PREFILL, "own = context_lens[seq] - starts[seq + 1] + row", "own = min(row, context_lens[seq] - 1)", "Expected output"),
    "prefill: the wrong head of keys": (PREFILL, "key_cache[block, offset, head // group]).sum()", "key_cache[block, offset, head % key_cache.shape[2]]).sum()", "Expected output"),
    "prefill: another text's table": (PREFILL, "block_tables[seq, position", "block_tables[seq - 1, position", ""),
    "prefill: the first sequence only": (PREFILL, "for seq in range(len(context_lens))", "for seq in range(1)", "Expected output"),
    "prefill: padding as well": (PREFILL, "range(starts[seq], starts[seq + 1])", "range(starts[seq], starts[seq + 1] if seq + 1 < len(context_lens) else len(query))", ""),
    "prefill: the output is not corrected": (PREFILL, "result * correction + weight", "result + weight", "Expected output"),
}  # fmt: skip

WRONG_KERNELS = {
    "write: padding too": (WRITE, "inside = (places < size) & (slot >= 0)", "inside = places < size", "outside"),
    "write: no mask": (WRITE, "inside = (places < size) & (slot >= 0)", "inside = slot >= 0", ""),
    "write: the key twice": (WRITE, "tl.load(value_ptr + token", "tl.load(key_ptr + token", "value_cache"),
    "write: 8 bits of a slot": (WRITE, "slot = tl.load(slots_ptr + token)", "slot = tl.load(slots_ptr + token).to(tl.int8).to(tl.int64)", ""),
    "prefill: no more than three tiles": (PREFILL, "rows = tile * TILE + tl.arange", "rows = tl.minimum(tile, 1) * TILE + tl.arange", ""),
    "write: slots in order": (WRITE, "slot = tl.load(slots_ptr + token)", "slot = tl.minimum(tl.load(slots_ptr + token), token)", ""),
    "decode: the maximum begins with 0": (DECODE, 'tl.full([ROWS], float("-inf"), tl.float32)', "tl.zeros([ROWS], tl.float32)", "Expected maxima"),
    "decode: no scale": (DECODE, "axis=2) * scale", "axis=2)", "Expected maxima"),
    "decode: scale twice": (DECODE, "axis=2) * scale", "axis=2) * scale * scale", "Expected maxima"),
    "decode: the total is not corrected": (DECODE, "total * correction + tl.sum", "total + tl.sum", "Expected totals"),
    "decode: the output is not corrected": (DECODE, "output * correction[:, None]", "output", "Expected outputs"),
    "decode: the last block whole": (DECODE, "inside = start + offsets < last", "inside = start + offsets < first + part_len", ""),
    "decode: scores are not masked": (DECODE, '        scores = tl.where(inside[None, :], scores, float("-inf"))\n', "", "Expected"),
    "decode: another text's table": (DECODE, "tables_ptr + seq * max_blocks +", "tables_ptr +", ""),
    "decode: the wrong head of keys": (DECODE, "NUM_KV_HEADS + kv_head)[:, None]", "NUM_KV_HEADS)[:, None]", ""),
    "decode: groups mixed": (DECODE, "kv_head * GROUP + rows", "rows * NUM_KV_HEADS + kv_head", ""),
    "decode: rows of nobody are stored": (DECODE, "tl.store(totals_ptr + parts, total, mask=mine)", "tl.store(totals_ptr + parts, total)", ""),
    "decode: each part is the whole": (DECODE, _LAST, "last = tl.load(context_lens_ptr + seq)", ""),
    "decode: keys for values": (DECODE, "values = tl.load(value_cache_ptr", "values = tl.load(key_cache_ptr", ""),
    "decode: keys read twice": (DECODE, "        scores = tl.sum(query", "        keys += 0 * tl.load(key_cache_ptr + places, mask=inside[:, None], other=0.0)\n        scores = tl.sum(query", "times as much"),
    "decode: parts of the wrong stride": (DECODE, "heads * tl.num_programs(2) + part", "heads + part * tl.num_programs(0)", ""),
    "prefill: no mask": (PREFILL, "start + offsets[None, :] <= positions[:, None]", "inside[None, :]", "Expected output"),
    "prefill: not itself": (PREFILL, "<= positions[:, None]", "< positions[:, None]", ""),
    "prefill: against the chunk": (PREFILL, "positions = context_len - (end - begin) + rows", "positions = rows", "Expected output"),
    "prefill: nothing is skipped": (PREFILL, _TILE_LAST, "last = context_len", "times as much"),
    "prefill: programs with nothing to do read": (PREFILL, _TILE_LAST, "last = tl.minimum(context_len, context_len - (end - begin) + (tile + 1) * TILE)", "times as much"),
    "prefill: one position too few": (PREFILL, "(tile + 1) * TILE), 0)", "(tile + 1) * TILE - 1), 0)", ""),
    "prefill: stored beyond the sequence": (PREFILL, "tl.store(output_ptr + own, output / total[:, None], mask=mine[:, None])", "tl.store(output_ptr + own, output / total[:, None])", ""),
    "prefill: not divided": (PREFILL, "output / total[:, None], mask", "output, mask", "Expected output"),
    "prefill: the wrong group": (PREFILL, "kv_head = head // GROUP", "kv_head = head % (NUM_HEADS // GROUP)", "Expected output"),
    "prefill: the output is not corrected": (PREFILL, "output * correction[:, None]", "output", "Expected output"),
}  # fmt: skip

WRONG_BACKENDS = {
    "attends first": ("        launch_write(write, key, value, *kv_cache, metadata.slot_mapping)\n", "", "After forward"),
    "decode for everything": ("if not metadata.is_decode:", "if False:", ""),
    "no scale of its own": ("metadata.query_start_loc, self.scale)", "metadata.query_start_loc, 0.125)", "Expected output"),
    "key and value swapped": ("launch_write(write, key, value,", "launch_write(write, value, key,", "does not hold"),
    "not merged": ("return merge(*launch_decode(decode, query, *context, self.scale, part_len)).to(query.dtype)", "return launch_decode(decode, query, *context, self.scale, part_len)[2][:, :, 0]", "Expected output"),
    "another dtype": (".to(query.dtype)", ".double()", "dtype"),
    "always float32": (".to(query.dtype)", "", "dtype"),
    "parts shorter than a block": ("max(64, kv_cache[0].shape[1])", "64", "must be a multiple of the block size, 128"),
    "no merge": ("return merge(*launch_decode(decode, query, *context, self.scale, part_len)).to(query.dtype)", "maxima, totals, outputs = launch_decode(decode, query, *context, self.scale, part_len)\n        return (outputs[:, :, 0] / totals[:, :, 0, None].clamp(min=1e-20)).to(query.dtype)", "Expected output"),
    "the query is scaled in place": ("        context = (*kv_cache", "        query *= 2\n        context = (*kv_cache", ""),
    "prefill is thrown away": ("return launch_prefill(", "launch_prefill(", ""),
}  # fmt: skip

RIGHT = {
    "pieces: scores first": (LOOPS, PIECES, "scores = keys @ query * scale", "scores = (keys * (query * scale)).sum(axis=1)"),
    "pieces: a loop over tokens": (
        LOOPS, PIECES, "    for keys, values in pieces:\n        scores = keys @ query * scale",
        "    for keys, values in ((k[None], v[None]) for ks, vs in pieces for k, v in zip(ks, vs)):\n        scores = keys @ query * scale",
    ),
    "merge: by logarithms": (LOOPS, MERGE, "(maxima - maximum).exp()", "torch.exp(maxima - maximum).clone()"),
    "write: over blocks": (LOOPS, WRITE, "key_cache[block, offset] = key[token]", "key_cache[block, offset, :, :] = key[token, :, :]"),
    "decode: two steps": (LOOPS, DECODE, "score = (query[seq, head] * key_cache[block, offset, head // group]).sum() * scale", "score = ((query[seq, head] * scale) * key_cache[block, offset, head // group]).sum()"),
    "decode: the queries of a group one by one": (LOOPS, DECODE, "range(query.shape[1]):", "np.arange(query.shape[1])[::-1]:"),
    "decode: tl.dot": (KERNEL, DECODE, "tl.sum(query[:, None, :] * keys[None, :, :], axis=2)", 'tl.dot(query, tl.trans(keys), input_precision="ieee")'),
    "decode: scaled before": (KERNEL, DECODE, "other=0.0).to(tl.float32)\n\n    first", "other=0.0).to(tl.float32) * 1.0\n\n    first"),
    "prefill: a mask of both": (KERNEL, PREFILL, "tl.where(start + offsets[None, :] <= positions[:, None], scores", "tl.where((start + offsets[None, :] <= positions[:, None]) & inside[None, :], scores"),
    "prefill: early return": (KERNEL, PREFILL, "    rows = tile * TILE + tl.arange(0, TILE)", "    if tile * TILE >= end - begin:\n        return\n    rows = tile * TILE + tl.arange(0, TILE)"),
    "backend: parts as long as a block": (LOOPS, BACKEND, "part_len = max(64, kv_cache[0].shape[1])", "part_len = kv_cache[0].shape[1]"),
}  # fmt: skip


def cells_of(answer, language):
    """The cells that an answer needs, in one of the two languages."""
    own = [answer]
    if answer == BACKEND:
        own = [cell.name for cell in CELLS if cell.kind == "answer" or cell.name.startswith("choose")]
    check = "check-forward" if answer == BACKEND else f"check-{answer}"
    if answer in (WRITE, DECODE, PREFILL):
        own = [f"{answer}-loops", f"{answer}-kernel"]
    wanted = {"setup", *own, f"choose-{answer}", check}
    return in_language([cell for cell in CELLS if cell.name in wanted], language)


def check_wrong(answer, language, old, new, words):
    outcome = run_cells(edited(cells_of(answer, language), old, new))
    assert outcome.failed == [NAMES[answer]]
    assert words in str(outcome.checks[NAMES[answer]])
    assert outcome.broken == {}


@pytest.mark.parametrize("language", [LOOPS, KERNEL])
def test_an_untouched_exercise_fails_at_its_checks_and_nowhere_else(language):
    cells = [Cell(cell.name, untouched(cell.source), cell.kind) if cell.kind == "answer" else cell for cell in CELLS]
    outcome = run_cells(in_language(cells, language))
    assert (outcome.points, outcome.broken, outcome.failed) == (0, {}, list(NAMES.values()))
    assert {type(error) for error in outcome.checks.values()} == {NotImplementedError}


@pytest.mark.parametrize("answer, old, new, words", WRONG_PIECES.values(), ids=WRONG_PIECES)
def test_a_mistake_in_arithmetic_fails_and_is_named(answer, old, new, words):
    check_wrong(answer, LOOPS, old, new, words)


@pytest.mark.slow
@pytest.mark.parametrize("answer, old, new, words", WRONG_LOOPS.values(), ids=WRONG_LOOPS)
def test_a_mistake_in_loops_fails_and_is_named(answer, old, new, words):
    check_wrong(answer, LOOPS, old, new, words)


@pytest.mark.slow
@pytest.mark.parametrize("answer, old, new, words", WRONG_KERNELS.values(), ids=WRONG_KERNELS)
def test_a_mistake_in_triton_fails_and_is_named(answer, old, new, words):
    check_wrong(answer, KERNEL, old, new, words)


@pytest.mark.slow
@pytest.mark.parametrize("old, new, words", WRONG_BACKENDS.values(), ids=WRONG_BACKENDS)
def test_a_mistake_in_a_backend_fails_and_is_named(old, new, words):
    check_wrong(BACKEND, LOOPS, old, new, words)


@pytest.mark.slow
@pytest.mark.parametrize("language, answer, old, new", RIGHT.values(), ids=RIGHT)
def test_another_right_answer_passes(language, answer, old, new):
    outcome = run_cells(edited(cells_of(answer, language), old, new))
    assert (outcome.failed, outcome.broken) == ([], {})


@pytest.mark.slow
@pytest.mark.parametrize("answer", [WRITE, DECODE, PREFILL])
def test_loops_need_not_be_compiled(answer):
    """Plain Python with NumPy is slow, and right."""
    cells = [Cell(cell.name, cell.source.replace("@njit(boundscheck=True)\n", ""), cell.kind) for cell in cells_of(answer, LOOPS)]
    outcome = run_cells(cells)
    assert (outcome.failed, outcome.broken) == ([], {})


@pytest.mark.slow
def test_the_engine_writes_the_same_on_triton():
    cells = [cell for cell in CELLS if cell.name != "write-text" and (cell.kind != "check" or cell.name == "check-engine")]
    outcome = run_cells(in_language(cells, KERNEL), with_model=True)
    assert (outcome.failed, outcome.broken, outcome.points) == ([], {}, 2)


@pytest.mark.slow
def test_the_engine_would_notice_a_wrong_backend():
    old, new = "if not metadata.is_decode:", "self.scale = 0.1\n        if not metadata.is_decode:"
    wrong = edited(in_language([cell for cell in CELLS if cell.name != "write-text"], LOOPS), old, new)
    assert ENGINE in run_cells(wrong, with_model=True).failed


@pytest.mark.slow
def test_small_mistakes_are_caught():
    count, survivors = find_survivors("06", every=47)
    assert 1 - len(survivors) / count >= WANTED, [mutant.change for mutant in survivors]


@pytest.mark.slow
@pytest.mark.parametrize("language", [LOOPS, KERNEL])
@settings(max_examples=settings().max_examples // 10, deadline=None)
@given(data=st.data())
def test_the_kernels_pass_the_cases_of_the_packages_own(language, data):
    """Block sizes, shared blocks, dtypes and groups as the package's kernels are tested with."""
    space = namespace_of(language)
    decode = data.draw(st.booleans())
    case = data.draw(attention_cases("cpu", decode=decode, cpu=language == LOOPS))
    head_dim, block_size = case.query.shape[2], case.key_cache.tensor.shape[1]
    if language == KERNEL and (head_dim & (head_dim - 1) or block_size & (block_size - 1)):
        return  # the lesson's kernels are for powers of 2
    if decode:
        arguments = [x.contiguous() if isinstance(x, torch.Tensor) else x for x in case.args]
        states = launch_decode(space["decode"], *arguments, part_len=block_size * data.draw(st.integers(1, 4)))
        output, expected = space["merge"](*states).to(case.query.dtype), reference.paged_decode_attention(*case.reference_args)
    else:
        arguments = [x.contiguous() if isinstance(x, torch.Tensor) else x for x in case.ragged_args]
        output, expected = (
            launch_prefill(space["prefill"], *arguments),
            reference.paged_prefill_attention(*case.ragged_reference_args),
        )
    assert_close(output, expected)


_spaces: dict[str, dict] = {}


def namespace_of(language):
    """What the solution defines."""
    if language not in _spaces:
        space = {"__name__": "__main__"}
        for cell in in_language(CELLS, language):
            if cell.kind == "answer" or cell.name == "setup" or cell.name.startswith("choose"):
                file = f"<06 {language} {cell.name}>"
                linecache.cache[file] = (len(cell.source), None, cell.source.splitlines(keepends=True), file)
                exec(compile(cell.source, file, "exec"), space)
        _spaces[language] = space
    return _spaces[language]


def test_16_bit_caches_are_written_by_loops_too():
    caches = [torch.zeros(3, 4, 2, 8, dtype=torch.bfloat16) for _ in range(2)]
    key, slots = torch.randn(2, 2, 8, dtype=torch.bfloat16), torch.tensor([5, -1])
    launch_write(namespace_of(LOOPS)["write"], key, key + 1, *caches, slots)
    assert torch.equal(caches[0].flatten(0, 1)[5], key[0]) and torch.equal(caches[1].flatten(0, 1)[5], key[0] + 1)
    assert int((caches[0] != 0).any(dim=(2, 3)).sum()) == 1


@pytest.mark.slow
def test_without_triton_the_loops_earn_all_points():
    """As on macOS: importing Triton fails, and the kernels' cells can be run all the same."""
    code = textwrap.dedent(
        """
        import sys
        sys.modules["triton"] = None
        sys.path[:0] = ["tests/support"]
        from lesson_cells import in_language, read_cells, run_cells
        outcome = run_cells(in_language(read_cells("06"), "numba"))
        print(outcome.failed, outcome.broken, outcome.points)
        told = run_cells(in_language(read_cells("06"), "triton")).checks
        print({str(error).splitlines()[-1] for error in told.values() if error})
        """
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[0] == "[] {} 18"
    assert "There is no Triton for this system: write the loops" in printed.splitlines()[1]


def test_all_checks_are_exported_and_used():
    text = "\n".join(cell.source for cell in CELLS)
    assert [name for name in lesson_06.__all__ if f"lesson_06.{name}(" not in text] == []
