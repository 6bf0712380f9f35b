"""Lesson 03's checks: the solution passes, an untouched exercise fails at each, other right solutions pass, mistakes fail where they belong.

`tests/support/mutate_lesson.py 03` makes many more mistakes, small ones.
"""

from __future__ import annotations

import ast

import nbformat
import pytest
import torch
from lesson_cells import ROOT, Cell, edited, read_cells, run_cells, untouched, without_earlier_checks
from mutate_lesson import WANTED, find_survivors

from minivllm.course.lessons import lesson_03
from minivllm.course.lessons.padded_steps import PaddedAttention, PaddedStep, make_requests, to_padded
from minivllm.errors import ConfigError
from minivllm.layers.attention import AttentionMetadata

CELLS = read_cells("03")
SIZE = "the memory says how many texts fit"
WRITE = "keys and values are in their slots, and nothing else is touched"
MASK = "a token sees its own past and nothing else"
ATTEND = "each row gets the attention that it would get alone"
ROWS = "every row has one text, and a length of its own"
LAYOUT = "padding has no place in a text"
RUNNER = "a step computes each new token once and asks only for the last one's logits"
GENERATE = "no token is computed twice"
SERVE = "a finished text writes no more, and its row goes to the next"
TEXT = "the model writes what it writes in the engine"
ENGINE = "the engine runs on your attention"

_LEFT = "left = memory_bytes - num_parameters * self.bytes_per_number"
_ROWS_FIT = "return max(0, left // (max_len * self.bytes_per_token()))"
_BYTES = 'return 2 * self.config["num_hidden_layers"] * num_kv_heads * head_dim * self.bytes_per_number'
_SLOTS = "cache[row, start : start + count] = new[i, :count]"
_POSITIONS = "positions = torch.tensor(step.starts)[:, None] + torch.arange(step.width)\n"
_VISIBLE = "return torch.arange(num_slots) <= positions[:, :, None]"
_NUM_SLOTS = "num_slots = max(start + count for start, count in zip(step.starts, step.counts))"
_KEYS = "keys, values = (cache[step.rows, :num_slots].transpose(1, 2) for cache in kv_cache)"
_MASK = "mask = self.visible(step, num_slots)[:, None]  # the same for all heads"
_TAKE = "row = self.free_rows.pop()\n        self.lengths[row] = 0"
_STARTS = "starts = [self.cache.lengths[row] for row in rows]"
_MODEL = "hidden = self.model(input_ids.flatten(), positions.flatten(), self.cache.layers, step)\n        self.cache.advance(rows, counts)"
_LAST = "last = [i * step.width + count - 1 for i, count in enumerate(counts)]"
_ONE = "        logits = runner.step([row], [tokens])\n        output.append(request.choose(logits[0], output))\n        tokens = output[-1:]"
_ADMIT = "        while waiting and runner.cache.num_free:\n            running[runner.cache.take()] = waiting.popleft()"
_LISTS = "token_lists = [outputs[number][-1:] or requests[number].prompt_token_ids for number in running.values()]"
_DONE = "            if requests[number].is_finished(output):\n                del running[row]\n                runner.cache.release(row)"

