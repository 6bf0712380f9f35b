"""Which program of a Triton kernel reads and writes which elements: a picture of a launch, and a player that goes through it step by step."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minivllm.errors import ConfigError
from minivllm.kernels.accesses import record_accesses
from minivllm.kernels.launches import Access, Launch, Problem, name_programs
from minivllm.viz.drawing import WIDTH, Labels, add_boxes, add_legend, label_places, new_figure, tidy
from minivllm.viz.notebook import import_widgets, to_png
from minivllm.viz.palette import INK, NEUTRAL, PALE, ink_on, request_color, tint
from minivllm.viz.player import make_player

if TYPE_CHECKING:
    from ipywidgets import VBox

_MOST_COLUMNS, _MOST_ROWS = 64, 12
"""Limits of a tensor's picture: beyond them, columns are grouped, several elements to a cell, and only some rows are shown."""
_MOST_OUTSIDE = 8
"""Columns that are drawn on each side of a tensor for accesses outside it."""
_MOST_SENTENCES = 4
_MOST_PROGRAMS, _MOST_TUPLES = 5, 3
"""Programs in the legend: numbers, or places in a grid of several axes."""
_ROW_HEIGHT, _PANEL_MARGIN, _LINE_HEIGHT = 0.26, 0.42, 0.16
_LEFT = 1.55
_READ_WHITENESS, _PAST_WHITENESS = 0.6, 0.8
_SENTENCE_WIDTH = 125
_VERBS = {"load": "reads", "store": "writes", "atomic": "updates"}


def show_accesses(launch: Callable[..., Any], *args: Any, **kwargs: Any) -> VBox:
    """Launch a kernel in Triton's interpreter and show which program touches which memory: the whole launch, then step by step.

    A launch `add[(4,)](x, y, out, 100, BLOCK=32)` is shown by `show_accesses(add[(4,)], x, y, out, 100, BLOCK=32)`.

    Mistakes are named below the picture: accesses outside a tensor, several programs that write one element, and a program that reads
    what another one writes. Accesses outside a tensor are drawn, but not made.

    Args:
        launch: A kernel with its grid, or any function that launches kernels.
        args, kwargs: Its arguments.

    Returns:
        A box for the notebook to show. `launches` are the recorded launches, `problems` their mistakes; `slider.value` is the step, 0 for
        the whole launch. `draw_accesses(box.launches[0])` draws the same as a figure.

    Raises:
        WidgetError: ipywidgets is not installed.
        KernelError: Triton is not installed.
        ConfigError: No kernel was launched, or `launch` is a kernel without a grid.
    """
    import_widgets()
    if hasattr(launch, "run") and hasattr(launch, "fn"):
        raise ConfigError(f"The kernel needs a grid: show_accesses({getattr(launch, '__name__', 'kernel')}[(programs,)], ...).")
    with record_accesses() as launches:
        launch(*args, **kwargs)
    if not launches:
        raise ConfigError("No Triton kernel was launched.")
    pages: list[tuple[Launch, int | None]] = [
        page for launch in launches for page in ((launch, None), *((launch, step) for step in range(len(launch.accesses))))
    ]

    @lru_cache(maxsize=200)
    def draw(number: int) -> bytes:
        return to_png(draw_accesses(*pages[number]))

    problems = [problem for launch in launches for problem in launch.problems()]
    found = "no mistakes" if not problems else f"{len(problems)} mistakes" if len(problems) > 1 else "1 mistake"
    sentence = f"{len(pages) - len(launches)} accesses, {found}; `draw_accesses(box.launches[0])` draws the launch as a figure."
    box = make_player(len(pages), draw, 0, sentence, num_filmed=4)
    box.launches, box.problems = launches, problems
    return box


