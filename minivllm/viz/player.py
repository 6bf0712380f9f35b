"""A player for traces: steps forward and back through an engine's blocks, queues and batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from minivllm.engine.trace import EngineTrace
from minivllm.viz.notebook import import_widgets, make_box, make_image, show_png, to_film, to_png
from minivllm.viz.step import draw_step

if TYPE_CHECKING:
    from ipywidgets import VBox

SPEEDS = {"1 step/s": (1000, 1), "3 steps/s": (333, 1), "10 steps/s": (100, 1), "50 steps/s": (100, 5)}
"""Milliseconds between pictures, and steps per picture."""
_NUM_KEPT = 200
"""Cached pictures, about 0.1 MB each."""


def play(trace: EngineTrace, step: int = 0) -> VBox:
    """Controls (play, pause, step back and forward, a slider, the speed) above the picture of a step.

    Without widgets (on GitHub) a film of the steps around the first one is shown, on paper that one. `draw_step(trace, step)` draws any step as an
    ordinary figure.

    Args:
        trace: Of any engine or simulation. Steps added later are not shown.
        step: The first step shown.

    Returns:
        A box for the notebook to show. `slider.value` is the step, `picture.value` its PNG.

    Raises:
        WidgetError: ipywidgets is not installed.
        ConfigError: There is no such step.

    Example:
        >>> llm = LLM("smollm2-135m", trace=True)  # doctest: +SKIP
        >>> llm.generate(prompts)  # doctest: +SKIP
        >>> play(llm.llm_engine.trace)  # doctest: +SKIP
    """
    widgets = import_widgets()
    if not len(trace):
        sentence = "The trace has no steps, so there is nothing to play."
        return make_box([widgets.HTML(sentence)], None, sentence)
    draw_png = lru_cache(maxsize=_NUM_KEPT)(lambda number: to_png(draw_step(trace, number)))
    sentence = f"A player of {len(trace)} steps; `draw_step(trace, step)` draws any of them as a figure."
    return make_player(len(trace), draw_png, step, sentence, "The trace has only one step:")


def make_player(
    num_steps: int,
    draw_png: Callable[[int], bytes],
    step: int,
    sentence: str,
    alone: str = "",
    *,
    name: str = "step",
    num_filmed: int = 8,
) -> VBox:
    """Controls above the picture of a step.

    Args:
        num_steps: At least 1.
        draw_png: Draws a step.
        step: The first one shown; negative numbers count from the end.
        sentence: What it is, where there are no widgets.
        alone: The text above the only step, instead of the controls.
        name: What the slider counts.
        num_filmed: How many steps a page without widgets shows, one after another; each takes about 25 KB of a stored notebook.

    Returns:
        A box for the notebook to show.
    """
    widgets = import_widgets()
    image = make_image()
    show_png(image, draw_png(step))
    step, last = step % num_steps, num_steps - 1
    box = make_box([image], image, sentence)
    box.slider = widgets.IntSlider(step, 0, last, description=name)
    if last == 0:
        box.children = (widgets.HTML(alone), image)
        return box
    box.play = widgets.Play(value=step, max=last, show_repeat=False)
    box.back = widgets.Button(icon="step-backward", tooltip="one step back")
    box.forward = widgets.Button(icon="step-forward", tooltip="one step forward")
    box.speed = widgets.Dropdown(options=SPEEDS, value=SPEEDS["3 steps/s"])
    box.back.layout.width = box.forward.layout.width = "40px"
    box.speed.layout.width, box.slider.layout.flex, box.slider.layout.min_width = "110px", "1 1 auto", "200px"
    box.slider.style.description_width = "initial"

    def show(change: dict[str, Any]) -> None:
        image.value = draw_png(change["new"])

    def move(steps: int) -> None:
        box.play.playing = False
        box.slider.value += steps  # the slider clamps it

    def set_speed(change: dict[str, Any]) -> None:
        box.play.interval, box.play.step = change["new"]

    def film() -> bytes:
        around = range(num_steps)[max(0, min(box.slider.value - 2, num_steps - num_filmed)) :][:num_filmed]
        return to_film([draw_png(number) for number in around], around.index(box.slider.value))

    box.slider.observe(show, "value")
    box.back.on_click(lambda _: move(-1))
    box.forward.on_click(lambda _: move(1))
    box.speed.observe(set_speed, "value")
    set_speed({"new": box.speed.value})
    widgets.link((box.play, "value"), (box.slider, "value"))
    box.film = film
    box.children = (widgets.HBox([box.play, box.back, box.forward, box.slider, box.speed]), image)
    return box
