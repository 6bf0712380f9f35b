"""The checks of lesson 03 for the loops: requests whose continuation is known, and a runner that watches every step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minivllm.course.lessons.lesson_03.situations import CorrectCache, count, expect

_ROUNDS = 30
_VOCAB_SIZE = 400


class ScriptedRequest:
    """A request whose continuation is known: the logits say what comes next, and it checks how it is called.

    Args:
        name: For messages.
        prompt: Its prompt.
        planned: Its continuation.
    """

    def __init__(self, name: str, prompt: list[int], planned: list[int]) -> None:
        self.name = name
        self.prompt_token_ids = prompt
        self.planned = planned

    def choose(self, logits: Tensor, output: Sequence[int]) -> int:
        """The most likely token."""
        expect(
            f"{self.name}.choose(logits, output).",
            "shape of logits",
            [_VOCAB_SIZE],
            list(logits.shape),
            "logits: one row of them",
        )
        said = f"{self.name}.choose(logits, output) for token {len(output)} of its continuation."
        expect(said, "output", self.planned[: len(output)], list(output), "which logits belong to which output")
        return int(logits.argmax())

    def is_finished(self, output: Sequence[int]) -> bool:
        """Whether the continuation is complete."""
        return len(output) >= len(self.planned)


class WatchedCache(CorrectCache):
    """Row bookkeeping of a `ScriptedRunner`."""

    def __init__(self, num_rows: int, rng: random.Random) -> None:
        super().__init__(num_rows, rng)
        self.owners: dict[int, int] = {}
        """The request in each row that a step has computed."""
        self.known: dict[int, int] = {}
        """By request: how many of its tokens are computed."""
        self.requests: list[ScriptedRequest] = []

    def release(self, row: int) -> None:
        """Make a row free, if its text is complete."""
        number = self.owners.get(row)
        if number is not None:
            request = self.requests[number]
            missing = len(request.prompt_token_ids) + len(request.planned) - 1 - self.known[number]
            assert missing <= 0, (
                f"release({row}): {request.name} is in this row and is not finished. Look at when a row is given back."
            )
        super().release(row)
        self.owners.pop(row, None)


class ScriptedRunner:
    """A runner without a model: knows what each step must compute, and reports a step that computes something else.

    Args:
        requests: The requests that will be served, in order.
        num_rows: Rows of the cache.
        rng: Chooses among free rows.
        others: Rows that other texts have.
    """

    def __init__(self, requests: list[ScriptedRequest], num_rows: int, rng: random.Random, others: int = 0) -> None:
        self.requests = requests
        self.cache = WatchedCache(num_rows + others, rng)
        self.cache.requests = requests
        self.others = {self.cache.take() for _ in range(others)}
        self.steps: list[list[tuple[int, int]]] = []
        """For each step, the requests in it and how many tokens of each were computed."""

    def step(self, rows: Sequence[int], token_lists: Sequence[Sequence[int]]) -> Tensor:
        """Check what the step computes; return logits that say what comes next."""
        rows, lists = [int(row) for row in rows], [[int(token) for token in tokens] for tokens in token_lists]
        said = f"Step {len(self.steps)}, step({rows}, {lists})."
        needed = sum(len(request.planned) for request in self.requests)
        assert len(self.steps) <= 2 * needed, f"{said} No more than {needed} steps are needed. Look at when a text is finished."
        assert rows, f"{said} A step needs at least one text. Look at what is left to do when it is called."
        expect(said, "lists of tokens", len(rows), len(lists), "the two lists: one entry for each text")
        assert len(set(rows)) == len(rows), f"{said} A row is in the step twice. Look at how the rows of a step are collected."
        parts = [self._read(said, row, tokens) for row, tokens in zip(rows, lists, strict=True)]
        self._check_batch(said, parts)
        self.cache.advance(rows, [len(tokens) for tokens in lists])
        self.steps.append([(number, len(tokens)) for number, tokens in zip(parts, lists, strict=True)])
        logits = torch.zeros(len(rows), _VOCAB_SIZE)
        for i, number in enumerate(parts):
            request = self.requests[number]
            self.cache.known[number] = self.cache.lengths[rows[i]]
            logits[i, request.planned[self.cache.known[number] - len(request.prompt_token_ids)]] = 1.0
        return logits

    def _read(self, said: str, row: int, tokens: list[int]) -> int:
        """The request in a row; raises an AssertionError if these are not the tokens it needs next."""
        cache = self.cache
        assert row not in self.others, f"{said} Row {row} belongs to another text. Look at which row `take` gave you."
        assert row in cache.lengths, (
            f"{said} No text has row {row}: it was never taken, or it was released because its text is finished."
        )
        if row not in cache.owners:
            waiting = [number for number in range(len(self.requests)) if number not in cache.known]
            number = next((n for n in waiting if self.requests[n].prompt_token_ids == tokens), -1)
            prompts = {self.requests[n].name: self.requests[n].prompt_token_ids for n in waiting[:3]}
            assert number >= 0, (
                f"{said}\nExpected for row {row}, whose text has no token in the cache yet: the whole prompt of a waiting text, {prompts}\n"
                f"Got for row {row}: {tokens}\nLook at what the first step of a text computes."
            )
            cache.owners[row], cache.known[number] = number, 0
            return number
        number = cache.owners[row]
        request, known = self.requests[number], cache.known[number]
        text = request.prompt_token_ids + request.planned
        left = len(text) - 1 - known
        assert left > 0, (
            f"{said} {request.name} in row {row} is finished, and a finished text computes nothing. Look at when its row is released."
        )
        if tokens != text[known : known + 1]:
            look = "what is known but not computed yet: the newest token"
            if tokens == text[: known + 1]:
                look = f"the cache: it has {count(known, 'token')} of this text already, and they were computed again"
            elif tokens and tokens[0] == text[known - 1]:
                look = f"token {text[known - 1]}: it was computed in the step before, and is computed twice"
            expect(said, f"new tokens of {request.name} in row {row}", text[known : known + 1], tokens, look)
        return number

    def _check_batch(self, said: str, parts: list[int]) -> None:
        """No text that could be in the step is left out, and none is overtaken."""
        cache = self.cache
        waiting = [self.requests[number].name for number in range(len(self.requests)) if number not in cache.known]
        if waiting:
            first = next(number for number in range(len(self.requests)) if number not in cache.known)
            late = [number for number in cache.known if number > first]
            assert not late, (
                f"{said} {self.requests[late[0]].name} has a row, but {waiting[0]} has waited longer. Look at the order in which rows are given."
            )
            assert not cache.num_free, (
                f"{said} {count(cache.num_free, 'row')} free, and {', '.join(waiting)} waiting: no step may run then. Look at when newcomers are admitted."
            )
        left_out = [(row, number) for row, number in cache.owners.items() if number not in parts]
        only_prompts = all(cache.known[number] == 0 for number in parts)
        for row, number in left_out:
            request = self.requests[number]
            assert cache.known[number] < len(request.prompt_token_ids) + len(request.planned) - 1, (
                f"{said} {request.name} is finished, but still has row {row}. Look at when a row is given back: as soon as its text is finished."
            )
        idle = [row for row in cache.lengths if row not in cache.owners and row not in self.others]
        assert not idle, f"{said} Row {idle[0]} was taken, but its text is not in the step. Look at what a step computes."
        if left_out and not only_prompts:
            name = self.requests[left_out[0][1]].name
            raise AssertionError(f"{said} {name} has a row and is left out of the step. Look at what a step computes.")


def make_requests(rng: random.Random, number: int) -> list[ScriptedRequest]:
    """Random requests, no two with the same first token; some have one token to write, some have one in the prompt."""
    firsts = rng.sample(range(1, _VOCAB_SIZE), number)
    requests = []
    for i, first in enumerate(firsts):
        prompt = [first, *(rng.randrange(1, _VOCAB_SIZE) for _ in range(rng.choice((0, 1, rng.randint(2, 6)))))]
        planned = [rng.randrange(1, _VOCAB_SIZE) for _ in range(rng.choice((1, 2, rng.randint(3, 12))))]
        requests.append(ScriptedRequest(f"request {i}", prompt, planned))
    return requests


def check_generate(generate: Any) -> None:
    """`generate`: a row for as long as the text is written, the prompt once, then each new token once."""
    for seed in range(_ROUNDS):
        rng = random.Random(f"generate {seed}")
        [request] = requests = make_requests(rng, 1)
        runner = ScriptedRunner(requests, 1, rng, others=rng.randint(0, 3))
        got = generate(runner, request)
        _check_end(runner, [request.planned], [got], "what `generate` returns: the list of the chosen tokens, without the prompt")


def check_serve(serve: Any) -> None:
    """`serve`: many requests through few rows, each row reused as soon as its text is finished."""
    for seed in range(_ROUNDS):
        rng = random.Random(f"serve {seed}")
        requests = make_requests(rng, rng.choice((1, rng.randint(2, 9))))
        runner = ScriptedRunner(requests, rng.randint(1, 4), rng)
        got = serve(runner, list(requests))
        planned = [request.planned for request in requests]
        _check_end(runner, planned, got, "what `serve` returns: a list for each request, in the order of `requests`")
    empty = serve(ScriptedRunner([], 2, random.Random(0)), [])
    assert empty is not None and list(empty) == [], f"serve(runner, []) must return an empty list, but returned {empty!r}."


def _check_end(runner: ScriptedRunner, planned: list[list[int]], got: Any, look: str) -> None:
    """Check what was returned, and that every row was given back."""
    said = f"Prompts {[request.prompt_token_ids for request in runner.requests]}."
    outputs = None if got is None else [None if output is None else [int(token) for token in output] for output in got]
    expect(said, "new tokens", planned, outputs, look)
    taken = sorted(set(runner.cache.lengths) - runner.others)
    assert not taken, f"{said} All texts are finished, but the rows {taken} were not released. Look at where a row is given back."
