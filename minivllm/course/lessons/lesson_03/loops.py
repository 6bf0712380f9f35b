"""The checks of lesson 03 for the loops: requests whose continuation is known, and a runner that watches every step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minivllm.course.lessons.lesson_03.situations import CorrectCache, count
from minivllm.course.observations import expect, fail, require, rounds, seeded

_ROUNDS = 30
_VOCAB_SIZE = 400


def _insist(said: str, what: str, expected: Any, got: Any, look: str) -> None:
    """As `expect`, for what is called from a loop: loops that are right may differ in their steps, so only a failure is seen."""
    if expected != got:
        expect(said, what, expected, got, look)


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
        self.text = prompt + planned
        self.last = len(self.text) - 1
        """The place of the newest token, which is never computed."""

    def choose(self, logits: Tensor, output: Sequence[int]) -> int:
        """The most likely token."""
        call = f"{self.name}.choose(logits, output)"
        _insist(f"{call}.", "shape of logits", [_VOCAB_SIZE], list(logits.shape), "logits: one row of them")
        said, look = f"{call} for token {len(output)} of its continuation.", "which logits belong to which output"
        _insist(said, "output", self.planned[: len(output)], list(output), look)
        return int(logits.argmax())

    def is_finished(self, output: Sequence[int]) -> bool:
        """Whether the continuation is complete."""
        return len(output) >= len(self.planned)


class ScriptedRunner(CorrectCache):
    """A runner without a model, which is its own cache: knows what each step must compute, and reports a step that computes something else.

    Args:
        requests: The requests that will be served, in order.
        num_rows: Rows of the cache.
        rng: Chooses among free rows.
        others: Rows that other texts have.
    """

    def __init__(self, requests: list[ScriptedRequest], num_rows: int, rng: random.Random, others: int = 0) -> None:
        super().__init__(num_rows + others, rng)
        self.requests = requests
        self.cache = self
        self.others = {self.take() for _ in range(others)}
        self.num_steps = 0
        self.owners: dict[int, int] = {}
        """The request in each row that a step has computed."""
        self.known: dict[int, int] = {}
        """By request: how many of its tokens are computed."""
        self.computed: list[list[int]] = [[] for _ in requests]
        """For each request, how many of its tokens each of its steps computed."""

    @property
    def waiting(self) -> list[int]:
        """Requests that no step has computed, in order."""
        return [number for number in range(len(self.requests)) if number not in self.known]

    def release(self, row: int) -> None:
        """Make a row free, if its text is complete."""
        number = self.owners.get(row)
        if number is not None and self.known[number] < self.requests[number].last:
            name = self.requests[number].name
            fail(f"release({row}): {name} is in this row and is not finished. Look at when a row is given back.")
        super().release(row)
        self.owners.pop(row, None)

    def step(self, rows: Sequence[int], token_lists: Sequence[Sequence[int]]) -> Tensor:
        """Check what the step computes; return logits that say what comes next."""
        rows, lists = [int(row) for row in rows], [[int(token) for token in tokens] for tokens in token_lists]
        said, needed = f"Step {self.num_steps}, step({rows}, {lists}).", sum(len(request.planned) for request in self.requests)
        if self.num_steps > 2 * needed:
            fail(f"{said} No more than {needed} steps are needed. Look at when a text is finished.")
        if not rows:
            fail(f"{said} A step needs at least one text. Look at what is left to do when it is called.")
        _insist(said, "lists of tokens", len(rows), len(lists), "the two lists: one entry for each text")
        if len(set(rows)) < len(rows):
            fail(f"{said} A row is in the step twice. Look at how the rows of a step are collected.")
        parts = [self._read(said, row, tokens) for row, tokens in zip(rows, lists, strict=True)]
        self._check_batch(said, parts)
        self.advance(rows, [len(tokens) for tokens in lists])
        self.num_steps += 1
        logits = torch.zeros(len(rows), _VOCAB_SIZE)
        for i, number in enumerate(parts):
            self.computed[number].append(len(lists[i]))
            self.known[number] = self.lengths[rows[i]]
            logits[i, self.requests[number].text[self.known[number]]] = 1.0
        return logits

    def _read(self, said: str, row: int, tokens: list[int]) -> int:
        """The request in a row; raises an AssertionError if these are not the tokens it needs next."""
        if row in self.others:
            fail(f"{said} Row {row} belongs to another text. Look at which row `take` gave you.")
        if row not in self.lengths:
            fail(f"{said} No text has row {row}: it was never taken, or it was released because its text is finished.")
        if row not in self.owners:
            number = next((n for n in self.waiting if self.requests[n].prompt_token_ids == tokens), -1)
            if number < 0:
                prompts = {self.requests[n].name: self.requests[n].prompt_token_ids for n in self.waiting[:3]}
                what = f"Expected for row {row}, whose text has no token in the cache yet: the whole prompt of a waiting text"
                fail(f"{said}\n{what}, {prompts}\nGot for row {row}: {tokens}\nLook at what the first step of a text computes.")
            self.owners[row], self.known[number] = number, 0
            return number
        number = self.owners[row]
        request, known = self.requests[number], self.known[number]
        if known >= request.last:
            rule = "is finished, and a finished text computes nothing. Look at when its row is released"
            fail(f"{said} {request.name} in row {row} {rule}.")
        look = "what is known but not computed yet: the newest token"
        if tokens == request.text[: known + 1]:
            look = f"the cache: it has {count(known, 'token')} of this text already, and they were computed again"
        elif tokens and tokens[0] == request.text[known - 1]:
            look = f"token {request.text[known - 1]}: it was computed in the step before, and is computed twice"
        _insist(said, f"new tokens of {request.name} in row {row}", request.text[known : known + 1], tokens, look)
        return number

    def _check_batch(self, said: str, parts: list[int]) -> None:
        """No text that could be in the step is left out, and none is overtaken."""
        waiting = [self.requests[number].name for number in self.waiting]
        late = [self.requests[number].name for number in self.known if waiting and number > self.waiting[0]]
        if late:
            fail(f"{said} {late[0]} has a row, but {waiting[0]} has waited longer. Look at the order in which rows are given.")
        if waiting and self.num_free:
            idle = f"{count(self.num_free, 'row')} free, and {', '.join(waiting)} waiting"
            fail(f"{said} {idle}: no step may run then. Look at when newcomers are admitted.")
        left_out = {row: self.requests[number] for row, number in self.owners.items() if number not in parts}
        for row, request in left_out.items():
            if self.known[self.owners[row]] >= request.last:
                look = "when a row is given back: as soon as its text is finished"
                fail(f"{said} {request.name} is finished, but still has row {row}. Look at {look}.")
        for row in self.lengths:
            if row not in self.owners and row not in self.others:
                fail(f"{said} Row {row} was taken, but its text is not in the step. Look at what a step computes.")
        if left_out and any(self.known[number] for number in parts):
            name = next(iter(left_out.values())).name
            fail(f"{said} {name} has a row and is left out of the step. Look at what a step computes.")


def make_requests(rng: random.Random, number: int) -> list[ScriptedRequest]:
    """Random requests, no two with the same first token; some have one token to write, some have one in the prompt."""
    requests = []
    for i, first in enumerate(rng.sample(range(1, _VOCAB_SIZE), number)):
        prompt = [first, *(rng.randrange(1, _VOCAB_SIZE) for _ in range(rng.choice((0, 1, rng.randint(2, 6)))))]
        planned = [rng.randrange(1, _VOCAB_SIZE) for _ in range(rng.choice((1, 2, rng.randint(3, 12))))]
        requests.append(ScriptedRequest(f"request {i}", prompt, planned))
    return requests


def check_generate(generate: Any) -> None:
    """`generate`: a row for as long as the text is written, the prompt once, then each new token once."""
    for rng in rounds("generate", _ROUNDS):
        [request] = requests = make_requests(rng, 1)
        runner = ScriptedRunner(requests, 1, rng, others=rng.randint(0, 3))
        got = generate(runner, request)
        _check_end(runner, [got], "what `generate` returns: the list of the chosen tokens, without the prompt")


def check_serve(serve: Any) -> None:
    """`serve`: many requests through few rows, each row reused as soon as its text is finished."""
    for rng in rounds("serve", _ROUNDS):
        requests = make_requests(rng, rng.choice((1, rng.randint(2, 9))))
        runner = ScriptedRunner(requests, rng.randint(1, 4), rng)
        got = serve(runner, list(requests))
        _check_end(runner, got, "what `serve` returns: a list for each request, in the order of `requests`")
    empty = serve(ScriptedRunner([], 2, seeded("nobody")), [])
    is_empty = empty is not None and list(empty) == []
    require(True, is_empty, f"serve(runner, []) must return an empty list, but returned {empty!r}.")


def _check_end(runner: ScriptedRunner, got: Any, look: str) -> None:
    """Check what was returned, and that every row was given back."""
    said = f"Prompts {[request.prompt_token_ids for request in runner.requests]}."
    outputs = None if got is None else [None if output is None else [int(token) for token in output] for output in got]
    expect(said, "new tokens", [request.planned for request in runner.requests], outputs, look)
    needed = [[len(request.prompt_token_ids), *[1] * (len(request.planned) - 1)] for request in runner.requests]
    expect(said, "tokens computed for each text, step by step", needed, runner.computed, "what each step computes")
    taken = sorted(set(runner.lengths) - runner.others)
    rule = f"All texts are finished, but the rows {taken} were not released"
    require(0, len(taken), f"{said} {rule}. Look at where a row is given back.")
