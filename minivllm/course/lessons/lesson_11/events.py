"""The checks of lesson 11 for streams in OpenAI's form, read as a client reads them."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from minivllm.course.lessons.lesson_11.situations import iterate, run
from minivllm.course.lessons.lesson_11.text import Source
from minivllm.course.lessons.streaming import Delta, make_usage
from minivllm.course.observations import expect, fail, rounds
from minivllm.errors import EngineDeadError

_PIECES = ("a", " two", "\n", "\n\n", "é", "🦜", '"', "\\", "\u2028", "\u0085", "data: ", "\r", "")
_LINE_ENDS = str.maketrans(dict.fromkeys("\u2028\u2029\u0085\x0b\x0c\x1c\x1d\x1e", "\n"))


def read_events(data: bytes) -> list[Any]:
    """What a client makes of a stream: the contents of all events that have ended. The strictest of readers, for which all these end a line.

    Raises:
        ValueError: It is not a stream of events.
    """
    *lines, rest = data.decode().replace("\r\n", "\n").replace("\r", "\n").translate(_LINE_ENDS).split("\n")
    events, content = [], None
    for line in lines:
        if line.startswith("data: "):
            content = line[6:] if content is None else f"{content}\n{line[6:]}"
        elif line:
            raise ValueError(f"a line that does not begin with 'data: ': {line[:60]!r}")
        elif content is not None:
            events.append(content if content == "[DONE]" else json.loads(content))
            if content != "[DONE]" and not isinstance(events[-1], dict):
                raise ValueError(f"an event whose content is no object: {content[:60]}")
            content = None
    if content is not None or rest:
        raise ValueError("an event without an empty line after it, so no client shows it")
    return events


def read_stream(said: str, data: Any) -> list[Any]:
    """The events of a stream, in a situation in words; fails if it is none."""
    if not isinstance(data, bytes):
        fail(f"{said}\nExpected: bytes\nGot: {data!r:.200}\nLook at what a response is made of.")
    try:
        return read_events(data)
    except ValueError as error:
        fail(
            f"{said}\nExpected: server-sent events\nGot: {error}\nIn: {data[:300]!r}\nLook at format_event, and at how [DONE] ends."
        )


def check_format_event(format_event: Any) -> None:
    """One event whose content is the given one, for every reader."""
    for rng in rounds("event", 40):
        content = {
            "text": "".join(rng.choices(_PIECES, k=rng.randint(0, 5))),
            "n": rng.randrange(9),
            "end": rng.choice((None, "stop")),
        }
        said = f"format_event({content!r})"
        expect(
            said,
            "contents of the events in it",
            [content],
            read_stream(said, format_event(content)),
            "the line, and what is after it",
        )


def _made_up(rng: random.Random) -> tuple[list[Delta], EngineDeadError | None]:
    deltas = [
        Delta([rng.randrange(9) for _ in range(rng.randint(1, 4))], None, "".join(rng.choices(_PIECES, k=2)))
        for _ in range(rng.randint(1, 5))
    ]
    if rng.random() < 0.25:
        return deltas, EngineDeadError(f"The engine has died: no memory in step {rng.randrange(100)}")
    deltas[-1].finish_reason = rng.choice(("stop", "length"))
    return deltas, None


@dataclass
class _Situation:
    """An answer of an engine, what is asked for, and what a client has got so far."""

    deltas: list[Delta]
    error: Exception | None
    head: dict[str, Any]
    num_prompt_tokens: int
    include_usage: bool
    data: bytes = b""
    num_events: list[int] = field(default_factory=list)
    """How many events the client had when each delta was asked for."""

    @property
    def said(self) -> str:
        """In words."""
        return (
            f"{len(self.deltas)} deltas{', then an EngineDeadError' if self.error else ''}, include_usage={self.include_usage}."
        )

    async def source(self) -> AsyncGenerator[Delta, None]:
        """What the engine gives."""
        for delta in self.deltas:
            self.num_events.append(len(read_stream(self.said, self.data)))
            yield delta
        if self.error is not None:
            raise self.error

    async def read(self, events_of: Any) -> None:
        """Read a learner's stream to its end; each part of it has whole events."""
        made = events_of(self.source(), self.head, self.num_prompt_tokens, self.include_usage)
        async for part in await iterate(made):
            read_stream(self.said, part)
            self.data += part


