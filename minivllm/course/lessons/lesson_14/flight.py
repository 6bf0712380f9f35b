"""The check of lesson 14 for a loop with two steps in flight, over a device that is simulated."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from minivllm.course.lessons.ranks import situation
from minivllm.course.observations import expect, fail, rounds

IN_FLIGHT = 2


@dataclass(frozen=True)
class Asked:
    """A request: it ends with `stop_token`, or after `max_tokens`."""

    id: str
    max_tokens: int
    stop_token: int


@dataclass
class Device:
    """Computes steps one after another, and keeps a diary. Times are in milliseconds of its own clock.

    Args:
        texts: The tokens that each request gets, by its id.
        step_time: Of the device, for a step.
        host_time: Of the host, before each launch.

    Attributes:
        diary: What was called, in order.
        now: The host's time.
        spans: When the device was computing each step.
        preparations: When the host was preparing each step.
    """

    texts: dict[str, list[int]]
    step_time: float = 6.0
    host_time: float = 2.0
    diary: list[str] = field(default_factory=list)
    now: float = 0.0
    spans: list[tuple[float, float]] = field(default_factory=list)
    preparations: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._steps: list[dict[str, int]] = []
        self._places = dict.fromkeys(self.texts, 0)
        self._collected: set[int] = set()

    def launch(self, ids: Sequence[str]) -> int:
        """Begin a step for these requests. Returns its number at once."""
        ids = list(ids)
        self.diary.append(f"launch {' '.join(ids)}")
        if len(self._steps) > 200:
            look = "who takes part: a request that has had max_tokens launches does not"
            fail(f"Expected: run returns.\nGot: more than 200 launches.\nLook at {look}.")
        step = {}
        for name in ids:
            place = self._places[name]
            step[name] = self.texts[name][place] if place < len(self.texts[name]) else -1
            self._places[name] += 1
        self.preparations.append((self.now, self.now + self.host_time))
        self.now += self.host_time
        start = max(self.now, self.spans[-1][1]) if self.spans else self.now
        self.spans.append((start, start + self.step_time))
        self._steps.append(step)
        return len(self._steps) - 1

    def collect(self, number: int) -> dict[str, int]:
        """Wait for a step. Returns a token for each of its requests."""
        if not 0 <= number < len(self._steps) or number in self._collected:
            raise ValueError(f"Step {number} was not launched, or has been collected already.")
        self.diary.append(f"collect {number}")
        self._collected.add(number)
        self.now = max(self.now, self.spans[number][1])
        return dict(self._steps[number])


def run_in_flight(requests: Sequence[Asked], device: Device, most: int = IN_FLIGHT) -> dict[str, list[int]]:
    """All tokens of all requests, with so many steps in flight."""
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    launched, finished, queue = dict.fromkeys(tokens, 0), set(), []
    while True:
        ids = [r.id for r in requests if r.id not in finished and launched[r.id] < r.max_tokens]
        if ids and len(queue) < most:
            queue.append(device.launch(ids))
            for name in ids:
                launched[name] += 1
        elif queue:
            got = device.collect(queue.pop(0))
            for request in requests:
                if request.id in got and request.id not in finished:
                    tokens[request.id].append(got[request.id])
                    if got[request.id] == request.stop_token or len(tokens[request.id]) == request.max_tokens:
                        finished.add(request.id)
        else:
            return tokens


def make_requests(rng: random.Random) -> tuple[list[Asked], dict[str, list[int]]]:
    """Requests, some of which stop early, and the tokens that the device has for them."""
    requests, texts = [], {}
    for name in "ABCD"[: rng.randint(1, 4)]:
        most, stop_token = rng.randint(1, 7), rng.randint(10, 12)
        texts[name] = [rng.randint(1, 9) for _ in range(most + 3)]
        for token in (stop_token, rng.randint(10, 12)):  # its own, and perhaps another's
            if rng.random() < 0.6:
                texts[name][rng.randrange(most)] = token
        requests.append(Asked(name, most, stop_token))
    return requests, texts


def check_in_flight(run: Callable[..., Any]) -> None:
    """The device always has a step to go on with, and nobody sees a token too many."""
    for rng in rounds("flight", 40):
        requests, texts = make_requests(rng)
        ends = [
            f"{r.id} gets {' '.join(map(str, texts[r.id]))} …, at most {r.max_tokens}, {r.stop_token} stops it" for r in requests
        ]
        said = f"run({'; '.join(ends)})."
        right, mine = Device(texts), Device(texts)
        expected = run_in_flight(requests, right)
        with situation(said):
            got = run(list(requests), mine)
        expect(said, "calls of the device", right.diary, mine.diary, lambda: _find_order_mistake(right.diary, mine.diary))  # noqa: B023
        got = {name: list(tokens) for name, tokens in got.items()} if isinstance(got, dict) else repr(got)[:80]
        expect(said, "tokens", expected, got, lambda: _find_token_mistake(requests, expected, got))  # noqa: B023


def _find_order_mistake(right: list[str], mine: list[str]) -> str:
    place = next((i for i, (a, b) in enumerate(zip(right, mine, strict=False)) if a != b), min(len(right), len(mine)))
    wanted = right[place] if place < len(right) else "the end"
    came = mine[place] if place < len(mine) else "the end"
    at = f"call {place}, which should be '{wanted}' and is '{came}'"
    if came == "the end":
        return f"{at}: a step that was launched must be collected, and a request must get all its tokens"
    if wanted.startswith("launch") and came.startswith("collect"):
        return f"{at}: launch before you wait, as long as fewer than {IN_FLIGHT} steps are in flight"
    if wanted.startswith("collect") and came.startswith("collect"):
        return f"{at}: the oldest step is collected first"
    if came.startswith("launch") and wanted.startswith("launch"):
        return f"{at}: who takes part: requests that have not finished and have had fewer than max_tokens launches"
    if wanted == "the end":
        return f"{at}: nobody is waiting for another token"
    return f"{at}: no more than {IN_FLIGHT} steps in flight, and none for requests that have had max_tokens launches or have finished"


def _find_token_mistake(requests: list[Asked], expected: dict[str, list[int]], got: Any) -> str:
    for request in requests if isinstance(got, dict) else ():
        right, mine = expected[request.id], got.get(request.id)
        if mine is None:
            return f"request {request.id}: it has no entry"
        if len(mine) > len(right) and mine[: len(right)] == right:
            return f"request {request.id}: it had finished, and the step that was in flight then has a surplus token, which is dropped"
        if mine == right[:-1]:
            return f"request {request.id}: its last token, the stop token included, belongs to its text"
        if mine != right:
            return f"request {request.id}: its tokens come in the order of the steps"
    return "what is returned: a dict of lists of tokens, by the ids of the requests"
