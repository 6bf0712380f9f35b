"""Fits the simulator's cost model to traced runs, and checks how well it predicts runs that it has not seen."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from minivllm.bench.offline import SCHEDULERS, run_offline
from minivllm.bench.report import format_table
from minivllm.bench.summary import EngineRun
from minivllm.bench.workloads import WorkloadRequest, make_workload, warm_up_requests
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.trace import EngineTrace
from minivllm.errors import ConfigError
from minivllm.executor.simulated import CostModel, StepWork, count_work
from minivllm.simulation.engine import simulate

INTERRUPTED = 1.5
"""A step this many times slower than predicted was interrupted by something outside the engine."""
STEPS_PER_POINT = 12
"""The fewest steps behind each point of the decode curve."""


def step_costs(trace: EngineTrace) -> list[tuple[StepWork, float]]:
    """The work of each step of a trace, and the seconds from its start to the next step's.

    So the engine's work between steps counts, but not idle time. Failed steps are left out.
    """
    costs = []
    for number, step in enumerate(trace):
        after = trace[number + 1] if number + 1 < len(trace) else None
        end = step.end if after is None or trace.is_idle_after(number) else after.start
        if step.error is None:
            work = count_work((part.action == "decode", part.num_tokens, part.context_len) for part in step.scheduled)
            costs.append((work, end - step.start))
    return costs


def fit_costs(traces: Sequence[EngineTrace]) -> CostModel:
    """The cost model that fits the steps of some runs best: non-negative least squares of relative errors.

    Errors are relative, so that a short step counts as much as a long one.

    Raises:
        ConfigError: The runs have too few steps.
    """
    costs = [cost for trace in traces for cost in step_costs(trace)]
    points = _curve_points([work.decode_seqs for work, _ in costs])
    num_coefficients = 5 + len(points)
    if len(costs) < 2 * num_coefficients:
        raise ConfigError(f"{len(costs)} steps are too few to fit a cost model to: trace a longer run.")
    rows = []
    for work, _ in costs:
        row = [1.0, work.prefill_tokens > 0, work.prefill_tokens, work.prefill_pairs, work.context_tokens]
        rows.append(row + _hats(points, work.decode_seqs))
    matrix, seconds = np.array(rows), np.array([time for _, time in costs])
    # Dividing by measured times gives interrupted steps little weight, but slow steps too little as well. So the first fit finds the
    # interrupted steps, and the second leaves them out and divides by predicted times.
    predicted = matrix @ _least_squares(matrix / seconds[:, None], np.ones(len(seconds)))
    kept = (predicted > 0) & (seconds < INTERRUPTED * predicted)
    matrix, seconds, predicted = matrix[kept], seconds[kept], predicted[kept]
    coefficients = _least_squares(matrix / predicted[:, None], seconds / predicted)
    fixed, prefill_step, prefill_token, prefill_pair, context_token, *heights = coefficients.tolist()
    slope = max(0.0, (heights[-1] - heights[0]) / (points[-1] - points[0])) if len(points) > 1 else 0.0
    curve = tuple(zip(points, heights, strict=True))
    return CostModel(fixed, prefill_step, prefill_token, prefill_pair, slope, context_token, curve)


def _curve_points(batches: list[int]) -> list[int]:
    """Batch sizes at which the curve bends: those of `batch_sizes` with enough steps since the previous one."""
    points = [0]
    for size in batch_sizes(max(batches, default=0)):
        if sum(points[-1] < other <= size for other in batches) >= STEPS_PER_POINT:
            points.append(size)
    return points[1:]


def _hats(points: list[int], num_seqs: int) -> list[float]:
    """Weights of the points' heights at a batch size: linear interpolation."""
    return [float(np.interp(num_seqs, [0, *points], [0, *heights])) for heights in np.eye(len(points))]


