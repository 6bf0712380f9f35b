"""Observes a learner's sampler and detokenizer from outside: random input, and the results.

See `lesson_04.observe`. Logits are multiples of 1/4, and what they are divided by is a power of 2, so that every correct solution gives
the same numbers to the last bit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from minivllm.course.lessons.lesson_01.cases import make_logits, safe_min_p, safe_top_p
from minivllm.course.lessons.lesson_01.detokenizer import TEXTS, cut, load_tokenizer, random_bytes
from minivllm.course.lessons.lesson_01.sampler import draw_case, make_random_row
from minivllm.sampling_params import SamplingParams

_ROUNDS = 30
_Observe = Callable[[Any, random.Random], list[Any]]


def _as_json(result: Tensor) -> list[list[Any]]:
    """Logits as JSON: removed ones are None."""
    return [[None if value == -math.inf else value for value in row] for row in result.tolist()]


def _batch(rng: random.Random, **options: Any) -> Tensor:
    return make_logits(rng, rng.randint(1, 5), rng.randint(6, 12), **options)


def _observe_forbid(forbid_stops: Any, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(_ROUNDS):
        logits = _batch(rng)
        num_rows, vocab_size = logits.shape
        stops = [rng.sample(range(vocab_size), rng.randint(0, 3)) for _ in range(num_rows)]
        lengths, limits = ([rng.randint(0, 4) for _ in range(num_rows)] for _ in range(2))
        observations.append(_as_json(forbid_stops(logits, stops, lengths, limits)))
    return observations


def _observe_penalties(apply_penalties: Any, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(2 * _ROUNDS):
        logits = _batch(rng)
        num_rows, vocab_size = logits.shape
        prompts = [rng.choices(range(vocab_size), k=rng.randint(1, 5)) for _ in range(num_rows)]
        outputs = [rng.choices(range(vocab_size), k=rng.randint(0, 6)) for _ in range(num_rows)]
        kinds = ((1.0, 2.0, 4.0, 0.5), (0.0, 0.5, -0.25), (0.0, 0.25, -0.5))
        values = [torch.tensor([rng.choice(kind) for _ in range(num_rows)]) for kind in kinds]
        observations.append(_as_json(apply_penalties(logits, prompts, outputs, *values)))
    return observations


def _observe_rows(choose: Callable[[random.Random, list[float]], float], *, ties: bool = False) -> _Observe:
    """Observe a function of logits and one parameter per row; `choose` picks the parameter given the row."""

    def observe(function: Any, rng: random.Random) -> list[Any]:
        observations: list[Any] = []
        for number in range(2 * _ROUNDS):
            logits = _batch(rng, ties=ties and number % 2 == 1)
            values = torch.tensor([choose(rng, row) for row in logits.tolist()])
            observations.append(_as_json(function(logits, values)))
        return observations

    return observe


def _observe_draw(draw: Any, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(2 * _ROUNDS):
        cases = [draw_case(rng, size) for size in [rng.randint(3, 9)] * rng.randint(1, 4)]
        logits, noise = (torch.tensor([case[i] for case in cases]) for i in range(2))
        observations.append([int(token) for token in draw(logits, noise)])
    return observations


def _observe_sampler(sampler_class: Any, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    sampler = sampler_class()
    for _ in range(2 * _ROUNDS):
        vocab_size = rng.randint(8, 24)
        logits = make_logits(rng, rng.randint(1, 6), vocab_size)
        rows = [make_random_row(rng, vocab_size, rng.randrange(5)) for _ in range(len(logits))]
        observations.append([int(token.token_id) for token in sampler.sample(logits, rows)])
    return observations


def _observe_characters(characters_class: Any, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(4 * _ROUNDS):
        data = random_bytes(rng)
        characters = characters_class()
        observations.append(
            [*(characters.add(piece) for piece in cut(rng, data[: rng.randint(1, len(data))])), characters.flush()]
        )
    return observations


def _observe_stops(stop_strings_class: Any, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(6 * _ROUNDS):
        finder = stop_strings_class(["".join(rng.choices("xyz", k=rng.randint(1, 6))) for _ in range(rng.randint(0, 3))])
        answers: list[Any] = []
        for _ in range(rng.randint(1, 8)):
            text, stop = finder.add("".join(rng.choices("xyz", k=rng.randint(0, 4))))
            answers.append([text, stop])
            if stop is not None:
                break
        else:
            answers.append(finder.flush())
        observations.append(answers)
    return observations


def _observe_detokenizer(detokenizer_class: Any, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    tokenizer = load_tokenizer()
    for _ in range(_ROUNDS):
        text = "".join(rng.sample("".join(TEXTS), 12)) + rng.choice(TEXTS)
        stop = [text[start : start + rng.randint(1, 4)] for start in rng.sample(range(8, len(text)), rng.randint(0, 2))]
        if rng.random() < 0.5:
            stop.append(text[-2:] + "…")  # the end of the text may become this
        params = SamplingParams(stop=stop or None, skip_special_tokens=rng.random() < 0.5)
        detokenizer = detokenizer_class(tokenizer, [], params)
        answers: list[Any] = []
        for token_id in [*tokenizer.encode(text), 2]:
            answers.append([detokenizer.update(token_id), detokenizer.text])
            if answers[-1][0] is not None:
                break
        else:
            answers.append([detokenizer.finish(), detokenizer.text])
        observations.append(answers)
    return observations


def _choose_top_k(rng: random.Random, row: list[float]) -> int:
    return rng.choice((0, -1, 1, 2, 3, len(row) - 1, len(row) + 3))


def _choose_temperature(rng: random.Random, row: list[float]) -> float:
    return rng.choice((0.0, 0.25, 0.5, 1.0, 2.0, 4.0))


def _choose_top_p(rng: random.Random, row: list[float]) -> float:
    return rng.choice((1.0, safe_top_p(rng, row), safe_top_p(rng, row)))


def _choose_min_p(rng: random.Random, row: list[float]) -> float:
    return rng.choice((0.0, safe_min_p(rng, row), safe_min_p(rng, row)))


OBSERVERS: Mapping[str, tuple[str, _Observe]] = {
    "check-forbid": ("forbid_stops", _observe_forbid),
    "check-penalties": ("apply_penalties", _observe_penalties),
    "check-temperature": ("apply_temperature", _observe_rows(_choose_temperature)),
    "check-min-p": ("keep_min_p", _observe_rows(_choose_min_p)),
    "check-top-k": ("keep_top_k", _observe_rows(_choose_top_k, ties=True)),
    "check-top-p": ("keep_top_p", _observe_rows(_choose_top_p)),
    "check-draw": ("draw", _observe_draw),
    "check-sampler": ("MySampler", _observe_sampler),
    "check-sampler-text": ("MySampler", _observe_sampler),
    "check-characters": ("Characters", _observe_characters),
    "check-stops": ("StopStrings", _observe_stops),
    "check-detokenizer": ("MyDetokenizer", _observe_detokenizer),
    "check-detokenizer-text": ("MyDetokenizer", _observe_detokenizer),
}
"""For each check, the function or class it tests, and how to observe it."""
