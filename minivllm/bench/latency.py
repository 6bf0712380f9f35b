"""Time to first token (TTFT) and inter-token latency (ITL) when a batch of requests arrives at once, by batch size."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tqdm.auto import tqdm

from minivllm.bench.report import format_table, quantity
from minivllm.bench.summary import RequestLatency, RunSummary
from minivllm.bench.workloads import WorkloadRequest, make_workload
from minivllm.engine.llm_engine import LLMEngine
from minivllm.errors import ConfigError
from minivllm.sampling_params import SamplingParams


@dataclass(kw_only=True)
class BatchLatency(RunSummary):
    """What the users of a batch wait, over all rounds.

    Attributes:
        batch_size: Requests that arrive at once.
        rounds: Output tokens per second of each round, prompts included in the time.
    """

    batch_size: int
    rounds: list[float]


def measure_latency(
    engine: LLMEngine,
    batch_sizes: Sequence[int],
    *,
    prompt_len: int = 64,
    output_len: int = 32,
    rounds: int = 3,
    use_tqdm: bool = True,
) -> list[BatchLatency]:
    """Run batches of requests of equal lengths: each batch size once to warm up, then `rounds` times.

    Args:
        engine: An idle engine with room for the largest batch (`max_num_seqs`).
        batch_sizes: Requests that arrive at once.
        prompt_len: Tokens of each prompt.
        output_len: Tokens that each request generates, at least 2, or there would be no ITL.
        rounds: How often each batch is run.
        use_tqdm: Show progress.

    Raises:
        ConfigError: A number is too small, or a request does not fit the model.
    """
    if min(batch_sizes) < 1 or rounds < 1 or output_len < 2:
        raise ConfigError(
            "Latency is measured with batches of at least 1 request, at least 1 round, and at least 2 output tokens."
        )
    config = engine.model_config
    if prompt_len + output_len > config.max_model_len:
        raise ConfigError(
            f"Prompts of {prompt_len} and outputs of {output_len} tokens do not fit the {config.max_model_len} tokens of the "
            "model: make them shorter."
        )
    results = []
    with tqdm(total=len(batch_sizes) * (1 + rounds), unit="batch", disable=not use_tqdm, dynamic_ncols=True) as bar:
        for batch_size in batch_sizes:
            bar.set_description(f"batch of {batch_size}")
            batches = []
            for seed in range(1 + rounds):  # other prompts each time, so that no cache can help
                requests = make_workload(
                    "uniform", batch_size, mean_prompt_len=prompt_len, mean_output_len=output_len, vocab_size=config.vocab_size,
                    seed=seed,
                )  # fmt: skip
                batches.append(run_batch(engine, requests))
                bar.update()
            results.append(summarize(batches[1:]))  # the first is the warm-up
    return results


def run_batch(engine: LLMEngine, requests: list[WorkloadRequest]) -> list[RequestLatency]:
    """Run requests that arrive at once, and note when each of their tokens comes."""
    arrival = engine.clock()
    for i, request in enumerate(requests):
        params = SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True)
        engine.add_request(str(i), request.prompt_token_ids, params, arrival_time=arrival)
    times: list[list[float]] = [[] for _ in requests]
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = engine.clock() - arrival
        for output in outputs:
            if output.error is not None:
                raise ConfigError(f"A request of the batch failed. {output.error}")
            so_far = times[int(output.request_id)]
            so_far += [now] * (len(output.outputs[0].token_ids) - len(so_far))  # several, where draft tokens were accepted
    return [
        RequestLatency.from_token_times(str(i), len(request.prompt_token_ids), times[i]) for i, request in enumerate(requests)
    ]


def summarize(batches: list[list[RequestLatency]]) -> BatchLatency:
    """The requests of all rounds together."""
    seconds = [max(request.latency for request in batch) for batch in batches]
    speeds = [sum(r.output_tokens for r in batch) / time for batch, time in zip(batches, seconds, strict=True)]
    return BatchLatency.of(list(itertools.chain(*batches)), sum(seconds), batch_size=len(batches[0]), rounds=speeds)


def format_batches(results: list[BatchLatency]) -> str:
    """The batch sizes as a table of text."""
    headers = ("batch", "TTFT median", "ITL median", "ITL p95", "ITL p99", "tokens/s")
    rows = []
    for result in results:
        times = (result.ttft.p50, result.itl.p50, result.itl.p95, result.itl.p99)
        cells = (quantity(time * 1e3, ".1f", " ms") for time in times)
        rows.append((result.batch_size, *cells, f"{statistics.median(result.rounds):.1f}"))
    return format_table(headers, rows, left=0)
