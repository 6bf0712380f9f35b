"""The checks of lesson 11 for an asynchronous engine: streams, hang-ups, a limit and a death, over a core on a script."""

from __future__ import annotations

import asyncio
import random
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

from minivllm.course.lessons.assembly import CoreOutput
from minivllm.course.lessons.lesson_08.situations import Crowd
from minivllm.course.lessons.lesson_11.situations import (
    WatchedCore,
    becomes,
    expect_nothing_left,
    expected_answers,
    iterate,
    make_core,
    run,
    settle,
    started,
)
from minivllm.course.lessons.streaming import Frontend
from minivllm.course.observations import expect, fail, rounds, see, seeded
from minivllm.errors import EngineDeadError
from minivllm.request import EngineCoreRequest
from minivllm.sampling_params import SamplingParams

_WAYS = ("cancelled", "closed", "read to the end", "closed after its end has come")
Answer = tuple[list[int], str | None]


async def read(engine: Any, request: EngineCoreRequest, rng: random.Random | None = None, most: int = 10**6) -> Answer:
    """All tokens of an answer and why it ended, or of its first deltas; with an rng, by a slow reader."""
    tokens, reason, deltas = [], None, await iterate(engine.generate(request))
    async for delta in deltas:
        tokens += delta.token_ids
        reason, most = delta.finish_reason, most - 1
        if most == 0:
            break
        if rng is not None:
            await asyncio.sleep(rng.choice((0, 0, 0.001, 0.004)))
    await deltas.aclose()
    return tokens, reason


def check_generate(cls: Any) -> None:
    """A crowd of requests, slow readers and fast ones: the tokens of the package's engine, and one thread for the core."""
    for number, rng in enumerate(rounds("generate", 6)):
        crowd = Crowd(f"streams {number}")
        core, _, requests = make_core(crowd)
        said = f"{len(requests)} clients at once, some of them slow. {crowd.describe()}"
        answers, thread = run(said, partial(_answer_all, cls, core, requests, rng, said))
        expected = expected_answers(crowd)
        for request, answer in zip(requests, answers, strict=True):
            name = f"tokens and finish reason of {request.request_id}"
            look = "handle, which finds the stream of each output, and generate, which reads until there is a finish_reason"
            expect(said, name, list(expected[request.request_id]), list(answer), look)
        look = "who calls the core: core_loop does, and nobody else"
        expect(said, "threads that have used the core", 1, len(core.threads), look)
        expect(said, "that the event loop's thread has", False, thread in core.threads, "where core_loop runs")
        expect(
            said,
            "that handle ran in the event loop's thread alone",
            True,
            core.handled_in == {thread},
            "deliver: it only passes on",
        )
        look = "deliver: call_soon is for the event loop's own thread"
        expect(said, "that call_soon was called in the core's thread", False, core.misused, look)
    run("One client, and a core that takes a step when it is allowed to.", lambda: _watch(cls, seeded("watch")))


async def _answer_all(
    cls: Any, core: WatchedCore, requests: list[EngineCoreRequest], rng: random.Random, said: str
) -> tuple[list[Answer], int]:
    num_blocks = core.num_free_blocks
    async with started(cls, core) as engine:
        answers = await asyncio.gather(*[_late(engine, request, rng) for request in requests])
        await expect_nothing_left(f"{said} All have read to the end.", engine, core, num_blocks)
    return answers, threading.get_ident()


async def _late(engine: Any, request: EngineCoreRequest, rng: random.Random) -> Answer:
    await asyncio.sleep(rng.choice((0, 0, 0.002, 0.01)))
    return await read(engine, request, rng if rng.random() < 0.5 else None)


