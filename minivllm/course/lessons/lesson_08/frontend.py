"""The checks of lesson 08 for the frontend: requests with text go in, text comes out, and nothing is left behind."""

from __future__ import annotations

import random
from typing import Any

from minivllm.course.lessons.assembly import CoreOutput
from minivllm.course.lessons.lesson_08.core import as_core_outputs
from minivllm.course.lessons.lesson_08.situations import Crowd, Letters, Script, quiet
from minivllm.course.observations import expect, fail, require, rounds, seeded, show
from minivllm.engine.detokenizer import IncrementalDetokenizer
from minivllm.engine.engine_core import EngineCore
from minivllm.engine.llm_engine import LLMEngine
from minivllm.errors import RequestError
from minivllm.outputs import RequestOutput
from minivllm.request import EngineCoreRequest, Request
from minivllm.sampling_params import SamplingParams

_LOOKS = {
    "outputs": "`take`: which tokens become text (not the one that ends it), what a stop string changes, and `finish` at the end; and the order of the outputs: that of the core",
    "unfinished requests": "`step`: a request that has a finish_reason is no longer among self.states",
    "requests in the core": "`step`: a stop string is found in the text, so the core does not know of it: abort the request there",
}


class PackageCore:
    """The package's core with the methods of this lesson's."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core

    def add_request(self, request: EngineCoreRequest) -> None:
        """As `MyEngineCore.add_request`, which does not ask whether the id is in use."""
        self.core.scheduler.add_request(Request(request))

    def abort_request(self, request_id: str) -> None:
        """As `MyEngineCore.abort_request`."""
        self.core.abort_requests([request_id])

    def step(self) -> list[CoreOutput]:
        """As `MyEngineCore.step`."""
        return as_core_outputs(self.core.step().outputs)


def make_engine(cls: Any, crowd: Crowd, fails_at: frozenset[int] = frozenset(), ends: bool = True) -> tuple[Any, EngineCore]:
    """A learner's engine on one of the package's cores, and that core."""
    engine = crowd.make_engine(Script(crowd.seed, fails_at, ends=ends))
    return cls(PackageCore(engine.core), engine.input_processor, Letters(), IncrementalDetokenizer), engine.core


def output_facts(outputs: Any) -> list[Any]:
    """Outputs in comparable form."""
    observations = []
    for output in outputs:
        answers = [(item.text, list(item.token_ids), item.finish_reason) for item in output.outputs]
        observations.append((output.request_id, answers, output.finished, bool(output.error)))
    return observations


def _run(engine: Any, crowd: Crowd, rng: random.Random) -> Any:
    """Add the crowd's requests, and abort some; yields the outputs of each step."""
    for request, wait in zip(crowd.requests, crowd.joins, strict=True):
        for _ in range(wait):
            yield output_facts(engine.step())
        engine.add_request(*request)
        if rng.random() < 0.2:
            engine.abort_request(f"r{rng.randrange(len(crowd.requests))}")
    for _ in range(600):
        if not engine.has_unfinished_requests():
            break
        yield output_facts(engine.step())


def check_entrance(cls: Any) -> None:
    """A request is checked before anything is done for it; a request that leaves is forgotten, here and in the core."""
    crowd, text = Crowd("the entrance"), "".join(seeded("entrance").sample("abcdefghijklm", 5))
    prompt = Letters().encode(text)
    params = SamplingParams(temperature=0, max_tokens=9, seed=1)
    engine, core = make_engine(cls, crowd, ends=False)

    def compare(said: str, expected: list[str]) -> None:
        expect(said, "unfinished requests", expected, sorted(engine.states), "what is kept in self.states, and when")
        expect(
            said,
            "requests in the core",
            expected,
            sorted(core.scheduler.requests),
            "what the core is told, and when: a refused request never gets there",
        )

    def refuse(said: str, *request: Any) -> None:
        try:
            engine.add_request(*request)
        except RequestError:
            return
        fail(
            f"{said}\nExpected: a RequestError\nGot: nothing was raised\nLook at add_request: what process_inputs raises must propagate, and ids must be unique."
        )

    engine.add_request("first", text, params)
    compare("One request was added.", ["first"])
    request = core.scheduler.requests["first"]
    expect(
        f"add_request('first', {text!r}, params)",
        "the core's prompt",
        prompt,
        request.prompt_token_ids,
        "the request that the core gets: core_request",
    )
    state = engine.states["first"]
    require("RequestState", type(state).__name__, f"Expected: a RequestState in self.states['first']\nGot: {state!r}")
    refuse("A prompt without any token.", "second", "", params)
    compare("A request that was refused has left nothing.", ["first"])
    refuse("A second request with the id of an unfinished one.", "first", "xyz", params)
    compare("A request with an id in use was refused.", ["first"])
    tokens = core.scheduler.requests["first"].prompt_token_ids
    expect(
        "A request with an id in use was refused.",
        "the core's prompt",
        prompt,
        tokens,
        "the order: process, check, and only then tell the core",
    )
    lost = "The request that was refused has taken the place of the first one of that id: ask before anything is changed."
    require(True, engine.states["first"] is state, lost)
    engine.add_request("third", "ab", params)
    core.step()
    compare("Two requests, after one step.", ["first", "third"])
    engine.abort_request("first")
    compare("abort_request('first') during its answer.", ["third"])
    engine.abort_request("first")
    engine.abort_request("nobody")
    compare("abort_request with ids that are no longer there, or never were.", ["third"])
    engine.add_request("first", "q", params)
    compare("An id that is free again is used again.", ["first", "third"])


