"""The summit of lesson 14: a learner's linear method in the real engine, its text, its speed and its quality."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from minivllm import LLM
from minivllm.config import ModelConfig
from minivllm.course.observations import expect
from minivllm.layers.platform import Platform
from minivllm.models.llama import LlamaForCausalLM
from minivllm.models.registry import MODELS
from minivllm.request import EngineCoreRequest, Request, Sequence
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler_output import ScheduledSequence
from minivllm.worker.cache_engine import CacheEngine

OPTIONS: dict[str, Any] = {
    "model": "smollm2-135m", "device": "cpu", "max_model_len": 512, "max_num_seqs": 4, "kv_cache_memory_bytes": 2**25, "dtype": "float32",
}  # fmt: skip
PROMPT = "The capital of France is"
TEXT = """A library keeps its books in the order of their numbers, and a catalogue tells which number a book has. A reader who looks for a
book asks the catalogue first, and then walks to the shelf. When a new book comes, it gets the next free number, wherever that is. In this
way no book ever has to be moved to make room for another, and the shelves are full up to the last one. The price is that books which
belong together do not stand together. Nobody minds, as long as the catalogue is quick to answer."""
"""Prose on which the two models are compared, written for this lesson."""
MOST_KL = 0.02
"""Bound of the mean Kullback-Leibler divergence from float32, in nats."""


@contextmanager
def computed_by(method_cls: Any) -> Iterator[None]:
    """In this block, linear layers of models that are loaded are computed by this method; None changes nothing."""

    class WithMethod(LlamaForCausalLM):
        def __init__(self, config: ModelConfig, platform: Platform) -> None:
            platform.make_linear_method = method_cls  # type: ignore[method-assign]
            super().__init__(config, platform)

    with patch.dict(MODELS, {} if method_cls is None else {"LlamaForCausalLM": WithMethod}):
        yield


def load(method_cls: Any = None, **options: Any) -> LLM:
    """The engine with the real model, in float32 or with a learner's method."""
    with computed_by(method_cls):
        return LLM(**OPTIONS | options)


@torch.inference_mode()
def compute_logits(llm: LLM, token_ids: list[int]) -> Tensor:
    """Logits at every position of a text, `[tokens, vocab_size]`."""
    worker: Any = llm.llm_engine.executor.worker
    runner, block_size = worker.model_runner, worker.cache_config.block_size
    num_blocks = -(-len(token_ids) // block_size)
    caches = CacheEngine(worker.rank_config, block_size, num_blocks, 0, worker.platform).gpu_cache
    request = Request(EngineCoreRequest("quality", token_ids, SamplingParams(), max_num_tokens=len(token_ids) + 1))
    scheduled = ScheduledSequence(Sequence(0, request), len(token_ids), list(range(num_blocks))).to_data()
    inputs = runner.prepare_inputs([scheduled], num_blocks)
    hidden = runner.model(inputs.input_ids, inputs.positions, caches, inputs.metadata)
    logits: Tensor = runner.model.compute_logits(hidden)
    return logits.float()


def compare(reference: Tensor, logits: Tensor) -> tuple[float, float]:
    """Mean Kullback-Leibler divergence in nats, and the share of positions with the same most likely token."""
    right, mine = reference.log_softmax(dim=-1), logits.log_softmax(dim=-1)
    divergence = (right.exp() * (right - mine)).sum(dim=-1)
    return float(divergence.double().mean()), float((right.argmax(-1) == mine.argmax(-1)).double().mean())


def seconds_per_token(llm: LLM, num_tokens: int = 24, prompt: str = PROMPT) -> float:
    """Of one sequence, its prompt included: with a short one it is the time of a decode step, with a single token that of a prefill."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate([prompt], params, use_tqdm=False)
    return (time.perf_counter() - start) / num_tokens


def check_real(method_cls: Any, packed_cls: Any, rounds_in_turns: int = 3) -> list[str]:
    """Load the model with a learner's methods, compare them with float32, and let all of them write.

    Args:
        method_cls: Computes with the learner's own loop.
        packed_cls: The same integers in the engine's order, which its compiled layers read.

    Returns:
        Lines about quality, speed and text.
    """
    reference = load()
    token_ids = reference.get_tokenizer().encode(TEXT)
    right, lines, engines = compute_logits(reference, token_ids), [], [reference]
    for name, cls in (("your loop", method_cls), ("your integers, packed", packed_cls)):
        mine = load(cls)
        engines.append(mine)
        divergence, agreement = compare(right, compute_logits(mine, token_ids))
        said = f"{len(token_ids)} tokens of prose, read by float32 and by {cls.__name__}."
        look = "the check of MyInt8 above: what is rounded must be rotated, and each row needs its own scale"
        expect(said, f"mean divergence below {MOST_KL} nats", True, divergence < MOST_KL, look)
        text = mine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)[0].outputs[0].text
        expect(f"{cls.__name__} and the prompt {PROMPT!r}.", "'Paris' in the text", True, "Paris" in text, "apply and get_rows")
        lines.append(
            f"{name}: mean divergence from float32 {divergence:.4f} nats, the same next token at {agreement:.0%} of the positions"
        )
        lines.append(f"  {PROMPT} {' '.join(text.split())}")
    times = [[seconds_per_token(llm) for llm in engines] for _ in range(rounds_in_turns)]
    best = [min(column) for column in zip(*times, strict=True)]
    for name, seconds in zip(("float32", "your loop", "your integers, packed"), best, strict=True):
        lines.append(f"{name}: {1 / seconds:.0f} tokens/s, {best[0] / seconds:.2f} times float32")
    return lines
