"""Knobs on a run: turn one, and the run is made again and drawn.

What runs is given in, so nothing here knows an engine: `bench/what_if.py` has the simulator's.
"""

from __future__ import annotations

import asyncio
import html
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from minivllm.engine.trace import EngineTrace
from minivllm.errors import ConfigError, MinivllmError
from minivllm.viz.notebook import import_widgets, make_box, make_image, show_png, to_png
from minivllm.viz.run import draw_run

if TYPE_CHECKING:
    from ipywidgets import VBox

Choices = Mapping[str, Sequence[Any]]

CHOICES: Choices = {
    "max_num_seqs": (1, 2, 4, 8, 16, 32),
    "block_size": (1, 4, 8, 16, 32, 64),
    "num_gpu_blocks": (16, 32, 48, 64, 96, 128, 256),
    "arrival_rate": (1.0, 2.0, 4.0, 8.0, 16.0, 32.0),
    "distribution": ("uniform", "longtail"),
    "scheduler": ("static", "continuous"),
}
"""The knobs, and the values that each can be turned to."""
START: Mapping[str, Any] = {
    "max_num_seqs": 8,
    "block_size": 16,
    "num_gpu_blocks": 64,
    "arrival_rate": 4.0,
    "distribution": "longtail",
    "scheduler": "continuous",
}
_LABEL_WIDTH = "180px"
_DELAY = 0.02
"""Seconds in which further moves are waited for before a run begins: those that have queued up while the last one ran."""


def knobs(
    run: Callable[..., EngineTrace],
    choices: Choices = CHOICES,
    start: Mapping[str, Any] = START,
    draw: Callable[[EngineTrace], Figure] = draw_run,
) -> VBox:
    """Sliders over the picture of a run. Each move runs again with the values that are shown, and draws what comes of it.

    Moves that come while a run is slow are made up for by one run, with the newest values. What cannot be run (a cache too small
    for a request, say) is told in a sentence, and the picture of the last good run stays.

    Where there are no widgets (on GitHub, on paper) the present picture is shown; `draw(run(**values))` is the same as a figure.

    Args:
        run: Called with one keyword argument for each knob.
        choices: Knobs and the values that each can be turned to: numbers make a slider, words make buttons.
        start: The values to begin with; the first choice where a knob is not named.
        draw: Makes a picture of size 9 inches or less.

    Returns:
        A box for the notebook to show. `knobs[name].value` is a knob's value, `picture.value` the PNG, `message.value` the
        sentence, empty if all went well.

    Raises:
        WidgetError: ipywidgets is not installed.
        ConfigError: A value to begin with is none of its knob's choices.

    Example:
        >>> from minivllm.bench.what_if import what_if
        >>> box = knobs(what_if)
        >>> box.knobs["max_num_seqs"].value = 4
    """
    widgets = import_widgets()
    image, message = make_image(), widgets.HTML()
    controls = {name: _make_knob(widgets, name, values, start.get(name, values[0])) for name, values in choices.items()}
    cells = [widgets.HBox([widgets.Label(name, layout={"width": _LABEL_WIDTH}), knob]) for name, knob in controls.items()]
    layout = widgets.Layout(grid_template_columns="repeat(2, minmax(0, 1fr))", grid_gap="2px 24px", width="100%")
    box = make_box(
        [widgets.GridBox(cells, layout=layout), message, image],
        image,
        "Knobs on a run; `draw(run(**values))` draws the same picture as a figure.",
    )
    box.knobs, box.message = controls, message
    redraw = _Coalesced(lambda: _redraw(run, draw, controls, image, message))
    for control in controls.values():
        control.observe(lambda change: redraw.ask(), "value")
    redraw.now()
    return box


def _make_knob(widgets: Any, name: str, values: Sequence[Any], value: Any) -> Any:
    """A slider over numbers, or a row of buttons with words."""
    if value not in values:
        raise ConfigError(f"{name} cannot begin with {value!r}: its choices are {', '.join(map(repr, values))}.")
    is_word = any(isinstance(choice, str) for choice in values)
    options = [(choice if isinstance(choice, str) else f"{choice:g}", choice) for choice in values]
    if is_word:
        return widgets.ToggleButtons(options=options, value=value, style={"button_width": "140px"})
    return widgets.SelectionSlider(options=options, value=value, layout={"flex": "1 1 auto", "width": "auto"})


def _redraw(
    run: Callable[..., EngineTrace], draw: Callable[[EngineTrace], Figure], controls: Mapping[str, Any], image: Any, message: Any
) -> None:
    """Run with the values that are shown. Whatever goes wrong is a sentence: a widget has nobody to raise to."""
    values = {name: control.value for name, control in controls.items()}
    try:
        png = to_png(draw(run(**values)))
    except Exception as error:
        sentence = str(error) if isinstance(error, MinivllmError) else f"{type(error).__name__}: {error}"
        stays = " <b>The picture is still that of the last run that worked.</b>" if image.value else ""
        message.value = f'<div style="line-height: 1.4; margin: 4px 0">⚠ {html.escape(sentence)}{stays}</div>'
    else:
        message.value = ""
        show_png(image, png)


class _Coalesced:
    """Calls something when asked, once for all who ask while it is busy or about to begin.

    In a notebook the kernel's event loop runs it a moment later, when the moves that have queued up are in. Without an event loop
    it runs at once.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._is_due = False

    def ask(self) -> None:
        """Have it called soon."""
        if self._is_due:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.now()
        else:
            self._is_due = True
            loop.call_later(_DELAY, self.now)

    def now(self) -> None:
        """Call it."""
        self._is_due = False
        self._call()
