"""Answers of a server as a client sees them, and what is wrong with them."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from minivllm.bench.openai_client import read_events
from minivllm.outputs import RequestOutput

MODEL = "smollm2-135m"


@dataclass
class Stream:
    """What a client got, and when: the pieces of each answer, by index."""

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str = ""

    @property
    def gaps(self) -> list[float]:
        """Seconds between two pieces."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    prompt: str,
    params: dict[str, Any],
    into: Stream | None = None,
    *,
    chat: bool = False,
    streamed: bool = True,
    rank: int | None = None,
) -> Stream:
    """Get an answer of /v1/completions or /v1/chat/completions, piece by piece or whole; from a replica, if its rank is given."""
    got = into or Stream()
    body = {"model": MODEL} | ({"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}) | params
    if streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    try:
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        async with session.post(f"{url}/v1/{'chat/' if chat else ''}completions", json=body, headers=headers) as response:
            if response.status != 200:
                got.error = f"status {response.status}: {(await response.text())[:200]}"
            elif streamed:
                await _read(got, response)
            else:
                _take(got, await response.json())
    except (aiohttp.ClientError, OSError) as error:
        got.error = f"{type(error).__name__}: {error}"
    return got


async def _read(got: Stream, response: aiohttp.ClientResponse) -> None:
    async with aclosing(read_events(response.content.iter_any())) as events:
        async for event in events:
            if event == b"[DONE]":
                return
            _take(got, json.loads(event))
    got.error = got.error or "the stream broke off"


def _take(got: Stream, chunk: dict[str, Any]) -> None:
    """Add a chunk, or a whole answer, to what was got."""
    if "error" in chunk:
        got.error = chunk["error"]["message"]
        return
    got.prompt_logprobs = chunk.get("prompt_logprobs", got.prompt_logprobs)
    got.num_tokens = (chunk.get("usage") or {}).get("completion_tokens", got.num_tokens)
    for choice in chunk["choices"]:
        index, message = choice["index"], choice.get("delta") or choice.get("message") or choice
        if index in got.reasons:
            got.error = "a piece came after the end"
        if "role" in message and "delta" in choice:
            continue  # the piece in front, without text
        got.texts[index] = got.texts.get(index, "") + (message.get("text") or message.get("content") or "")
        got.times.append(time.perf_counter())
        got.prompt_logprobs = choice.get("prompt_logprobs", got.prompt_logprobs)
        if choice["finish_reason"]:
            got.reasons[index] = choice["finish_reason"]
        if logprobs := choice.get("logprobs"):
            values = logprobs.get("token_logprobs") or [entry["logprob"] for entry in logprobs.get("content") or ()]
            got.logprobs.setdefault(index, []).extend(values)


def fault(got: Stream, expected: RequestOutput, tolerance: float = 1e-3) -> str:
    """How an answer differs from that of `LLM.generate`; "" if it does not. Log-probabilities may differ by the tolerance."""
    if got.error:
        return got.error
    texts = {output.index: output.text for output in expected.outputs}
    if got.texts != texts:
        return f"the text differs: {got.texts} instead of {texts}"
    if got.reasons != {output.index: output.finish_reason for output in expected.outputs}:
        return f"it ends otherwise: {got.reasons}"
    num_tokens = sum(len(output.token_ids) for output in expected.outputs)
    if got.num_tokens != num_tokens:
        return f"{got.num_tokens} tokens are counted instead of {num_tokens}"
    for output in expected.outputs:
        chosen = [entry[token_id].logprob for token_id, entry in zip(output.token_ids, output.logprobs or (), strict=False)]
        if not _are_close(got.logprobs.get(output.index, []), chosen, tolerance):
            return f"the log-probabilities differ: {got.logprobs.get(output.index)} instead of {chosen}"
    told = [max((item["logprob"] for item in entry.values()), default=0.0) for entry in got.prompt_logprobs or () if entry]
    known = [max(item.logprob for item in entry.values()) for entry in expected.prompt_logprobs or () if entry]
    return "" if _are_close(told, known, tolerance) else f"the prompt's log-probabilities differ: {told} instead of {known}"


def _are_close(some: list[float], others: list[float], tolerance: float) -> bool:
    return len(some) == len(others) and all(abs(a - b) <= tolerance for a, b in zip(some, others, strict=True))


async def replicas_of(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """The answer of /replicas."""
    async with session.get(f"{url}/replicas") as response:
        answer: dict[str, Any] = await response.json()
        return answer


async def all_ready(session: aiohttp.ClientSession, url: str, seconds: float = 120.0) -> dict[str, Any]:
    """Wait until every replica takes requests and has none."""
    end = time.monotonic() + seconds
    while True:
        answer = await replicas_of(session, url)
        if all(item["state"] == "ready" and not item["running"] + item["waiting"] for item in answer["replicas"]):
            return answer
        if time.monotonic() > end:
            raise RuntimeError(f"The replicas are not ready: {answer}")
        await asyncio.sleep(0.05)


def percentile(values: list[float], share: float) -> float:
    """Of a list that may be empty."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0
