"""Pictures in stored notebooks are made small, and look the same."""

from __future__ import annotations

import base64
import io

import nbformat
import numpy as np
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

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
    data = {"image/png": base64.b64encode(png).decode(), "text/plain": "<Figure size 900x860 with 1 Axes>"}
    outputs = [new_output("stream", text="hello\n"), new_output("display_data", data)]
    notebook = new_notebook(cells=[new_markdown_cell("# A map"), new_code_cell("1", outputs=outputs)])
    assert shrink_pictures(notebook) > len(png) / 2
    text, figure = notebook.cells[1].outputs
    assert text.text == "hello\n" and figure.data["text/plain"] == data["text/plain"]
    assert base64.b64decode(figure.data["image/png"]) == shrink(png)
    assert shrink_pictures(notebook) == 0
    nbformat.validate(notebook)
