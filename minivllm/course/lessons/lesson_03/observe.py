"""Observes a learner's classes and functions from outside: random steps, and everything visible afterwards.

See `lesson_04.observe`. Numbers that depend on the order of arithmetic are reported rounded, and only if they are far from where
the rounding changes; which ones are reported does not depend on the learner. Rows are reported by the order in which they were taken.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from minivllm.course.lessons.lesson_03.attention import make_attention_case, make_config, make_new
from minivllm.course.lessons.lesson_03.loops import ScriptedRunner, make_requests
from minivllm.course.lessons.lesson_03.runner import FakeModel, make_runner_case, make_token_lists
from minivllm.course.lessons.lesson_03.situations import (
    attend_alone,
    isolate,
    lay_out,
    make_attention,
    make_cache,
    make_step,
    num_slots_of,
    visible,
)
from minivllm.course.lessons.padded_steps import PaddedStep
from minivllm.layers.attention import AttentionMetadata

_ROUNDS = 20
_NUM_ROWS, _MAX_LEN = 5, 12
_Observe = Callable[[Any, random.Random], list[Any]]


def _observe_size(cls: Any, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(_ROUNDS):
        size = cls(make_config(rng), rng.choice((1, 2, 4)))
        observations.append(size.bytes_per_token())
        for _ in range(5):
            observations.append(size.rows_that_fit(rng.randint(10**9, 10**11), rng.randint(10**7, 10**10), rng.randint(10, 9000)))
    return observations


def _observe_write(cls: Any, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(_ROUNDS):
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        step = make_step(rng, _NUM_ROWS, _MAX_LEN, decode=rng.random() < 0.2)
        if rng.random() < 0.3:
            step.starts[-1] = _MAX_LEN - step.counts[-1] + 1  # does not fit
        cache, new = make_cache(generator, _NUM_ROWS, _MAX_LEN, 1, 2), make_new(generator, step, 1, 2)
        refused = True
        with suppress(ValueError):
            make_attention(cls, 1, 1, 2).write(cache, *new, step)
            refused = False
        observations.append([refused, *(part.flatten().tolist() for part in cache)])
    return observations


def _observe_mask(cls: Any, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(_ROUNDS):
        step = make_step(rng, _NUM_ROWS, _MAX_LEN)
        seen = make_attention(cls).visible(step, num_slots_of(step) + rng.randint(0, 3))
        real = [seen[i, :new].int().tolist() for i, new in enumerate(step.counts)]
        observations.append([list(seen.shape), real, bool(seen.any(dim=-1).all())])
    return observations


def _report(got: Tensor, expected: Tensor) -> list[float]:
    """The numbers, rounded, at places where a small error does not change the rounding."""
    scaled = expected.double() * 100
    safe = ((scaled - scaled.floor()) - 0.5).abs() > 0.1
    return torch.round(got.double() * 100)[safe].tolist()


def _observe_attend(cls: Any, rng: random.Random) -> list[Any]:
    made, observations = isolate(cls, visible=visible), []
    for _ in range(_ROUNDS):
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        step, cache, query, scale = make_attention_case(rng, generator, decode=rng.random() < 0.2)
        got = make_attention(made, 6, 2, 8, scale).attend(query, cache, step)
        expected = attend_alone(query, cache, step, scale)
        observations.append([_report(got[i, :new], expected[i, :new]) for i, new in enumerate(step.counts)])
    return observations


def _observe_rows(cls: Any, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(_ROUNDS):
        num_rows = rng.randint(2, 5)
        cache = cls(1, num_rows, 4, 1, 2)
        rows: list[int] = []
        for _ in range(20):
            action, refused = rng.choice(("take", "advance", "advance", "release")), True
            with suppress(ValueError):
                if action == "take":
                    rows.append(cache.take())
                elif action == "advance" and rows:
                    some = rng.sample(rows, rng.randint(1, len(rows)))
                    cache.advance(some, [rng.randint(1, 3) for _ in some])
                elif action == "release" and rows:
                    row = rng.choice(rows)
                    cache.release(row)
                    rows.remove(row)
                refused = False
            observations.append([action, refused, [cache.lengths[row] for row in rows], len(cache.lengths), cache.num_free])
    return observations


def _observe_layout(cls: Any, rng: random.Random) -> list[Any]:
    cases = [make_token_lists(rng) for _ in range(2 * _ROUNDS)]
    return [[part.tolist() for part in cls.__new__(cls).lay_out(*case)] for case in cases]


def _observe_runner(cls: Any, rng: random.Random) -> list[Any]:
    made, observations = isolate(cls, lay_out=lay_out), []
    for _ in range(_ROUNDS):
        cache, rows, token_lists = make_runner_case(rng)
        model = FakeModel(cache)
        logits = made(model, cache).step(rows, token_lists)
        calls = [{name: value for name, value in call.items() if name != "kv_caches"} for call in model.calls]
        observations.append([calls, sorted(cache.lengths.items()), len(model.asked[0]), logits.tolist()])
    return observations


def _observe_generate(generate: Any, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(_ROUNDS):
        requests = make_requests(rng, 1)
        runner = ScriptedRunner(requests, 1, rng, others=2)
        observations.append([list(generate(runner, requests[0])), runner.steps, runner.cache.num_free])
    return observations


def _observe_serve(serve: Any, rng: random.Random) -> list[Any]:
    """Steps may be composed in two ways, so only each request's computed tokens are reported."""
    observations: list[Any] = []
    for _ in range(_ROUNDS):
        requests = make_requests(rng, rng.randint(1, 8))
        runner = ScriptedRunner(requests, rng.randint(1, 4), rng)
        outputs = [list(output) for output in serve(runner, requests)]
        parts = [[count for step in runner.steps for other, count in step if other == number] for number in range(len(requests))]
        observations.append([outputs, parts, runner.cache.num_free])
    return observations


