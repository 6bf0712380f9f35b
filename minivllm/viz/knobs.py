"""Interactive runs: move a slider, and the run is repeated with the new value and drawn.

The function that runs is passed in, so nothing here depends on an engine; `simulation/what_if.py` provides the simulator's.
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
"""The knobs and their values."""
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
"""Seconds to wait before a run, to collect moves that were queued during the last one."""


def knobs(
    run: Callable[..., EngineTrace],
    choices: Choices = CHOICES,
    start: Mapping[str, Any] = START,
    draw: Callable[[EngineTrace], Figure] = draw_run,
) -> VBox:
    """Sliders above the picture of a run. Each move repeats the run with the values shown and redraws the picture.

    Several moves during a slow run lead to a single new run, with the latest values. If a run fails (because the cache is too small
    for a request, say), the reason is shown in a sentence, and the picture of the last successful run stays.

    Without widgets (on GitHub, on paper) the current picture is shown; `draw(run(**values))` draws the same as a figure.

    Args:
        run: Called with one keyword argument per knob.
        choices: Knobs and their values: numbers become a slider, words become buttons.
        start: Initial values; the default is the knob's first choice.
        draw: Draws a run, at most 9 inches wide.

    Returns:
        A box for the notebook to show. `knobs[name].value` is a knob's value, `picture.value` the PNG, `message.value` the error
        message, empty after a successful run.

    Raises:
        WidgetError: ipywidgets is not installed.
        ConfigError: An initial value is not among its knob's choices.

    Example:
        >>> from minivllm.simulation.what_if import what_if
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
    """A slider for numbers, or a row of buttons for words."""
    if value not in values:
        raise ConfigError(f"{name} cannot start at {value!r}: its choices are {', '.join(map(repr, values))}.")
    is_word = any(isinstance(choice, str) for choice in values)
    options = [(choice if isinstance(choice, str) else f"{choice:g}", choice) for choice in values]
    if is_word:
        return widgets.ToggleButtons(options=options, value=value, style={"button_width": "140px"})
    return widgets.SelectionSlider(options=options, value=value, layout={"flex": "1 1 auto", "width": "auto"})


def _redraw(
    run: Callable[..., EngineTrace], draw: Callable[[EngineTrace], Figure], controls: Mapping[str, Any], image: Any, message: Any
) -> None:
    """Run with the current values. Errors are shown as a message, because a widget's callback has no caller to raise to."""
    values = {name: control.value for name, control in controls.items()}
    try:
        png = to_png(draw(run(**values)))
    except Exception as error:
        sentence = str(error) if isinstance(error, MinivllmError) else f"{type(error).__name__}: {error}"
        stays = " <b>The picture still shows the last successful run.</b>" if image.value else ""
        message.value = f'<div style="line-height: 1.4; margin: 4px 0">⚠ {html.escape(sentence)}{stays}</div>'
    else:
        message.value = ""
        show_png(image, png)


class _Coalesced:
    """Merges calls that arrive while one is pending.

    In a notebook the kernel's event loop makes the call a moment later, when queued moves have arrived. Without an event loop it is
    made at once.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._is_due = False

    def ask(self) -> None:
        """Request a call."""
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
        """Make the call."""
        self._is_due = False
        self._call()
