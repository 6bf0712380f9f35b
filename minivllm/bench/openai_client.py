"""A client of any OpenAI-compatible server that times the answers.

It asks for an exact number of greedy tokens. `/v1/completions` gets prompts as token ids; a chat gets text, a word for each token id.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from minivllm.bench.summary import ServedRequest
from minivllm.bench.workloads import WorkloadRequest
from minivllm.errors import ConfigError

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child",
    "world", "school", "state", "family", "student", "group", "country", "problem", "hand", "part",
)  # fmt: skip
"""Each is one token in most vocabularies."""
PROBE_SECONDS = 10.0
"""How long a server may take to list its models."""
KEEP_ALIVE_SECONDS = 2.0
"""How long an idle connection is kept. A server that kept it for less might close it just as a request is sent."""
_LONGEST_DETAIL = 200
_LONGEST_LINE = 2**20
"""Longest line of a stream, in bytes."""
_NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises for invalid JSON."""


class ServedModel(msgspec.Struct):
    """A model of a server. `max_model_len`, in tokens, limits prompt and output together; vLLM's and minivllm's servers give it."""

    id: str
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[ServedModel]


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def brings_tokens(self) -> bool:
        """Whether this is a piece of the answer, rather than only its beginning (a role) or end (a finish reason).

        A piece may have no text: a token can be half of a character.
        """
        if self.text or (self.delta and self.delta.content):
            return True
        return self.finish_reason is None and (self.delta is None or self.delta.role is None)


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class _Usage(msgspec.Struct):
    prompt_tokens: _Count
    completion_tokens: _Count


class _Answer(msgspec.Struct):
    """The fields of an answer, or of an event of a streamed one, that are read."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _FailedRequest(Exception):  # noqa: N818
    """A failure of a request."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason, self.detail = reason, detail


class OpenAIClient:
    """An async context manager, which closes its connections at the end.

    Args:
        base_url: Such as `http://127.0.0.1:8000`, with or without `/v1`.
        api_key: Sent as a bearer token.
        endpoint: One of `ENDPOINTS`.
        stream: Stream the answers; otherwise only their ends are timed.
        ignore_eos: Generate past end-of-sequence tokens, an extension of vLLM's and minivllm's servers.
        timeout: Seconds that a request may take.

    Raises:
        ConfigError: The URL is invalid, or the timeout is out of range.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        endpoint: str = "completions",
        stream: bool = True,
        ignore_eos: bool = True,
        timeout: float = 300.0,
    ) -> None:
        self.base_url = _checked_url(base_url)
        if not 0 < timeout < math.inf:
            raise ConfigError(f"The timeout is {timeout}, but must be a number of seconds above 0.")
        self.endpoint = endpoint
        self.stream = stream
        self.ignore_eos = ignore_eos
        self.timeout = timeout
        if api_key and not api_key.isprintable():
            raise ConfigError("The API key must be printable characters: it is sent in a header.")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> OpenAIClient:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
        timeout = aiohttp.ClientTimeout(total=self.timeout)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=timeout)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def find_model(self, name: str | None = None) -> ServedModel:
        """The model with this name, or the first that the server lists.

        Raises:
            ConfigError: The server cannot be reached, refuses, or has no such model.
        """
        try:
            timeout = aiohttp.ClientTimeout(total=PROBE_SECONDS)
            async with self._session.get(f"{self.base_url}/v1/models", timeout=timeout) as response:
                status, body = response.status, await response.read()
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            why = str(error) or f"no answer within {PROBE_SECONDS:.0f} s"
            what = f"No server can be reached at {self.base_url} ({why})"
            raise ConfigError(f"{what}: start one with `minivllm serve`, or give its --base-url.") from None
        if status in (401, 403):
            raise ConfigError(f"The server at {self.base_url} refuses the API key (status {status}): give it with --api-key.")
        models = []
        if status == 200:
            with contextlib.suppress(*_NOT_JSON):
                models = [model for model in msgspec.json.decode(body, type=_ModelList).data if model.id.isprintable()]
        if name is None and models:
            return models[0]
        if name is None:
            raise ConfigError(f"The server at {self.base_url} lists no models (status {status}): name one with --model.")
        if models and name not in [model.id for model in models]:
            there = ", ".join(repr(model.id) for model in models)
            raise ConfigError(f"The server at {self.base_url} has no model {name!r}, but {there}: name that with --model.")
        return next((model for model in models if model.id == name), ServedModel(name))

    async def send(self, request: WorkloadRequest, model: str, lateness: float = 0.0) -> ServedRequest:
        """Send a request and wait for its end. Failures and cancellation are recorded, not raised.

        The times of the result are those of `time.perf_counter()`.
        """
        served = ServedRequest(len(request.prompt_token_ids), request.output_len, lateness, start=time.perf_counter())
        try:
            async with self._session.post(
                f"{self.base_url}{ENDPOINTS[self.endpoint]}",
                data=json.dumps(self.body(request, model)),
                headers={"Content-Type": "application/json"},
            ) as response:
                if response.status != 200:
                    raise _FailedRequest(f"status {response.status}", _message(await response.read()))
                if self.stream:
                    await _read_stream(response.content.iter_any(), served)
                else:
                    _read_whole(await response.read(), served)
        except _FailedRequest as failure:
            served.error, served.detail = failure.reason, failure.detail
        except asyncio.CancelledError:
            served.error = "given up"
        except asyncio.TimeoutError:
            served.error = "timeout"
        except aiohttp.ClientConnectorError as error:
            served.error, served.detail = "no connection", str(error)
        except (aiohttp.ClientError, OSError) as error:
            served.error, served.detail = "broken connection", str(error)
        except _NOT_JSON as error:
            served.error, served.detail = "broken answer", str(error)
        served.end = time.perf_counter()
        return served

    def body(self, request: WorkloadRequest, model: str) -> dict[str, Any]:
        """The JSON body of a request."""
        body: dict[str, Any] = {"model": model, "max_tokens": request.output_len, "temperature": 0, "stream": self.stream}
        if self.endpoint == "chat":
            text = " ".join(WORDS[token_id % len(WORDS)] for token_id in request.prompt_token_ids)
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = request.prompt_token_ids
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        return body


def _checked_url(url: str) -> str:
    """The URL without a trailing slash and `/v1`."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"The base URL is {url!r}, which is invalid ({error}).") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"The base URL is {url!r}, but must be like http://127.0.0.1:8000.")
    if parts.username is not None:
        raise ConfigError("The base URL must not hold a name or a password: give the key with --api-key.")
    return url.rstrip("/").removesuffix("/v1")


