"""The checks of lesson 08 for the frontend: requests with text go in, text comes out, and nothing is left behind."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

from minivllm.course.lessons.assembly import refused
from minivllm.course.lessons.lesson_08.core import PackageCore
from minivllm.course.lessons.lesson_08.situations import Crowd, Letters, expect_list, quiet
from minivllm.course.observations import expect, fail, require, rounds, seeded
from minivllm.engine.detokenizer import IncrementalDetokenizer
from minivllm.engine.llm_engine import LLMEngine
from minivllm.errors import RequestError
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import SamplingParams

_PARAMS = SamplingParams(temperature=0, max_tokens=9, seed=1)
_LOOKS = {
    "outputs": "`take`: which tokens become text (not the one that ends it), what a stop string changes, and `finish` at the end; and the order of the outputs: that of the core",
    "unfinished requests": "`step`: a request that has a finish_reason is no longer among self.states",
    "requests in the core": "`step`: a stop string is found in the text, so the core does not know of it: abort the request there",
}


def make_engine(cls: Any, crowd: Crowd, **options: Any) -> Any:
    """A learner's engine on one of the package's cores."""
    engine = crowd.make_engine(**options)
    return cls(PackageCore(engine.core), engine.input_processor, Letters(), IncrementalDetokenizer)


def _refuse(engine: Any, said: str, request_id: str, prompt: str) -> None:
    try:
        engine.add_request(request_id, prompt, _PARAMS)
    except RequestError:
        return
    look = "add_request: what process_inputs raises must propagate, and ids must be unique"
    fail(f"{said}\nExpected: a RequestError\nGot: nothing was raised\nLook at {look}.")


def _compare_requests(said: str, engine: Any, **prompts: str) -> None:
    """The requests in an engine and in its core should be these, with these prompts."""
    expected = {name: f"a RequestState of {prompt!r}" for name, prompt in prompts.items()}
    got = {name: f"a {type(state).__name__} of {_prompt_of(state)!r}" for name, state in engine.states.items()}
    expect(said, "unfinished requests", expected, got, "what is kept in self.states, and when: ask before anything is changed")
    in_core = {name: Letters().decode(request.prompt_token_ids) for name, request in engine.core.scheduler.requests.items()}
    look = "what the core is told (core_request), and when: process, check, and only then tell the core; a refused request never gets there"
    expect(said, "requests in the core", prompts, in_core, look)


def _prompt_of(state: Any) -> Any:
    return Letters().decode(state.core_request.prompt_token_ids) if hasattr(state, "core_request") else None


def check_entrance(cls: Any) -> None:
    """A request is checked before anything is done for it; a request that leaves is forgotten, here and in the core."""
    engine, text = make_engine(cls, Crowd("the entrance"), ends=False), "".join(seeded("entrance").sample("abcdefghijklm", 5))
    engine.add_request("first", text, _PARAMS)
    _compare_requests("One request was added.", engine, first=text)
    _refuse(engine, "A prompt without any token.", "second", "")
    _compare_requests("A prompt without any token was refused.", engine, first=text)
    _refuse(engine, "A second request with the id of an unfinished one.", "first", "xyz")
    _compare_requests("A request with an id in use was refused.", engine, first=text)
    engine.add_request("third", "ab", _PARAMS)
    engine.core.step()
    _compare_requests("Two requests, after one step.", engine, first=text, third="ab")
    engine.abort_request("first")
    _compare_requests("abort_request('first') during its answer.", engine, third="ab")
    engine.abort_request("first")
    engine.abort_request("nobody")
    _compare_requests("abort_request with ids that are no longer there, or never were.", engine, third="ab")
    engine.add_request("first", "q", _PARAMS)
    _compare_requests("An id that is free again is used again.", engine, first="q", third="ab")


def observe(outputs: list[RequestOutput]) -> list[Any]:
    """Outputs in comparable form."""
    return [
        (output.request_id, [(item.text, list(item.token_ids), item.finish_reason) for item in output.outputs], output.finished, bool(output.error))
        for output in outputs
    ]  # fmt: skip


def _run(engine: Any, crowd: Crowd, rng: random.Random) -> Iterator[list[Any]]:
    """Add the crowd's requests, and abort some; gives the outputs of each step."""

    def add(*request: Any) -> None:
        engine.add_request(*request)
        if rng.random() < 0.2:
            engine.abort_request(f"r{rng.randrange(len(crowd.requests))}")

    return map(observe, crowd.run(add, engine.step, engine.has_unfinished_requests))


