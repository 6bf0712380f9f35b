"""What the widgets share: ipywidgets where it is installed, pictures as bytes, and what a page without widgets shows."""

from __future__ import annotations

import base64
import io
from functools import lru_cache
from types import ModuleType
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from minivllm.errors import MinivllmError

WIDTH = 900
"""Pixels of a notebook page that a widget takes at most, for figures of 9 inches."""
_DOTS_PER_INCH = 125
"""A quarter more than the page has, for sharp letters on fine screens."""


class WidgetError(MinivllmError, ImportError):
    """Widgets are asked for where there are none."""


def import_widgets() -> ModuleType:
    """The module `ipywidgets`. It comes with the extra `course`, and nothing but the widgets needs it.

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
    """A figure as a PNG of 256 colours, drawn without pyplot and so without any state that a notebook shares.

    That is a quarter of the size of all colours, to send at each move of a slider and to store in a notebook, and looks the same.
    """
    figure.set_dpi(_DOTS_PER_INCH)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba(), "raw", "RGBA", 0, 1).convert("RGB")
    buffer = io.BytesIO()
    picture.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(buffer, "PNG", compress_level=6)
    return buffer.getvalue()


def make_image() -> Any:
    """An empty `ipywidgets.Image` as wide as the page, hidden until `show_png` gives it a picture."""
    image = import_widgets().Image(format="png")
    image.layout.width, image.layout.max_width, image.layout.display = "100%", f"{WIDTH}px", "none"
    return image


def show_png(image: Any, png: bytes) -> None:
    """Put a picture on an image."""
    image.value = png
    image.layout.display = "block"


@lru_cache(maxsize=1)
def _pictured_box() -> type:
    """The class of `make_box`, made when ipywidgets is there."""

    class PicturedBox(import_widgets().VBox):  # type: ignore[misc]
        """A column of widgets. Where there are no widgets, its picture is shown instead."""

        picture: Any = None
        sentence = ""

        def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
            bundle = super()._repr_mimebundle_(**kwargs)
            if bundle is not None:
                bundle["text/plain"] = self.sentence
                if self.picture is not None and self.picture.value:
                    bundle["image/png"] = base64.b64encode(self.picture.value).decode("ascii")
            return bundle

    return PicturedBox


def make_box(children: list[Any], picture: Any, sentence: str) -> Any:
    """A column of widgets that is still something on GitHub, in a PDF, or in a notebook without ipywidgets.

    Args:
        children: From top to bottom.
        picture: The image among them that stands for all where there are no widgets; None if there is none.
        sentence: Stands for all where there are no pictures either.
    """
    box = _pictured_box()(children)
    box.picture, box.sentence = picture, sentence
    box.layout.max_width = f"{WIDTH}px"
    return box
