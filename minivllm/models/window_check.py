"""Sliding windows are not computed yet: a model that needs them is refused, unless its windows cover all that it is asked to read."""

from __future__ import annotations

from minivllm.config import ModelConfig
from minivllm.errors import ModelLoadError


def refuse_windows(config: ModelConfig) -> None:
    """Raise a ModelLoadError if a layer would see less than `max_model_len` tokens."""
    window, num_layers = config.hf_config.get("sliding_window"), config.num_layers
    first = config.hf_config.get("max_window_layers", 0)
    kinds = config.hf_config.get("layer_types") or ["sliding_attention" if i >= first else "full" for i in range(num_layers)]
    if window is None or "sliding_attention" not in kinds:
        return
    if not isinstance(window, int) or window < config.max_model_len:
        raise ModelLoadError(
            f"{config.name} has sliding windows of {window!r} tokens, which are supported only where they hide nothing: set max_model_len, "
            f"which is {config.max_model_len}, to at most {window!r}."
        )