def _check_stream(events_of: Any, make_choices: Callable[[list[Delta]], list[Any]], kind: str) -> None:
    for rng in rounds(kind, 40):
        head = {"id": f"{kind}-{rng.randrange(10**6)}", "object": kind, "created": rng.randrange(10**9), "model": "m"}
        situation = _Situation(*_made_up(rng), head, rng.randint(1, 99), rng.random() < 0.5)
        run(situation.said, partial(situation.read, events_of))
        deltas, said, num_prompt_tokens = situation.deltas, situation.said, situation.num_prompt_tokens
        choices = make_choices(deltas)
        expected = [{**head, "choices": [choice]} for choice in choices]
        if situation.error is not None:
            expected.append({"error": {"message": str(situation.error), "type": "server_error", "param": None, "code": None}})
        elif situation.include_usage:
            usage = make_usage(num_prompt_tokens, sum(len(delta.token_ids) for delta in deltas))
            expected.append({**head, "choices": [], "usage": usage})
        _compare(said, [*expected, "[DONE]"], read_stream(said, situation.data))
        first = len(choices) - len(deltas)
        late = [number for number, seen in enumerate(situation.num_events[1:], start=1) if seen < first + number]
        expect(
            said,
            "deltas that the client did not get before the next was asked for",
            [],
            late,
            "when you yield: each event at once",
        )


def _check_early_ends(events_of: Any, kind: str) -> None:
    """An error that is none of the engine's comes out; and a client that hangs up gets no more events, and the deltas are closed."""
    head, error = {"id": kind, "object": kind, "created": 1, "model": "m"}, ValueError("a bug")
    broken = _Situation([Delta([1], None, "a")], error, head, 1, True)
    try:
        run("Deltas that raise a ValueError.", partial(broken.read, events_of))
    except ValueError as raised:
        got = repr(raised)
    else:
        got = "events, as if nothing had happened"
    look = "what you catch: an EngineDeadError is told to the client, any other error is a bug, and is raised"
    expect("Deltas that raise a ValueError.", "what comes out", repr(error), got, look)

    for num_events, name in ((1, "first"), (2, "second")):
        said = f"A client hangs up after the {name} event."
        got = run(said, partial(_hang_up, events_of, head, num_events))
        look = "async with aclosing(deltas), before the first `yield`, and what you catch: a closed generator may not yield"
        expect(said, "outcome", "no more events, and `deltas` is closed", got, look)


async def _hang_up(events_of: Any, head: dict[str, Any], num_events: int) -> str:
    deltas = Source([Delta([1]), Delta([2]), Delta([3], "stop")]).read()
    events = await iterate(events_of(deltas, head, 1, True))
    for _ in range(num_events):
        await anext(events)
    try:
        await events.aclose()
    except RuntimeError as raised:
        return f"RuntimeError: {raised}"
    is_closed = await anext(deltas, None) is None  # closed, or closed before it began
    return "no more events, and `deltas` is closed" if is_closed else "no more events, but `deltas` is left open"


def _compare(said: str, expected: list[Any], got: list[Any]) -> None:
    names = {
        "choices": "the choices of each event, and which events there are",
        "usage": "usage: one event before [DONE], if asked for, with no choices",
    }
    for name in ("id", "object", "created", "model"):
        names[name] = "head: its fields are in every event, and the same"
    for number, (right, mine) in enumerate(zip(expected, got, strict=False), start=1):
        if isinstance(right, dict) and isinstance(mine, dict):
            for name in dict.fromkeys([*right, *mine]):
                look = names.get(name, "what belongs into this event, and what an error's event is")
                expect(
                    said, f"{name!r} of event {number}", right.get(name, "no such field"), mine.get(name, "no such field"), look
                )
        else:
            expect(said, f"event {number}", right, mine, "the last events: usage, an error, and [DONE], once, at the end")
    expect(said, "number of events", len(expected), len(got), "which events there are, from the first to [DONE]")


def check_completion_events(completion_events: Any) -> None:
    """Deltas, usage, errors and [DONE], each in its place."""

    def make(deltas: list[Delta]) -> list[Any]:
        return [{"index": 0, "text": delta.text, "logprobs": None, "finish_reason": delta.finish_reason} for delta in deltas]

    _check_stream(completion_events, make, "text_completion")
    _check_early_ends(completion_events, "text_completion")


def check_chat_events(chat_events: Any) -> None:
    """The same for a chat: the role comes once."""

    def make(deltas: list[Delta]) -> list[Any]:
        parts = [({"role": "assistant", "content": ""}, None)] + [
            ({"content": delta.text}, delta.finish_reason) for delta in deltas
        ]
        return [{"index": 0, "delta": part, "logprobs": None, "finish_reason": reason} for part, reason in parts]

    _check_stream(chat_events, make, "chat.completion.chunk")
    _check_early_ends(chat_events, "chat.completion.chunk")