WRONG = {
    # what fits
    "heads of queries are counted": ('num_kv_heads = self.config.get("num_key_value_heads", num_heads)', "num_kv_heads = num_heads", SIZE, "heads of keys (not of queries)"),
    "one head where the config has no entry": ('self.config.get("num_key_value_heads", num_heads)', 'self.config.get("num_key_value_heads", 1)', SIZE, "where the config lacks an entry"),
    "head_dim always from the width": ('self.config.get("head_dim", self.config["hidden_size"] // num_heads)', 'self.config["hidden_size"] // num_heads', SIZE, "head_dim"),
    "the head's width by heads of keys": ('self.config["hidden_size"] // num_heads', 'self.config["hidden_size"] // num_kv_heads', SIZE, "bytes_per_token()"),
    "keys without values": (_BYTES, _BYTES.replace("2 * ", ""), SIZE, "keys and values"),
    "one layer": (_BYTES, _BYTES.replace('self.config["num_hidden_layers"] * ', ""), SIZE, "layers"),
    "numbers of two bytes, whatever is asked": (_BYTES, _BYTES.replace("self.bytes_per_number", "2"), SIZE, "bytes_per_number"),
    "weights take no memory": (_LEFT, "left = memory_bytes", SIZE, "what the weights leave"),
    "a parameter is a byte": (_LEFT, "left = memory_bytes - num_parameters", SIZE, "what the weights leave"),
    "less than no row": (_ROWS_FIT, _ROWS_FIT.replace("max(0, ", "(1 * "). replace("(1 * left // (max_len * self.bytes_per_token()))", "left // (max_len * self.bytes_per_token())"), SIZE, "weights that leave nothing"),
    "a part of a row": (_ROWS_FIT, _ROWS_FIT.replace("//", "/"), SIZE, "must be a whole number"),
    "rounded up": (_ROWS_FIT, "return max(0, -(-left // (max_len * self.bytes_per_token())))", SIZE, "rounding down"),
    # into the slots
    "written one slot off": (_SLOTS, "cache[row, start + 1 : start + count + 1] = new[i, :count]", WRITE, ""),
    "written one slot too early": (_SLOTS, "cache[row, start - 1 : start + count - 1] = new[i, :count]", WRITE, ""),
    "always from the first slot": (_SLOTS, "cache[row, :count] = new[i, :count]", WRITE, "step.starts[i]"),
    "padding is written": (_SLOTS, "end = min(start + step.width, max_len)\n                cache[row, start:end] = new[i, : end - start]", WRITE, "of text"),
    "padding on the left is expected": (_SLOTS, "cache[row, start : start + count] = new[i, step.width - count :]", WRITE, "padding, column"),
    "text i in row i": (_SLOTS, "cache[i, start : start + count] = new[i, :count]", WRITE, "what was there before"),
    "values into the keys": ("for cache, new in zip(kv_cache, (keys, values)):", "for cache, new in zip(kv_cache, (values, keys)):", WRITE, "the value of new token 0"),
    "values are forgotten": ("for cache, new in zip(kv_cache, (keys, values)):", "for cache, new in zip(kv_cache, (keys,)):", WRITE, "values.\nExpected in slot"),
    "a copy is written": ("for cache, new in zip(kv_cache, (keys, values)):", "for cache, new in zip([part.clone() for part in kv_cache], (keys, values)):", WRITE, "whether you write to the tensors that you were given"),
    "only the last new token": (_SLOTS, "cache[row, start + count - 1] = new[i, count - 1]", WRITE, "what was there before"),
    "the rest of the row is cleared": (_SLOTS, f"cache[row, start:] = 0\n                {_SLOTS}", WRITE, "other numbers"),
    "a text that does not fit is cut off": ("raise ValueError(f\"{count} new tokens after {start} do not fit into a row of {max_len} slots\")", "pass", WRITE, "must raise a ValueError"),
    "the last slot is not used": ("if start + count > max_len:", "if start + count >= max_len:", WRITE, "do not fit"),
    "padding must fit too": ("if start + count > max_len:", "if start + step.width > max_len:", WRITE, "do not fit"),
    "found out too late": (
        "        for start, count in zip(step.starts, step.counts):\n            if start + count > max_len:\n                raise ValueError(f\"{count} new tokens after {start} do not fit into a row of {max_len} slots\")\n        for cache, new in zip(kv_cache, (keys, values)):\n            for i, row in enumerate(step.rows):\n                start, count = step.starts[i], step.counts[i]",
        "        for cache, new in zip(kv_cache, (keys, values)):\n            for i, row in enumerate(step.rows):\n                start, count = step.starts[i], step.counts[i]\n                if start + count > max_len:\n                    raise ValueError(\"full\")",
        WRITE,
        "write nothing, but other texts",
    ),
    # who sees what
    "a token does not see itself": (_VISIBLE, _VISIBLE.replace("<=", "<"), MASK, "whether a token sees itself"),
    "a token sees the next one": (_VISIBLE, _VISIBLE.replace("<= positions[:, :, None]", "<= positions[:, :, None] + 1"), MASK, "beyond the token's own position"),
    "what is in the cache is not seen": (_POSITIONS, "positions = torch.zeros(len(step.rows), 1, dtype=torch.int64) + torch.arange(step.width)\n", MASK, "step.starts"),
    "everything up to the longest is seen": (_VISIBLE, "return torch.ones(len(step.rows), step.width, num_slots, dtype=torch.bool)", MASK, "beyond the token's own position"),
    "not causal": (_POSITIONS, "positions = (torch.tensor(step.starts) + torch.tensor(step.counts) - 1)[:, None].expand(-1, step.width)\n", MASK, "hold later tokens"),
    "the tokens end in the last slot": (_POSITIONS, "positions = num_slots - step.width + torch.arange(step.width).expand(len(step.rows), -1)\n", MASK, ""),
    "padding sees nothing": (_VISIBLE, "real = torch.arange(step.width) < torch.tensor(step.counts)[:, None]\n        return (torch.arange(num_slots) <= positions[:, :, None]) & real[:, :, None]", MASK, "its softmax would be NaN"),
    "slots before tokens": (_VISIBLE, "return (torch.arange(num_slots) <= positions[:, :, None]).transpose(1, 2)", MASK, "the order of the dimensions"),
    "zeros and minus infinity": (_VISIBLE, "return torch.where(torch.arange(num_slots) <= positions[:, :, None], 0.0, -torch.inf)", MASK, "dtype"),
    # attention
    "row i for text i": (_KEYS, _KEYS.replace("cache[step.rows,", "cache[: len(step.rows),"), ATTEND, "not in row i"),
    "the whole row is read": (_NUM_SLOTS, "num_slots = kv_cache[0].shape[1]", ATTEND, "not even behind a mask"),
    "one slot too few": (_NUM_SLOTS, _NUM_SLOTS + " - 1", ATTEND, ""),
    "the new tokens are forgotten": (_NUM_SLOTS, "num_slots = max(max(step.starts), 1)", ATTEND, ""),
    "no mask": ("attn_mask=mask, ", "", ATTEND, "`visible` has to be passed on"),
    "causal as if all texts began here": ("attn_mask=mask, ", "is_causal=True, ", ATTEND, "takes the first query for the first token"),
    "a mask is kept for the next step": (
        _MASK,
        f"kept = getattr(self, 'kept', None)\n        {_MASK}\n        if kept is not None and kept.shape == mask.shape:\n            mask = kept\n        self.kept = mask",
        ATTEND,
        "what your object keeps from one step to the next",
    ),
    "the mask of the first text for all": (_MASK, "mask = self.visible(step, num_slots)[:1, None]", ATTEND, "the mask"),
    "the usual scale": ("scale=self.scale, ", "", ATTEND, "it is self.scale"),
    "keys and values exchanged": ("query.transpose(1, 2), keys, values,", "query.transpose(1, 2), values, keys,", ATTEND, "which of the two tensors are the keys"),
    "heads tiled instead of repeated": (
        "query.transpose(1, 2), keys, values, attn_mask=mask, scale=self.scale, enable_gqa=True",
        "query.transpose(1, 2), keys.repeat(1, 3, 1, 1), values.repeat(1, 3, 1, 1), attn_mask=mask, scale=self.scale",
        ATTEND,
        "which heads belong together",
    ),
    "heads before tokens": ("return output.transpose(1, 2)\n", "return output\n", ATTEND, "the order of the dimensions"),
    "the mask written into the cache": (_MASK, f"kv_cache[0][step.rows[0], 0] = 0\n        {_MASK}", ATTEND, "must not change the cache"),
    # rows
    "nothing is said of the length": (_TAKE, "row = self.free_rows.pop()", ROWS, "lengths"),
    "a row begins with one token": (_TAKE, _TAKE.replace("= 0", "= 1"), ROWS, "begins with 0"),
    "a row is given twice": (_TAKE, "row = self.free_rows[-1]\n        self.lengths[row] = 0", ROWS, ""),
    "no row raises what the list raises": ('            raise ValueError("no row is free")', "            pass", ROWS, "but raised IndexError"),
    "no row is None": ('            raise ValueError("no row is free")', "            return None", ROWS, "but returned None"),
    "all rows grow": ("for row, count in zip(rows, counts):\n            self.lengths[row] += count", "for row in self.lengths:\n            self.lengths[row] += max(counts)", ROWS, "to no other"),
    "a row grows by the width of the step": ("            self.lengths[row] += count", "            self.lengths[row] += max(counts)", ROWS, "adds counts[i]"),
    "a row has its last count": ("            self.lengths[row] += count", "            self.lengths[row] = count", ROWS, "adds counts[i]"),
    "a released row is still known": ("        del self.lengths[row]\n", "        self.lengths[row] = 0\n", ROWS, "a free one is not"),
    "a released row is lost": ("        self.free_rows.append(row)\n", "", ROWS, "which rows can be taken again"),
    "a row can be released twice": ('raise ValueError(f"row {row} is free")', "return", ROWS, "must raise a ValueError"),
    "release raises what the dict raises": ('        if row not in self.lengths:\n            raise ValueError(f"row {row} is free")\n', "", ROWS, "but raised KeyError"),
    "released before it is looked at": ('        if row not in self.lengths:\n            raise ValueError(f"row {row} is free")\n        del self.lengths[row]\n        self.free_rows.append(row)', '        self.free_rows.append(row)\n        if row not in self.lengths:\n            raise ValueError("free")\n        del self.lengths[row]', ROWS, "what it changes before it raises"),
    "the memory is cleared": ("        del self.lengths[row]\n", "        del self.lengths[row]\n        for keys, values in self.layers:\n            keys[row] = values[row] = 0\n", ROWS, "No method here touches it"),
    # the padded batch
    "padded on the left": ("input_ids[i, : len(tokens)] = torch.tensor(tokens)", "input_ids[i, width - len(tokens) :] = torch.tensor(tokens)", LAYOUT, "which side the padding is on"),
    "every prompt begins anew": ("torch.arange(start, start + len(tokens))", "torch.arange(len(tokens))", LAYOUT, "they go on from starts[i]"),
    "positions one off": ("torch.arange(start, start + len(tokens))", "torch.arange(start, start + len(tokens)) + 1", LAYOUT, "positions"),
    "positions counted from the padding": ("torch.arange(start, start + len(tokens))", "torch.arange(start, start + len(tokens)) + width - len(tokens)", LAYOUT, "positions"),
    "padding has positions": ("positions = torch.zeros_like(input_ids)", "positions = torch.tensor(starts)[:, None] + torch.arange(width)", LAYOUT, "padding has position 0"),
    "the width of the first": ("width = max(len(tokens) for tokens in token_lists)", "width = max(len(token_lists[0]), 1 + max(len(tokens) for tokens in token_lists))", LAYOUT, "input_ids"),
    "floats": ("input_ids = torch.zeros(len(token_lists), width, dtype=torch.int64)", "input_ids = torch.zeros(len(token_lists), width)", LAYOUT, "dtype of input_ids"),
    # the runner
    "one text after another": (
        _MODEL,
        "states = [self.model(ids, place, self.cache.layers, PaddedStep([row], [start], [count])) for ids, place, row, start, count in zip(input_ids, positions, rows, starts, counts)]\n        hidden = torch.cat(states)\n        self.cache.advance(rows, counts)",
        RUNNER,
        "all texts are one batch",
    ),
    "not flat": (_MODEL, "hidden = self.model(input_ids, positions, self.cache.layers, step)\n        self.cache.advance(rows, counts)", RUNNER, "the model takes flat tokens"),
    "every step begins at 0": (_STARTS, "starts = [0 for row in rows]", RUNNER, "positions"),
    "the length of row i": (_STARTS, "starts = [list(self.cache.lengths.values())[i] for i in range(len(rows))]", RUNNER, ""),
    "counted before the model": (_MODEL, "self.cache.advance(rows, counts)\n        hidden = self.model(input_ids.flatten(), positions.flatten(), self.cache.layers, step)", RUNNER, "lengths while the model runs"),
    "not counted": (_MODEL, _MODEL.split("\n")[0], RUNNER, "`advance`, once"),
    "counted with the padding": (_MODEL, _MODEL.replace("advance(rows, counts)", "advance(rows, [step.width] * len(rows))"), RUNNER, "real tokens of each text"),
    "counted once for each layer": (_MODEL, _MODEL + "\n        self.cache.advance(rows, counts)", RUNNER, "`advance`, once"),
    "the step counts the padding": ("step = PaddedStep(rows, starts, counts)", "step = PaddedStep(rows, starts, [input_ids.shape[1]] * len(rows))", RUNNER, "counts without padding"),
    "the last column": (_LAST, "last = [i * step.width + step.width - 1 for i in range(len(rows))]", RUNNER, "the last real token of each text"),
    "as if nothing were padded": (_LAST, "last = [sum(counts[: i + 1]) - 1 for i in range(len(rows))]", RUNNER, "the last real token of each text"),
    "logits of every token": ("return self.model.compute_logits(hidden[last])", "return self.model.compute_logits(hidden)[last]", RUNNER, "rows of logits, where"),
    "hidden states for logits": ("return self.model.compute_logits(hidden[last])", "self.model.compute_logits(hidden[last])\n        return hidden[last]", RUNNER, "shape of what `step` returns"),
    # one text
    "the prompt's last token is computed twice": (_ONE, _ONE.replace("        logits = runner.step([row], [tokens])", "        if not output:\n            runner.step([row], [tokens])\n            tokens = tokens[-1:]\n        logits = runner.step([row], [tokens])"), GENERATE, "request 0 in row"),
    "each new token is computed twice": (_ONE, _ONE.replace("tokens = output[-1:]", "tokens = output[-2:]"), GENERATE, "new tokens of request 0"),
    "everything is computed again": (_ONE, _ONE.replace("tokens = output[-1:]", "tokens = request.prompt_token_ids + output"), GENERATE, "computed again"),
    "the prompt token by token": (_ONE, "        for token in tokens:\n            logits = runner.step([row], [[token]])\n        output.append(request.choose(logits[0], output))\n        tokens = output[-1:]", GENERATE, "what the first step of a text computes"),
    "the last token is computed too": ("        tokens = output[-1:]\n    runner.cache.release(row)\n", "        tokens = output[-1:]\n    runner.step([row], [tokens])\n    runner.cache.release(row)\n", GENERATE, "a finished text computes nothing"),
    "one token more": ("while not request.is_finished(output):", "while not request.is_finished(output[:-1]):", GENERATE, "a finished text computes nothing"),
    "the row is kept": ("        tokens = output[-1:]\n    runner.cache.release(row)\n", "        tokens = output[-1:]\n", GENERATE, "were not released"),
    "row 0, whoever has it": ("    row = runner.cache.take()\n", "    row = 0\n    runner.cache.lengths[row] = 0\n", GENERATE, ""),
    "the prompt is returned too": ("    runner.cache.release(row)\n    return output\n    ###", "    runner.cache.release(row)\n    return request.prompt_token_ids + output\n    ###", GENERATE, "without the prompt"),
    "chosen by the whole text": (_ONE, _ONE.replace("request.choose(logits[0], output)", "request.choose(logits[0], request.prompt_token_ids + output)"), GENERATE, "whose output belong together"),
    "logits of all rows": (_ONE, _ONE.replace("logits[0]", "logits"), GENERATE, "one row of them"),
    # many texts
    "a finished row goes on": (_DONE, "            if requests[number].is_finished(output):\n                pass\n        if all(requests[number].is_finished(outputs[number]) for number in running.values()):\n            for row in running:\n                runner.cache.release(row)\n            running = {}", SERVE, "a finished text computes nothing"),
    "a finished row is kept empty": (_DONE, "            if requests[number].is_finished(output):\n                del running[row]\n        if not running:\n            for row in list(runner.cache.lengths):\n                runner.cache.release(row)", SERVE, "is finished, but still has row"),
    "one newcomer at a time": (_ADMIT, _ADMIT.replace("while waiting", "if waiting"), SERVE, "no step may run then"),
    "the last who came goes first": (_ADMIT, _ADMIT.replace("popleft()", "pop()"), SERVE, "has waited longer"),
    "newcomers wait until all are done": (_ADMIT, "        if not running:\n" + "\n".join("    " + line for line in _ADMIT.split("\n")), SERVE, "no step may run then"),
    "logits of another row": ("requests[number].choose(logits[i], output)", "requests[number].choose(logits[-1 - i], output)", SERVE, ""),
    "logits by row of the cache": ("requests[number].choose(logits[i], output)", "requests[number].choose(logits[row % len(logits)], output)", SERVE, ""),
    "prompts again at every step": (_LISTS, "token_lists = [requests[number].prompt_token_ids for number in running.values()]", SERVE, "new tokens of request"),
    "all of the output at every step": (_LISTS, _LISTS.replace("outputs[number][-1:]", "outputs[number]"), SERVE, "new tokens of request"),
    "rows are not given back": (_DONE, _DONE.replace("                runner.cache.release(row)", "                pass"), SERVE, ""),
    "in the order in which they end": ("    return outputs\n", "    return sorted(outputs, key=len)\n", SERVE, "in the order of `requests`"),
    "rows by their number": ("list(running), token_lists)", "list(range(len(running))), token_lists)", SERVE, ""),
}  # fmt: skip
"""What was written instead, by what is wrong with it: a passage of the solution, its replacement, the check that must be the first to fail,
and words of its message."""


