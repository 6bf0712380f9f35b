"""The checks of lesson 11 for an asynchronous engine: streams, hang-ups, a limit and a death, over a core on a script."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

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
)
from minivllm.course.lessons.streaming import TooManyRequestsError
from minivllm.course.observations import expect, fail, rounds, seeded
from minivllm.errors import EngineDeadError
from minivllm.request import EngineCoreRequest
from minivllm.sampling_params import SamplingParams

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
        threads: list[int] = []

        async def work(
            core: Any = core, requests: Any = requests, rng: Any = rng, said: str = said, threads: Any = threads
        ) -> list[Answer]:
            threads.append(threading.get_ident())
            engine, num_blocks = cls(core), core.num_free_blocks
            answers = await asyncio.gather(*[_late(engine, request, rng) for request in requests])
            await expect_nothing_left(f"{said} All have read to the end.", engine, core, num_blocks)
            engine.shutdown()
            return answers

        answers, expected = run(said, work), expected_answers(crowd)
        for request, answer in zip(requests, answers, strict=True):
            name = f"tokens and finish reason of {request.request_id}"
            look = "handle, which finds the stream of each output, and generate, which reads until there is a finish_reason"
            expect(said, name, list(expected[request.request_id]), list(answer), look)
        expect(
            said, "threads that have used the core", 1, len(core.threads), "who calls the core: core_loop does, and nobody else"
        )
        expect(said, "that the event loop's thread has", False, threads[0] in core.threads, "where core_loop runs")


async def _late(engine: Any, request: EngineCoreRequest, rng: random.Random) -> Answer:
    await asyncio.sleep(rng.choice((0, 0, 0.002, 0.01)))
    return await read(engine, request, rng if rng.random() < 0.5 else None)


def check_hang_up(cls: Any) -> None:
    """Clients that leave in each of the ways there are; a limit; and two hundred streams with random hang-ups."""
    for number, rng in enumerate(rounds("hang up", 8)):
        said = "A core that takes a step when it is allowed to."
        run(said, lambda rng=rng, number=number: _leave(cls, Crowd(f"hang up {number}"), rng))
    run("As many requests as may be, and one more.", lambda: _exceed(cls, seeded("limit")))
    said = "Two hundred streams; about half of the clients hang up somewhere."
    run(said, lambda: _crowd(cls, said, seeded("two hundred")), seconds=30.0)


async def _leave(cls: Any, crowd: Crowd, rng: random.Random) -> None:
    core, frontend, _ = make_core(crowd, is_gated=True, ends=False)
    request, _ = frontend.process("".join(rng.choices("abcdefgh", k=5)), _params(40))
    engine, num_blocks = cls(core), core.num_free_blocks
    way = rng.choice(("closed", "cancelled", "read to the end", "closed after its end has come"))
    num_deltas, has_ended = rng.randint(1, 5), "end" in way
    deltas = await iterate(engine.generate(request))
    said = f"A request for 40 tokens; after {num_deltas} deltas it is {way}."
    for _ in range(num_deltas):
        await _next(core, deltas)
    if has_ended:
        core.allow()
        await becomes(lambda: not engine.streams)
        expect(
            said, "requests that still have a stream", [], sorted(engine.streams), "handle: who has finished leaves self.streams"
        )
    if way == "read to the end":
        await _drain(deltas)
    elif way == "cancelled":
        waiting = asyncio.ensure_future(_drain(deltas))
        await settle()
        waiting.cancel()
        [outcome] = await asyncio.gather(waiting, return_exceptions=True)
        look = "what you catch: a CancelledError must come out of generate"
        expect(said, "that the task was cancelled", True, isinstance(outcome, asyncio.CancelledError), look)
    await deltas.aclose()
    core.allow()
    aborted = ([] if has_ended else [request.request_id]) + ["the last message"]
    engine.inbox.put(("abort", "the last message"))
    await becomes(lambda: "the last message" in core.aborted)
    look = "when an abort is sent: if the request has not finished, however generate ends, and only then"
    expect(said, "requests that the core was told to abort", aborted, core.aborted, look)
    await expect_nothing_left(said, engine, core, num_blocks)
    engine.shutdown()


async def _next(core: WatchedCore, deltas: Any) -> None:
    """The next delta, with as many steps as it takes."""
    coming = asyncio.ensure_future(anext(deltas))
    while not coming.done():
        core.allow(1)
        await asyncio.sleep(0.002)
    await coming


async def _drain(deltas: Any) -> None:
    async for _ in deltas:
        pass


async def _exceed(cls: Any, rng: random.Random) -> None:
    core, _, requests = make_core(Crowd("limit"), is_gated=True, ends=False)
    limit = rng.randint(2, 5)
    engine, said = cls(core, max_requests=limit), f"max_requests={limit}, and {limit} streams."
    streams = [await iterate(engine.generate(request)) for request in requests[:limit]]
    waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
    await settle()
    expect(said, "requests with a stream", limit, len(engine.streams), "generate: up to max_requests may come in")
    try:
        await asyncio.wait_for(anext(engine.generate(requests[limit])), 0.2)
        got = "it came in"
    except TooManyRequestsError:
        got = "TooManyRequestsError"
    except (asyncio.TimeoutError, TimeoutError):
        got = "it waits"
    expect(said, "what one more gets", "TooManyRequestsError", got, "generate: the limit stands before everything else")
    core.allow()
    await asyncio.gather(*waiting, return_exceptions=True)
    for stream in streams:
        await stream.aclose()
    await becomes(lambda: core.is_idle)
    expect(
        said,
        "whether the core has heard of it",
        False,
        requests[limit].request_id in core.added,
        "generate: refuse before you queue",
    )
    tokens, _ = await read(engine, requests[limit + 1])
    expect(
        f"{said} They leave, and another comes.",
        "that it gets tokens",
        True,
        bool(tokens),
        "who counts: only unfinished requests",
    )
    engine.shutdown()


async def _crowd(cls: Any, said: str, rng: random.Random) -> None:
    core, frontend, _ = make_core(Crowd("two hundred"), ends=False)
    engine, num_blocks = cls(core), core.num_free_blocks

    async def visit() -> int:
        await asyncio.sleep(rng.random() / 10)
        prompt, params = "".join(rng.choices("abcdefgh", k=rng.randint(1, 9))), _params(rng.randint(1, 12))
        request, _ = frontend.process(prompt, params)
        most, is_cancelled = rng.choice((1, 2, 3, 10**6)), rng.random() < 0.3
        reading = asyncio.ensure_future(read(engine, request, None, most))
        if is_cancelled:
            await asyncio.sleep(rng.random() / 20)
            reading.cancel()
        [result] = await asyncio.gather(reading, return_exceptions=True)
        if isinstance(result, BaseException):
            if not isinstance(result, asyncio.CancelledError):
                raise result
            return 0
        tokens, reason = result
        return 0 if reason is None or len(tokens) == params.max_tokens else 1

    num_wrong = sum(await asyncio.gather(*[visit() for _ in range(200)]))
    expect(said, "answers that have ended with the wrong number of tokens", 0, num_wrong, "tokens lost, or given twice")
    await expect_nothing_left(said, engine, core, num_blocks)
    engine.shutdown()


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, seed=1, ignore_eos=True)


def check_death(cls: Any) -> None:
    """All who wait for a core that dies hear of it, at once; and so do those who come later, or wait at a shutdown."""
    run("engine.end(error), with no client.", lambda: _end(cls))
    for number, rng in enumerate(rounds("death", 6)):
        step = rng.randint(1, 4)
        said = f"A core that raises an error in step {step}, with {2 + number} clients."
        run(said, lambda said=said, step=step, number=number: _die(cls, Crowd(f"death {number}"), said, step, 2 + number))
    said = "A shutdown while two clients wait."
    run(said, lambda: _shut_down(cls, said))


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
    engine, error = cls(core), EngineDeadError("over")
    engine.end(error)
    expect(
        "engine.end(error), with no client.", "engine.dead is the error", True, engine.dead is error, "end: it keeps the error"
    )
    engine.shutdown()


async def _die(cls: Any, crowd: Crowd, said: str, step: int, num_clients: int) -> None:
    core, _, requests = make_core(crowd, fails_at=step, ends=False)
    long = [request for request in requests if request.sampling_params.max_tokens > 4] or requests
    long = [*long, *[request for request in requests if request not in long]][:num_clients]
    engine = cls(core)
    outcomes = await asyncio.gather(*[_outcome(read(engine, request)) for request in long])
    heard = [outcome for outcome in outcomes if outcome != "an answer"]
    for outcome in heard:
        is_right = outcome.startswith("EngineDeadError") and f"out of memory in step {step}" in outcome
        if not is_right:
            fail(
                f"{said}\nExpected in generate: an EngineDeadError with the text 'out of memory in step {step}'\nGot: {outcome}\nLook at handle, and at what the streams fail with."
            )
    expect(said, "clients that hear of it, at least one", True, bool(heard), "handle: it fails all streams")
    expect(said, "requests that still have a stream", [], sorted(engine.streams), "end: no stream is left")
    expect(
        said, "that engine.dead is an EngineDeadError", True, isinstance(engine.dead, EngineDeadError), "end: it keeps the error"
    )
    later = await _outcome(read(engine, requests[-1]))
    expect(said, "that one who comes later hears of it", True, later.startswith("EngineDeadError"), "self.dead")
    look = "end: streams are taken out, so no abort is sent for them"
    expect(said, "that messages were sent to a thread that has ended", False, not engine.inbox.empty(), look)
    engine.shutdown()


async def _shut_down(cls: Any, said: str) -> None:
    core, _, requests = make_core(Crowd("shutdown"), is_gated=True, ends=False)
    engine = cls(core)
    reading = [asyncio.ensure_future(_outcome(read(engine, request))) for request in requests[:2]]
    await settle()
    threading.Timer(0.05, core.allow).start()
    engine.shutdown()
    expect(
        said,
        "that the core's thread has ended",
        False,
        engine.thread.is_alive(),
        "shutdown: the one of the class above ends the thread",
    )
    outcomes = [outcome.split(":")[0] for outcome in await asyncio.gather(*reading)]
    expect(said, "what they get", ["EngineDeadError"] * 2, outcomes, "shutdown: nobody waits for an engine that is gone")
    expect(said, "requests that still have a stream", [], sorted(engine.streams), "end: no stream is left")
