"""The pictures of what a kernel reads and writes, and their player."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from matplotlib.colors import to_hex

pytest.importorskip("triton")  # there is none for macOS
import triton
import triton.language as tl

from minivllm.errors import ConfigError
from minivllm.kernels.accesses import record_accesses
from minivllm.viz.accesses import draw_accesses, show_accesses
from minivllm.viz.notebook import to_png
from minivllm.viz.palette import request_color, tint


@triton.jit
def double(out_ptr, x_ptr, num_elements, BLOCK: tl.constexpr, STEP: tl.constexpr):
    places = tl.program_id(0) * STEP + tl.arange(0, BLOCK)
    tl.store(out_ptr + places, 2 * tl.load(x_ptr + places), mask=places < num_elements)


@triton.jit
def idle(number):
    pass


def record(size=20, grid=3, block=8, step=8, shape=None):
    x, out = torch.ones(size), torch.zeros(size)
    if shape:
        x, out = x.view(shape), out.view(shape)
    with record_accesses() as launches:
        double[(grid,)](out, x, size, BLOCK=block, STEP=step)
    return launches[0]


def boxes(axes, fill, edge=None):
    """Left, right and top of the boxes in a colour, in the order of their places."""
    found = []
    for collection in axes.collections:
        if (
            len(collection.get_facecolor())
            and to_hex(collection.get_facecolor()[0]) == fill.lower()
            and collection.get_zorder() < 6
        ):
            found += [
                (round(path.vertices[:, 0].min()), round(path.vertices[:, 1].min() - 0.05)) for path in collection.get_paths()
            ]
    return sorted(found)


def words(figure):
    return [text.get_text() for text in figure.texts]


def test_a_launch_has_a_panel_for_each_tensor():
    figure = draw_accesses(record(size=24))
    out, x = figure.axes
    for program in range(3):
        cells = [(place, 0) for place in range(8 * program, 8 * program + 8)]
        assert boxes(out, request_color(program)) == cells
        assert boxes(x, tint(request_color(program), 0.6)) == cells
    assert words(figure)[-1].startswith("No access outside the tensors")
    assert figure.get_suptitle() == "double, 3 programs"
    labels = [text.get_text() for text in out.get_legend().get_texts()]
    assert labels == ["program 0", "program 1", "program 2", "pale: read", "grey: by several", "full: written"]


def test_what_lies_outside_is_drawn_beside_the_tensor_and_said():
    launch = record()
    figure = draw_accesses(launch)
    out, x = figure.axes
    assert x.get_xlim() == out.get_xlim() == (0, 24)
    dotted = [collection for collection in x.collections if collection.get_zorder() == 6]
    places = sorted(round(path.vertices[:, 0].min()) for collection in dotted for path in collection.get_paths())
    assert places == [20, 21, 22, 23]
    assert "Program 2 reads outside x_ptr, which has 20 elements: at offsets 20, 21, 22 and 23" in " ".join(words(figure))
    assert "! outside" in [text.get_text() for text in out.get_legend().get_texts()]


def test_conflicts_are_hatched():
    figure = draw_accesses(record(size=20, grid=3, block=8, step=6))
    out, _ = figure.axes
    assert "conflict" in [text.get_text() for text in out.get_legend().get_texts()]
    hatched = [collection for collection in out.collections if collection.get_hatch()]
    assert hatched
    assert any("Programs 0 and 1 write out_ptr[6]" in text for text in words(figure))


def test_a_step_is_drawn_over_those_before_it():
    launch = record(size=24)
    figure = draw_accesses(launch, 3)  # program 1 stores
    out, x = figure.axes
    assert boxes(out, request_color(1)) == [(place, 0) for place in range(8, 16)]
    assert boxes(out, tint(request_color(0), 0.8)) == [(place, 0) for place in range(8)]
    assert boxes(x, tint(request_color(1), 0.8)) == [(place, 0) for place in range(8, 16)]
    assert boxes(out, request_color(2)) == []
    title = figure.get_suptitle()
    assert title.startswith("double, 3 programs: access 4 of 6\nProgram 1 writes 8 of out_ptr: tl.store(out_ptr + places")
    assert "(4 masked)" in draw_accesses(record(), -1).get_suptitle()
    assert draw_accesses(launch, -3).get_suptitle() == title
    for step in (6, -7):
        with pytest.raises(ConfigError, match="There is no step"):
            draw_accesses(launch, step)


@pytest.mark.parametrize(
    "size, shape", [(0, None), (1, None), (64, None), (65, None), (1000, None), (300, (3, 100)), (640, (40, 16)), (60, (3, 4, 5))]
)
def test_any_shape_can_be_drawn(size, shape):
    block = 64
    launch = record(size, -(-size // block) or 1, block, block, shape)
    for step in (None, 0, -1):
        figure = draw_accesses(launch, step)
        assert figure.get_figheight() < 10
        assert to_png(figure)


def test_of_many_rows_those_that_are_touched_are_drawn():
    x = torch.zeros(100, 4)
    with record_accesses() as launches:
        double[(1,)](torch.zeros(4), x[70], 4, BLOCK=4, STEP=4)
        double[(1,)](x, x, 0, BLOCK=4, STEP=4)
    far = draw_accesses(launches[1])
    assert "12 of 100 rows" in far.axes[0].texts[0].get_text()


def test_rows_with_mistakes_are_drawn_first():
    figure = draw_accesses(record(1000, 8, 128, 128))
    dotted = [collection for axes in figure.axes for collection in axes.collections if collection.get_zorder() == 6]
    assert dotted and "12 of 16 rows" in figure.axes[1].texts[0].get_text()


def test_a_kernel_without_tensors_can_be_drawn():
    with record_accesses() as launches:
        idle[(2,)](1)
    assert to_png(draw_accesses(launches[0])) and draw_accesses(launches[0]).get_suptitle() == "idle, 2 programs"


def test_the_player_begins_with_the_whole_launch():
    x, out = torch.ones(20), torch.zeros(20)
    box = show_accesses(double[(3,)], out, x, 20, BLOCK=8, STEP=8)
    assert box.slider.value == 0 and box.slider.max == 6
    assert [problem.kind for problem in box.problems] == ["outside"]
    assert out.tolist() == [2.0] * 20
    whole = box.picture.value
    box.slider.value = 3
    assert box.picture.value != whole
    box.slider.value = 0
    assert box.picture.value == whole
    assert box.sentence.startswith("6 accesses, 1 mistake")
    assert "image/png" in box._repr_mimebundle_()


def test_several_launches_follow_each_other():
    def both():
        for size in (8, 16):
            double[(2,)](torch.zeros(size), torch.ones(size), size, BLOCK=size // 2, STEP=size // 2)

    box = show_accesses(both)
    assert len(box.launches) == 2 and box.slider.max == 9 and box.problems == []


def test_what_is_no_launch():
    with pytest.raises(ConfigError, match=r"The kernel needs a grid: show_accesses\(double\[\(programs,\)\], ...\)"):
        show_accesses(double, torch.zeros(1))
    with pytest.raises(ConfigError, match="No Triton kernel was launched"):
        show_accesses(lambda: None)


def test_kernels_that_are_compiled_elsewhere_are_shown_too(tmp_path):
    """Without TRITON_INTERPRET, as on a machine with a GPU, kernels and the library's own helpers are made to be compiled."""
    script = tmp_path / "kernel.py"
    script.write_text(
        "import torch, triton, triton.language as tl\n"
        "from minivllm.viz.accesses import show_accesses\n"
        "@triton.jit\n"
        "def softmax(out_ptr, x_ptr, size, BLOCK: tl.constexpr):\n"
        "    places = tl.arange(0, BLOCK)\n"
        "    x = tl.load(x_ptr + tl.program_id(0) * size + places, mask=places < size, other=float('-inf'))\n"
        "    x = tl.exp(x - tl.max(x, axis=0))\n"
        "    tl.store(out_ptr + tl.program_id(0) * size + places, x / tl.sum(x, axis=0), mask=places < size)\n"
        "x, out = torch.randn(3, 10), torch.zeros(3, 10)\n"
        "box = show_accesses(softmax[(3,)], out, x, 10, BLOCK=16)\n"
        "print(type(softmax).__name__, torch.allclose(out, x.softmax(1)), box.problems)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    said = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, env=environment).stdout
    assert said == "JITFunction True []\n"


def test_colours_are_those_of_the_legend():
    figure = draw_accesses(record(size=24))
    handles = figure.axes[0].get_legend().legend_handles
    assert [to_hex(handle.get_facecolor()) for handle in handles[:3]] == [request_color(number).lower() for number in range(3)]