RIGHT = {
    "slots by index": (_SLOTS, "cache[row].index_copy_(0, torch.arange(start, start + count), new[i, :count])"),
    "keys, then values": (
        "        for cache, new in zip(kv_cache, (keys, values)):\n            for i, row in enumerate(step.rows):\n                start, count = step.starts[i], step.counts[i]\n                cache[row, start : start + count] = new[i, :count]",
        "        for i, (row, start, count) in enumerate(zip(step.rows, step.starts, step.counts)):\n            for j in range(count):\n                kv_cache[0][row, start + j] = keys[i, j]\n                kv_cache[1][row, start + j] = values[i, j]",
    ),
    "a mask made slot by slot, where padding sees the first slot": (
        _POSITIONS + "        " + _VISIBLE,
        "mask = torch.zeros(len(step.rows), step.width, num_slots, dtype=torch.bool)\n        mask[:, :, 0] = True\n        for i, (start, count) in enumerate(zip(step.starts, step.counts)):\n            for j in range(count):\n                mask[i, j, : start + j + 1] = True\n        return mask",
    ),
    "one text after another, without a mask": (
        _NUM_SLOTS,
        "output = torch.zeros_like(query)\n        for i, (row, start, count) in enumerate(zip(step.rows, step.starts, step.counts)):\n            for j in range(count):\n                keys, values = (cache[row, : start + j + 1].transpose(0, 1) for cache in kv_cache)\n                part = F.scaled_dot_product_attention(query[i, j][:, None], keys, values, scale=self.scale, enable_gqa=True)\n                output[i, j] = part[:, 0]\n        return output\n        " + _NUM_SLOTS,
    ),
    "softmax by hand, heads repeated": (
        "output = F.scaled_dot_product_attention(\n            query.transpose(1, 2), keys, values, attn_mask=mask, scale=self.scale, enable_gqa=True\n        )",
        "group = self.num_heads // self.num_kv_heads\n        keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))\n        scores = query.transpose(1, 2) @ keys.transpose(2, 3) * self.scale\n        output = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1) @ values",
    ),
    "the lowest free row": ("row = self.free_rows.pop()\n", "row = min(self.free_rows)\n        self.free_rows.remove(row)\n"),
    "padding by torch": (
        "        width = max(len(tokens) for tokens in token_lists)\n",
        "        pad = torch.nn.utils.rnn.pad_sequence\n        ids = pad([torch.tensor(tokens) for tokens in token_lists], batch_first=True)\n        places = pad([torch.arange(start, start + len(tokens)) for tokens, start in zip(token_lists, starts)], batch_first=True)\n        return ids, places\n        width = max(len(tokens) for tokens in token_lists)\n",
    ),
    "rows and columns": ("compute_logits(hidden[last])", "compute_logits(hidden.view(*input_ids.shape, -1)[range(len(rows)), [count - 1 for count in counts]])"),
    "the prompt before the loop": (
        "    output, tokens = [], request.prompt_token_ids\n    while not request.is_finished(output):\n" + _ONE,
        "    logits = runner.step([row], [list(request.prompt_token_ids)])\n    output = [request.choose(logits[0], [])]\n    while not request.is_finished(output):\n        logits = runner.step([row], [[output[-1]]])\n        output = output + [request.choose(logits[-1], output)]",
    ),
    "prompts in steps of their own": (
        _LISTS,
        "fresh = {row: number for row, number in running.items() if not outputs[number]}\n        batch = fresh or dict(running)\n        token_lists = [outputs[number][-1:] or requests[number].prompt_token_ids for number in batch.values()]",
        "logits = runner.step(list(running), token_lists)\n        for i, (row, number) in enumerate(list(running.items())):",
        "logits = runner.step(list(batch), token_lists)\n        for i, (row, number) in enumerate(batch.items()):",
    ),
}  # fmt: skip
"""Other ways to write an answer: passages of the solution, each with its replacement."""


