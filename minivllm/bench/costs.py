"""Cost models: the default one, and how they are saved."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

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
memory in every step, with kernels that are fast for up to 24 sequences.
"""


LONGEST = 1e9
"""Bound of the numbers of a cost model, in seconds."""


def load_costs(path: Path) -> CostModel:
    """A cost model from a JSON file: what `minivllm bench calibrate --json` wrote, or only the model's fields, in seconds.

    Raises:
        ConfigError: The file is missing or not a cost model.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"There is no cost model {path} that can be read ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a cost model: it is not valid JSON ({error}).") from None
    costs = content.get("calibration", content) if isinstance(content, dict) else None
    costs = costs.get("costs", costs) if isinstance(costs, dict) else None
    names = [field.name for field in dataclasses.fields(CostModel)]
    if not isinstance(costs, dict) or "fixed" not in costs or not set(costs) <= set(names):
        raise ConfigError(f"{path} is not a cost model: it must have 'fixed', and may have {', '.join(names)}.")
    values = {name: value for name, value in costs.items() if name != "decode_curve"}
    try:
        values["decode_curve"] = tuple((size, seconds) for size, seconds in costs.get("decode_curve", []))
    except (TypeError, ValueError):
        raise ConfigError(f"{path} is not a cost model: decode_curve must be a list of [sequences, seconds].") from None
    sizes = [size for size, _ in values["decode_curve"]]
    numbers = [(name, value) for name, value in values.items() if name != "decode_curve"]
    numbers += [("a number in decode_curve", number) for point in values["decode_curve"] for number in point]
    for name, value in numbers:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < LONGEST:
            raise ConfigError(
                f"{path} is not a cost model: {name} is {value!r}, but must be a number, 0 or more and below {LONGEST:g}."
            )
    if sizes != sorted(set(sizes)) or 0 in sizes:
        raise ConfigError(f"{path} is not a cost model: the sequences of decode_curve must increase from point to point.")
    return CostModel(**values)
