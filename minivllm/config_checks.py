"""Checks that configurations have in common: each says what was given and what is possible."""

from __future__ import annotations

from typing import Any

from minivllm.errors import ConfigError


def check_at_least(name: str, value: Any, low: int) -> None:
    """Raise a ConfigError unless the value is a whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} is {value!r}, but must be a whole number of at least {low}.")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise a ConfigError unless the value is one of the choices."""
    if value not in choices:
        one_of = "one of " if len(choices) > 1 else ""
        raise ConfigError(f"{name} is {value!r}, but must be {one_of}{', '.join(map(repr, choices))}.")