def without(cells, *names):
    """The cells except some that take seconds."""
    return [cell for cell in cells if cell.name not in names]


def test_an_untouched_exercise_fails_at_its_checks_and_nowhere_else():
    cells = [Cell(cell.name, untouched(cell.source), cell.kind) if cell.kind == "answer" else cell for cell in CELLS]
    outcome = run_cells(cells)
    assert (outcome.points, outcome.broken) == (0, {})
    assert len(outcome.failed) == 9


@pytest.mark.slow
@pytest.mark.parametrize("old, new, first, words", WRONG.values(), ids=WRONG)
def test_a_mistake_fails_where_it_was_made_and_is_named(old, new, first, words):
    outcome = run_cells(without_earlier_checks(CELLS, edited(CELLS, old, new)), stop_at_failure=True)
    assert outcome.failed == [first]
    assert words in str(outcome.checks[first])
    assert outcome.broken == {}


@pytest.mark.slow
@pytest.mark.parametrize("passages", RIGHT.values(), ids=RIGHT)
def test_another_right_answer_passes(passages):
    cells = CELLS
    for old, new in zip(passages[::2], passages[1::2], strict=True):
        cells = edited(cells, old, new)
    outcome = run_cells(without_earlier_checks(CELLS, cells))
    assert (outcome.failed, outcome.broken) == ([], {})