def draw_accesses(launch: Launch, step: int | None = None, title: str = "") -> Figure:
    """Draw each tensor of a launch as a grid of its elements, with the programs that read and write them.

    Args:
        launch: From `record_accesses`.
        step: The number of an access, negative numbers count from the end. It is drawn in full colour, earlier ones are pale. None draws the whole launch.
        title: Above the figure. Defaults to a description.

    Raises:
        ConfigError: There is no such step.
    """
    accesses = launch.accesses
    if step is not None and not -len(accesses) <= step < len(accesses):
        raise ConfigError(f"There is no step {step}: the launch has {len(accesses)} accesses.")
    current = None if step is None else accesses[step]
    problems = launch.problems()
    sentences = _wrap(problems) if step is None or step % len(accesses) == len(accesses) - 1 else []
    panels = [_Panel(launch, number, current) for number in range(len(launch.tensors))]
    left = max((panel.left for panel in panels), default=0)
    span = max(16, left + max((panel.cells + panel.right for panel in panels), default=0))  # elements are as wide in all tensors
    below = 0.12 + _LINE_HEIGHT * len(sentences)
    heights = [_PANEL_MARGIN + _ROW_HEIGHT * panel.height for panel in panels]
    above = 0.55 if step is None else 0.75
    total = max(sum(heights), 0.3) + below + above
    figure = new_figure(total, title or _describe(launch, step), left=_LEFT, right=0.15, top=0.55, bottom=below)
    programs = list(dict.fromkeys(access.program for access in accesses))
    colors = {program: request_color(number) for number, program in enumerate(programs)}
    top = total - above
    for panel, height in zip(panels, heights, strict=True):
        axes = figure.add_axes(
            (
                _LEFT / WIDTH,
                (top - height + _PANEL_MARGIN - 0.12) / total,
                (WIDTH - _LEFT - 0.15) / WIDTH,
                (height - _PANEL_MARGIN) / total,
            )
        )
        axes.set(xlim=(-left, span - left), ylim=(len(panel.shown) + panel.below, -panel.above))
        panel.paint(axes, colors, current, None if step is None else step % len(accesses), problems)
        top -= height
    if panels:
        beside = -(_LEFT - 0.1) / (WIDTH - _LEFT - 0.15)  # from the edge of the figure on: it is long
        add_legend(figure.axes[0], _legend(launch, colors, problems), y=1.0 + 0.03 / (_ROW_HEIGHT * panels[0].height), x=beside)
    for number, sentence in enumerate(sentences):
        y = (below - 0.1 - _LINE_HEIGHT * (number + 0.5)) / total
        figure.text(0.02, y, sentence, fontsize=8.5, color=INK, va="center")
    return figure


def _describe(launch: Launch, step: int | None) -> str:
    number = math.prod(launch.grid)
    name = f"{launch.kernel}, {number} program{'s' if number != 1 else ''}"
    if step is None:
        return name
    access = launch.accesses[step]
    masked = f" ({access.num_masked} masked)" if access.num_masked else ""
    tensor, count = launch.tensors[access.tensor].name, len(access.elements)
    who = name_programs([access.program], launch.grid)
    number = step % len(launch.accesses) + 1
    line = textwrap.shorten(access.source, 90, placeholder=" …")
    return f"{name}: access {number} of {len(launch.accesses)}\n{who} {_VERBS[access.kind]} {count} of {tensor}{masked}: {line}"


def _wrap(problems: Sequence[Problem]) -> list[str]:
    """The problems as lines of text."""
    if not problems:
        return ["No access outside the tensors, and no element on which programs get in each other's way."]
    lines = [
        line for problem in problems[:_MOST_SENTENCES] for line in textwrap.wrap("• " + problem.sentence + ".", _SENTENCE_WIDTH)
    ]
    more = len(problems) - _MOST_SENTENCES
    return [*lines, f"… and {more} more"] if more > 0 else lines


def _legend(launch: Launch, colors: dict[Any, str], problems: Sequence[Problem]) -> list[Artist]:
    most = _MOST_PROGRAMS if launch.grid[1] == launch.grid[2] == 1 else _MOST_TUPLES
    handles: list[Artist] = [
        Patch(facecolor=color, edgecolor="none", label=name_programs([program], launch.grid).lower())
        for program, color in list(colors.items())[:most]
    ]
    if len(colors) > most:
        del handles[3:]
        handles.append(Patch(facecolor="none", edgecolor="none", label="…"))
    some = request_color(0)
    kinds = {access.kind for access in launch.accesses}
    if "load" in kinds:
        handles.append(Patch(facecolor=tint(some, _READ_WHITENESS), edgecolor=PALE, label="pale: read"))
        handles.append(Patch(facecolor=tint(NEUTRAL, _READ_WHITENESS), edgecolor=PALE, label="grey: by several"))
    if kinds - {"load"}:
        handles.append(Patch(facecolor=some, edgecolor=PALE, label="full: written"))
    found = {problem.kind for problem in problems}
    if found - {"outside"}:
        handles.append(Patch(facecolor="white", edgecolor=INK, hatch="xxxxx", label="conflict"))
    if "outside" in found:
        handles.append(Patch(facecolor="white", edgecolor=INK, linewidth=1.6, linestyle=":", label="! outside"))
    return handles


