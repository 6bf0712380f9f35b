"""Observes a learner's functions, kernels and backend from outside: random steps, and the resulting numbers.

See `lesson_04.observe`. Numbers that depend on the order of arithmetic are reported rounded, and only if they are far from where
the rounding changes; which ones are reported depends neither on the learner nor on the language.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.course.lessons.lesson_06.engine import make_backend, make_forward_case, make_metadata, split_new
from minivllm.course.lessons.lesson_06.kernels import exact_parts, make_prefill_case, make_write_case
from minivllm.course.lessons.lesson_06.situations import interpreted, make_case
from minivllm.course.lessons.lesson_06.softmax import exact_state, make_parts, make_pieces
from minivllm.course.lessons.paged_kernels import launch_decode, launch_prefill, launch_write

_ROUNDS = 10
_Observe = Callable[[Any, random.Random], list[Any]]


def _report(got: Any, expected: Any) -> list[Any]:
    """The numbers in hundredths of the largest one, rounded, at places where a small error does not change the rounding."""
    exact, mine = torch.as_tensor(expected).double().reshape(-1), torch.as_tensor(np.asarray(got)).double().reshape(-1)
    if mine.shape != exact.shape:
        return ["another shape", len(mine)]
    finite = exact.isfinite()
    largest = exact[finite].abs().max().clamp(min=1e-6) if finite.any() else torch.tensor(1.0)
    scaled = exact * 100 / largest
    safe = finite & (((scaled - scaled.floor()) - 0.5).abs() > 0.2)
    return [(mine[~finite] == exact[~finite]).tolist(), torch.round(mine * 100 / largest)[safe].nan_to_num(nan=1e9).tolist()]


def _generator(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(32))


def _observe_pieces(attend_in_pieces: Any, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(_ROUNDS):
        query, pieces, scale = make_pieces(rng)
        keys, values = (np.concatenate([piece[i] for piece in pieces]) for i in range(2))
        exact = exact_state(query, keys, values, scale)
        state = attend_in_pieces(query, iter(pieces), scale)
        observations.append([_report(mine, wanted) for mine, wanted in zip(state, exact, strict=True)])
    return observations


def _observe_merge(merge: Any, rng: random.Random) -> list[Any]:
    cases = [make_parts(rng) for _ in range(_ROUNDS)]
    return [_report(merge(maxima, totals, outputs), exact) for maxima, totals, outputs, exact in cases]


def _observe_write(write: Any, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(_ROUNDS):
        case = make_write_case(rng, _generator(rng), torch.float32)
        with interpreted():
            launch_write(write, **case)
        observations.append([case["key_cache"].flatten().tolist(), case["value_cache"].flatten().tolist()])
    return observations


def _observe_decode(decode: Any, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(_ROUNDS):
        case = make_case(rng, _generator(rng), torch.float32, decode=True)
        part_len = case.key_cache.shape[1] * rng.choice((1, 2, 3))
        with interpreted():
            states = launch_decode(decode, case.query, *case.context, case.scale, part_len)
        exact = exact_parts(case, part_len, states[0].shape[2])
        observations.append([_report(mine, wanted) for mine, wanted in zip(states, exact, strict=True)])
    return observations


def _observe_prefill(prefill: Any, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(_ROUNDS):
        case = make_prefill_case(rng, _generator(rng), torch.float32)
        with interpreted():
            output = launch_prefill(prefill, case.query, *case.context, case.query_start_loc, case.scale)
        observations.append(_report(output, case.attend()))
    return observations


def _observe_forward(cls: Any, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(_ROUNDS):
        case, decode = make_forward_case(rng)
        exact, metadata = case.attend(), make_metadata(case, decode)
        key, value = split_new(case, metadata)
        with interpreted():
            output = make_backend(cls, case)(case.query, key, value, (case.key_cache, case.value_cache), metadata)
        observations.append([_report(output, exact), [_plain(cache) for cache in (case.key_cache, case.value_cache)]])
    return observations


def _plain(cache: Tensor) -> list[float]:
    return cache.flatten().nan_to_num(nan=1e9).tolist()


OBSERVERS: Mapping[str, tuple[str, _Observe]] = {
    "check-pieces": ("attend_in_pieces", _observe_pieces),
    "check-merge": ("merge", _observe_merge),
    "check-write": ("write", _observe_write),
    "check-decode": ("decode", _observe_decode),
    "check-prefill": ("prefill", _observe_prefill),
    "check-forward": ("MyBackend", _observe_forward),
    "check-engine": ("MyBackend", _observe_forward),
}
"""For each check, what it tests, and how to observe it."""
