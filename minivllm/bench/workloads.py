"""Requests to measure with: random token ids, with lengths and arrival times like those of real services, or from a file."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from minivllm.config import check_at_least, check_choice
from minivllm.errors import ConfigError
from minivllm.sampling_params import RequestOutputKind, SamplingParams

DISTRIBUTIONS = ("uniform", "longtail")
ARRIVALS = ("poisson", "bursts", "at-once")


@dataclass(frozen=True)
class WorkloadRequest:
    """A request of a workload: its prompt, exactly how many tokens it generates, and when it arrives, in seconds."""

    prompt_token_ids: list[int]
    output_len: int
    arrival_time: float = 0.0

    def sampling_params(self, output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY) -> SamplingParams:
        """Greedy, past end-of-sequence tokens, so that exactly `output_len` tokens come."""
        return SamplingParams(temperature=0, max_tokens=self.output_len, ignore_eos=True, output_kind=output_kind)


def arrival_times(arrivals: str, rate: float, *, burst_size: int = 8, seed: int = 0) -> Iterator[float]:
    """When requests arrive, in seconds: an endless iterator.

    Args:
        arrivals: "poisson": independently of each other, as from many users. "bursts": `burst_size` at a time, with Poisson arrivals of
            the bursts. "at-once": all at the start.
        rate: Requests per second, on average.
        burst_size: Requests in a burst.
        seed: The same seed gives the same times.

    Raises:
        ConfigError: `arrivals` is unknown, or a number is out of range.
    """
    check_choice("arrivals", arrivals, ARRIVALS)
    if arrivals != "at-once" and not (rate > 0 and math.isfinite(rate)):
        raise ConfigError(f"arrival_rate is {rate!r}, but must be a number of requests per second above 0.")
    check_at_least("burst_size", burst_size, 1)
    return _times(arrivals, rate, burst_size if arrivals == "bursts" else 1, random.Random(seed))


def _times(arrivals: str, rate: float, burst_size: int, rng: random.Random) -> Iterator[float]:
    now = 0.0
    while True:
        if arrivals != "at-once":
            now += rng.expovariate(rate / burst_size)
        for _ in range(burst_size):
            yield now


def generate_requests(
    num_requests: int | None,
    *,
    arrivals: str = "poisson",
    arrival_rate: float = 1.0,
    burst_size: int = 8,
    distribution: str = "longtail",
    mean_prompt_len: int = 48,
    mean_output_len: int = 48,
    max_len: int = 8192,
    num_shared_prompt_tokens: int = 0,
    vocab_size: int = 50_000,
    seed: int = 0,
) -> Iterator[WorkloadRequest]:
    """Requests in the order of their arrival, drawn one by one: a million of them take no memory.

    A prompt is consecutive token ids from a random one on, as in vLLM's random data set.

    Args:
        num_requests: How many; None draws without end.
        arrivals, arrival_rate, burst_size: See `arrival_times`.
        distribution: Of lengths. "uniform": every request has the mean lengths. "longtail": log-normal with sigma 1, as in real
            services: most are short, one in twenty is more than five times the median. The means hold for many requests, roughly for few.
        mean_prompt_len, mean_output_len: Tokens.
        max_len: The longest prompt and output together; the prompt takes at most half of it.
        num_shared_prompt_tokens: Tokens that all prompts begin with, on top of their lengths.
        vocab_size: Token ids are below this.
        seed: Of arrivals and lengths, which do not depend on each other's options.

    Raises:
        ConfigError: An argument is out of range.
    """
    if num_requests is not None:
        check_at_least("num_requests", num_requests, 1)
    check_at_least("mean_prompt_len", mean_prompt_len, 1)
    check_at_least("mean_output_len", mean_output_len, 1)
    check_at_least("num_shared_prompt_tokens", num_shared_prompt_tokens, 0)
    check_choice("distribution", distribution, DISTRIBUTIONS)
    longest_prompt = max_len // 2 - num_shared_prompt_tokens
    if longest_prompt < 1:
        raise ConfigError(f"{num_shared_prompt_tokens} shared prompt tokens leave no room for prompts in max_len = {max_len}.")
    times = arrival_times(arrivals, arrival_rate, burst_size=burst_size, seed=seed)
    rng = random.Random(seed + 1)

    def length(mean: int) -> int:
        # A log-normal variable with mu = 0 and sigma = 1 has the mean exp(1/2).
        factor = rng.lognormvariate(-0.5, 1.0) if distribution == "longtail" else 1.0
        return max(1, round(mean * factor))

    def requests() -> Iterator[WorkloadRequest]:
        prefix = [token_id % vocab_size for token_id in range(num_shared_prompt_tokens)]
        for time in itertools.islice(times, num_requests):
            prompt_len = min(length(mean_prompt_len), longest_prompt)
            prompt = prefix + consecutive_tokens(rng.randrange(vocab_size), prompt_len, vocab_size)
            yield WorkloadRequest(prompt, min(length(mean_output_len), max_len - len(prompt)), time)

    return requests()


def consecutive_tokens(first: int, count: int, vocab_size: int) -> list[int]:
    """A meaningless prompt: consecutive token ids from `first` on."""
    if first + count <= vocab_size:
        return list(range(first, first + count))
    return [(first + i) % vocab_size for i in range(count)]


def make_workload(
    distribution: str,
    num_requests: int,
    *,
    mean_prompt_len: int = 48,
    mean_output_len: int = 48,
    vocab_size: int = 49152,
    max_len: int = 8192,
    seed: int = 0,
) -> list[WorkloadRequest]:
    """The requests of `generate_requests`, all arriving at the start, with lengths scaled to have exactly their means.

    So workloads of both distributions have the same number of tokens, except for what `max_len` cuts off.

    Raises:
        ConfigError: An argument is out of range.
    """
    drawn = list(
        generate_requests(
            num_requests, arrivals="at-once", distribution=distribution, mean_prompt_len=mean_prompt_len,
            mean_output_len=mean_output_len, vocab_size=vocab_size, seed=seed,
        )
    )  # fmt: skip
    prompt_lens = _scale([len(request.prompt_token_ids) for request in drawn], mean_prompt_len)
    output_lens = _scale([request.output_len for request in drawn], mean_output_len)
    requests = []
    for request, prompt_len, output_len in zip(drawn, prompt_lens, output_lens, strict=True):
        prompt_len = min(prompt_len, max_len // 2)
        prompt = consecutive_tokens(request.prompt_token_ids[0], prompt_len, vocab_size)
        requests.append(WorkloadRequest(prompt, min(output_len, max_len - prompt_len)))
    return requests


def _scale(lengths: list[int], mean: int) -> list[int]:
    """Lengths of at least 1, scaled so that they sum to `len(lengths) * mean`."""
    total = len(lengths) * mean
    scaled = [max(1, round(length * total / sum(lengths))) for length in lengths]
    while difference := total - sum(scaled):  # from rounding
        scaled[scaled.index(max(scaled))] += difference if difference > 0 else -1
    return scaled


def warm_up_requests(requests: list[WorkloadRequest], width: int) -> list[WorkloadRequest]:
    """A short workload to warm up with: `width` requests at once, then fewer and fewer.

    So whatever an engine prepares in its first step of a batch size is prepared before anything is measured.
    """
    return [
        WorkloadRequest(request.prompt_token_ids, min(request.output_len, 1 + i)) for i, request in enumerate(requests[:width])
    ]


class _Item(msgspec.Struct):
    """A request in a workload's file."""

    ids: Annotated[list[int], msgspec.Meta(min_length=1)]
    out: Annotated[int, msgspec.Meta(ge=1)]


def load_workload(file: Path) -> list[WorkloadRequest]:
    """A workload from a JSON list of objects with "ids" (the prompt) and "out" (how many tokens to generate).

    Raises:
        ConfigError: The file is missing or not a workload.
    """
    try:
        items = msgspec.json.decode(file.read_bytes(), type=list[_Item])
    except OSError as error:
        raise ConfigError(f"There is no workload file {file} that can be read ({error.strerror}).") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file} is not a workload ({error}): it must be a JSON list of objects with 'ids', a list of token ids, and 'out', how many "
            "tokens to generate."
        ) from None
    if not items:
        raise ConfigError(f"{file} is not a workload: it has no requests.")
    return [WorkloadRequest(item.ids, item.out) for item in items]