async def _watch(cls: Any, rng: random.Random) -> None:
    """Each token comes when it has been computed, the last to a late reader, too, and the stream is there before the core hears of it."""
    core, frontend, _ = make_core(Crowd("watch"), is_gated=True, ends=False)
    num_tokens = rng.randint(3, 6)
    request, _ = frontend.process("abcde", _params(num_tokens + 2))
    async with started(cls, core) as engine:
        inbox, early = engine.inbox, []

        def note(message: Any) -> None:
            early.append(not engine.streams)
            inbox.put(message)

        engine.inbox = SimpleNamespace(put=note, put_nowait=note)
        deltas = await iterate(engine.generate(request))
        sizes = [len((await _next(core, deltas)).token_ids) for _ in range(num_tokens)]
        engine.inbox = inbox
        core.allow()
        await becomes(lambda: not engine.streams)
        sizes += [len(delta.token_ids) async for delta in deltas]
    said = f"A request for {num_tokens + 2} tokens, of which the last two are read when both have come."
    look = "generate: it yields each delta when it comes, and the last also if its stream has left self.streams"
    expect(said, "tokens in each delta", [1] * num_tokens + [2], sizes, look)
    expect(said, "messages sent before there was a stream", False, any(early), "generate: first the stream, then the message")
    _hand_out_none(engine)


def _hand_out_none(engine: Any) -> None:
    """An output may have no token."""
    stream = engine.streams["by hand"] = _Noted()
    engine.handle([CoreOutput("by hand", None, "error")])
    expect(
        "An output without a token, of a request that has failed.",
        "what is put into its stream",
        [([], "error")],
        stream.puts,
        "handle: no token is an empty list",
    )


class _Noted:
    """A stream that notes what is put into it."""

    def __init__(self) -> None:
        self.puts: list[Any] = []

    def put(self, token_ids: list[int], finish_reason: str | None = None) -> None:
        """As of a stream."""
        self.puts.append((token_ids, finish_reason))


def check_hang_up(cls: Any) -> None:
    """Clients that leave in each of the ways there are; a limit; and two hundred streams with random hang-ups."""
    for number, rng in enumerate(rounds("hang up", 10)):
        way, num_deltas = _WAYS[number % len(_WAYS)], rng.randint(1, 5)
        if number == 0:
            num_deltas = 0  # before the first one
        run(
            "A core that takes a step when it is allowed to.",
            partial(_leave, cls, Crowd(f"hang up {number}"), rng, way, num_deltas),
        )
    run("As many requests as may be, and one more.", lambda: _exceed(cls, seeded("limit")))
    said = "Two hundred streams; about half of the clients hang up somewhere."
    run(said, lambda: _crowd(cls, said, seeded("two hundred")), seconds=30.0)


async def _leave(cls: Any, crowd: Crowd, rng: random.Random, way: str, num_deltas: int) -> None:
    core, frontend, _ = make_core(crowd, is_gated=True, ends=False)
    request, _ = frontend.process("".join(rng.choices("abcdefgh", k=5)), _params(40))
    num_blocks, has_ended = core.num_free_blocks, "end" in way
    said = f"A request for 40 tokens; after {num_deltas} deltas it is {way}."
    async with started(cls, core) as engine:
        deltas = await iterate(engine.generate(request))
        for _ in range(num_deltas):
            await _next(core, deltas)
        if has_ended:
            core.allow()
            await becomes(lambda: not engine.streams)
            expect(
                said,
                "requests that still have a stream",
                [],
                sorted(engine.streams),
                "handle: who has finished leaves self.streams",
            )
        await _end_reading(said, way, deltas)
        core.allow()
        aborted = ([] if has_ended else [request.request_id]) + ["the last message"]
        engine.inbox.put(("abort", "the last message"))
        await becomes(lambda: "the last message" in core.aborted)
        look = "when an abort is sent: if the request has not finished, however generate ends, and only then"
        expect(said, "requests that the core was told to abort", aborted, core.aborted, look)
        await expect_nothing_left(said, engine, core, num_blocks)


