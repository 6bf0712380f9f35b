"""From logits to a token: what each step leaves of the distribution, as a figure and with sliders, and the race that draws the token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from minivllm.viz.knobs import knobs
from minivllm.viz.palette import INK, PALE, REQUEST_COLORS, tint

if TYPE_CHECKING:
    from ipywidgets import VBox

Stages = Mapping[str, Sequence[float]]
"""The probabilities of the same tokens after each step, by the step's name."""

FILTER_CHOICES: Mapping[str, Sequence[Any]] = {
    "temperature": (0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0),
    "min_p": (0.0, 0.02, 0.05, 0.1, 0.2, 0.5),
    "top_k": (0, 1, 2, 3, 5, 8, 12, 20),
    "top_p": (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0),
}
"""The sliders of `play_filters`. 0 for `top_k` and 1 for `top_p` keep all tokens."""


def draw_stages(tokens: Sequence[str], stages: Stages) -> Figure:
    """Bars for the same tokens after each step, one row of bars above the other.

    Each row shows the row above it as outlines; a token that the step removes is crossed out.

    Args:
        tokens: What each token spells, most likely first.
        stages: The distribution after each step, the first one untouched. Probabilities of 0 mean removed.
    """
    height = 1.1 * len(stages) + 0.9
    figure = Figure(figsize=(9, height))
    rows = figure.subplots(len(stages), sharex=True, sharey=True, squeeze=False)[:, 0]
    figure.subplots_adjust(left=0.08, right=0.99, top=1 - 0.1 / height, bottom=0.9 / height, hspace=0.2)
    highest = 1.1 * max(prob for probs in stages.values() for prob in probs)
    places = range(len(tokens))
    before: Sequence[float] | None = None
    for axes, (name, probs), color in zip(rows, stages.items(), REQUEST_COLORS, strict=False):
        axes.bar(places, probs, color=tint(color, 0.15), width=0.8)
        if before is not None:
            axes.bar(places, before, fill=False, edgecolor=INK, linewidth=0.8, width=0.8)
            gone = [place for place in places if before[place] > 0 and not probs[place] > 0]
            axes.plot(gone, [0.07 * highest] * len(gone), "x", color=INK, markersize=7, clip_on=False)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        axes.text(0.995, 0.9, name, transform=axes.transAxes, ha="right", va="top", bbox=box)
        axes.set_ylim(0, highest)
        axes.grid(axis="y", color=PALE, linewidth=0.5)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        before = probs
    rows[-1].set_xticks(places, [_label(token) for token in tokens], rotation=45, ha="right", rotation_mode="anchor")
    figure.supylabel("probability", fontsize=10, x=0.005)
    return figure


def draw_arrivals(tokens: Sequence[str], times: Sequence[Sequence[float]]) -> Figure:
    """Races between tokens, one line each: a dot where a token arrives, and the first one's name before it.

    Args:
        tokens: What each token spells, most likely first.
        times: For each race, the time of each token; above 0.
    """
    height = 0.3 * len(times) + 1.2
    figure = Figure(figsize=(9, height))
    axes = figure.subplots()
    figure.subplots_adjust(left=0.05, right=0.84, top=1 - 0.1 / height, bottom=0.6 / height)
    for number, race in enumerate(times):
        axes.axhline(number, color=PALE, linewidth=0.8, zorder=0)
        winner = min(range(len(tokens)), key=lambda token: race[token])
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        axes.annotate(
            _label(tokens[winner]),
            (race[winner], number),
            (-10, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            bbox=box,
        )
    for token, color in zip(range(len(tokens)), REQUEST_COLORS, strict=False):
        won = [min(race) == race[token] for race in times]
        axes.scatter(
            [race[token] for race in times], range(len(times)), [110 if first else 40 for first in won], tint(color, 0.15),
            edgecolor=[INK if first else "none" for first in won], zorder=2,
        )  # fmt: skip
        axes.scatter([], [], 40, tint(color, 0.15), label=_label(tokens[token]))
    axes.set_xscale("log")
    axes.set_xlim(min(map(min, times)) / 4, max(map(max, times)) * 1.3)
    axes.set_ylim(len(times) - 0.5, -0.5)
    axes.set_yticks(range(len(times)), range(1, len(times) + 1))
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("time of arrival")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, borderaxespad=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def play_filters(tokens: Sequence[str], apply: Any, **start: Any) -> VBox:
    """`draw_stages` below sliders for temperature, min-p, top-k and top-p.

    Args:
        tokens: What each token spells, most likely first.
        apply: Called with the four values as keyword arguments; returns the stages.
        start: Initial values; without one, a slider starts where it changes nothing.
    """
    initial = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0} | start
    return knobs(apply, FILTER_CHOICES, initial, lambda stages: draw_stages(tokens, stages))


def _label(token: str) -> str:
    """A token as a tick label: a leading space is drawn, and "$" would begin a formula."""
    return repr(token)[1:-1].replace(" ", "·").replace("$", r"\$")
