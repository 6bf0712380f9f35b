"""Lesson 01's checks, tested as code is: right solutions pass, and a plausible mistake fails where it was made.

`tests/support/mutate_lesson.py 01` makes many more mistakes, small ones.
"""

from __future__ import annotations

import pytest
from lesson_cells import Cell, edited, read_cells, run_cells, untouched, without_earlier_checks
from mutate_lesson import WANTED, find_survivors

from minivllm.course.lessons.lesson_01.sampler import check_distribution
from minivllm.worker.sampler import Sampler

FORBID, PENALTIES, TEMPERATURE = (
    "a text that is too short cannot end",
    "penalties follow their definitions",
    "each row has its own temperature",
)
MIN_P, TOP_K, TOP_P = (
    "min-p is measured against the most likely token",
    "every row keeps its own k",
    "the token that crosses top-p stays",
)
DRAW, SAMPLER = "the first to arrive is drawn", "a batch of different requests, each as if it were alone"
SAMPLER_TEXT = "a real model writes the same text with your sampler"
CHARACTERS, STOPS = (
    "never half a character, and never a whole one late",
    "nothing of a stop string is shown, and all that cannot be one is",
)
DETOKENIZER = "tokens become text, whole and up to the stop string"
DETOKENIZER_TEXT = "the engine gives out the same text with your detokenizer"

_MIN_P_LIMITS = "    limits = min_p.unsqueeze(1) * probs.amax(dim=-1, keepdim=True)\n"
_TOP_P_REMOVED = "    removed = (more_likely >= top_p) & (top_p < 1)\n"
_FOUND = "        found = [(text.index(stop), number) for number, stop in enumerate(self.stop_strings) if stop in text]\n        if found:"
_NOISE = "exponential_noise(keys, logits.shape[1], logits.device)"
_DRAWN = "(noise / logits.softmax(dim=-1)).argmin(dim=-1)"
_KEYS = "[random_key(row.seq.request.seed, row.index, row.position) for row in rows]"
_LIKELIEST = "        likeliest = logits.argmax(dim=-1)\n"
_PENALTIES_AND_LIKELIEST = """        logits = apply_penalties(
            logits,
            [request.prompt_token_ids for request in requests],
            [row.seq.output_token_ids for row in rows],
            column("repetition_penalty"),
            column("presence_penalty"),
            column("frequency_penalty"),
        )
        likeliest = logits.argmax(dim=-1)
"""
_REPETITION = "        seen = list({*prompt, *output})\n"
_WHERE = "torch.where(values > 0, values / repetition[row], values * repetition[row])"