ISOLATED = {
    "mask": (_VISIBLE, _VISIBLE.replace("<=", "<"), [MASK]),
    "layout": ("torch.arange(start, start + len(tokens))", "torch.arange(len(tokens))", [LAYOUT]),
    "rows": ("        self.free_rows.append(row)\n", "", [ROWS]),
    "runner": (_STARTS, "starts = [0 for row in rows]", [RUNNER]),
    "generate": ("        tokens = output[-1:]\n    runner.cache.release(row)\n", "        tokens = output[-1:]\n", [GENERATE]),
}


@pytest.mark.parametrize("old, new, failed", ISOLATED.values(), ids=ISOLATED)
def test_a_mistake_fails_on_its_own_floor_only(old, new, failed):
    assert run_cells(without_earlier_checks(CELLS, edited(CELLS, old, new))).failed == failed


@pytest.mark.slow
def test_small_mistakes_are_caught():
    count, survivors = find_survivors("03", every=7)
    assert 1 - len(survivors) / count >= WANTED, [mutant.change for mutant in survivors]


@pytest.mark.slow
@pytest.mark.parametrize(
    "old, new, words",
    [
        (_STARTS, "starts = [max(self.cache.lengths[row] - 1, 0) for row in rows]", "Your `serve` writes with the model"),
        (_VISIBLE, _VISIBLE.replace("<=", "<"), "Expected tokens"),
    ],
)
def test_the_real_model_would_notice_too(old, new, words):
    outcome = run_cells(edited(without(CELLS, "look", "check-engine"), old, new), with_model=True)
    assert TEXT in outcome.failed
    assert words in str(outcome.checks[TEXT])


