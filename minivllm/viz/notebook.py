"""Helpers shared by the widgets: importing ipywidgets, rendering PNGs, and a fallback for pages without widgets."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from minivllm.errors import MinivllmError

WIDTH = 900
"""Maximum width of a widget in pixels, for figures 9 inches wide."""
_DOTS_PER_INCH = 125
"""A quarter more than the page's, for sharp text on high-resolution screens."""
_FRAME_MS, _REST_MS = 800, 2500
"""How long a film shows a picture, and how long the one that it rests on."""


class WidgetError(MinivllmError, ImportError):
    """ipywidgets is not installed."""


def import_widgets() -> ModuleType:
    """Import `ipywidgets`, which comes with the extra `course` and is needed only by the widgets.

    Raises:
        WidgetError: It is not installed.
    """
    try:
        import ipywidgets
    except ImportError:
        raise WidgetError(
            'The widgets need ipywidgets, which is not installed: run `pip install "minivllm[course]"`, or draw the same pictures '
            "with `draw_step(trace, step)` and `draw_run(trace)`."
        ) from None
    return ipywidgets


def to_png(figure: Figure) -> bytes:
    """Render a figure as a PNG in 256 colours, without pyplot and its global state.

    It looks the same as in full colour at a quarter of the size, which matters when it is sent for each move of a slider.
    """
    figure.set_dpi(_DOTS_PER_INCH)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba(), "raw", "RGBA", 0, 1).convert("RGB")
    buffer = io.BytesIO()
    _quantize(picture).save(buffer, "PNG", compress_level=6)
    return buffer.getvalue()


def to_film(pngs: Sequence[bytes], still: int) -> bytes:
    """An animated PNG of some pictures, which rests on one of them; where nothing moves, as on paper, that one is shown.

    Args:
        pngs: In order; at least one.
        still: The index of the one to rest on.
    """
    frames = [Image.open(io.BytesIO(png)).convert("RGB") for png in pngs]
    width, height = max(frame.width for frame in frames), max(frame.height for frame in frames)
    strip = Image.new("RGB", (width, height * len(frames)), "white")  # all frames of an animated PNG have the same colours
    for number, frame in enumerate(frames):
        strip.paste(frame, (0, number * height))
    strip = _quantize(strip)
    frames = [strip.crop((0, number * height, width, (number + 1) * height)) for number in range(len(frames))]
    times = [_REST_MS if number == still else _FRAME_MS for number in range(len(frames))]
    buffer = io.BytesIO()
    frames[still].save(buffer, "PNG", save_all=True, default_image=True, append_images=frames, duration=times, loop=0)
    return buffer.getvalue()


def _quantize(picture: Image.Image) -> Image.Image:
    return picture.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)


def make_image() -> Any:
    """An `ipywidgets.Image` as wide as the page, hidden until `show_png` sets its picture."""
    image = import_widgets().Image(format="png")
    image.layout.width, image.layout.max_width, image.layout.display = "100%", f"{WIDTH}px", "none"
    return image


def show_png(image: Any, png: bytes) -> None:
    """Set and show the picture of an image widget."""
    image.value = png
    image.layout.display = "block"


@lru_cache(maxsize=1)
def _pictured_box() -> type:
    """The class behind `make_box`, defined on first use because it needs ipywidgets."""

    class PicturedBox(import_widgets().VBox):  # type: ignore[misc]  # a base class known only at run time
        """A column of widgets that shows its picture, or its film, where there are no widgets."""

        picture: Any = None
        film: Callable[[], bytes] | None = None
        sentence = ""

        def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
            bundle = super()._repr_mimebundle_(**kwargs)
            if bundle is not None:
                bundle["text/plain"] = self.sentence
                if self.picture is not None and self.picture.value:
                    png = self.film() if self.film else self.picture.value
                    bundle["image/png"] = base64.b64encode(png).decode("ascii")
            return bundle

    return PicturedBox


def make_box(children: list[Any], picture: Any, sentence: str) -> Any:
    """A column of widgets with a fallback for GitHub, PDF and notebooks without ipywidgets.

    Args:
        children: From top to bottom.
        picture: The image among them that is shown where there are no widgets, if any.
        sentence: Shown where there are no pictures either.
    """
    box = _pictured_box()(children)
    box.picture, box.sentence = picture, sentence
    box.layout.max_width = f"{WIDTH}px"
    return box
