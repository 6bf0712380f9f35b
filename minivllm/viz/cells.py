"""The cells of the block map, one per block: collected one by one, then drawn in a few layers.

The lower part of a cell is a bar that shows how full the block is, the upper part its number and owner. In small cells the bar fills
the whole cell.
"""

from __future__ import annotations

from matplotlib.axes import Axes

from minivllm.viz.blocks import Block
from minivllm.viz.drawing import Box, Labels, add_boxes, text_width
from minivllm.viz.palette import INK, NEUTRAL, PALE, tint

BAR = 0.36
"""The height of the bar, as a share of the cell."""
ALLOCATED = 0.72
"""Whiteness of the part above the bar, for device blocks."""
DOTS = "....."
"""The hatch of tokens outside running sequences: cached in free blocks, or on the host."""
_LID = 0.1
"""The height of the dark top that marks a block in the prefix cache."""
_MOST_STRIPES = 4


def host_look(on_host: bool) -> tuple[str, float]:
    """The layer of a block's tokens, and the whiteness of the part above them."""
    return ("tokens on the host", 1.0) if on_host else ("tokens", ALLOCATED)


class Cells:
    """Collects the shapes of all cells and draws them as a few collections.

    Args:
        colors: By request id.
        width, height: Of a cell, in points.
        longest_number: The longest number in a cell.
    """

    def __init__(self, colors: dict[str, str], width: float, height: float, longest_number: str) -> None:
        self.colors, self.width, self.height = colors, width, height
        room = 0.95 * width - 0.5
        self.size = max(4.5, min(8.0, 0.5 * height, room / text_width(longest_number, 1.0)))
        """Of the texts, in points."""
        self.with_text = height >= 9 and text_width(longest_number, self.size) <= room + 1e-6
        self.boxes: dict[str, list[Box]] = {}
        self.faces: dict[str, list[str]] = {}
        self.texts: list[tuple[float, float, str, str]] = []

    def put(self, layer: str, box: Box, color: str = "none") -> None:
        """Add a box to one of the layers that `paint` draws."""
        self.boxes.setdefault(layer, []).append(box)
        self.faces.setdefault(layer, []).append(color)

    def write(self, x: float, y: float, text: str, side: str) -> None:
        """Add a text whose left end, right end or middle is at its point."""
        if self.with_text:
            self.texts.append((x, y, text, side))

    def fits(self, number: str, note: str) -> bool:
        """Whether a cell has room for a note next to its number."""
        return text_width(number, self.size) + text_width(note, self.size) + 7.5 <= 0.88 * self.width

    def add(self, number: str, note: str, block: Block, block_size: int, box: Box, on_host: bool) -> None:
        """Add a block's cell.

        Args:
            number, note: The texts at the left and right. For a shared block the note is its reference count.
            block: Its state.
            block_size: Tokens per block.
            box: Its place.
            on_host: Whether the block is in host memory.
        """
        tokens, whiteness = host_look(on_host)
        left, right, bottom, top = box
        requests = list(dict.fromkeys(key.request_id for key in block.owners))[:_MOST_STRIPES]
        bar = bottom + (top - bottom) * (BAR if self.with_text else 1.0 - _LID)
        if requests:
            end = left + (right - left) * block.num_tokens / block_size
            self.put("allocated", box, tint(self.colors[requests[0]], whiteness))
            for i, request_id in enumerate(requests):
                color, low, high = self.colors[request_id], i / len(requests), (i + 1) / len(requests)
                if i:  # the first one's tint already covers the cell
                    sides = (left + (right - left) * low, left + (right - left) * high)
                    self.put("allocated stripes", (*sides, bottom, top), tint(color, whiteness))
                self.put(tokens, (left, end, bottom + (bar - bottom) * low, bottom + (bar - bottom) * high), color)
            self.put("shared" if block.num_references > 1 else "owned", box)
        elif block.cached:
            self.put("free", box, tint(NEUTRAL, 0.88))
            self.put("cached", (left, right, bottom, bar), tint(NEUTRAL, 0.65))
        else:
            self.put("free", box, "white")
        if block.cached:
            self.put("lid", (left, right, top + (bottom - top) * _LID, top), INK)
        if block.written:
            self.put("written", box)
        middle, margin = top + (bottom - top) * (0.53 - BAR / 2), 3.0 / self.width
        self.write(left + margin, middle, number, "left")
        if block.num_references > 1:
            note = f"×{block.num_references}"
        if note and self.fits(number, note):
            self.write(right - margin, middle, note, "right")

    def paint(self, axes: Axes) -> None:
        """Draw all layers, back to front."""
        thin = 0.5 if min(self.width, self.height) > 5 else 0.0
        thick = 1.8 if min(self.width, self.height) > 12 else 1.0
        layers = (
            ("free", PALE, max(thin, 0.2), None),
            ("cached", NEUTRAL, thin, DOTS),
            ("allocated", "none", 0.0, None),
            ("allocated stripes", "none", 0.0, None),
            ("tokens", "none", 0.0, None),
            ("tokens on the host", INK, 0.0, DOTS),
            ("owned", INK, thin, None),
            ("lid", "none", 0.0, None),
            ("shared", "black", thick, None),
        )
        for i, (layer, edge, line_width, hatch) in enumerate(layers):
            add_boxes(
                axes,
                self.boxes.get(layer, ()),
                self.faces.get(layer, ()),
                edge=edge,
                line_width=line_width,
                hatch=hatch,
                label=layer,
                zorder=2 + 0.1 * i,
            )
        if "written" in self.boxes:
            add_boxes(axes, self.boxes["written"], "none", edge="white", line_width=thick + 1.4, zorder=3.1)
            add_boxes(
                axes,
                self.boxes["written"],
                "none",
                edge="black",
                line_width=thick + 0.4,
                label="written",
                zorder=3.2,
                dashes=(2.0, 1.2),
            )
        for side, align in (("left", 0.0), ("right", 1.0), ("middle", 0.5)):
            texts = [item for item in self.texts if item[3] == side]
            if texts:
                labels = Labels(axes, [item[:2] for item in texts], [item[2] for item in texts], self.size, align=(align, 0.5))
                axes.add_collection(labels, autolim=False)
