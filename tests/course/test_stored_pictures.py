"""Pictures in stored notebooks are made small, and look the same."""

from __future__ import annotations

import base64
import io

import nbformat
import numpy as np
import pytest

from minivllm.course.pictures import shrink, shrink_pictures

pytest.importorskip("matplotlib")
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from minivllm.viz.engine_map import draw_engine_map


@pytest.fixture(scope="module")
def png():
    buffer = io.BytesIO()
    FigureCanvasAgg(draw_engine_map(7)).print_png(buffer)
    return buffer.getvalue()


def test_a_figure_takes_less_than_half_and_looks_the_same(png):
    small = shrink(png)
    assert len(small) < len(png) / 2
    before, after = (np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), dtype=float) for data in (png, small))
    assert before.shape == after.shape
    assert np.abs(before - after).mean() < 2 and np.percentile(np.abs(before - after), 99.9) < 40


def test_a_small_picture_stays_as_it_is(png):
    assert shrink(shrink(png)) == shrink(png)


def test_what_is_transparent_becomes_white():
    buffer = io.BytesIO()
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(buffer, "PNG")
    assert Image.open(io.BytesIO(shrink(buffer.getvalue()))).convert("RGB").getpixel((0, 0)) == (255, 255, 255)


def test_in_a_notebook_pictures_alone_change(png):
    text = nbformat.v4.new_output("stream", text="hello\n")
    figure = nbformat.v4.new_output(
        "display_data", {"image/png": base64.b64encode(png).decode(), "text/plain": "<Figure size 900x860 with 1 Axes>"}
    )
    cells = [nbformat.v4.new_markdown_cell("# A map"), nbformat.v4.new_code_cell("1", outputs=[text, figure])]
    notebook = nbformat.v4.new_notebook(cells=cells)
    assert shrink_pictures(notebook) > len(png) / 2
    assert notebook.cells[1].outputs[0].text == "hello\n"
    assert notebook.cells[1].outputs[1].data["text/plain"] == "<Figure size 900x860 with 1 Axes>"
    assert base64.b64decode(notebook.cells[1].outputs[1].data["image/png"]) == shrink(png)
    assert shrink_pictures(notebook) == 0
    nbformat.validate(notebook)