@quiet
def check_take(cls: Any) -> None:
    """Tokens become text, up to the stop string; finished requests are forgotten, here and in the core."""
    for seed in range(25):
        crowd, fails_at = Crowd(f"take {seed}", stop_strings=True), {4} if seed % 3 == 0 else frozenset()
        stops = {name: params.stop for name, _, params in crowd.requests if params.stop}
        theirs, mine = crowd.make_engine(fails_at=fails_at), make_engine(cls, crowd, fails_at=fails_at)
        steps = _run(mine, crowd, seeded(f"abort {seed}"))
        for number, expected in enumerate(_run(theirs, crowd, seeded(f"abort {seed}")), 1):
            said = f"{crowd.describe()} Stop strings: {stops or 'none'}. Step {number}. Outputs are (request_id, [(text, token_ids, finish_reason)], finished, whether there is an error)."
            expect(said, "outputs", expected, next(steps, None), _LOOKS["outputs"])
            unfinished = sorted(theirs.output_processor.states)
            expect(said, "unfinished requests", unfinished, sorted(mine.states), _LOOKS["unfinished requests"])
            in_core, mine_in_core = (sorted(engine.core.scheduler.requests) for engine in (theirs, mine))
            expect(said, "requests in the core", in_core, mine_in_core, _LOOKS["requests in the core"])


class _Watched:
    """The package's engine. Records its calls, and raises an error in one of them, such as the third step."""

    def __init__(self, engine: LLMEngine, call: str = "", error: type[BaseException] = KeyboardInterrupt) -> None:
        self.engine, self.call, self.error = engine, call, error
        self.abort_request, self.has_unfinished_requests = engine.abort_request, engine.has_unfinished_requests
        self.counts: Counter[str] = Counter()
        self.added: list[str] = []
        self.late: list[str] = []
        """Requests that were added after the first step."""

    def _count(self, name: str) -> None:
        self.counts[name] += 1
        if f"{name} {self.counts[name]}" == self.call:
            raise self.error

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams) -> None:
        self._count("add_request")
        self.engine.add_request(request_id, prompt, params)
        self.added.append(request_id)
        if self.counts["step"]:
            self.late.append(request_id)

    def step(self) -> list[RequestOutput]:
        self._count("step")
        if self.counts["step"] == 3000:
            fail("generate takes step after step and never ends: continue only while has_unfinished_requests().")
        return self.engine.step()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"generate needs only add_request, abort_request, has_unfinished_requests and step, not {name}")


def make_prompts(rng: random.Random) -> list[Any]:
    """Prompts, some of which cannot be served."""
    good = ["".join(rng.choices("abc de", k=rng.randint(1, 20))) for _ in range(rng.randint(1, 9))]
    return [rng.choice(("", [1_000_000], "x" * 70)) if rng.random() < 0.25 else prompt for prompt in good]


def make_params(count: int) -> list[SamplingParams]:
    """For each prompt its own: answers of different lengths."""
    return [SamplingParams(temperature=0, max_tokens=(14, 2, 7, 12, 4)[i % 5], seed=3) for i in range(count)]