WRONG = {
    "forbidden once too often": (
        FORBID,
        "num_outputs[row] < min_tokens[row]",
        "num_outputs[row] <= min_tokens[row]",
        "too short",
    ),
    "never forbidden": (FORBID, "num_outputs[row] < min_tokens[row]", "False", "too short"),
    "forbidden for the whole batch": (
        FORBID,
        "logits[row, list(stops)] = -torch.inf",
        "logits[:, list(stops)] = -torch.inf",
        "to stay",
    ),
    "everything else is forbidden": (
        FORBID,
        "logits[row, list(stops)] = -torch.inf",
        "kept = logits[row, list(stops)]\n            logits[row] = -torch.inf\n            logits[row, list(stops)] = kept",
        "to stay",
    ),
    "a large number instead of infinity": (
        FORBID,
        "logits[row, list(stops)] = -torch.inf",
        "logits[row, list(stops)] = -1e4",
        "expected tokens",
    ),
    "stops forbidden in place": (
        FORBID,
        "    logits = logits.clone()\n    for row, stops",
        "    for row, stops",
        "changed the logits",
    ),
    "negative logits divided": (PENALTIES, _WHERE, "values / repetition[row]", "dividing them makes a token likelier"),
    "repetition subtracted": (PENALTIES, _WHERE, "values - repetition[row]", "token"),
    "repetition of the output alone": (PENALTIES, _REPETITION, "        seen = list({*output})\n", "of prompt and output"),
    "repetition of the prompt alone": (PENALTIES, _REPETITION, "        seen = list({*prompt})\n", "of prompt and output"),
    "repetition for each time": (
        PENALTIES,
        f"{_REPETITION}        values = logits[row, seen]\n        logits[row, seen] = {_WHERE}\n",
        "        for seen in [*prompt, *output]:\n"
        "            value = logits[row, seen]\n"
        "            logits[row, seen] = value / repetition[row] if value > 0 else value * repetition[row]\n",
        "each once",
    ),
    "presence for each time": (
        PENALTIES,
        "presence[row] + frequency[row] * times",
        "(presence[row] + frequency[row]) * times",
        "once, however often",
    ),
    "frequency once": (PENALTIES, "presence[row] + frequency[row] * times", "presence[row] + frequency[row]", "for each time"),
    "the prompt counts for presence": (
        PENALTIES,
        "Counter(output).items()",
        "Counter(prompt + output).items()",
        "not of the prompt",
    ),
    "penalties added": (
        PENALTIES,
        "logits[row, token_id] -= presence",
        "logits[row, token_id] += presence",
        "presence",
    ),
    "the first row's penalties for all": (PENALTIES, "frequency[row] * times", "frequency[0] * times", "frequency"),
    "presence before repetition": (
        PENALTIES,
        f"{_REPETITION}        values = logits[row, seen]\n        logits[row, seen] = {_WHERE}\n"
        "        for token_id, times in Counter(output).items():\n"
        "            logits[row, token_id] -= presence[row] + frequency[row] * times\n",
        "        for token_id, times in Counter(output).items():\n"
        "            logits[row, token_id] -= presence[row] + frequency[row] * times\n"
        f"{_REPETITION}        values = logits[row, seen]\n        logits[row, seen] = {_WHERE}\n",
        "the order",
    ),
    "penalties in place": (
        PENALTIES,
        "    logits = logits.clone()\n    for row, (prompt",
        "    for row, (prompt",
        "changed the logits",
    ),
    "temperature multiplied": (
        TEMPERATURE,
        "logits / divisor.unsqueeze(1)",
        "logits * divisor.unsqueeze(1)",
        "what divides each row",
    ),
    "division by zero": (
        TEMPERATURE,
        "torch.where(temperature > 0, temperature, torch.ones_like(temperature))",
        "temperature",
        "temperature",
    ),
    "temperature of the columns": (
        TEMPERATURE,
        "logits / divisor.unsqueeze(1)",
        "(logits.T / divisor.unsqueeze(0)).T[..., :] * 1 / 1 if logits.shape[0] != logits.shape[1] else logits / divisor",
        "row",
    ),
    "one temperature for all": (TEMPERATURE, "logits / divisor.unsqueeze(1)", "logits / divisor[0]", "what divides each row"),
    "min-p against 1": (MIN_P, _MIN_P_LIMITS, "    limits = min_p.unsqueeze(1)\n", "min_p times the highest probability"),
    "min-p against the batch's most likely": (
        MIN_P,
        _MIN_P_LIMITS,
        "    limits = min_p.unsqueeze(1) * probs.max()\n",
        "min_p times the highest probability",
    ),
    "min-p of the logits": (
        MIN_P,
        _MIN_P_LIMITS,
        "    probs = logits\n    limits = min_p.unsqueeze(1) * probs.amax(dim=-1, keepdim=True)\n",
        "keep_min_p",
    ),
    "min-p against the sum": (
        MIN_P,
        _MIN_P_LIMITS,
        "    limits = min_p.unsqueeze(1) * probs.sum(dim=-1, keepdim=True)\n",
        "min_p times the highest probability",
    ),
    "min-p gives probabilities": (
        MIN_P,
        "logits.masked_fill(probs < limits, -torch.inf)",
        "probs.masked_fill(probs < limits, -torch.inf)",
        "to stay",
    ),
    "ties at the k-th place cut": (
        TOP_K,
        "    return logits.masked_fill(logits < last_kept, -torch.inf)\n",
        "    order = logits.argsort(dim=-1, descending=True, stable=True)\n"
        "    ranks = order.argsort(dim=-1)\n"
        "    return logits.masked_fill(ranks >= top_k.unsqueeze(1), -torch.inf)\n",
        "ties",
    ),
    "one too many": (
        TOP_K,
        "gather(1, top_k.unsqueeze(1) - 1)",
        "gather(1, (top_k.unsqueeze(1)).clamp(max=vocab_size - 1))",
        "each row's own k",
    ),
    "the k-th itself removed": (TOP_K, "logits < last_kept", "logits <= last_kept", "to stay"),
    "zero keeps nothing": (
        TOP_K,
        "top_k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)",
        "top_k = top_k.clamp(min=1, max=vocab_size)",
        "all stay",
    ),
    "a k larger than the vocabulary": (
        TOP_K,
        "top_k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)",
        "top_k = torch.where(top_k > 0, top_k, vocab_size)",
        "",
    ),
    "the largest k for all": (TOP_K, "top_k.unsqueeze(1) - 1)", "top_k.max().expand(len(top_k), 1) - 1)", "each row's own k"),
    "the smallest are kept": (TOP_K, "logits.sort(dim=-1, descending=True)", "logits.sort(dim=-1)", "keep_top_k"),
    "the crossing token left out": (
        TOP_P,
        "more_likely = probs.cumsum(dim=-1) - probs",
        "more_likely = probs.cumsum(dim=-1)",
        "the sum crosses top_p",
    ),
    "nothing stays if the first crosses": (
        TOP_P,
        "more_likely = probs.cumsum(dim=-1) - probs\n    removed = (more_likely >= top_p) & (top_p < 1)\n    removed[:, 0] = False",
        "removed = (probs.cumsum(dim=-1) > top_p) & (top_p < 1)",
        "at least one",
    ),
    "one too many stays": (
        TOP_P,
        _TOP_P_REMOVED,
        "    removed = (more_likely - probs >= top_p) & (top_p < 1)\n",
        "keep_top_p",
    ),
    "top-p of 1 by the rounded sum": (
        TOP_P,
        _TOP_P_REMOVED,
        "    removed = more_likely >= top_p\n",
        "must not decide",
    ),
    "unsorted": (
        TOP_P,
        "logits.softmax(dim=-1).sort(dim=-1, descending=True)",
        "logits.softmax(dim=-1), torch.arange(logits.shape[1]).expand_as(logits)",
        "the most likely first",
    ),
    "the least likely first": (
        TOP_P,
        "logits.softmax(dim=-1).sort(dim=-1, descending=True)",
        "logits.softmax(dim=-1).sort(dim=-1)",
        "keep_top_p",
    ),
    "not brought back": (TOP_P, "torch.zeros_like(removed).scatter(1, order, removed)", "removed", "keep_top_p"),
    "brought back with gather": (
        TOP_P,
        "torch.zeros_like(removed).scatter(1, order, removed)",
        "removed.gather(1, order)",
        "goes back from the sorted row",
    ),
    "the first row's top-p": (TOP_P, "    top_p = top_p.unsqueeze(1)\n", "    top_p = top_p[:1].unsqueeze(1)\n", "keep_top_p"),
    "summed over rows": (TOP_P, "probs.cumsum(dim=-1) - probs", "probs.cumsum(dim=0) - probs", "each row by itself"),
    "the last to arrive": (DRAW, _DRAWN, "(noise / logits.softmax(dim=-1)).argmax(dim=-1)", "arrives first"),
    "times multiplied": (DRAW, _DRAWN, "(noise * logits.softmax(dim=-1)).argmin(dim=-1)", "divided by its probability"),
    "times of the logits": (DRAW, _DRAWN, "(noise / logits).argmin(dim=-1)", "divided by its probability"),
    "a race between rows": (DRAW, _DRAWN, "(noise / logits.softmax(dim=-1)).argmin(dim=0)", "draw"),
    "probabilities over rows": (DRAW, _DRAWN, "(noise / logits.softmax(dim=0)).argmin(dim=-1)", "draw"),
    "the first row's noise for all": (DRAW, _DRAWN, "(noise[0] / logits.softmax(dim=-1)).argmin(dim=-1)", "row"),
    "noise added to the logits": (DRAW, _DRAWN, "(logits + noise).argmax(dim=-1)", "divided by its probability"),
    "the token of least noise": (DRAW, _DRAWN, "noise.argmin(dim=-1)", "never arrives"),
    "removed tokens arrive late": (DRAW, _DRAWN, "(noise / (logits.softmax(dim=-1) + 1e-3)).argmin(dim=-1)", "never arrives"),
    "removed tokens arrive very late": (
        DRAW,
        _DRAWN,
        "(noise / (logits.softmax(dim=-1) + 1e-6)).argmin(dim=-1)",
        "never arrives",
    ),
    "removed tokens in logarithms": (
        DRAW,
        _DRAWN,
        "((logits.softmax(dim=-1) + 1e-10).log() - noise.log()).argmax(dim=-1)",
        "never arrives",
    ),
    "ids as floats": (DRAW, _DRAWN, "(noise / logits.softmax(dim=-1)).argmin(dim=-1).float()", "whole numbers"),
    "powers that overflow": (DRAW, _DRAWN, "(noise / logits.exp()).argmin(dim=-1)", "exp(210)"),
    "rare tokens forgotten": (DRAW, _DRAWN, "(noise / logits.softmax(dim=-1).half()).argmin(dim=-1)", "most of them rare"),
    "small noise rounded up": (
        DRAW,
        _DRAWN,
        "(noise.clamp(min=1e-6) / logits.softmax(dim=-1)).argmin(dim=-1)",
        "most of them rare",
    ),
    "noise divided in place": (DRAW, _DRAWN, "noise.div_(logits.softmax(dim=-1)).argmin(dim=-1)", "changed the noise"),
    "the most likely, always": (DRAW, _DRAWN, "logits.argmax(dim=-1)", "expected token"),
    "drawn by torch's own generator": (
        DRAW,
        _DRAWN,
        "torch.multinomial(logits.softmax(dim=-1), 1).squeeze(1)",
        "expected token",
    ),
    "a column of tokens": (DRAW, "argmin(dim=-1)", "argmin(dim=-1, keepdim=True)", "one for each row"),
    "one random stream for the batch": (
        SAMPLER,
        _KEYS,
        "[random_key(rows[0].seq.request.seed, row.index, i) for i, row in enumerate(rows)]",
        "",
    ),
    "noise without the index": (
        SAMPLER,
        _KEYS,
        "[random_key(row.seq.request.seed, 0, row.position) for row in rows]",
        "random key",
    ),
    "noise without the position": (
        SAMPLER,
        _KEYS,
        "[random_key(row.seq.request.seed, row.index, 0) for row in rows]",
        "random key",
    ),
    # By chance the first batch may come out right: then what is named is that the rows alone draw other tokens.
    "noise of torch's own generator": (SAMPLER, _NOISE, "torch.empty_like(logits).exponential_()", "noise"),
    "greedy before the penalties": (
        SAMPLER,
        _PENALTIES_AND_LIKELIEST,
        "        likeliest = logits.argmax(dim=-1)\n" + _PENALTIES_AND_LIKELIEST.removesuffix(_LIKELIEST),
        "greedy",
    ),
    "greedy rows drawn": (SAMPLER, 'torch.where(column("is_greedy"), likeliest, drawn)', "drawn", "greedy"),
    "everybody greedy": (SAMPLER, 'torch.where(column("is_greedy"), likeliest, drawn)', "likeliest", ""),
    "filters before temperature": (
        SAMPLER,
        '        logits = apply_temperature(logits, column("temperature"))\n'
        '        logits = keep_min_p(logits, column("min_p"))\n'
        '        logits = keep_top_k(logits, column("top_k"))\n'
        '        logits = keep_top_p(logits, column("top_p"))\n',
        '        logits = keep_min_p(logits, column("min_p"))\n'
        '        logits = keep_top_k(logits, column("top_k"))\n'
        '        logits = keep_top_p(logits, column("top_p"))\n'
        '        logits = apply_temperature(logits, column("temperature"))\n',
        "the order",
    ),
    "top-p before top-k": (
        SAMPLER,
        '        logits = keep_top_k(logits, column("top_k"))\n        logits = keep_top_p(logits, column("top_p"))\n',
        '        logits = keep_top_p(logits, column("top_p"))\n        logits = keep_top_k(logits, column("top_k"))\n',
        "the order",
    ),
    "min-p last": (
        SAMPLER,
        '        logits = keep_min_p(logits, column("min_p"))\n'
        '        logits = keep_top_k(logits, column("top_k"))\n'
        '        logits = keep_top_p(logits, column("top_p"))\n',
        '        logits = keep_top_k(logits, column("top_k"))\n'
        '        logits = keep_top_p(logits, column("top_p"))\n'
        '        logits = keep_min_p(logits, column("min_p"))\n',
        "the order",
    ),
    "tensors in SampledToken": (
        SAMPLER,
        "for token_id in token_ids.tolist()]",
        "for token_id in token_ids]",
        "plain numbers",
    ),
    "the output's length where there is no output": (
        SAMPLER,
        "positions = [row.position for row in rows]",
        "positions = [len(row.seq.output_token_ids) for row in rows]",
        "",
    ),
    "min-p forgotten": (SAMPLER, '        logits = keep_min_p(logits, column("min_p"))\n', "", ""),
    "the output's penalties for the prompt": (
        SAMPLER,
        "            [row.seq.output_token_ids for row in rows],\n",
        "            [request.prompt_token_ids for request in requests],\n",
        "",
    ),
    "stops of min_tokens by the wrong length": (
        SAMPLER,
        "positions = [row.position for row in rows]",
        "positions = [row.position + 1 for row in rows]",
        "",
    ),
    "numbers instead of SampledToken": (
        SAMPLER,
        "return [SampledToken(token_id) for token_id in token_ids.tolist()]",
        "return token_ids.tolist()",
        "SampledToken",
    ),
    "half characters shown": (CHARACTERS, "            if not 0x80", "            break\n            if not 0x80", "must wait"),
    "a whole character waits": (CHARACTERS, "announced > size and", "announced >= size and", "must not wait"),
    "everything waits for the next call": (
        CHARACTERS,
        "        data = self.waiting + data\n        end = len(data)\n",
        "        data, self.waiting = self.waiting, data\n        return data.decode('utf-8', errors='replace')\n        end = len(data)\n",
        "Characters",
    ),
    "what waited is lost": (CHARACTERS, "data = self.waiting + data", "data = b'' + data", "no byte may be lost"),
    "what waited comes twice": (
        CHARACTERS,
        "        self.waiting = data[end:]\n",
        "        self.waiting = data[max(0, end - 1):]\n",
        "",
    ),
    "three bytes for everything": (
        CHARACTERS,
        "announced = 4 if first >= 0xF0 else 3 if first >= 0xE0 else 2 if first >= 0xC0 else 1",
        "announced = 3 if first >= 0xC0 else 1",
        "",
    ),
    "only the last byte is looked at": (
        CHARACTERS,
        "range(1, min(3, len(data)) + 1)",
        "range(1, min(1, len(data)) + 1)",
        "must wait",
    ),
    "broken bytes wait for ever": (CHARACTERS, " and first <= 0xF7", "", "must not wait"),
    "bytes that are no text are dropped": (
        CHARACTERS,
        'return data[:end].decode("utf-8", errors="replace")',
        'return data[:end].decode("utf-8", errors="ignore")',
        "",
    ),
    "flush keeps what it gave": (
        CHARACTERS,
        '        self.waiting = b""\n        return text\n',
        "        return text\n",
        "second flush",
    ),
    "flush drops what waits": (
        CHARACTERS,
        'text = self.waiting.decode("utf-8", errors="replace")',
        'text = ""',
        "Look at flush",
    ),
    "stop strings within one piece only": (STOPS, "text = self.held + text", "shown, text = self.held, text", ""),
    "nothing held back": (
        STOPS,
        "                    end = min(end, len(text) - size)\n",
        "                    pass\n",
        "must wait",
    ),
    "always held back": (
        STOPS,
        "        self.held = text[end:]\n",
        "        end = max(0, len(text) - max(map(len, self.stop_strings), default=1) + 1)\n        self.held = text[end:]\n",
        "no more",
    ),
    "the shortest beginning held back": (
        STOPS,
        "end = min(end, len(text) - size)\n",
        "end = max(end if end < len(text) else 0, len(text) - size)\n",
        "must wait",
    ),
    "the stop string kept in the text": (
        STOPS,
        "return text[:start], self.stop_strings[number]",
        "return text[: start + len(self.stop_strings[number])], self.stop_strings[number]",
        "right before the stop string",
    ),
    "the last one that begins": (STOPS, "start, number = min(found)", "start, number = max(found)", "which one begins first"),
    "the first of the list": (STOPS, "start, number = min(found)", "start, number = found[0]", "which one begins first"),
    "found at the last place": (STOPS, "(text.index(stop), number)", "(text.rindex(stop), number)", ""),
    "found but not said": (STOPS, "return text[:start], self.stop_strings[number]", "return text[:start], None", "got None"),
    "said without the text before it": (STOPS, "return text[:start], self", 'return "", self', "nothing lost"),
    "held back is lost at the end": (STOPS, 'text, self.held = self.held, ""', 'text, self.held = "", ""', "Look at flush"),
    "held back is shown twice": (STOPS, "        self.held = text[end:]\n", "        self.held = text[max(0, end - 1):]\n", ""),
    "only the first stop string": (
        STOPS,
        "        for stop in self.stop_strings:\n            for size",
        "        for stop in self.stop_strings[:1]:\n            for size",
        "must wait",
    ),
    "special tokens shown": (DETOKENIZER, "token_id in self.tokenizer.skipped_token_ids:", "False:", "MyDetokenizer with"),
    "special tokens never shown": (
        DETOKENIZER,
        "if self.params.skip_special_tokens and token_id",
        "if token_id",
        "MyDetokenizer with",
    ),
    "the text is not kept": (
        DETOKENIZER,
        "        self.text += new\n        return stop\n",
        "        self.text = new\n        return stop\n",
        "MyDetokenizer with",
    ),
    "the stop string is not returned": (
        DETOKENIZER,
        "        self.text += new\n        return stop\n",
        "        self.text += new\n        return None\n",
        "MyDetokenizer with",
    ),
    "the end is lost": (DETOKENIZER, "            self.text += self.stops.flush()\n", "            pass\n", "MyDetokenizer with"),
    "half a character at the end is lost": (
        DETOKENIZER,
        "new, stop = self.stops.add(self.characters.flush())",
        'new, stop = self.stops.add("")',
        "MyDetokenizer with",
    ),
}
"""What is wrong: the check that must be the first to fail, the passage of the answer, what stands there instead, and words of the message."""

