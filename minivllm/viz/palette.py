"""Colours: each request has the same one in every figure, and colour-blind readers can tell them apart.

Colour identifies the request. State is shown by lightness, hatching and height, so that figures are readable in black and white.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from matplotlib.colors import to_hex, to_rgb

from minivllm.engine.trace import EngineTrace
from minivllm.viz.memo import remembered

REQUEST_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F7F7F", "#B8A900")
"""The palette of Okabe and Ito, with a darker yellow and grey for black, so that text is legible on all of them."""

NUM_COLORS = 3 * len(REQUEST_COLORS)
"""How many different colours requests have: the palette, plain, darker and lighter."""

INK = "#333333"
"""Colour of texts, hatches and outlines."""
PALE = "#BBBBBB"
"""Colour of grids and of the outlines of empty boxes."""
NEUTRAL = "#6E6E6E"
"""For any request, in legends and where requests are aggregated."""


@dataclass(frozen=True)
class Look:
    """How a state is drawn.

    Attributes:
        label: In a legend.
        whiteness: From 0, the request's colour, to 1, white.
        height: Of the bar, as a share of the row.
        hatch: A matplotlib hatch pattern, or None.
        outlined: Whether it has an outline.
    """

    label: str
    whiteness: float = 0.0
    height: float = 0.84
    hatch: str | None = None
    outlined: bool = False


STATE_LOOKS = {
    "waiting": Look("waiting", whiteness=1.0, height=0.26, outlined=True),
    "prefill": Look("prefill", whiteness=0.6, hatch="/////", outlined=True),
    "decode": Look("decode"),
    "stalled": Look("stalled: not in this step", whiteness=0.45, height=0.26),
    "preempted": Look("preempted: to be recomputed", whiteness=1.0, height=0.6, hatch="xxxxx", outlined=True),
    "swapped": Look("swapped out", whiteness=1.0, height=0.6, hatch=".....", outlined=True),
    "rejected": Look("rejected drafts", whiteness=1.0, hatch="xxxxx", outlined=True),
}
"""The looks of the states of a sequence, and of rejected drafts."""


def request_color(number: int) -> str:
    """The colour of a request by its number in order of arrival: the palette's eight, then eight darker, eight lighter, and again."""
    color = REQUEST_COLORS[number % len(REQUEST_COLORS)]
    shade = number // len(REQUEST_COLORS) % 3
    if shade == 1:
        return to_hex([0.6 * part for part in to_rgb(color)]).upper()
    return tint(color, 0.4).upper() if shade == 2 else color


@remembered
def request_colors(trace: EngineTrace) -> dict[str, str]:
    """The colours of all requests by id: the same in every figure of a trace.

    Requests that appear only in steps come last, in order of appearance.
    """
    ids = dict.fromkeys(trace.requests)
    for step in trace:
        ids.update(dict.fromkeys(item.request_id for item in step.scheduled))
        for tables in (step.block_tables, step.swapped_tables):
            ids.update(dict.fromkeys(key.request_id for key in tables))
    return {request_id: request_color(number) for number, request_id in enumerate(ids)}


@lru_cache(maxsize=256)
def tint(color: str, whiteness: float) -> str:
    """A colour mixed with white: 0 leaves it unchanged, 1 is white."""
    return to_hex([part + (1.0 - part) * whiteness for part in to_rgb(color)])


def ink_on(color: str) -> str:
    """Black or white, whichever is more legible on a colour."""
    red, green, blue = to_rgb(color)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