def classes_of_the_walkthrough():
    """The source of all classes and functions that the walkthrough writes, in order."""
    cells = nbformat.read(ROOT / "notebooks" / "03_the_kv_cache.ipynb", as_version=4).cells
    sources = [
        cell.source.replace("%", "#", 1) if cell.source.startswith("%") else cell.source
        for cell in cells
        if cell.cell_type == "code"
    ]
    return [
        ast.unparse(node)
        for source in sources
        for node in ast.parse(source).body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    ]


@pytest.mark.slow
def test_pasting_the_walkthrough_earns_nothing():
    """Its functions under the names of the exercise."""
    imports = "import torch\nimport torch.nn.functional as F\nfrom minivllm.kernels.reference import causal_attention\nfrom minivllm.layers.attention import AttentionBackend"
    names = ("CacheSize", "Writing", "Masking", "Attending", "RowCache", "Padding", "Runner")
    pasted = "\n\n".join(
        [imports, *classes_of_the_walkthrough(), *(f"{name} = Ours" for name in names), "generate = write", "serve = write_batch"]
    )
    cells = [cell for cell in CELLS if cell.kind != "answer"]
    cells.insert(1, Cell("pasted", pasted, "answer"))
    assert run_cells(cells).points == 0


def test_an_engines_ragged_batch_is_padded_and_unpadded():
    metadata = AttentionMetadata(
        is_decode=False,
        slot_mapping=torch.empty(0),
        block_tables=torch.tensor([[2], [0]]),
        context_lens=torch.tensor([5, 3]),
        query_start_loc=torch.tensor([0, 1, 4]),
    )
    step, places = to_padded(metadata)
    assert step == PaddedStep([2, 0], [4, 0], [1, 3])
    assert places.tolist() == [0, 3, 4, 5]
    metadata.block_tables = torch.tensor([[2, 1], [0, 3]])
    with pytest.raises(ConfigError, match="set block_size to max_model_len"):
        to_padded(metadata)