RIGHT = {
    "top-k by topk": (
        "last_kept = logits.sort(dim=-1, descending=True).values.gather(1, top_k.unsqueeze(1) - 1)",
        "last_kept = torch.stack([row.topk(int(k)).values[-1] for row, k in zip(logits, top_k)]).unsqueeze(1)",
    ),
    "top-p in float64, from the back": (
        "    probs, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)\n    more_likely = probs.cumsum(dim=-1) - probs\n",
        "    probs, order = logits.double().softmax(dim=-1).sort(dim=-1, descending=True)\n"
        "    more_likely = torch.nn.functional.pad(probs.cumsum(dim=-1), (1, 0))[:, :-1]\n",
    ),
    "min-p by the difference of logits": (
        "    return logits.masked_fill(probs < limits, -torch.inf)\n",
        "    return logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + min_p.unsqueeze(1).log(), -torch.inf)\n",
    ),
    "the draw by logarithms": (_DRAWN, "(logits - noise.log()).argmax(dim=-1)"),
    "Python's own incremental decoder": (
        "        data = self.waiting + data\n        end = len(data)\n",
        "        import codecs\n"
        "        if not hasattr(self, 'decoder'):\n"
        "            self.decoder = codecs.getincrementaldecoder('utf-8')('replace')\n"
        "        return self.decoder.decode(data)\n"
        "        end = len(data)\n",
    ),
}
"""Other ways that are as good."""


