"""What the playground runs: an engine on a virtual clock, made from the page's settings and the reader's code, step by step.

It runs in the browser, where there are no torch, no NumPy and no sockets, and in any Python, where it is tested.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import linecache
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from minivllm.bench.workloads import WorkloadRequest, generate_requests
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.engine.trace import StepRecord
from minivllm.entrypoints.dashboard.step_view import StepView
from minivllm.errors import MinivllmError
from minivllm.executor.simulated import VirtualClock
from minivllm.simulation.engine import make_simulated_engine, simulate

if TYPE_CHECKING:
    from minivllm.entrypoints.playground.race import Race

READER = "your code"
"""The name of the reader's code in tracebacks."""
MOST_OVERTAKEN = 8
"""A request starves once more than so many that came later have finished since its last token."""
LONGEST_ADVANCE = 0.1
"""Seconds of this machine after which steps are reported, though more were asked for."""
MOST_PRINTED = 2000
"""Characters of what the reader's code prints that are shown, the last ones."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The page's sliders and boxes: the engine's options, and the traffic. Lengths are means in tokens."""

    num_gpu_blocks: int = 96
    block_size: int = 16
    num_cpu_blocks: int = 96
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = False
    enable_prefix_caching: bool = False
    preemption_mode: str = "recompute"
    scheduler: str = "continuous"
    num_requests: int = 64
    arrivals: str = "poisson"
    arrival_rate: float = 4.0
    distribution: str = "longtail"
    mean_prompt_len: int = 64
    mean_output_len: int = 64
    num_shared_prompt_tokens: int = 0
    seed: int = 0

    @property
    def max_len(self) -> int:
        """The most tokens of a request, prompt and output: half of the cache, so that two find room, and what one step may compute, if a
        prompt must fit in it.
        """
        return max(2, min(self.engine_options()["max_model_len"], self.num_gpu_blocks * self.block_size // 2))

    def requests(self, max_len: int | None = None) -> list[WorkloadRequest]:
        """The traffic, with requests of at most so many tokens, or of `max_len` of these settings."""
        names = ("num_requests", "arrivals", "arrival_rate", "distribution", "mean_prompt_len", "mean_output_len", "seed")
        options = {name: getattr(self, name) for name in (*names, "num_shared_prompt_tokens")}
        return list(generate_requests(**options, max_len=self.max_len if max_len is None else max_len))

    def engine_options(self) -> dict[str, Any]:
        """Arguments of `make_simulated_engine`."""
        names = (
            "num_gpu_blocks", "block_size", "num_cpu_blocks", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill",
            "enable_prefix_caching", "preemption_mode", "scheduler",
        )  # fmt: skip
        max_model_len = 8192 if self.enable_chunked_prefill else self.max_num_batched_tokens
        return {name: getattr(self, name) for name in names} | {"max_model_len": max_model_len}


class ReaderError(Exception):
    """What the reader asks for cannot be run; the message says why."""


@dataclass
class Session:
    """One run: requests arrive, and the engine steps until all have ended.

    Args:
        settings: See `Settings`; what is left out has its default.
        code: Python that defines a `Scheduler` or a `BlockSpaceManager` (or both) in place of the package's; empty for the package's own.

    Raises:
        MinivllmError: A setting is out of range; the message says which.
        ReaderError: The code defines none of the classes. What it raises is passed on.
    """

    settings: Settings
    code: str = ""
    num_steps: int = 0
    _view: StepView = field(default_factory=StepView)

    def __post_init__(self) -> None:
        options = self.settings.engine_options() | run_reader(self.code)
        self.clock = VirtualClock()
        self.waiting_to_arrive = deque(enumerate(self.settings.requests()))
        self.engine = make_simulated_engine(clock=self.clock, **options)
        self.engine.core.snapshot_requests()
        self._overtaken: dict[str, int] = {}
        """Unfinished requests in order of arrival, and how many that came later have finished since its last token."""
        self._started: set[str] = set()
        """Requests with a token."""

    def describe(self) -> dict[str, Any]:
        """What the live page's event "engine" tells."""
        engine = self.engine
        sizes = {
            "num_gpu_blocks": engine.block_manager.num_gpu_blocks,
            "max_model_len": self.settings.engine_options()["max_model_len"],
        }
        configs = dataclasses.asdict(engine.scheduler_config) | dataclasses.asdict(engine.core.cache_config)
        return {"model": "", "num_engines": 1, "replica": 0, "may_kill": False} | configs | sizes

    def advance(self, num_steps: int) -> dict[str, Any]:
        """Run so many steps, or fewer if all requests have ended, or if they take long.

        Returns:
            `report`, as in the live page's event "steps", or None; `num_steps` and `now` so far; `done`; `starving`, sentences about
            requests that others overtake.

        Raises:
            RuntimeError: The scheduler plans nothing although there are requests. What the reader's code raises is passed on.
        """
        end = time.monotonic() + LONGEST_ADVANCE
        for _ in range(num_steps):
            if not self._step() or time.monotonic() > end:
                break
        return {
            "report": self._view.report(),
            "num_steps": self.num_steps,
            "now": self.clock.now,
            "done": not self.waiting_to_arrive and not self.engine.has_unfinished_requests(),
            "starving": [
                f"Request #{request_id} has waited for its {'next' if request_id in self._started else 'first'} token while more than "
                f"{MOST_OVERTAKEN} that came later have finished."
                for request_id, count in self._overtaken.items()
                if count > MOST_OVERTAKEN
            ],
        }

    def _step(self) -> bool:
        """One step of the engine; False if there is nothing left to do."""
        if not self.engine.has_unfinished_requests():
            if not self.waiting_to_arrive:
                return False
            self.clock.advance_to(self.waiting_to_arrive[0][1].arrival_time)
        while self.waiting_to_arrive and self.waiting_to_arrive[0][1].arrival_time <= self.clock.now:
            number, request = self.waiting_to_arrive.popleft()
            prompt = {"prompt_token_ids": request.prompt_token_ids}
            self.engine.add_request(str(number), prompt, request.sampling_params(), arrival_time=request.arrival_time)
            self._overtaken[str(number)] = 0
        self.engine.step()
        self.num_steps += 1
        assert self.engine.trace is not None
        steps = self.engine.trace.steps
        for step in steps:
            self._view.take(step)
            self._watch(step)
        steps.clear()  # the view has what the page draws
        return True

    def _watch(self, step: StepRecord) -> None:
        """Note who has got a token, and who has been overtaken."""
        for item in step.scheduled:
            if item.num_new_tokens:
                self._overtaken[item.key.request_id] = 0
                self._started.add(item.key.request_id)
        for finish in step.finished:
            self._overtaken.pop(finish[0], None)
            for request_id in self._overtaken:
                if int(request_id) > int(finish[0]):
                    break
                self._overtaken[request_id] += 1


def run_reader(code: str) -> dict[str, Any]:
    """Run the reader's code, and return the classes that it defines as arguments of `make_simulated_engine`."""
    if not code.strip():
        return {}
    linecache.cache[READER] = (len(code), None, code.splitlines(keepends=True), READER)  # so that tracebacks show its lines
    module = sys.modules["reader"] = ModuleType("reader")  # where dataclasses look for it
    exec(compile(code, READER, "exec"), vars(module))
    found = {}
    for argument, base in (("scheduler", Scheduler), ("block_space_manager_cls", BlockSpaceManager)):
        own = vars(module).get(base.__name__)
        if isinstance(own, type) and own.__module__ == "reader":
            found[argument] = own
    if not found:
        raise ReaderError("The code defines neither a class Scheduler nor a class BlockSpaceManager, so there is nothing to run.")
    return found


def explain(error: BaseException) -> str:
    """What happened, in a sentence, and where in the reader's code."""
    if isinstance(error, ReaderError):
        return str(error)
    if isinstance(error, SyntaxError) and error.filename == READER:
        return f"Line {error.lineno}: {error.msg}."
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [
        f"line {frame.lineno}, in {frame.name}: {frame.line}"
        for frame in traceback.extract_tb(cause.__traceback__)
        if frame.filename == READER
    ]
    try:
        text = str(cause) if isinstance(cause, MinivllmError) else f"{type(cause).__name__}: {cause}"
    except Exception:  # a class of the reader's
        text = type(cause).__name__
    return "\n".join([text, *reversed(lines)])


@contextlib.contextmanager
def _naming(run: str) -> Iterator[None]:
    """Let an error say in which run it happened."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ReaderError(f"{run}: {explain(error)}") from error


def begin_race(runs: list[dict[str, Any]]) -> tuple[Race, dict[str, Any]]:
    """Two runs of the same requests to their ends, to be looked at moment by moment; and a `page` that compares them, all `moments` in
    seconds, and the number of the one where they part, `first`, or None.

    Raises:
        ReaderError: A run cannot be made; the message says which, and why.
    """
    from minivllm.bench.trace_diff import diff_traces, to_page  # not at the top: the first step need not wait for it
    from minivllm.entrypoints.playground.race import Race

    chosen, traces = [], []
    for run in runs:
        with _naming(run["name"]):
            chosen.append(Settings(**run["settings"]))
    max_len = min(settings.max_len for settings in chosen)
    for run, settings in zip(runs, chosen, strict=True):
        with _naming(run["name"]):
            options = settings.engine_options() | run_reader(run["code"])
            trace = simulate(settings.requests(max_len), **options).trace
            assert trace is not None
            traces.append(trace)
    first, second = traces
    diff = diff_traces((runs[0]["name"], runs[1]["name"]), (first, second))
    race = Race((first, second))
    page = to_page(diff, "A race of two schedulers")
    return race, {"page": page, "moments": race.moments, "first": race.moment_of(diff.step)}


_session: Session | None = None
_race: tuple[int, Race] | None = None
"""The latest race, and the number that the page has given it."""


def call(message: str) -> str:
    """What the page's worker calls, with JSON in and out: `{"begin": settings, "code": code}`, `{"advance": num_steps}`,
    `{"race": [{"name": name, "settings": settings, "code": code}, …], "number": number}` of two, `{"look": moment, "number": number}` at
    that race, or `{"check": [[name, source], …]}`, cells and a check.
    """
    global _session, _race
    request, printed = json.loads(message), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            if "begin" in request:
                _session = Session(Settings(**request["begin"]), request.get("code", ""))
                answer = {"engine": _session.describe()}
            elif "check" in request:
                from minivllm.entrypoints.playground.exercise import run_check

                answer = run_check(request["check"])
            elif "race" in request:
                race, answer = begin_race(request["race"])
                _race = (request["number"], race)
            elif "look" in request:
                if _race is None or _race[0] != request["number"]:
                    raise ReaderError("The runs are gone, because Python was stopped or another race has begun: race again.")
                answer = {"runs": _race[1].look(request["look"])}
            else:
                assert _session is not None
                answer = _session.advance(request["advance"])
    except (Exception, SystemExit) as error:
        answer = {"error": explain(error)}
    return json.dumps(answer | {"printed": printed.getvalue()[-MOST_PRINTED:]})