@quiet()
def check_take(cls: Any) -> None:
    """Tokens become text, up to the stop string; finished requests are forgotten, here and in the core."""
    for seed in range(25):
        crowd = Crowd(f"take {seed}", stop_strings=True)
        fails_at = frozenset({4}) if seed % 3 == 0 else frozenset()
        theirs = crowd.make_engine(Script(crowd.seed, fails_at))
        mine, core = make_engine(cls, crowd, fails_at)
        wanted = _run(theirs, crowd, seeded(f"abort {seed}"))
        got = _run(mine, crowd, seeded(f"abort {seed}"))
        for number, expected in enumerate(wanted, 1):
            stops = {name: params.stop for name, _, params in crowd.requests if params.stop}
            said = f"{crowd.describe()} Stop strings: {stops or 'none'}. Step {number}. Outputs are (request_id, [(text, token_ids, finish_reason)], finished, whether there is an error)."
            for one in expected:
                one[1].sort()
            expect(said, "outputs", expected, next(got, None), _LOOKS["outputs"])
            expect(
                said,
                "unfinished requests",
                sorted(theirs.output_processor.states),
                sorted(mine.states),
                _LOOKS["unfinished requests"],
            )
            expect(
                said,
                "requests in the core",
                sorted(theirs.core.scheduler.requests),
                sorted(core.scheduler.requests),
                _LOOKS["requests in the core"],
            )


# -- generate --------------------------------------------------------------------------------------------------------


