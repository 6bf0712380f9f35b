"""Requests that come over time, drawn one by one: a million of them take no memory.

`bench/workloads.py` makes workloads that are there at once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import islice

from minivllm.bench.workloads import DISTRIBUTIONS, WorkloadRequest
from minivllm.errors import ConfigError

ARRIVALS = ("poisson", "bursts", "at-once")


def arrival_times(arrivals: str, rate: float, *, burst_size: int = 8, seed: int = 0) -> Iterator[float]:
    """The moments at which requests come, in seconds, without end.

    Args:
        arrivals: "poisson": each independently of the others, as those of many users are. "bursts": `burst_size` of them at a
            time, and the bursts as Poisson arrivals. "at-once": all at the start.
        rate: Requests per second, on average.
        burst_size: Requests in a burst.
        seed: The same seed gives the same moments.

    Raises:
        ConfigError: There are no such arrivals, or a number is out of range.
    """
    if arrivals not in ARRIVALS:
        raise ConfigError(f"arrivals is {arrivals!r}, but must be one of {', '.join(map(repr, ARRIVALS))}.")
    if arrivals != "at-once" and not (rate > 0 and math.isfinite(rate)):
        raise ConfigError(f"arrival_rate is {rate!r}, but must be a number of requests per second above 0.")
    if burst_size < 1:
        raise ConfigError(f"burst_size is {burst_size}, but must be at least 1.")
    return _times(arrivals, rate, burst_size if arrivals == "bursts" else 1, random.Random(seed))


def _times(arrivals: str, rate: float, burst_size: int, rng: random.Random) -> Iterator[float]:
    now = 0.0
    while True:
        if arrivals != "at-once":
            now += rng.expovariate(rate / burst_size)
        for _ in range(burst_size):
            yield now


def generate_requests(
    num_requests: int,
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
    """Requests in the order of their arrival.

    Args:
        num_requests: How many.
        arrivals, arrival_rate, burst_size: See `arrival_times`.
        distribution: Of lengths. "uniform": every request has the mean lengths; "longtail": they are log-normal with sigma 1, as
            in `make_workload`, but here the means hold for many requests, and a sample of few comes near them only.
        mean_prompt_len, mean_output_len: Tokens.
        max_len: The longest prompt and output together; the prompt takes at most half of it.
        num_shared_prompt_tokens: Every prompt begins with the same so many tokens, on top of its length.
        vocab_size: Token ids are below this.
        seed: Of everything. Arrivals and lengths do not depend on each other's options.

    Raises:
        ConfigError: An argument is out of range.
    """
    for name, value, low in (
        ("num_requests", num_requests, 1),
        ("mean_prompt_len", mean_prompt_len, 1),
        ("mean_output_len", mean_output_len, 1),
        ("num_shared_prompt_tokens", num_shared_prompt_tokens, 0),
    ):
        if value < low:
            raise ConfigError(f"{name} is {value}, but must be at least {low}.")
    if distribution not in DISTRIBUTIONS:
        raise ConfigError(f"distribution is {distribution!r}, but must be one of {', '.join(map(repr, DISTRIBUTIONS))}.")
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
        for time in islice(times, num_requests):
            prompt_len = min(length(mean_prompt_len), longest_prompt)
            first = rng.randrange(vocab_size)
            prompt = prefix + [(first + i) % vocab_size for i in range(prompt_len)]
            yield WorkloadRequest(prompt, min(length(mean_output_len), max_len - len(prompt)), time)

    return requests()