async def _end_reading(said: str, way: str, deltas: Any) -> None:
    if way == "read to the end":
        await _drain(deltas)
    elif way == "cancelled":
        waiting = asyncio.ensure_future(_drain(deltas))
        await settle()
        waiting.cancel()
        [outcome] = await asyncio.gather(waiting, return_exceptions=True)
        look = "what you catch: a CancelledError must come out of generate"
        expect(said, "that the task was cancelled", True, isinstance(outcome, asyncio.CancelledError), look)
    else:
        await deltas.aclose()


async def _next(core: WatchedCore, deltas: Any) -> Any:
    """The next delta, with as many steps as it takes."""
    coming = asyncio.ensure_future(anext(deltas))
    while not coming.done():
        if core.is_waiting:
            core.allow(1)
        await asyncio.sleep(0.002)
    try:
        return await coming
    except StopAsyncIteration:
        fail(
            "A request that is not over, read delta by delta.\nExpected: another delta\nGot: an end\nLook at when generate returns."
        )


async def _drain(deltas: Any) -> None:
    async for _ in deltas:
        pass


async def _exceed(cls: Any, rng: random.Random) -> None:
    core, _, requests = make_core(Crowd("limit"), is_gated=True, ends=False)
    limit = rng.randint(2, 5)
    said = f"max_requests={limit}, and {limit} streams."
    async with started(cls, core, max_requests=limit) as engine:
        streams = [await iterate(engine.generate(request)) for request in requests[:limit]]
        waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await becomes(lambda: core.is_waiting)  # the core has taken all messages
        expect(said, "requests with a stream", limit, len(engine.streams), "generate: up to max_requests may come in")
        got = await _kind(asyncio.wait_for(anext(engine.generate(requests[limit])), 0.2))
        expect(said, "what one more gets", "TooManyRequestsError", got, "generate: the limit stands before everything else")
        core.allow()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
        await becomes(lambda: core.is_idle)
        look = "generate: refuse before you queue"
        expect(said, "whether the core has heard of it", False, requests[limit].request_id in core.added, look)
        tokens, _ = await read(engine, requests[limit + 1])
        said = f"{said} They leave, and another comes."
        expect(said, "that it gets tokens", True, bool(tokens), "who counts: only unfinished requests")


async def _kind(work: Any) -> str:
    """The name of the error that some work raises."""
    try:
        await work
    except Exception as error:
        return "it waits" if isinstance(error, (TimeoutError, asyncio.TimeoutError)) else type(error).__name__
    return "no error"


async def _crowd(cls: Any, said: str, rng: random.Random) -> None:
    core, frontend, _ = make_core(Crowd("two hundred"), ends=False)
    num_blocks = core.num_free_blocks
    async with started(cls, core) as engine:
        num_wrong = sum(await asyncio.gather(*[_visit(engine, frontend, rng) for _ in range(200)]))
        expect(said, "answers that have ended with the wrong number of tokens", 0, num_wrong, "tokens lost, or given twice")
        await expect_nothing_left(said, engine, core, num_blocks)


async def _visit(engine: Any, frontend: Frontend, rng: random.Random) -> bool:
    """Read an answer, or some of it. Returns whether it ended with the wrong number of tokens."""
    await asyncio.sleep(rng.random() / 10)
    prompt, params = "".join(rng.choices("abcdefgh", k=rng.randint(1, 9))), _params(rng.randint(1, 12))
    request, _ = frontend.process(prompt, params)
    most, is_cancelled = rng.choice((1, 2, 3, 10**6)), rng.random() < 0.3
    reading = asyncio.ensure_future(read(engine, request, None, most))
    if is_cancelled:
        await asyncio.sleep(rng.random() / 20)
        reading.cancel()
    [result] = await asyncio.gather(reading, return_exceptions=True)
    if isinstance(result, asyncio.CancelledError):
        return False
    if isinstance(result, BaseException):
        raise result
    tokens, reason = result
    return reason is not None and len(tokens) != params.max_tokens


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, seed=1, ignore_eos=True)