async def _read_stream(chunks: AsyncIterator[bytes], served: ServedRequest) -> None:
    """Time each piece of a streamed answer, up to its end."""
    num_pieces, latest, has_ended = 0, served.start, False
    async for event in read_events(chunks):
        now = time.perf_counter()
        if event == b"[DONE]":
            has_ended = True
            continue  # read to the end, so that the connection can be reused
        answer = msgspec.json.decode(event, type=_Answer)
        if answer.error is not None:
            raise _FailedRequest("error event", _message(event))
        if answer.usage is not None:
            _count(served, answer.usage)
        for choice in answer.choices:
            has_ended = has_ended or choice.finish_reason is not None
            if not choice.brings_tokens:
                continue
            if num_pieces == 0:
                served.ttft = now - served.start
            else:
                served.itls.append(now - latest)
            num_pieces, latest = num_pieces + 1, now
            if served.counted_by == "pieces":
                served.output_tokens = num_pieces
    if not has_ended:
        raise _FailedRequest("broken answer", "the stream stopped before its end")
    if num_pieces == 0 and served.output_tokens == 0:
        raise _FailedRequest("broken answer", "the stream had no token")


async def read_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event, from bytes split anywhere. Comments and other fields are skipped."""
    rest = b""
    data: list[bytes] = []
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            raise _FailedRequest("broken answer", f"a line of the stream has more than {_LONGEST_LINE} bytes")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line.removeprefix(b"data:").removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []


def _read_whole(body: bytes, served: ServedRequest) -> None:
    answer = msgspec.json.decode(body, type=_Answer)
    if answer.error is not None:
        raise _FailedRequest("error answer", _message(body))
    if answer.usage is None:
        raise _FailedRequest("broken answer", "it has no usage, so its tokens cannot be counted")
    _count(served, answer.usage)


def _count(served: ServedRequest, usage: _Usage) -> None:
    served.prompt_tokens, served.output_tokens, served.counted_by = usage.prompt_tokens, usage.completion_tokens, "usage"


def _message(body: bytes) -> str:
    """The message in an error's body, or else the beginning of the body."""
    try:
        error = json.loads(body)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError, RecursionError):
        text = body.decode(errors="replace")
    text = str(text).strip()[:_LONGEST_DETAIL]
    return "".join(character if character.isprintable() else " " for character in text)
