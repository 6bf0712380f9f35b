"""What each user waits for: the first token (TTFT), and the next ones (ITL), when so many requests arrive at once."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tqdm.auto import tqdm

from minivllm.bench.offline import percentile
from minivllm.bench.workloads import WorkloadRequest, make_workload
from minivllm.engine.llm_engine import LLMEngine
from minivllm.errors import ConfigError
from minivllm.sampling_params import SamplingParams


@dataclass(frozen=True)
class LatencyResult:
    """A batch size. Times in milliseconds.

    TTFT is from arrival to a request's first token, over all requests of all rounds. ITL is the time between two tokens of
    one request, over all of them. `output_tokens_per_second` is the median of the rounds, prompts included in the time.
    """

    batch_size: int
    ttft_median: float
    itl_median: float
    itl_p95: float
    itl_p99: float
    output_tokens_per_second: float


def measure_latency(
    engine: LLMEngine,
    batch_sizes: Sequence[int],
    *,
    prompt_len: int = 64,
    output_len: int = 32,
    rounds: int = 3,
    use_tqdm: bool = True,
) -> list[LatencyResult]:
    """Run batches of equal requests of random tokens, each size once to warm up and then so many rounds.

    Args:
        engine: With nothing to do, and with room for the largest batch (`max_num_seqs`).
        batch_sizes: Requests that arrive at once.
        prompt_len: Tokens of each prompt.
        output_len: Tokens that each request generates; at least 2, so that there is a time between two.
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
            token_times: list[list[float]] = []
            speeds = []
            for seed in range(1 + rounds):  # other prompts each time, so that no cache can help
                requests = make_workload(
                    "uniform", batch_size, mean_prompt_len=prompt_len, mean_output_len=output_len, vocab_size=config.vocab_size,
                    seed=seed,
                )  # fmt: skip
                times = run_batch(engine, requests)
                bar.update()
                if seed == 0:
                    continue  # warm-up
                token_times += times
                speeds.append(batch_size * output_len / max(request[-1] for request in times))
            results.append(summarize(batch_size, token_times, statistics.median(speeds)))
    return results


def run_batch(engine: LLMEngine, requests: list[WorkloadRequest]) -> list[list[float]]:
    """For each request, the seconds from the arrival of all to each of its tokens."""
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
            so_far += [now] * (len(output.outputs[0].token_ids) - len(so_far))  # several, where guesses were right
    return times


def summarize(batch_size: int, token_times: list[list[float]], output_tokens_per_second: float) -> LatencyResult:
    """Statistics of the times at which each request's tokens came, in seconds since arrival."""
    first = [times[0] * 1e3 for times in token_times]
    between = [(later - earlier) * 1e3 for times in token_times for earlier, later in itertools.pairwise(times)]
    return LatencyResult(
        batch_size=batch_size,
        ttft_median=statistics.median(first),
        itl_median=statistics.median(between),
        itl_p95=percentile(between, 95),
        itl_p99=percentile(between, 99),
        output_tokens_per_second=output_tokens_per_second,
    )


def format_table(results: list[LatencyResult]) -> str:
    """The batch sizes as a table of text."""
    header = f"{'batch':>5}{'TTFT median':>15}{'ITL median':>14}{'ITL p95':>13}{'ITL p99':>13}{'tokens/s':>10}"
    lines = [header, "-" * len(header)]
    lines += [
        f"{result.batch_size:>5}{result.ttft_median:>12.1f} ms{result.itl_median:>11.1f} ms{result.itl_p95:>10.1f} ms"
        f"{result.itl_p99:>10.1f} ms{result.output_tokens_per_second:>10.1f}"
        for result in results
    ]
    return "\n".join(lines)