@pytest.fixture(scope="module")
def cells():
    return read_cells("01")


def test_an_untouched_exercise_fails_at_its_checks_and_nowhere_else(cells):
    outcome = run_cells([Cell(cell.name, untouched(cell.source), cell.kind) for cell in cells])
    assert outcome.failed == list(outcome.checks) and outcome.broken == {} and outcome.points == 0
    assert {type(error) for error in outcome.checks.values()} == {NotImplementedError}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_solution_fails_where_it_is_wrong_and_hears_why(cells, name):
    first, old, new, words = WRONG[name]
    outcome = run_cells(without_earlier_checks(cells, edited(cells, old, new)), stop_at_failure=True)
    assert outcome.failed == [first]
    assert outcome.broken == {}
    error = outcome.checks[first]
    assert words in str(error)
    if isinstance(error, AssertionError):
        assert "ook " in str(error)


@pytest.mark.parametrize("name", RIGHT)
def test_another_right_solution_passes(cells, name):
    changed = edited(cells, *RIGHT[name])
    if "decoder" in RIGHT[name][1]:
        changed = edited(
            changed,
            'text = self.waiting.decode("utf-8", errors="replace")',
            "text = self.decoder.decode(b'', final=True) if hasattr(self, 'decoder') else ''",
        )
    outcome = run_cells(without_earlier_checks(cells, changed))
    assert outcome.failed == [] and outcome.broken == {}


def test_the_engines_own_sampler_draws_20_000_tokens_as_the_probabilities_say():
    check_distribution(Sampler())


@pytest.mark.slow
def test_a_sample_of_small_mistakes_is_caught():
    count, survivors = find_survivors("01", every=13)
    assert count >= 12
    assert len(survivors) <= (1 - WANTED) * count, [mutant.change for mutant in survivors]