def check_death(cls: Any) -> None:
    """All who wait for a core that dies hear of it, at once; and so do those who come later, or wait at a shutdown."""
    run("engine.end(error), with no client.", lambda: _end(cls))
    for number, rng in enumerate(rounds("death", 6)):
        step = rng.randint(1, 4)
        see(step)
        said = f"A core that raises an error in step {step}, with {2 + number} clients."
        run(said, lambda said=said, step=step, number=number: _die(cls, Crowd(f"death {number}"), said, step, 2 + number))
    for num_clients in (2, 0):
        said = f"A shutdown while {num_clients} clients wait."
        run(said, lambda said=said, num_clients=num_clients: _shut_down(cls, said, num_clients))


async def _outcome(work: Any) -> str:
    try:
        await work
    except EngineDeadError as error:
        return f"EngineDeadError: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "an answer"


async def _end(cls: Any) -> None:
    core, _, _ = make_core(Crowd("end"))
    async with started(cls, core) as engine:
        error = EngineDeadError("over")
        engine.end(error)
        expect(
            "engine.end(error), with no client.",
            "engine.dead is the error",
            True,
            engine.dead is error,
            "end: it keeps the error",
        )


async def _die(cls: Any, crowd: Crowd, said: str, step: int, num_clients: int) -> None:
    core, frontend, _ = make_core(crowd, fails_at=step, is_gated=True, ends=False)
    requests = [frontend.process("abcde", _params(20))[0] for _ in range(num_clients + 1)]
    async with started(cls, core) as engine:
        reading = [asyncio.ensure_future(_outcome(read(engine, request))) for request in requests[1:]]
        await becomes(lambda: len(engine.streams) == num_clients or all(task.done() for task in reading))
        core.allow()
        for outcome in await asyncio.gather(*reading):
            if not (outcome.startswith("EngineDeadError") and f"out of memory in step {step}" in outcome):
                expected = f"an EngineDeadError with the text 'out of memory in step {step}'"
                look = "handle, which ends all streams, and what they fail with"
                fail(f"{said}\nExpected in generate: {expected}\nGot: {outcome}\nLook at {look}.")
        expect(said, "requests that still have a stream", [], sorted(engine.streams), "end: no stream is left")
        is_dead = isinstance(engine.dead, EngineDeadError)
        expect(said, "that engine.dead is an EngineDeadError", True, is_dead, "end: it keeps the error")
        later = await _outcome(read(engine, requests[0]))
        expect(said, "that one who comes later hears of it", True, later.startswith("EngineDeadError"), "self.dead")
        look = "end: streams are taken out, so no abort is sent for them"
        expect(said, "aborts that were sent to a thread that has ended", [], _aborts(engine.inbox), look)


def _aborts(inbox: Any) -> list[Any]:
    """The requests whose abort nobody has read."""
    messages = []
    while not inbox.empty():
        messages.append(inbox.get())
    return [message[1] for message in messages if message is not None and message[0] == "abort"]


async def _shut_down(cls: Any, said: str, num_clients: int) -> None:
    core, _, requests = make_core(Crowd("shutdown"), is_gated=True, ends=False)
    async with started(cls, core) as engine:
        reading = [asyncio.ensure_future(_outcome(read(engine, request))) for request in requests[:num_clients]]
        await settle()
        threading.Timer(0.05, core.allow).start()
        engine.shutdown()
        look = "shutdown: the one of the class above ends the thread"
        expect(said, "that the core's thread has ended", True, not engine.thread.is_alive(), look)
        reading.append(asyncio.ensure_future(_outcome(read(engine, requests[-1]))))
        outcomes = [outcome.split(":")[0] for outcome in await asyncio.gather(*reading)]
        look = "shutdown: nobody waits for an engine that is gone, nor comes later"
        expect(said, "what they get, and one who comes later", ["EngineDeadError"] * (num_clients + 1), outcomes, look)
        expect(said, "requests that still have a stream", [], sorted(engine.streams), "end: no stream is left")
