"""The checks of lesson 15 for what a step costs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from minivllm.course.observations import expect, expect_number, rounds
from minivllm.executor.simulated import CostModel, StepWork

NAMES = ("fixed", "per_prefill_token", "per_decode_seq", "per_context_token")
"""The four coefficients that are fitted: fields of `CostModel`."""
Steps = list[tuple[StepWork, float]]
"""Steps, and the seconds that they took."""


def random_costs(rng: random.Random) -> CostModel:
    """A machine."""
    return CostModel(
        fixed=rng.uniform(0.005, 0.03),
        per_prefill_token=rng.uniform(3e-5, 8e-4),
        per_decode_seq=rng.uniform(1e-4, 1e-3),
        per_context_token=rng.uniform(2e-7, 3e-6),
    )


def random_steps(rng: random.Random, costs: CostModel, count: int, noise: float) -> Steps:
    """Steps of a machine, each up to `noise` slower or faster than its cost says: some with prompts, most without."""
    steps = []
    for _ in range(count):
        prefill = rng.choice((0, 0, rng.randint(1, 2000)))
        decodes = rng.choice((0, rng.randint(1, 64))) if prefill else rng.randint(1, 64)
        work = StepWork(prefill, prefill * (prefill + 1) // 2, decodes, decodes * rng.randint(20, 1500))
        steps.append((work, costs(work) * (1 + noise * rng.uniform(-1, 1))))
    return steps


def columns(steps: Steps) -> np.ndarray:
    """The matrix of a fit: [num_steps, 4]."""
    return np.array([(1.0, work.prefill_tokens, work.decode_seqs, work.context_tokens) for work, _ in steps])


def solve(steps: Steps, power: float = 1.0) -> list[float]:
    """The four prices with the least squares of errors over seconds to this power: 1 for relative errors, 0 for seconds."""
    matrix, seconds = columns(steps), np.array([time for _, time in steps])
    weights = seconds**-power
    scale = matrix.max(axis=0)
    return [float(x) for x in np.linalg.lstsq(matrix * weights[:, None] / scale, seconds * weights, rcond=None)[0] / scale]


def solve_twice(steps: Steps, limit: float = 1.5) -> list[float]:
    """As `solve`, without the steps that took `limit` times as long as the first fit says."""
    first = CostModel(**dict(zip(NAMES, solve(steps), strict=True)))
    return solve([(work, time) for work, time in steps if time < limit * first(work)])


def _compare(said: str, right: list[float], got: Any, look: str, others: dict[str, list[float]]) -> None:
    expect(
        said,
        "type of the result",
        "CostModel",
        type(got).__name__,
        "what the function returns: a `CostModel`, with the four coefficients by name",
    )
    for i, name in enumerate(NAMES):
        shown = f"{name} (µs)"
        mistakes = {words: 1e6 * wrong[i] for words, wrong in others.items()}
        expect_number(said, shown, 1e6 * right[i], 1e6 * getattr(got, name), look, mistakes, tolerance=1e-4)
    others_of = {name: value for name, value in vars(got).items() if name not in NAMES and value}
    expect(said, "further coefficients that are not 0", {}, others_of, "the arguments of `CostModel`: only these four")


def check_fit(fit: Any) -> None:
    """The four coefficients, exactly where the steps are exact, and with the least relative errors where they are not."""
    for rng in rounds("exact", 6):
        costs = random_costs(rng)
        steps = random_steps(rng, costs, 60, 0.0)
        right = [getattr(costs, name) for name in NAMES]
        look = "the columns of the matrix: 1 for each step, prefill_tokens, decode_seqs, context_tokens, in the order of the coefficients"
        _compare("60 steps without any noise.", right, fit(steps), look, {"in milliseconds": [1e3 * value for value in right]})
    for rng in rounds("noise", 6):
        steps = random_steps(rng, random_costs(rng), 80, 0.15)
        look = "how you weigh: divide each row of the matrix, and its seconds, by the seconds of the step, so that every relative error counts alike"
        half = columns(steps) / np.array([time for _, time in steps])[:, None]
        others = {
            "the fit with the least errors in seconds, in which long steps count for more": solve(steps, 0.0),
            "a fit in which each step was divided by the root of its seconds": solve(steps, 0.5),
            "a fit in which each step was divided by its seconds twice": solve(steps, 2.0),
            "a fit in which only the matrix was divided": np.linalg.lstsq(
                half, np.array([time for _, time in steps]), rcond=None
            )[0].tolist(),
        }
        _compare("80 steps, each up to 15 % off.", solve(steps), fit(steps), look, others)


def check_interrupted(fit_costs: Any) -> None:
    """Steps during which something else had the machine say nothing of the engine."""
    for rng in rounds("interrupted", 8):
        steps = random_steps(rng, random_costs(rng), 120, 0.08)
        number = rng.randint(3, 8)
        for place in rng.sample(range(len(steps)), number):
            work, time = steps[place]
            steps[place] = work, time * rng.uniform(2.2, 6.0)
        for place in rng.sample(range(len(steps)), 2):
            work, time = steps[place]
            steps[place] = work, time * 0.6
        said = f"120 steps; {number} of them took 2 to 6 times as long, because something else ran on the machine, and 2 were quick ones."
        look = "which steps the second fit is made from: those that took less than 1.5 times what the first fit says of them"
        right = solve_twice(steps)
        first = CostModel(**dict(zip(NAMES, solve(steps), strict=True)))
        median = float(np.median([time for _, time in steps]))
        others = {
            "the first fit, with the interrupted steps in it": solve(steps),
            "a fit without the long steps, interrupted or not": solve(
                [(work, time) for work, time in steps if time < 1.5 * median]
            ),
            "a fit that leaves out quick steps, too": solve(
                [(work, time) for work, time in steps if 1 / 1.5 < time / first(work) < 1.5]
            ),
        }
        if others["the first fit, with the interrupted steps in it"] != right:
            _compare(said, right, fit_costs(steps), look, others)
