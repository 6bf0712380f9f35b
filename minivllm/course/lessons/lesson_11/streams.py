"""The check of lesson 11 for what one client has not read yet."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from minivllm.course.lessons.lesson_11.situations import run, settle
from minivllm.course.lessons.streaming import Delta
from minivllm.course.observations import expect, fail, rounds
from minivllm.errors import EngineDeadError

_TAKEN = "get: it takes all that is there, and leaves a new empty list"
_WAKING = "put, which sets the event, and get, which clears it only after the wait"
_SECONDS = 1.0
"""How long `get` may take when there is news."""


def check_stream(cls: Any) -> None:
    """All that was put is got, once and in order; get waits for news, and for nothing else; after a failure it raises."""
    for rng in rounds("stream", 40):
        run("A MyStream in use.", lambda rng=rng: _use(cls(), rng))
    for rng in rounds("failure", 6):
        run("A MyStream that fails.", lambda rng=rng: _let_fail(cls(), rng))


async def _use(stream: Any, rng: random.Random) -> None:
    story, pending, kept = [], [], []
    for number in range(rng.randint(2, 9)):
        is_last = number == 8 or rng.random() < 0.15
        tokens = [rng.randrange(1000) for _ in range(rng.randint(0 if is_last else 1, 4))]
        reason = rng.choice(("stop", "length")) if is_last else None
        waiter = None
        if not pending and (is_last or rng.random() < 0.5):
            story.append("get()")
            waiter = await _get_early(stream, story, is_first=not kept)
        given = list(tokens)
        stream.put(given, reason) if is_last else stream.put(given)
        given.append(-1)  # the caller's list is the caller's
        pending += tokens
        story.append(f"put({tokens}, {reason!r})" if is_last else f"put({tokens})")
        if waiter is None and not is_last and rng.random() < 0.5:
            continue
        story += [] if waiter else ["get()"]
        delta = await _get(waiter or stream.get(), story)
        kept.append((list(pending), reason, delta))
        _compare(story, pending, reason, delta)
        pending = []
        if is_last:
            break
    for tokens, reason, delta in kept:
        _compare([*story, "and a look at a delta that get returned before"], tokens, reason, delta)


async def _get_early(stream: Any, story: list[str], is_first: bool) -> asyncio.Task[Any]:
    """A call of get that waits."""
    waiter = asyncio.create_task(stream.get())
    await settle()
    if waiter.done():
        await waiter
    waits, cleared = "get: first it waits (`await`) until there is news", ", and what it has returned is no news any more (clear)"
    look = waits if is_first else waits + cleared
    expect(_tell(story), "that get has returned before anything came", False, waiter.done(), look)
    return waiter


async def _get(getting: Any, story: list[str]) -> Any:
    try:
        return await asyncio.wait_for(getting, _SECONDS)
    except asyncio.TimeoutError:
        fail(f"{_tell(story)}\nExpected: a Delta\nGot: nothing, get still waits\nLook at {_WAKING}.")


def _tell(story: list[str]) -> str:
    return f"On a new MyStream: {', '.join(story)}."


def _compare(story: list[str], tokens: list[int], reason: str | None, delta: Any) -> None:
    if not isinstance(delta, Delta):
        fail(f"{_tell(story)}\nExpected: a Delta\nGot: {delta!r:.200}\nLook at what get returns.")
    expect(_tell(story), "delta.token_ids", tokens, delta.token_ids, _TAKEN)
    expect(_tell(story), "delta.finish_reason", reason, delta.finish_reason, "put and get: the reason comes with the last tokens")


async def _let_fail(stream: Any, rng: random.Random) -> None:
    story, error = [], EngineDeadError(f"gone {rng.randrange(100)}")
    if rng.random() < 0.5:
        stream.put([1, 2])
        story += ["put([1, 2])", "get()"]
        await stream.get()
    waiters = [asyncio.create_task(stream.get())] if rng.random() < 0.5 else []
    await settle()
    stream.fail(error)
    story += [*["get()" for _ in waiters], f"fail({error!r})", "get()", "get()"]
    for waiter in [*waiters, stream.get(), stream.get()]:
        try:
            got = repr(await asyncio.wait_for(waiter, _SECONDS))
        except asyncio.TimeoutError:
            got = "nothing, it waits"
        except Exception as raised:
            got = repr(raised)
        expect(
            _tell(story),
            "what get does after fail",
            repr(error),
            got,
            "fail, which wakes get, and get, which raises the error each time",
        )
