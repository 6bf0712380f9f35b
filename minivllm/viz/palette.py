"""Colours: one request has the same one in every figure, and colour-blind readers can tell them apart."""

from matplotlib.colors import to_rgb

REQUEST_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F7F7F", "#B8A900")
"""Okabe and Ito's palette, with its yellow darkened and its black made grey, so that text can be read on all of them."""


def request_color(number: int) -> str:
    """The colour of a request, by its number in the order of arrival."""
    return REQUEST_COLORS[number % len(REQUEST_COLORS)]


def ink_on(color: str) -> str:
    """Black or white, whichever is easier to read on a colour."""
    red, green, blue = to_rgb(color)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
