"""What fewer bits do to a model: how often another token becomes the most likely, and how far the distributions move.

    python benchmarks/quality.py --weights bfloat16 int8

The default model is published as a 4-bit GGUF file (Q4_1), so its "float32" weights are dequantized 4-bit ones: the numbers say little
about models that were trained in 16 bits.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from minivllm.bench.report import format_table, report
from minivllm.config import EngineArgs
from minivllm.engine.llm_engine import LLMEngine
from minivllm.entrypoints.cli.options import check_writable
from minivllm.entrypoints.llm import LLM
from minivllm.errors import ConfigError
from minivllm.request import EngineCoreRequest, Request, Sequence
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler_output import ScheduledSequence
from minivllm.worker.cache_engine import CacheEngine

TEXT = (Path(__file__).parent / "workloads" / "prose.txt").read_text(encoding="utf-8")
"""Plain technical prose, written for this project."""
WINDOW = 500
"""The text is read in pieces of this many tokens."""
NUM_POSITIONS = 2000
OPTIONS: dict[str, dict[str, str]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int8-bfloat16": {"quantization": "int8", "dtype": "bfloat16"},
}
"""Engine options that mean fewer bits. The last has weights of 8 bits and a KV cache in bfloat16."""


@dataclass(frozen=True)
class Quality:
    """A model in fewer bits compared with itself in float32, at each position of a text.

    Attributes:
        quantization: Of `OPTIONS`.
        num_positions: Number of positions.
        agreement: Share of the positions where both have the same most likely next token.
        mean_kl: Mean Kullback-Leibler divergence from the float32 distribution, in nats.
    """

    quantization: str
    num_positions: int
    agreement: float
    mean_kl: float


def measure_quality(
    reference: LLMEngine,
    engines: dict[str, LLMEngine],
    num_positions: int = NUM_POSITIONS,
    text: str = TEXT,
    use_tqdm: bool = True,
) -> list[Quality]:
    """Compare the logits of each engine's model at every position of a text.

    Args:
        reference: The model in float32.
        engines: The models in fewer bits, by their names in `OPTIONS`.
        num_positions: How many positions to compare.
        text: The text.
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
    request = Request(EngineCoreRequest("quality", token_ids, SamplingParams(), max_num_tokens=len(token_ids) + 1))
    scheduled = ScheduledSequence(Sequence(0, request), len(token_ids), list(range(num_blocks))).to_data()
    inputs = runner.prepare_inputs([scheduled], num_blocks)
    hidden = runner.model(inputs.input_ids, inputs.positions, caches, inputs.metadata)
    return runner.model.compute_logits(hidden).float().cpu()


def measure_qualities(model: str, quantizations: list[str], num_positions: int = NUM_POSITIONS) -> list[Quality]:
    """Load the model in float32 and with each of these `OPTIONS`, and compare."""

    def load(dtype: str = "float32", **options: Any) -> LLMEngine:
        return LLM(model, device="cpu", dtype=dtype, num_gpu_blocks_override=64, max_num_seqs=1, **options).llm_engine

    reference = load()
    engines = {name: load(**OPTIONS[name]) for name in quantizations}
    return measure_quality(reference, engines, num_positions)


def format_qualities(qualities: list[Quality]) -> str:
    """The comparison as a table of text, with a title."""
    rows = [(quality.quantization, f"{quality.agreement:.1%}", f"{quality.mean_kl:.4f} nats") for quality in qualities]
    title = f"Weights of fewer bits against float32, at {qualities[0].num_positions} positions of prose"
    return f"{title}\n\n{format_table(('weights', 'same next token', 'mean KL'), rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EngineArgs.model, help="(default: %(default)s)")
    parser.add_argument("--weights", nargs="+", choices=tuple(OPTIONS), default=list(OPTIONS), help="(default: %(default)s)")
    parser.add_argument("--positions", type=int, default=NUM_POSITIONS, help="positions to compare (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args()
    check_writable(arguments.json)
    qualities = measure_qualities(arguments.model, arguments.weights, arguments.positions)
    results = {"model": arguments.model, "results": [vars(quality) for quality in qualities]}
    report(arguments.model, format_qualities(qualities), results, file=arguments.json)


if __name__ == "__main__":
    main()
