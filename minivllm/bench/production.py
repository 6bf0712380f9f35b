"""Requests as production services got them: when each arrived, how long its prompt and its answer were, and which beginnings prompts share.

The traces are those of Azure (Patel et al., Splitwise, ISCA 2024) and of Kimi (Qin et al., Mooncake, FAST 2025); see `data/README.md`. They
have no texts: prompts are made of random token ids.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import math
import random
import zlib
from collections.abc import Iterator, Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from minivllm.bench.workloads import WorkloadRequest, consecutive_tokens
from minivllm.config import check_at_least
from minivllm.errors import ConfigError

_DATA = files("minivllm.bench") / "data"
"""The traces that come with the package."""
HASHED_BLOCK_SIZE = 512
"""Tokens per hash in Mooncake's trace."""


class TracedRequest(NamedTuple):
    """A request of a production trace: seconds since the first one arrived, and its tokens."""

    arrival_time: float
    prompt_len: int
    output_len: int


class HashedRequest(NamedTuple):
    """A request whose prompt can be compared with others.

    `hash_ids` has a number for each block of `HASHED_BLOCK_SIZE` tokens; two blocks with the same number end the same prefix.
    """

    arrival_time: float
    prompt_len: int
    output_len: int
    hash_ids: tuple[int, ...]


def load_conversation_trace() -> list[TracedRequest]:
    """Azure's 19,366 requests, in the order of their arrival."""
    return load_trace(str(_DATA / "azure_2023_conversation.csv.gz"))


def load_mooncake_trace() -> list[HashedRequest]:
    """Kimi's 12,031 requests, in the order of their arrival."""
    return load_trace(str(_DATA / "mooncake_conversation.jsonl.gz"))


def load_trace(name: str) -> list[Any]:
    """A trace in the format of Azure's (CSV, `TracedRequest`) or of Mooncake's (JSON lines, `HashedRequest`).

    Args:
        name: A file, packed with gzip or not; or the name of one that comes with the package.

    Raises:
        ConfigError: There is no such file, or it has another format.
    """
    path = Path(name)
    try:
        data = path.read_bytes() if path.exists() else (_DATA / path.name).read_bytes()
    except OSError as error:
        known = ", ".join(sorted(item.name for item in _DATA.iterdir() if item.name.endswith(".gz")))
        raise ConfigError(
            f"There is no trace {name} that can be read ({error.strerror}): name a file, or one of {known}."
        ) from None
    try:
        lines = (gzip.decompress(data) if path.suffix == ".gz" else data).decode().splitlines()
        trace = _read_azure(lines) if ".csv" in path.suffixes else _read_mooncake(lines)
    except (OSError, EOFError, IndexError, KeyError, TypeError, ValueError, zlib.error, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{name} is not a trace ({type(error).__name__}: {error}): it must be CSV like Azure's, or JSON lines like Mooncake's "
            "(minivllm/bench/data/README.md)."
        ) from None
    if not trace:
        raise ConfigError(f"{name} is not a trace: it has no requests.")
    if any(request.prompt_len < 0 or request.output_len < 0 for request in trace):
        raise ConfigError(f"{name} is not a trace: it has a request with a negative number of tokens.")
    return trace


def _read_azure(lines: list[str]) -> list[TracedRequest]:
    rows = list(csv.DictReader(lines))
    # fromisoformat takes six digits of a second in Python 3.10, and the file has seven.
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    return [
        TracedRequest((time - times[0]).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        for time, row in zip(times, rows, strict=True)
    ]


def _read_mooncake(lines: list[str]) -> list[HashedRequest]:
    return [
        HashedRequest(item["timestamp"] / 1000, item["input_length"], item["output_length"], tuple(item["hash_ids"]))
        for item in map(msgspec.json.decode, lines)
    ]


def replay_trace(
    trace: Sequence[TracedRequest | HashedRequest], num_requests: int | None = None, **options: Any
) -> list[WorkloadRequest]:
    """The first requests of a trace as a workload; the arguments are those of `stream_trace`."""
    return list(stream_trace(trace, num_requests, **options))


def stream_trace(
    trace: Sequence[TracedRequest | HashedRequest],
    num_requests: int | None = None,
    *,
    request_rate: float | None = None,
    rate_factor: float = 1.0,
    length: float = 1.0,
    max_len: int = 8192,
    vocab_size: int = 50_000,
    seed: int = 0,
) -> Iterator[WorkloadRequest]:
    """The first requests of a trace as a workload, faster or slower, longer or shorter than they were. Prompts are made one by one.

    Args:
        trace: Of `load_trace`.
        num_requests: How many, from the beginning; all if None.
        request_rate: Requests per second on average. Gaps between arrivals keep their proportions. None keeps the trace's own, `math.inf`
            lets all arrive at once.
        rate_factor: What that rate is multiplied by.
        length: What all lengths are multiplied by. No prompt and no output becomes shorter than 1 token.
        max_len: The longest prompt and output together; a prompt is cut to half of it, then the output to the rest.
        vocab_size: Random token ids are below this. In a trace with hashes, the token ids of a block are its hash.
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
    if not 1e-9 < rate_factor < math.inf:
        raise ConfigError(f"rate_factor is {rate_factor!r}, but must be a factor above 0.")
    times = [request.arrival_time for request in chosen]
    if not all(earlier <= later for earlier, later in itertools.pairwise(times)) or not all(map(math.isfinite, times)):
        raise ConfigError("The trace is not in the order of arrival: sort it.")
    first, last = chosen[0].arrival_time, chosen[-1].arrival_time
    own_rate = (len(chosen) - 1) / (last - first) if last > first else 0.0
    stretch = (1.0 if request_rate is None else own_rate / request_rate) / rate_factor
    rng = random.Random(seed)

    def make(request: TracedRequest | HashedRequest) -> WorkloadRequest:
        prompt_len = min(max(1, round(request.prompt_len * length)), max_len // 2)
        output_len = min(max(1, round(request.output_len * length)), max_len - prompt_len)
        if isinstance(request, HashedRequest):
            size = max(1, round(HASHED_BLOCK_SIZE * length))
            prompt = list(itertools.chain.from_iterable([hash_id] * size for hash_id in request.hash_ids))[:prompt_len]
            prompt += [prompt[-1]] * (prompt_len - len(prompt))  # lost in rounding
        else:
            prompt = consecutive_tokens(rng.randrange(vocab_size), prompt_len, vocab_size)
        return WorkloadRequest(prompt, output_len, (request.arrival_time - first) * stretch)

    return map(make, chosen)
