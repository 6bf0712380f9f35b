"""The last checks of lesson 03: a learner's parts with the real model, and inside the engine."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from minivllm.course.lessons.padded_steps import make_requests, model_of

if TYPE_CHECKING:
    from minivllm.entrypoints.llm import LLM
    from minivllm.sampling_params import SamplingParams

_MAX_LEN = 256
_PROMPTS = (
    "Once upon a time there was a king who",
    "Water boils at",
    "The old man had three wishes, and he thought about them for a long time, because he knew that the first one was",
    "1, 2, 3, 4,",
    "The sea is",
    "My favourite colour is",
    "To bake bread you need",
    "Hello",
)


def _params() -> list[SamplingParams]:
    """Greedy and drawn with a seed, in turns, of different lengths."""
    from minivllm import SamplingParams

    lengths = (24, 5, 14, 20, 1, 12, 17, 9)
    return [
        SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.8 if i % 2 else 0.0, seed=i if i % 2 else None)
        for i, length in enumerate(lengths)
    ]


def _load(attention_class: type | None = None, **options: Any) -> LLM:
    from minivllm import LLM

    chosen = {} if attention_class is None else {"attention_backend": attention_class}
    return LLM("smollm2-135m", device="cpu", max_model_len=_MAX_LEN, **chosen, **options)


def _generate(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(list(_PROMPTS), _params(), use_tqdm=False)
    error = next((output.error for output in outputs if output.error), None)
    assert error is None, f"The engine runs on your attention, and a step failed: {error}"
    return [list(output.outputs[0].token_ids) for output in outputs]


@cache
def _expected() -> list[list[int]]:
    """What the engine writes with its own attention."""
    return _generate(_load(num_gpu_blocks_override=64))


def _load_contiguous(attention_class: type) -> LLM:
    """An engine with a learner's attention, whose cache has three rows: blocks as long as the longest text."""
    return _load(attention_class, block_size=_MAX_LEN, num_gpu_blocks_override=3, max_num_seqs=3)


def _compare(expected: list[list[int]], got: list[list[int]], how: str, look: str) -> None:
    for prompt, params, theirs, mine in zip(_PROMPTS, _params(), expected, got, strict=True):
        if theirs != mine:
            kind = "greedy" if params.temperature == 0 else f"seed {params.seed}"
            same = next((i for i, pair in enumerate(zip(theirs, mine, strict=False)) if pair[0] != pair[1]), len(mine))
            raise AssertionError(
                f"{how} {prompt!r}, {kind}.\nExpected tokens: {theirs}\nGot tokens: {mine}\nThe first {same} are the same. Look at {look}."
            )


@torch.inference_mode()
def check_text(attention_class: type, cache_class: Any, runner_class: Any, serve: Any) -> None:
    """A learner's loop, cache and attention write the same text with the real model as `LLM.generate`."""
    llm = _load_contiguous(attention_class)
    runner, params = _make_runner(llm, cache_class, runner_class, num_rows=3), _params()
    got = [[int(token) for token in output] for output in serve(runner, make_requests(llm, list(_PROMPTS), params))]
    look = "what the real model adds to the checks above: thirty layers that share the lengths, and positions that become angles"
    _compare(_expected(), got, "Your `serve` writes with the model, in three rows.", look)


def check_engine(attention_class: type) -> None:
    """The engine, with a learner's attention in every layer and blocks as long as the longest text, writes the same as with its own."""
    got = _generate(_load_contiguous(attention_class))
    _compare(
        _expected(),
        got,
        "The engine runs on your attention, with three rows.",
        "`write` and `attend`: the checks above test them alone",
    )


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
    """Let a learner's parts write the first line of an answer to each question, and look at the cache after each step.

    Args:
        llm: An engine with the learner's attention; its model is used.
        cache_class, runner_class, serve: The learner's.
        questions: What to continue.
        num_rows: Rows of the cache.
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
