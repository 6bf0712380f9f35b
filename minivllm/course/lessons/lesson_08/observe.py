"""Observes a learner's engine from outside: random memory, steps, tokens and texts, and the results.

See `lesson_04.observe`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from minivllm.course.lessons.lesson_08.bench import observe_assembled
from minivllm.course.lessons.lesson_08.core import find_moves, observe_core, observe_touched
from minivllm.course.lessons.lesson_08.frontend import make_engine, make_prompts, observe_engine, observe_generate
from minivllm.course.lessons.lesson_08.inputs import make_counts, make_runner, make_slot_case, observations_of
from minivllm.course.lessons.lesson_08.situations import Crowd, make_sequences, quiet
from minivllm.course.lessons.lesson_08.start_up import make_device, make_memory, make_request, run_worker
from minivllm.errors import ConfigError, RequestError
from minivllm.sampling_params import SamplingParams

_ROUNDS = 20
_Observe = Callable[[Any, random.Random], list[Any]]


def _observe_count(count_blocks: Any, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(3 * _ROUNDS):
        memory = make_memory(rng)
        try:
            observations.append(int(count_blocks(*memory)))
        except ConfigError:
            observations.append("refused")
    return observations


def _observe_start_up(cls: Any, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(_ROUNDS):
        device, cache, limits = make_device(rng)
        worker = cls(device, SimpleNamespace(), cache, limits)
        observations.append([list(map(int, worker.start_up())), device.used_bytes, list(worker.cache)])
    return observations


def _observe_lay_out(lay_out: Any, rng: random.Random) -> list[Any]:
    cases = [make_counts(rng) for _ in range(_ROUNDS)]
    return [[np.asarray(array).tolist() for array in lay_out(np.array(starts), np.array(counts))] for starts, counts in cases]


def _observe_slots(find_slots: Any, rng: random.Random) -> list[Any]:
    return [np.asarray(find_slots(*make_slot_case(rng))).tolist() for _ in range(_ROUNDS)]


def _observe_inputs(cls: Any, rng: random.Random) -> list[Any]:
    sizes = [rng.choice((1, 2, 4, 16)) for _ in range(_ROUNDS)]
    return [observations_of(make_runner(cls, size).prepare_inputs(make_sequences(rng, size))) for size in sizes]


def _observe_runner(cls: Any, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(_ROUNDS):
        size = rng.choice((1, 2, 4, 16))
        runner, sequences = make_runner(cls, size), make_sequences(rng, size)
        outputs = runner.execute_model(sequences, ["caches"])
        observations.append([[list(output.token_ids) for output in outputs], runner.device.model.num_rows, runner.sampler.rows])
    return observations


def _observe_worker(cls: Any, rng: random.Random) -> list[Any]:
    return [list(run_worker(cls, make_request(rng))) for _ in range(_ROUNDS)]


def _observe_compute(cls: Any, rng: random.Random) -> list[Any]:
    return [observe_core(cls, Crowd(str(rng.random()))) for _ in range(4)]


@quiet()
def _observe_fail(cls: Any, rng: random.Random) -> list[Any]:
    crowds = [Crowd(str(rng.random())) for _ in range(6)]
    observations = [observe_core(cls, crowd, frozenset([rng.randint(1, 9), *find_moves(crowd)[:1]])) for crowd in crowds]
    return [list(map(list, observe_touched(cls))), *observations]


def _observe_entrance(cls: Any, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(_ROUNDS):
        engine, core = make_engine(cls, Crowd(str(rng.random())))
        for _ in range(6):
            request_id, prompt = rng.choice("abc"), rng.choice(make_prompts(rng))
            if rng.random() < 0.3:
                engine.abort_request(request_id)
            try:
                engine.add_request(request_id, prompt, SamplingParams(temperature=0, max_tokens=5, seed=1))
                refusal = False
            except RequestError:
                refusal = True
            requests = {name: request.prompt_token_ids for name, request in core.scheduler.requests.items()}
            observations.append([refusal, sorted(engine.states), sorted(requests.items())])
    return observations


def _observe_take(cls: Any, rng: random.Random) -> list[Any]:
    crowds = [Crowd(str(rng.random()), stop_strings=True) for _ in range(6)]
    return [observe_engine(cls, crowd, rng, frozenset({rng.randint(1, 30)})) for crowd in crowds]


def _observe_generate(cls: Any, rng: random.Random) -> list[Any]:
    return [observe_generate(cls, make_prompts(rng), str(rng.random())) for _ in range(_ROUNDS)]


OBSERVERS: Mapping[str, tuple[str, _Observe]] = {
    "check-count": ("count_blocks", _observe_count),
    "check-start": ("StartUp", _observe_start_up),
    "check-lay-out": ("lay_out", _observe_lay_out),
    "check-slots": ("find_slots", _observe_slots),
    "check-inputs": ("Inputs", _observe_inputs),
    "check-runner": ("MyRunner", _observe_runner),
    "check-worker": ("MyWorker", _observe_worker),
    "check-core": ("Stepping", _observe_compute),
    "check-fail": ("MyEngineCore", _observe_fail),
    "check-entrance": ("Entrance", _observe_entrance),
    "check-engine": ("MyLLMEngine", _observe_take),
    "check-generate": ("MyLLM", _observe_generate),
    "check-parts": ("assemble", observe_assembled),
    "check-text": ("assemble", observe_assembled),
}
"""For each check, what it tests, and how to observe it."""
