"""The last checks of lesson 03: a learner's parts with the real model, and inside the engine."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from minivllm.course.lessons.lesson_03.situations import (
    MAX_LEN,
    NUM_ROWS,
    attend_alone,
    describe,
    make_pair,
    make_step,
    written,
)
from minivllm.course.lessons.padded_steps import PaddedStep, make_requests, model_of
from minivllm.course.lessons.tensors import expect_close
from minivllm.course.observations import is_recording, require, rounds
from minivllm.layers.attention import AttentionMetadata

if TYPE_CHECKING:
    from minivllm.entrypoints.llm import LLM
    from minivllm.sampling_params import SamplingParams

_MAX_LEN = 256
_PROMPTS = {
    "Once upon a time there was a king who": 24,
    "Water boils at": 5,
    "The old man had three wishes, and he thought about them for a long time, because he knew that the first one was": 14,
    "1, 2, 3, 4,": 20,
    "The sea is": 1,
    "My favourite colour is": 12,
    "To bake bread you need": 17,
    "Hello": 9,
}
"""Texts to continue, and by how many tokens."""


def _params() -> list[SamplingParams]:
    """Greedy and drawn with a seed, in turns."""
    from minivllm import SamplingParams

    return [
        SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.8 * (i % 2), seed=i if i % 2 else None)
        for i, length in enumerate(_PROMPTS.values())
    ]


def _load(**options: Any) -> LLM:
    from minivllm import LLM

    return LLM("smollm2-135m", device="cpu", max_model_len=_MAX_LEN, **options)


def _load_contiguous(attention_class: type) -> LLM:
    """An engine with a learner's attention, whose cache has three rows: blocks as long as the longest text."""
    return _load(attention_backend=attention_class, block_size=_MAX_LEN, num_gpu_blocks_override=3, max_num_seqs=3)


def _generate(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(list(_PROMPTS), _params(), use_tqdm=False)
    error = next((output.error for output in outputs if output.error), None)
    require(None, error, f"The engine runs on your attention, and a step failed: {error}")
    return [list(output.outputs[0].token_ids) for output in outputs]


@cache
def _expected() -> list[list[int]]:
    """What the engine writes with its own attention."""
    return _generate(_load(num_gpu_blocks_override=64))


def _compare(got: list[list[int]], how: str, look: str) -> None:
    """Raise an AssertionError about the first text that the engine writes otherwise with its own attention."""
    for prompt, params, expected, mine in zip(_PROMPTS, _params(), _expected(), got, strict=True):
        kind = "greedy" if params.temperature == 0 else f"seed {params.seed}"
        same = next((i for i, pair in enumerate(zip(expected, mine, strict=False)) if pair[0] != pair[1]), len(mine))
        said = f"{how} {prompt!r}, {kind}.\nExpected tokens: {expected}\nGot tokens: {mine}"
        require(expected, mine, f"{said}\nThe first {same} are the same. Look at {look}.")


@torch.inference_mode()
def check_text(attention_class: type, cache_class: Any, runner_class: Any, serve: Any) -> None:
    """A learner's loop, cache and attention write the same text with the real model as `LLM.generate`."""
    llm = _load_contiguous(attention_class)
    runner, params = _make_runner(llm, cache_class, runner_class, num_rows=3), _params()
    got = [[int(token) for token in output] for output in serve(runner, make_requests(llm, list(_PROMPTS), params))]
    look = "what the real model adds to the checks above: thirty layers that share the lengths, and positions that become angles"
    _compare(got, "Your `serve` writes with the model, in three rows.", look)


def check_engine(attention_class: Any) -> None:
    """The engine, with a learner's attention in every layer and blocks as long as the longest text, writes the same as with its own.

    A layer comes first, in random situations; for the grader that is all.
    """
    look = "`write`, `visible` and `attend`: the checks above test them alone"
    for rng in rounds("layer", 20):
        step = make_step(rng)
        cache, new = make_pair(rng, NUM_ROWS, MAX_LEN, 1, 4), make_pair(rng, len(step.rows), step.width, 1, 4)
        query, _ = make_pair(rng, len(step.rows), step.width, 2, 4)
        after = written(cache[0], new[0], step), written(cache[1], new[1], step)
        said = f"A layer of the engine, whose batch is not padded, runs on your attention: {describe(step)}."
        ragged = (_without_padding(x, step) for x in (query, *new))
        got = attention_class(2, 1, 4, 0.5)(*ragged, cache, _to_ragged(step))
        expect_close(said, "output", _without_padding(attend_alone(query, after, step, 0.5), step), got, look)
    if not is_recording():
        _compare(_generate(_load_contiguous(attention_class)), "The engine runs on your attention, with three rows.", look)


def _without_padding(x: Tensor, step: PaddedStep) -> Tensor:
    """The tokens of a padded batch, one after another."""
    return torch.cat([x[i, :new] for i, new in enumerate(step.counts)])


def _to_ragged(step: PaddedStep) -> AttentionMetadata:
    """A step as the engine describes it, with one block for each text."""
    starts, counts = torch.tensor(step.starts), torch.tensor(step.counts)
    query_start_loc = torch.tensor([0, *counts.cumsum(0)], dtype=torch.int32)
    tables = torch.tensor(step.rows, dtype=torch.int32)[:, None]
    return AttentionMetadata(step.width == 1, torch.empty(0), tables, (starts + counts).int(), query_start_loc)


def _make_runner(llm: LLM, cache_class: Any, runner_class: Any, num_rows: int) -> Any:
    model = llm.llm_engine.model_config
    rows = cache_class(model.num_layers, num_rows, _MAX_LEN, model.num_kv_heads, model.head_dim)
    return runner_class(model_of(llm), rows)


class CacheRun(NamedTuple):
    """How a run used its cache.

    Attributes:
        steps: For each step, the tokens in the cache by row; free rows are missing.
        used: The share of all slots that held a token, on average over the steps.
        begun: For each step, the rows in which a new text began.
    """

    steps: list[dict[int, int]]
    used: float
    begun: list[set[int]]


@torch.inference_mode()
def serve_watched(llm: LLM, cache_class: Any, runner_class: Any, serve: Any, questions: list[str], num_rows: int) -> CacheRun:
    """Let a learner's parts, and the model of an engine with the learner's attention, write the first line of an answer to each question.

    Returns:
        What the cache, of so many rows, had after each step.
    """
    from minivllm import SamplingParams

    steps: list[dict[int, int]] = []
    begun: list[set[int]] = []

    class Watched(runner_class):  # type: ignore[misc]
        def step(self, rows: Any, token_lists: Any) -> Any:
            begun.append({row for row in rows if self.cache.lengths[row] == 0})
            logits = super().step(rows, token_lists)
            steps.append(dict(self.cache.lengths))
            return logits

    newline = llm.get_tokenizer().encode("\n")
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=_MAX_LEN - 32, stop_token_ids=newline)
    serve(_make_runner(llm, cache_class, Watched, num_rows), make_requests(llm, questions, params))
    used = sum(sum(lengths.values()) for lengths in steps) / (len(steps) * num_rows * _MAX_LEN)
    return CacheRun(steps, used, begun)