def _observe_engine(cls: Any, rng: random.Random) -> list[Any]:
    """The attention as a layer of the engine calls it: a ragged batch, one block for each text."""
    observations: list[Any] = []
    for _ in range(_ROUNDS):
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        step = make_step(rng, _NUM_ROWS, _MAX_LEN)
        cache = make_cache(generator, _NUM_ROWS, _MAX_LEN, 1, 4)
        starts, counts = torch.tensor(step.starts), torch.tensor(step.counts)
        metadata = AttentionMetadata(
            is_decode=step.width == 1,
            slot_mapping=torch.empty(0),
            block_tables=torch.tensor(step.rows, dtype=torch.int32)[:, None],
            context_lens=(starts + counts).int(),
            query_start_loc=torch.tensor([0, *counts.cumsum(0).tolist()], dtype=torch.int32),
        )
        query, key, value = (torch.randn(sum(step.counts), heads, 4, generator=generator) for heads in (2, 1, 1))
        kept = cache[0].clone(), cache[1].clone()
        got = make_attention(cls, 2, 1, 4)(query, key, value, cache, metadata)
        expected = []
        for row, start, *new in zip(
            step.rows, step.starts, *(part.split(step.counts) for part in (query, key, value)), strict=True
        ):
            alone = PaddedStep([row], [start], [len(new[0])])
            for part, tokens in zip(kept, new[1:], strict=True):
                part[row, start : start + len(tokens)] = tokens
            expected.append(attend_alone(new[0][None], kept, alone, 0.5)[0])
        observations.append(_report(got, torch.cat(expected)))
    return observations


OBSERVERS: Mapping[str, tuple[str, _Observe]] = {
    "check-size": ("CacheSize", _observe_size),
    "check-write": ("Writing", _observe_write),
    "check-mask": ("Masking", _observe_mask),
    "check-attend": ("Attending", _observe_attend),
    "check-rows": ("RowCache", _observe_rows),
    "check-layout": ("Padding", _observe_layout),
    "check-runner": ("Runner", _observe_runner),
    "check-generate": ("generate", _observe_generate),
    "check-serve": ("serve", _observe_serve),
    "check-text": ("serve", _observe_serve),
    "check-engine": ("Attending", _observe_engine),
}
"""For each check, the class or function it tests, and how to observe it."""