def test_the_frame_of_attention_calls_both_parts_with_padded_tensors():
    seen = []

    class Recording(PaddedAttention):
        def write(self, kv_cache, keys, values, step):
            seen.append(("write", list(keys.shape), kv_cache))

        def attend(self, query, kv_cache, step):
            seen.append(("attend", list(query.shape), kv_cache))
            return query * 2

    attention = Recording(2, 1, 4, 1.0)
    query, key = torch.randn(6, 2, 4), torch.randn(6, 1, 4)
    assert torch.equal(attention(query, key, key, "cache", PaddedStep([1, 0], [0, 0], [3, 2])), query * 2)
    assert seen == [("write", [2, 3, 1, 4], "cache"), ("attend", [2, 3, 2, 4], "cache")]
    metadata = AttentionMetadata(False, torch.empty(0), torch.tensor([[2], [0]]), torch.tensor([5, 3]), torch.tensor([0, 1, 4]))
    assert torch.equal(attention(query[:4], key[:4], key[:4], "cache", metadata), query[:4] * 2)


def test_all_checks_are_exported_and_used():
    used = {name for cell in CELLS for name in lesson_03.__all__ if f"lesson_03.{name}(" in cell.source}
    assert used == set(lesson_03.__all__)


@pytest.mark.slow
def test_requests_for_a_loop_choose_and_end_as_in_the_engine():
    from minivllm import LLM, SamplingParams

    llm = LLM("smollm2-135m", device="cpu", num_gpu_blocks_override=16)
    [request] = make_requests(llm, ["Water boils at"], SamplingParams(temperature=0, max_tokens=3))
    logits = torch.zeros(llm.llm_engine.model_config.vocab_size)
    logits[77] = 1.0
    assert request.choose(logits, []) == 77
    assert [request.is_finished(output) for output in ([], [5, 6], [5, 6, 7])] == [False, False, True]
    [ends] = make_requests(llm, ["Water boils at"], [SamplingParams(max_tokens=9, stop_token_ids=[5])])
    assert ends.is_finished([4, 5]) and not ends.is_finished([5, 4])
    assert ends.is_finished([request.request.eos_token_ids[0]])