class _Watched:
    """The package's engine; records its calls, and can be interrupted in a step or while requests are added."""

    def __init__(
        self, engine: LLMEngine, interrupt_at: int = 0, interrupt_adding: int = 0, error: type[BaseException] = KeyboardInterrupt
    ) -> None:
        self.engine, self.interrupt_at, self.interrupt_adding = engine, interrupt_at, interrupt_adding
        self.error = error
        self.num_steps = 0
        self.added: list[str] = []
        self.late: list[str] = []
        """Requests that were added after the first step."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"generate needs add_request, abort_request, has_unfinished_requests and step of the engine, and not {name}"
        )

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams) -> None:
        if self.interrupt_adding and len(self.added) + 1 == self.interrupt_adding:
            raise self.error
        self.engine.add_request(request_id, prompt, params)
        self.added.append(request_id)
        if self.num_steps:
            self.late.append(request_id)

    def abort_request(self, request_id: str) -> None:
        self.engine.abort_request(request_id)

    def has_unfinished_requests(self) -> bool:
        return self.engine.has_unfinished_requests()

    def step(self) -> list[RequestOutput]:
        self.num_steps += 1
        if self.num_steps == 3000:
            fail("generate takes step after step and never ends: continue only while has_unfinished_requests().")
        if self.num_steps == self.interrupt_at:
            raise self.error
        return self.engine.step()


def make_prompts(rng: random.Random) -> list[Any]:
    """Prompts, some of which cannot be served."""
    return [
        rng.choice(("", [VOCABULARY_END], "x" * 70))
        if rng.random() < 0.25
        else "".join(rng.choices("abc de", k=rng.randint(1, 20)))
        for _ in range(rng.randint(1, 9))
    ]


VOCABULARY_END = 1_000_000
"""No model of these checks has such a token."""


def check_generate(cls: Any) -> None:
    """One output for each prompt, in their order; a prompt that cannot be served does not affect the others; Ctrl-C leaves nothing behind."""
    for seed, rng in enumerate(rounds("generate", 15)):
        prompts, crowd = make_prompts(rng), Crowd(f"generate {seed}")
        package = crowd.make_engine(Script(crowd.seed))
        watched = _Watched(package)
        llm = cls(watched)
        said = f"generate({prompts!r}, params)"
        if seed % 3 == 0:
            package.add_request("somebody else's", "abc", _params(1)[0])
            said += ", while the engine also has another caller's request"
        params = _params(len(prompts))
        outputs = llm.generate(prompts, params)
        if not isinstance(outputs, list) or not all(isinstance(output, RequestOutput) for output in outputs):
            fail(f"{said}\nExpected: a list of RequestOutput\nGot: {show(outputs)}")
        served = [isinstance(prompt, str) and 0 < len(prompt) < 60 for prompt in prompts]
        expect(said, "outputs, how many", len(prompts), len(outputs), "one output for each prompt, including refused ones")
        reasons = [_reason(crowd, prompt) for prompt in prompts]
        look = "the ids (strings, one for each request), and `refused`, in the place of a prompt that raised a RequestError"
        expect(said, "the outputs' errors", reasons, [output.error for output in outputs], look)
        look = "the order: that of the prompts, not the one in which they finish"
        letters = [Letters().encode(prompt) if good else [] for prompt, good in zip(prompts, served, strict=True)]
        expect(said, "the prompts of the outputs", letters, [output.prompt_token_ids for output in outputs], look)
        expect(
            said,
            "finished",
            [True] * len(prompts),
            [output.finished for output in outputs],
            "which output is kept: the last one of each request",
        )
        look = "when the steps begin: after all prompts were added, so that they share their steps"
        expect(said, "requests added after the first step", [], watched.late, look)
        ids = [output.request_id for output, good in zip(outputs, served, strict=True) if good]
        names = [watched.added.index(name) if name in watched.added else f"unknown: {name}" for name in ids]
        expect(
            said,
            "places of the outputs' request_ids among those added",
            list(range(len(ids))),
            names,
            "which outputs are those of this call",
        )
        require(True, len(set(watched.added)) == len(watched.added), f"{said}\nTwo requests got the same id.")
        limits = [item.max_tokens for item, good in zip(params, served, strict=True) if good]
        lengths = [len(output.outputs[0].token_ids) for output, good in zip(outputs, served, strict=True) if good]
        too_long = f"{said}\nExpected answers of at most {limits} tokens\nGot answers of {lengths} tokens\nLook at params: each prompt has its own entry."
        require(True, all(length <= limit for length, limit in zip(lengths, limits, strict=True)), too_long)
        require(False, watched.has_unfinished_requests(), f"{said}\nRequests were left in the engine.")
        llm.generate(["abc", "de"], _params(2))
        again = "generate was called twice, and an id was reused: keep counting with self.numbers."
        require(True, len(set(watched.added)) == len(watched.added), again)
    _check_interrupt(cls)


def _params(count: int) -> list[SamplingParams]:
    """For each prompt its own: answers of different lengths."""
    return [SamplingParams(temperature=0, max_tokens=(14, 2, 7, 12, 4)[i % 5], seed=3) for i in range(count)]


def _reason(crowd: Crowd, prompt: Any) -> str | None:
    """Why a prompt is refused."""
    try:
        crowd.make_engine(Script("")).input_processor.process_inputs("a request", prompt, _params(1)[0])
    except RequestError as error:
        return str(error)
    return None


def _check_interrupt(cls: Any) -> None:
    cases: dict[str, dict[str, Any]] = {
        "in the third step": {"interrupt_at": 3},
        "while the second request is added": {"interrupt_adding": 2},
        "(here a ValueError) while the second request is added": {"interrupt_adding": 2, "error": ValueError},
    }
    for when, options in cases.items():
        engine = Crowd("generate and interrupt").make_engine(Script("generate and interrupt", ends=False))
        engine.add_request("not of this call", "abcdef", _params(1)[0])
        said = f"Ctrl-C {when} of generate(['abc', 'de', 'f'], params), and the engine also has another caller's request."
        wanted: type[BaseException] = options.get("error", KeyboardInterrupt)
        got = "nothing was raised"
        try:
            cls(_Watched(engine, **options)).generate(["abc", "de", "f"], _params(3))
        except BaseException as error:
            got = f"a {type(error).__name__}" if type(error) is wanted else repr(error)
        look = (
            "`except BaseException`, which begins before the first request is added, and `raise`, after the requests are aborted"
        )
        expect(said, "what generate raises", f"a {wanted.__name__}", got, look)
        left = sorted(engine.output_processor.states)
        look = "what happens at a BaseException: abort the requests of this call, and only those"
        expect(said, "requests left in the engine", ["not of this call"], left, look)