_GENERATE = {
    "the outputs' errors": "the ids (strings, one for each request), and `refused`, in the place of a prompt that raised a RequestError: one output for each prompt",
    "the prompts of the outputs": "the order: that of the prompts, not the one in which they finish",
    "finished": "which output is kept: the last one of each request",
    "the numbers of new tokens": "params: each prompt has its own entry",
    "requests added after the first step": "when the steps begin: after all prompts were added, so that they share their steps",
    "places of the outputs' request_ids among those added": "which outputs are those of this call",
}
_INTERRUPT = {
    "raised": "`except BaseException`, which begins before the first request is added, and `raise`, after the requests are aborted",
    "left": "what happens at a BaseException: abort the requests of this call, and only those",
}


def generate(engine: _Watched, prompts: list[Any], params: list[SamplingParams]) -> list[RequestOutput]:
    """What `generate` should do, if nobody interrupts it."""
    outputs = {}
    for number, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        try:
            engine.add_request(f"{number}", prompt, param)
        except RequestError as error:
            outputs[f"{number}"] = refused(f"{number}", error)
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    return [outputs[f"{number}"] for number in range(len(prompts))]


def observe_call(engine: _Watched, outputs: list[RequestOutput]) -> dict[str, Any]:
    """A call of `generate` in comparable form."""
    ids = [output.request_id for output in outputs if output.error is None]
    places = [engine.added.index(name) if name in engine.added else name for name in ids]
    return {
        "the outputs' errors": [output.error for output in outputs],
        "the prompts of the outputs": [output.prompt_token_ids for output in outputs],
        "finished": [output.finished for output in outputs],
        "the numbers of new tokens": [[len(item.token_ids) for item in output.outputs] for output in outputs],
        "requests added after the first step": engine.late,
        "places of the outputs' request_ids among those added": places,
    }


def check_generate(cls: Any) -> None:
    """One output for each prompt, in their order; a prompt that cannot be served does not affect the others; Ctrl-C leaves nothing behind."""
    for seed, rng in enumerate(rounds("generate", 15)):
        crowd, prompts = Crowd(f"generate {seed}"), make_prompts(rng)
        said, params = f"generate({prompts!r}, params)", make_params(len(prompts))
        theirs, mine = (_Watched(crowd.make_engine(ends=False)) for _ in range(2))
        if seed % 3 == 0:
            mine.engine.add_request("somebody else's", "abc", params[0])
            said += ", while the engine also has another caller's request"
        llm = cls(mine)
        outputs = llm.generate(prompts, params)
        expect_list(said, RequestOutput, outputs)
        expected, got = observe_call(theirs, generate(theirs, prompts, params)), observe_call(mine, outputs)
        for name, look in _GENERATE.items():
            expect(said, name, expected[name], got[name], look)
        require(False, mine.has_unfinished_requests(), f"{said}\nRequests were left in the engine.")
        llm.generate(["abc", "de"], make_params(2))
        again = "generate was called twice, and an id was reused: keep counting with self.numbers."
        require(len(mine.added), len(set(mine.added)), again)
    _check_interrupt(cls)


def _check_interrupt(cls: Any) -> None:
    cases: tuple[tuple[str, str, type[BaseException]], ...] = (
        ("in the third step", "step 3", KeyboardInterrupt),
        ("while the second request is added", "add_request 2", KeyboardInterrupt),
        ("(here a ValueError) while the second request is added", "add_request 2", ValueError),
    )
    for when, call, error in cases:
        engine = Crowd("generate and interrupt").make_engine(ends=False)
        engine.add_request("not of this call", "abcdef", make_params(1)[0])
        said = f"Ctrl-C {when} of generate(['abc', 'de', 'f'], params), and the engine also has another caller's request."
        got = "nothing was raised"
        try:
            cls(_Watched(engine, call, error)).generate(["abc", "de", "f"], make_params(3))
        except BaseException as raised:
            got = f"a {type(raised).__name__}" if type(raised) is error else repr(raised)
        expect(said, "what generate raises", f"a {error.__name__}", got, _INTERRUPT["raised"])
        left = sorted(engine.output_processor.states)
        expect(said, "requests left in the engine", ["not of this call"], left, _INTERRUPT["left"])