class _Panel:
    """One tensor as a grid of cells: a row for each row of the tensor, or for each 64 elements of a vector.

    Args:
        launch: Of a kernel.
        number: The tensor's.
        current: The access that is shown, which decides which rows are.
    """

    def __init__(self, launch: Launch, number: int, current: Access | None) -> None:
        self.launch, self.number = launch, number
        self.tensor = launch.tensors[number]
        self.accesses = [access for access in launch.accesses if access.tensor == number]
        count = self.tensor.num_elements
        self.columns = max(1, min(count, _MOST_COLUMNS) if len(self.tensor.shape) < 2 else self.tensor.shape[-1])
        self.group = -(-self.columns // _MOST_COLUMNS)
        self.cells = -(-self.columns // self.group)
        self.rows = max(1, -(-count // self.columns))
        places = [self._outside_places(access) for access in self.accesses]
        outside = np.concatenate(places) if places else np.zeros((0, 2), int)
        inside_rows = (outside[:, 0] >= 0) & (outside[:, 0] < self.rows)
        self.left = int(max(0, -outside[inside_rows, 1].min(initial=0)))
        self.right = int(max(0, outside[inside_rows, 1].max(initial=0) - self.cells + 1))
        self.above = int((outside[:, 0] < 0).any())
        self.below = int((outside[:, 0] >= self.rows).any())
        self.shown = self._choose_rows(current)
        self.places = {row: place for place, row in enumerate(self.shown)}
        self.height = len(self.shown) + self.above + self.below

    def _choose_rows(self, current: Access | None) -> list[int]:
        """The rows to draw: all of them, or the touched ones around the current access."""
        if self.rows <= _MOST_ROWS:
            return list(range(self.rows))
        touched = np.unique(
            np.concatenate([access.elements[access.elements >= 0] // self.columns for access in self.accesses] or [[0]])
        )
        rows = [*touched.astype(int).tolist(), *(row for row in range(_MOST_ROWS) if row not in touched)]
        beyond = [
            row
            for row in np.unique(np.concatenate([self._outside_places(access)[:, 0] for access in self.accesses] or [[0]]))
            if row in touched
        ]
        first = rows.index(int(beyond[0])) if beyond else 0
        if current is not None and current.tensor == self.number and (current.elements >= 0).any():
            first = rows.index(int(current.elements[current.elements >= 0].min()) // self.columns)
        first = max(0, min(first, len(touched) - _MOST_ROWS))
        return sorted(rows[first : first + _MOST_ROWS])

    def _outside_places(self, access: Access) -> np.ndarray:
        """Row and cell of each element outside the tensor, as far as they are drawn: `[n, 2]`."""
        offsets = access.byte_offsets[access.elements < 0] // self.tensor.item_size
        if len(self.tensor.shape) < 2:
            step = self.tensor.stride[0] if self.tensor.shape and self.tensor.stride[0] else 1
            positions = offsets // step
            if self.rows == 1:
                rows, columns = np.zeros_like(positions), positions
            else:
                rows, columns = np.divmod(positions, self.columns)
        else:
            rows, rest = np.divmod(offsets, max(1, self.tensor.stride[-2]))
            columns = rest // max(1, self.tensor.stride[-1])
        cells = np.where(columns < 0, columns, columns // self.group)
        within = np.clip(cells, -_MOST_OUTSIDE, self.cells + _MOST_OUTSIDE - 1)
        rows = np.clip(rows, -1, self.rows)
        return np.unique(np.stack([rows, within], axis=1), axis=0)

    def _cell_of(self, elements: np.ndarray) -> np.ndarray:
        """Row and cell of elements of the tensor: `[n, 2]`, each once."""
        return np.unique(np.stack([elements // self.columns, elements % self.columns // self.group], axis=1), axis=0)

    def _cells(self, access: Access) -> list[tuple[int, int]]:
        return list(map(tuple, self._cell_of(access.elements[access.elements >= 0]).tolist()))

    def _box(self, place: tuple[int, int]) -> tuple[float, float, float, float] | None:
        """Where a cell is drawn; None if it is not."""
        row, cell = place
        y = -1 if row < 0 else len(self.shown) if row >= self.rows else self.places.get(row)
        if y is None:
            return None
        return cell, cell + 1, y + 0.95, y + 0.05

    def paint(
        self,
        axes: Axes,
        colors: dict[Any, str],
        current: Access | None,
        step: int | None,
        problems: Sequence[Problem],
    ) -> None:
        """Draw it: the whole launch, or one access and, pale, those before it."""
        everything = [(row, cell) for row in self.shown for cell in range(self._cells_in(row))]
        self._add(axes, everything, "white", PALE, 0.5)
        past = self.launch.accesses if step is None else self.launch.accesses[:step]
        readers: dict[tuple[int, int], dict[Any, None]] = {}
        writers: dict[tuple[int, int], dict[Any, None]] = {}
        for access in past:
            if access.tensor == self.number:
                for place in self._cells(access):
                    (readers if access.kind == "load" else writers).setdefault(place, {})[access.program] = None
        labels: list[tuple[tuple[int, int], str, str]] = []
        whiteness = 0.0 if step is None else _PAST_WHITENESS
        for place in everything:
            programs = writers.get(place) or readers.get(place)
            if not programs:
                continue
            color = colors[next(iter(programs))] if len(programs) == 1 else NEUTRAL
            fill = tint(color, max(whiteness, 0.0 if place in writers else _READ_WHITENESS))
            self._add(axes, [place], fill, PALE, 0.5, zorder=3)
            if len(programs) > 1 and self.group == 1 and step is None:
                labels.append((place, str(len(programs)), ink_on(fill)))
        if step is None:
            for problem in problems:
                if problem.tensor == self.number and problem.kind != "outside":
                    places = list(map(tuple, self._cell_of(np.array(problem.elements)).tolist()))
                    self._add(axes, places, "white", INK, 1.2, hatch="xxxxx", zorder=4)
                    labels = [label for label in labels if label[0] not in places]
        for access in self.accesses if step is None else [current]:
            if access is None or access.tensor != self.number:
                continue
            color = colors[access.program]
            if step is not None:
                self._add(axes, self._cells(access), color if access.kind != "load" else tint(color, 0.35), INK, 1.4, zorder=5)
            outside = list(map(tuple, self._outside_places(access).tolist()))
            self._add(
                axes, outside, tint(color, _READ_WHITENESS if access.kind == "load" else 0.0), INK, 1.6, zorder=6, dashes=(1, 1)
            )
            labels += [(place, "!", "black") for place in outside]
        self._label(axes, labels)

    def _cells_in(self, row: int) -> int:
        """Cells of a row: the last row of a vector may be shorter."""
        left = self.tensor.num_elements - row * self.columns
        return max(0, min(self.cells, -(-left // self.group)))

    def _add(self, axes: Axes, places: Sequence[tuple[int, int]], color: str, edge: str, width: float, **options: Any) -> None:
        boxes = [box for box in map(self._box, places) if box is not None]
        add_boxes(axes, boxes, color, edge=edge, line_width=width, **options)

    def _label(self, axes: Axes, labels: Sequence[tuple[tuple[int, int], str, str]]) -> None:
        """Write into cells, and name rows and columns."""
        boxes = [(self._box(place), text, color) for place, text, color in dict.fromkeys(labels)]
        points = [((box[0] + box[1]) / 2, (box[2] + box[3]) / 2) for box, _, _ in boxes if box is not None]
        kept = [(text, color) for box, text, color in boxes if box is not None]
        if points:
            texts = Labels(axes, points, [text for text, _ in kept], 7, [color for _, color in kept])
            texts.set_zorder(7)
            axes.add_collection(texts, autolim=False)
        tidy(axes, "", "")
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_xticks([])
        letters = len(str(self.cells * self.group))
        every = next(step for step in (1, 2, 4, 8, 16, 32, 64) if self.cells / step * (letters + 1) <= 100)
        label_places(axes, "x", [(cell + 0.5, str(cell * self.group)) for cell in range(0, self.cells, every)], 6.5)
        names = [(place + 0.5, self._row_name(row)) for row, place in self.places.items()] if self.rows > 1 else []
        label_places(axes, "y", names, 6.5)
        size = f"[{', '.join(map(str, self.tensor.shape))}]"
        part = f"\n{len(self.shown)} of {self.rows} rows" if len(self.shown) < self.rows else ""
        name = f"{self.tensor.name}\n{size}{part}"
        axes.text(
            -0.045 if self.rows > 1 else -0.02, 1.0, name, transform=axes.transAxes, ha="right", va="top", fontsize=8, color=INK
        )

    def _row_name(self, row: int) -> str:
        if len(self.tensor.shape) < 2:
            return str(row * self.columns)
        return ",".join(map(str, np.unravel_index(row, self.tensor.shape[:-1])))
