"""Cost models: the default one, and how they are saved."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

from minivllm.errors import ConfigError
from minivllm.executor.simulated import CostModel

DEFAULT_COSTS = CostModel(
    fixed=20.5e-3, per_prefill_token=0.68e-3, per_prefill_pair=0.0, per_decode_seq=0.6e-3, per_context_token=2.3e-6
)
"""PLACEHOLDER until calibrated"""


def load_costs(path: Path) -> CostModel:
    """The cost model in a JSON file that `minivllm bench calibrate --json` wrote, or in one with its fields alone.

    Raises:
        ConfigError: The file is missing or has another form.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"There is no cost model {path} that can be read ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a cost model: it is not valid JSON ({error}).") from None
    costs = content.get("costs", content) if isinstance(content, dict) else None
    names = [field.name for field in dataclasses.fields(CostModel)]
    if not isinstance(costs, dict) or set(costs) != set(names):
        raise ConfigError(f"{path} is not a cost model: it must have {', '.join(names)}, in seconds.")
    for name, value in costs.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise ConfigError(f"{path} is not a cost model: {name} is {value!r}, but must be a number of seconds, 0 or more.")
    return CostModel(**costs)
