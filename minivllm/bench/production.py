"""Requests as production services got them: when each arrived, how long its prompt and its answer were, and what prompts had in common.

The traces are those of Azure (Patel et al., Splitwise, ISCA 2024) and of Kimi (Qin et al., Mooncake, FAST 2025); see `data/README.md`. They
have no texts: prompts are made of random token ids.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import math
import random
from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files
from typing import NamedTuple

import msgspec

from minivllm.bench.workloads import WorkloadRequest, consecutive_tokens
from minivllm.config import check_at_least
from minivllm.errors import ConfigError


class TracedRequest(NamedTuple):
    """A request of a production trace: seconds since the first one arrived, and its tokens."""

    arrival_time: float
    prompt_len: int
    output_len: int


def load_conversation_trace() -> list[TracedRequest]:
    """The 19,366 requests of the trace, in the order of their arrival."""
    rows = csv.DictReader(_lines_of("azure_2023_conversation.csv.gz"))
    # fromisoformat takes six digits of a second in Python 3.10, and the file has seven.
    lines = [
        (datetime.fromisoformat(row["TIMESTAMP"][:26]), int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows
    ]
    first = lines[0][0]
    return [TracedRequest((time - first).total_seconds(), prompt, output) for time, prompt, output in lines]


class HashedRequest(NamedTuple):
    """A request of which is known what its prompt has in common with others: a hash for each block of 512 tokens and all before them."""

    arrival_time: float
    prompt_len: int
    output_len: int
    hash_ids: tuple[int, ...]


def load_mooncake_trace() -> list[HashedRequest]:
    """The 12,031 requests of the trace, in the order of their arrival."""
    items = map(msgspec.json.decode, _lines_of("mooncake_conversation.jsonl.gz"))
    return [
        HashedRequest(item["timestamp"] / 1000, item["input_length"], item["output_length"], tuple(item["hash_ids"]))
        for item in items
    ]


def _lines_of(name: str) -> list[str]:
    """The lines of a packed file of the package."""
    return gzip.decompress(files("minivllm.bench").joinpath("data", name).read_bytes()).decode().splitlines()


def replay_trace(
    trace: Sequence[TracedRequest],
    num_requests: int | None = None,
    *,
    request_rate: float | None = None,
    length: float = 1.0,
    max_len: int = 8192,
    vocab_size: int = 50_000,
    seed: int = 0,
) -> list[WorkloadRequest]:
    """The first requests of a trace as a workload, faster or slower, longer or shorter than they were.

    Args:
        trace: Of `load_conversation_trace`.
        num_requests: How many, from the beginning; all if None.
        request_rate: Requests per second on average. Gaps between arrivals keep their proportions. None keeps the trace's own, `math.inf`
            lets all arrive at once.
        length: What all lengths are multiplied by. No prompt and no output becomes shorter than 1 token.
        max_len: The longest prompt and output together; a prompt is cut to half of it, then the output to the rest.
        vocab_size: Token ids are below this.
        seed: Of the token ids.

    Raises:
        ConfigError: A number is out of range.
    """
    if num_requests is not None:
        check_at_least("num_requests", num_requests, 1)
    chosen = list(trace[:num_requests])
    check_at_least("max_len", max_len, 2)
    check_at_least("vocab_size", vocab_size, 1)
    if not chosen or len(chosen) < (num_requests or 1):
        raise ConfigError(f"The trace has {len(chosen)} requests, but {num_requests or 'at least 1'} are wanted.")
    if not 0 < length < 1e6:
        raise ConfigError(f"length is {length!r}, but must be a factor above 0.")
    if request_rate is not None and not request_rate > 1e-9:
        raise ConfigError(f"request_rate is {request_rate!r}, but must be above 0 requests per second (or inf).")
    times = [request.arrival_time for request in chosen]
    if not all(earlier <= later for earlier, later in itertools.pairwise(times)) or not all(map(math.isfinite, times)):
        raise ConfigError("The trace is not in the order of arrival: sort it.")
    first, last = chosen[0].arrival_time, chosen[-1].arrival_time
    own_rate = (len(chosen) - 1) / (last - first) if last > first else 0.0
    stretch = 1.0 if request_rate is None else own_rate / request_rate
    rng = random.Random(seed)
    requests = []
    for arrival_time, prompt_len, output_len in chosen:
        prompt_len = min(max(1, round(prompt_len * length)), max_len // 2)
        output_len = min(max(1, round(output_len * length)), max_len - prompt_len)
        prompt = consecutive_tokens(rng.randrange(vocab_size), prompt_len, vocab_size)
        requests.append(WorkloadRequest(prompt, output_len, (arrival_time - first) * stretch))
    return requests
