"""Which layers have sliding-window attention, from a model's config.json.

Families say it in three ways: one `sliding_window` for all layers (Mistral, Phi-3), one that `use_sliding_window` turns on from layer
`max_window_layers` on (Qwen2, Qwen3), or a list of `layer_types` (SmolLM3, which must have it, Gemma 3, and newer files of Qwen). What a file
leaves out is as in the configuration classes of transformers. Mirrors `vllm/config/model.py`.
"""

from __future__ import annotations

from typing import Any

from minivllm.config import ModelConfig
from minivllm.errors import ModelLoadError
from minivllm.models.base import declares

IN_ALL_LAYERS = {"MistralForCausalLM": 4096, "Phi3ForCausalLM": None}
"""Families whose layers all have the window, and the window of a file that names none."""
IF_SWITCHED_ON = {"Qwen2ForCausalLM": 4096, "Qwen3ForCausalLM": 4096, "SmolLM3ForCausalLM": None}
"""Families that have windows only with `use_sliding_window`."""
IN_A_PATTERN = {"Gemma3ForCausalLM": 6}
"""Families with windows of 4,096 tokens in all but each n-th layer, unless the file says otherwise."""
DEFAULT_MAX_WINDOW_LAYERS = 28
SLIDING, FULL = "sliding_attention", "full_attention"
"""In `layer_types`."""


def layer_windows(config: ModelConfig) -> list[int]:
    """The window of each layer: how many tokens each token sees, itself included; 0 for all before it.

    Raises:
        ModelLoadError: A value is damaged.
    """
    hf_config, architecture = config.hf_config, config.architecture
    if architecture in IN_ALL_LAYERS:
        windowed = [True] * config.num_layers
        window = hf_config.get("sliding_window", IN_ALL_LAYERS[architecture])
    elif architecture in IF_SWITCHED_ON:
        windowed = _switched_on_layers(config) if hf_config.get("use_sliding_window") else []
        window = hf_config.get("sliding_window", IF_SWITCHED_ON[architecture])
    elif architecture in IN_A_PATTERN:
        windowed = [kind == SLIDING for kind in layer_types(config)]
        window = hf_config.get("sliding_window", 4096)
    else:
        windowed, window = _layer_types(config) or [], hf_config.get("sliding_window")
    if not any(windowed) or window is None:
        return [0] * config.num_layers
    window = _read_count(config, "sliding_window", window, lowest=1)
    return [window if is_windowed and window < config.max_model_len else 0 for is_windowed in windowed]


def cache_window(config: ModelConfig) -> int:
    """How many tokens back any layer sees, so that cache blocks before them may be freed; 0 if some layer sees all."""
    if config.model_cls is None or not declares(config.model_cls, "supports_windows"):
        return 0  # a class of the user's own may read config.json in another way
    windows = layer_windows(config)
    return max(windows) if all(windows) else 0


def layer_types(config: ModelConfig) -> list[str]:
    """The kind of each layer in a family with a pattern: as the file says, or each n-th without a window. Raises as `layer_windows`."""
    if _layer_types(config) is not None:
        return list(config.hf_config["layer_types"])
    period = _read_count(config, "sliding_window_pattern", IN_A_PATTERN[config.architecture], lowest=1)
    return [SLIDING if (i + 1) % period else FULL for i in range(config.num_layers)]


def _switched_on_layers(config: ModelConfig) -> list[bool]:
    """Where windows are switched on: the layers that `layer_types` names; without that list, those from `max_window_layers` on (Qwen)."""
    listed = _layer_types(config)
    if listed is not None:
        return listed
    if config.architecture == "SmolLM3ForCausalLM":
        raise ModelLoadError(
            f"{config.path / 'config.json'} has use_sliding_window, but no layer_types that say where: add them."
        )
    first = _read_count(config, "max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, lowest=0)
    return [i >= first for i in range(config.num_layers)]


def _layer_types(config: ModelConfig) -> list[bool] | None:
    """Of each layer, whether `layer_types` says that it has a window; None if the file has no such list."""
    types = config.hf_config.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != config.num_layers or not set(map(str, types)) <= {SLIDING, FULL}:
        raise ModelLoadError(
            f"{config.path / 'config.json'} has layer_types = {types!r}, but it must have 'sliding_attention' or 'full_attention' for each of "
            f"the {config.num_layers} layers."
        )
    return [kind == SLIDING for kind in types]


def _read_count(config: ModelConfig, name: str, default: Any, lowest: int) -> int:
    """A whole number; a ModelLoadError if it is anything else."""
    value = config.hf_config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ModelLoadError(
            f"{config.path / 'config.json'} has {name} = {value!r}, but it must be a whole number of at least {lowest}."
        )
    return value
