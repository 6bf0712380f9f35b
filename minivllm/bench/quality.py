"""What quantized weights do to a model: how often it would choose another next token, and how far its distributions move."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm.auto import tqdm

from minivllm.bench.prose import TEXT
from minivllm.engine.llm_engine import LLMEngine
from minivllm.errors import ConfigError
from minivllm.request import Request, Sequence
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler_output import ScheduledSequence
from minivllm.worker.cache_engine import CacheEngine

WINDOW = 500
"""Tokens of context at most: the text is read in pieces of this length."""


@dataclass(frozen=True)
class Quality:
    """A quantized model held against the same one in float32, at each position of a text.

    Attributes:
        quantization: Of `EngineArgs`.
        num_positions: Next tokens that were compared.
        agreement: Share of them where both models find the same token most likely.
        mean_kl: Mean Kullback-Leibler divergence from the float32 distribution, in nats.
    """

    quantization: str
    num_positions: int
    agreement: float
    mean_kl: float


def measure_quality(
    reference: LLMEngine, engines: dict[str, LLMEngine], num_positions: int = 2000, text: str = TEXT, use_tqdm: bool = True
) -> list[Quality]:
    """Compute the logits of every position with each engine's model.

    Args:
        reference: The model in float32, not quantized.
        engines: Quantization to the model so quantized.
        num_positions: How many positions to compare.
        text: To read.
        use_tqdm: Show progress.

    Raises:
        ConfigError: The text is too short, or there is no tokenizer.
    """
    if reference.tokenizer is None:
        raise ConfigError("Quality is measured on a text, which needs a tokenizer: leave out skip_tokenizer_init.")
    token_ids = reference.tokenizer.encode(text)
    if num_positions < 1 or len(token_ids) < num_positions:
        raise ConfigError(
            f"The number of positions is {num_positions}, but must be from 1 to the {len(token_ids)} tokens of the text."
        )
    window = min(WINDOW, reference.model_config.max_model_len - 1)
    windows = [token_ids[:num_positions][i : i + window] for i in range(0, num_positions, window)]
    equal, divergence = dict.fromkeys(engines, 0), dict.fromkeys(engines, 0.0)
    for token_ids in tqdm(windows, desc="comparing", unit="window", disable=not use_tqdm, dynamic_ncols=True):
        expected = compute_logits(reference, token_ids).log_softmax(dim=-1)
        for name, engine in engines.items():
            logprobs = compute_logits(engine, token_ids).log_softmax(dim=-1)
            equal[name] += int((logprobs.argmax(dim=-1) == expected.argmax(dim=-1)).sum())
            divergence[name] += float((expected.exp() * (expected - logprobs)).sum(dim=-1).double().sum())
    return [Quality(name, num_positions, equal[name] / num_positions, divergence[name] / num_positions) for name in engines]


@torch.inference_mode()
def compute_logits(engine: LLMEngine, token_ids: list[int]) -> Tensor:
    """Logits at every position of a sequence, `[len(token_ids), vocab_size]`, in float32 on the CPU."""
    worker = engine.executor.worker
    runner, block_size = worker.model_runner, worker.cache_config.block_size
    num_blocks = -(-len(token_ids) // block_size)
    caches = CacheEngine(worker.model_config, block_size, num_blocks, 0, worker.platform).gpu_cache
    request = Request("quality", token_ids, SamplingParams(), max_num_tokens=len(token_ids) + 1)
    scheduled = ScheduledSequence(Sequence(0, request), len(token_ids), list(range(num_blocks)))
    inputs = runner.prepare_inputs([scheduled], num_blocks)
    hidden = runner.model(inputs.input_ids, inputs.positions, caches, inputs.metadata)
    return runner.model.compute_logits(hidden).float().cpu()


def format_table(results: list[Quality]) -> str:
    """The results as a table of text."""
    lines = [f"{'weights':<10}{'same next token':>17}{'mean KL':>14}"]
    lines += [f"{result.quantization:<10}{result.agreement:>17.1%}{result.mean_kl:>9.4f} nats" for result in results]
    return "\n".join(lines)
