"""What `minivllm bench kernels` measured, as points of a roofline: operations, bytes and seconds of each kernel.

Bytes are those that a kernel cannot do without: weights, inputs and outputs once each; keys and values of the contexts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.bench.attention import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS
from minivllm.bench.linear import SHAPES
from minivllm.errors import ConfigError

FLOAT32_BYTES = 4


def kernel_points(
    results: dict[str, Any], ways: Sequence[str] = ("minivllm",), backends: Sequence[str] = ("cpu",)
) -> list[dict[str, Any]]:
    """The float32 linear layers, by rows in the batch, and the attention of a decode step, by sequences and context.

    Args:
        results: The content of the file that `minivllm bench kernels --json FILE` wrote.
        ways: Of `bench.linear.WAYS`, those to show. "F.linear" stands in for ways that were not measured. Not those with 8 and 4
            bits: their arithmetic has another roof, which is not measured.
        backends: Of attention, those to show: "cpu" or "torch".

    Returns:
        For each kernel the arguments of `viz.roofline.RooflinePoint`: name, flops, bytes, seconds, series.

    Raises:
        ConfigError: These are no results of `bench kernels`, or a way is not one of float32.
    """
    for way in ways:
        if "int" in way:
            raise ConfigError(
                f"{way!r} does not calculate in float32, and the roof of 8 and 4 bits is not measured: leave it out."
            )
    try:
        linear, attention = results["linear"], results["attention"]
        shown = [way for way in ways if way in linear] or ["F.linear"]
        points = [_linear_point(way, int(rows), milliseconds) for way in shown for rows, milliseconds in linear[way].items()]
        points += [_attention_point(row, backend) for backend in backends for row in attention]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"These are not results of `minivllm bench kernels` ({type(error).__name__}: {error}): write them with its --json."
        ) from None
    return points


def peaks(results: dict[str, Any]) -> tuple[float, float]:
    """The machine's measured float32 operations per second and bytes per second.

    Raises:
        ConfigError: These are no results of `bench kernels`.
    """
    try:
        return results["floor"]["gigaflops"] * 1e9, results["floor"]["read_gigabytes_per_second"] * 1e9
    except (KeyError, TypeError) as error:
        raise ConfigError(f"These are not results of `minivllm bench kernels` ({type(error).__name__}: {error}).") from None


def _linear_point(way: str, rows: int, milliseconds: float) -> dict[str, Any]:
    weights = sum(outputs * inputs for outputs, inputs in SHAPES)
    activations = rows * sum(outputs + inputs for outputs, inputs in SHAPES)
    return {
        "name": f"{rows} row{'' if rows == 1 else 's'}",
        "flops": 2 * rows * weights,
        "bytes": (weights + activations) * FLOAT32_BYTES,
        "seconds": milliseconds / 1e3,
        "series": f"linear layers ({way}), by rows in the batch",
    }


def _attention_point(row: dict[str, Any], backend: str) -> dict[str, Any]:
    """Scores are a product of each query head with each key, and so is their use on the values."""
    tokens = NUM_LAYERS * row["sequences"] * row["context"]
    return {
        "name": f"{row['sequences']} × {row['context']:,}",
        "flops": 2 * 2 * tokens * NUM_HEADS * HEAD_DIM,
        "bytes": 2 * tokens * NUM_KV_HEADS * HEAD_DIM * FLOAT32_BYTES,
        "seconds": row["milliseconds"][backend] / 1e3,
        "series": f"decode attention ({backend}), sequences × tokens of context",
    }
