"""Colours: one request has the same one in every figure, and colour-blind readers can tell them apart."""

REQUEST_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F7F7F", "#B8A900")
"""Okabe and Ito's palette, with its yellow darkened and its black made grey so that white text can be read on them."""


def request_color(number: int) -> str:
    """The colour of a request, by its number in the order of arrival."""
    return REQUEST_COLORS[number % len(REQUEST_COLORS)]