def _least_squares(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Non-negative least squares: columns that would get a negative coefficient are dropped, the most negative first."""
    scale = np.abs(matrix).max(axis=0)
    used = np.flatnonzero(scale)
    while True:
        solution = np.linalg.lstsq(matrix[:, used] / scale[used], wanted, rcond=None)[0]
        if (solution >= 0).all():
            break
        used = np.delete(used, np.argmin(solution))
    coefficients = np.zeros(matrix.shape[1])
    coefficients[used] = solution / scale[used]
    return coefficients


def fit_quality(costs: CostModel, steps: list[tuple[StepWork, float]]) -> tuple[float, float]:
    """How well a model fits steps: coefficient of determination (R²) and median relative error."""
    seconds = np.array([time for _, time in steps])
    errors = np.array([costs(work) for work, _ in steps]) - seconds
    variance = seconds.var()
    r_squared = 1 - np.square(errors).mean() / variance if variance else 1.0
    return float(r_squared), float(np.median(np.abs(errors) / seconds))


@dataclass(frozen=True)
class Setting:
    """A workload and how to run it."""

    workload: str
    requests: list[WorkloadRequest]
    scheduler: str
    max_num_seqs: int


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, ...: powers of two, the midpoints between them, and `largest`."""
    sizes = {size for power in range(largest.bit_length() + 1) for size in (2**power, 3 * 2**power // 2)}
    return sorted({size for size in sizes if size < largest} | {largest} - {0})


def calibration_settings(max_num_seqs: int, vocab_size: int, max_model_len: int, seed: int = 0) -> list[Setting]:
    """A run for each batch size, with prompts of many lengths: the terms of the cost model occur in many combinations."""
    settings = []
    for size in batch_sizes(max_num_seqs):
        rng = random.Random(seed + size)
        requests = []
        for i in range(size + max(5, size // 2)):
            prompt_len = max(1, min((8, 32, 96, 256)[i % 4] + rng.randrange(8), max_model_len // 2))
            prompt = [rng.randrange(vocab_size) for _ in range(prompt_len)]
            requests.append(WorkloadRequest(prompt, max(1, min(rng.randrange(16, 49), max_model_len - prompt_len))))
        rng.shuffle(requests)
        settings.append(Setting("calibration", requests, "continuous", size))
    return settings


@dataclass(frozen=True)
class Prediction:
    """A run as predicted and as measured: output tokens per second, and mean TTFT in seconds."""

    workload: str
    scheduler: str
    max_num_seqs: int
    predicted_throughput: float
    measured_throughput: float
    predicted_ttft: float
    measured_ttft: float

    @property
    def throughput_error(self) -> float:
        """Relative to the measured value."""
        return self.predicted_throughput / self.measured_throughput - 1

    @property
    def ttft_error(self) -> float:
        """Relative to the measured value."""
        return self.predicted_ttft / self.measured_ttft - 1


def run_setting(engine: LLMEngine, setting: Setting) -> EngineRun:
    """Run a setting on the real engine."""
    config = engine.core.scheduler_config
    engine.core.scheduler_config = replace(config, max_num_seqs=setting.max_num_seqs)
    try:
        return run_offline(engine, setting.scheduler, f"{setting.workload} {setting.max_num_seqs}", setting.requests)
    finally:
        engine.core.scheduler_config = config


def predict(costs: CostModel, engine: LLMEngine, setting: Setting, measured: list[EngineRun]) -> Prediction:
    """Simulate a setting on an engine with the same cache, and compare with the medians of the measurements."""
    simulated = simulate(
        setting.requests,
        cost_model=costs,
        scheduler=setting.scheduler,
        block_size=engine.cache_config.block_size,
        num_gpu_blocks=engine.block_manager.num_gpu_blocks,
        max_model_len=engine.model_config.max_model_len,
        trace=False,
        **asdict(engine.scheduler_config) | {"max_num_seqs": setting.max_num_seqs},
    )
    return Prediction(
        workload=setting.workload,
        scheduler=setting.scheduler,
        max_num_seqs=setting.max_num_seqs,
        predicted_throughput=simulated.output_tokens_per_second,
        measured_throughput=statistics.median(result.output_tokens_per_second for result in measured),
        predicted_ttft=simulated.ttft.mean,
        measured_ttft=statistics.median(result.ttft.mean for result in measured),
    )


def unseen_settings(max_num_seqs: int, vocab_size: int, max_model_len: int) -> list[Setting]:
    """Runs unlike the calibration's: other lengths, distributions and batch sizes, and static batching."""
    lengths = {"uniform": (24, 32, 48), "longtail": (32, 64, 40)}
    values = sorted({max(1, max_num_seqs // 8), max(1, max_num_seqs // 3), max(1, 5 * max_num_seqs // 8), max_num_seqs})
    settings = []
    for distribution, (count, mean_prompt_len, mean_output_len) in lengths.items():
        requests = make_workload(
            distribution, count, mean_prompt_len=mean_prompt_len, mean_output_len=mean_output_len, vocab_size=vocab_size,
            max_len=max_model_len, seed=1,
        )  # fmt: skip
        settings += [Setting(distribution, requests, scheduler, value) for scheduler in SCHEDULERS for value in values]
    return settings


@dataclass(frozen=True)
class Calibration:
    """A cost model, how well it fits the steps it comes from, and how well it predicts other runs."""

    costs: CostModel
    num_steps: int
    r_squared: float
    median_step_error: float
    predictions: list[Prediction]

    def to_json(self) -> dict[str, Any]:
        """Plain data, from which `simulation.costs.load_costs` reads the costs."""
        predictions = [vars(p) | {"throughput_error": p.throughput_error, "ttft_error": p.ttft_error} for p in self.predictions]
        return asdict(self) | {"predictions": predictions}


def calibrate(engine: LLMEngine, rounds: int = 2) -> Calibration:
    """Measure calibration runs and unseen runs in turns; fit a cost model to the former and predict the latter.

    Args:
        engine: An idle engine, with the largest `max_num_seqs` to simulate.
        rounds: How often each run is repeated; predictions are compared with medians.
    """
    config, largest = engine.model_config, engine.scheduler_config.max_num_seqs
    if rounds < 1:
        raise ConfigError(f"rounds is {rounds}, but must be at least 1.")
    calibration = calibration_settings(largest, config.vocab_size, config.max_model_len)
    unseen = unseen_settings(largest, config.vocab_size, config.max_model_len)
    needed = max(len(request.prompt_token_ids) + request.output_len for s in calibration + unseen for request in s.requests)
    if engine.cache_tokens < needed:
        raise ConfigError(
            f"A calibration has requests of up to {needed} tokens, but the cache holds {engine.cache_tokens}: give it more memory "
            f"(kv_cache_memory_bytes), or lower max_model_len."
        )
    run_setting(engine, Setting("warm-up", warm_up_requests(calibration[-1].requests, largest), "continuous", largest))
    traces: list[EngineTrace] = []
    measured: list[list[EngineRun]] = [[] for _ in unseen]
    for _ in range(rounds):
        traces += [run_setting(engine, setting).trace for setting in calibration]
        for results, setting in zip(measured, unseen, strict=True):
            results.append(run_setting(engine, setting))
    costs = fit_costs(traces)
    steps = [cost for trace in traces for cost in step_costs(trace)]
    predictions = [predict(costs, engine, setting, results) for setting, results in zip(unseen, measured, strict=True)]
    return Calibration(costs, len(steps), *fit_quality(costs, steps), predictions)


def format_report(calibration: Calibration) -> str:
    """The cost model in words, and its predictions as a table."""
    costs = calibration.costs
    curve = ", ".join(f"{size}: {seconds * 1e3:.1f}" for size, seconds in costs.decode_curve)
    lines = [
        f"A step takes {costs.fixed * 1e3:.1f} ms, and",
        f"  for decoding sequences (number: ms)  {curve}, then {costs.per_decode_seq * 1e3:.2f} each",
        f"  for each token of their contexts     {costs.per_context_token * 1e6:.2f} µs",
        f"  for prompts                          {costs.per_prefill_step * 1e3:.1f} ms",
        f"  for each token of a prompt           {costs.per_prefill_token * 1e3:.3f} ms",
        f"  for each pair that attends           {costs.per_prefill_pair * 1e6:.3f} µs",
        f"fitted to {calibration.num_steps} steps: R² {calibration.r_squared:.4f}, median error of a step "
        f"{calibration.median_step_error:.1%}",
        "",
    ]
    headers = (
        "unseen run", "batching", "max_num_seqs", "tokens/s predicted", "measured", "error", "TTFT predicted", "measured", "error",
    )  # fmt: skip
    rows = [
        (
            p.workload, p.scheduler, p.max_num_seqs,
            f"{p.predicted_throughput:.1f}", f"{p.measured_throughput:.1f}", f"{p.throughput_error:+.1%}",
            f"{p.predicted_ttft:.2f} s", f"{p.measured_ttft:.2f} s", f"{p.ttft_error:+.1%}",
        )
        for p in calibration.predictions
    ]  # fmt: skip
    lines.append(format_table(headers, rows, left=2))
    worst = [max(abs(getattr(p, name)) for p in calibration.predictions) for name in ("throughput_error", "ttft_error")]
    lines.append(f"largest error: throughput {worst[0]:.1%}, mean TTFT {worst[1]:.1%}")
    return "\n".join(lines)
