"""The default cost model, and loading others from files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

from minivllm.errors import ConfigError
from minivllm.executor.simulated import CostModel

DEFAULT_COSTS = CostModel(
    fixed=0.01973,
    per_prefill_step=0.003806,
    per_prefill_token=0.0007197,
    per_prefill_pair=0.0,
    per_decode_seq=0.001103,
    per_context_token=2.146e-06,
    decode_curve=(
        (1, 0.0),
        (2, 0.0004936),
        (3, 0.003906),
        (4, 0.003512),
        (6, 0.006179),
        (8, 0.006313),
        (12, 0.008426),
        (16, 0.01058),
        (24, 0.01179),
        (32, 0.03418),
    ),
)
"""SmolLM2-135M in float32 on 2 cores with AVX-512, from benchmarks/results/calibrate_2026-11-21.json: an engine that reads its weights from
memory in every step. Steps of more than 24 sequences took another, slower path then.
"""


def load_costs(path: Path) -> CostModel:
    """A cost model from a JSON file: written by `minivllm bench calibrate --json`, or only the model's fields, in seconds.

    Raises:
        ConfigError: The file is missing or not a cost model.
    """
    try:
        costs = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"There is no cost model {path} that can be read ({error.strerror}).") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a cost model: it is not valid JSON ({error}).") from None
    for key in ("calibration", "costs"):
        costs = costs.get(key, costs) if isinstance(costs, dict) else None
    names = [field.name for field in dataclasses.fields(CostModel)]
    if not isinstance(costs, dict) or "fixed" not in costs or not set(costs) <= set(names):
        raise ConfigError(f"{path} is not a cost model: it must have 'fixed', and may have {', '.join(names)}.")
    try:
        model = msgspec.convert(costs, CostModel)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{path} is not a cost model ({error}): times are in seconds, and decode_curve is a list of [sequences, seconds]."
        ) from None
    sizes = [size for size, _ in model.decode_curve]
    if sizes != sorted(set(sizes)):
        raise ConfigError(f"{path} is not a cost model: the sequences of decode_curve must increase from point to point.")
    return model
