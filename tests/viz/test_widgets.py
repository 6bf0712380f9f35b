"""The player and the knobs without a browser: what their values are told to be is what they show."""

from __future__ import annotations

import asyncio
import base64
import io
import sys
import threading

import numpy as np
import pytest
from PIL import Image
from viz_traces import TRACES

from minivllm.bench.trace_summary import summarize_trace
from minivllm.engine.trace import EngineTrace
from minivllm.errors import ConfigError
from minivllm.simulation.what_if import what_if
from minivllm.viz import player
from minivllm.viz.knobs import CHOICES, START, knobs
from minivllm.viz.notebook import WidgetError, to_png
from minivllm.viz.player import play
from minivllm.viz.run import draw_run
from minivllm.viz.step import draw_step, find_queues

pytest.importorskip("ipywidgets", reason="ipywidgets is not installed")


@pytest.fixture(scope="module")
def traces():
    return {name: make() for name, make in TRACES.items()}


@pytest.fixture
def tiny(traces):
    return traces["tiny"]


# -- a step ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRACES)
def test_the_queues_are_as_long_as_the_engine_said(traces, name):
    trace = traces[name]
    for number, step in enumerate(trace):
        queues = find_queues(trace, number)
        lengths = len(queues.running), len(queues.waiting), len(queues.swapped)
        assert lengths == (step.num_running, step.num_waiting, step.num_swapped), f"step {number}"


def test_who_came_first_waits_in_front(traces):
    trace = traces["recompute"]
    waiting = [[key.request_id for key in find_queues(trace, number).waiting] for number in range(len(trace))]
    assert any(len(names) > 1 for names in waiting)
    assert all(names == sorted(names) for names in waiting)


def texts(figure):
    """All that is written in a figure."""
    found = [text.get_text() for text in figure.texts]
    for axes in figure.axes:
        found += [text.get_text() for text in axes.texts]
        found += [text for item in axes.collections for text in getattr(item, "texts", ())]
    return found


def test_a_step_shows_its_queues_and_its_batch(traces):
    trace = traces["swap"]
    number = next(number for number, step in enumerate(trace) if step.preempted)
    step, written = trace[number], texts(draw_step(trace, number))
    assert {f"running: {step.num_running}", f"waiting: {step.num_waiting}", f"swapped: {step.num_swapped}"} <= set(written)
    assert f"batch: {len(step.scheduled)}" in written
    assert any("preempted, swapped out: " + step.preempted[0].request_id in text for text in written)
    assert [text for text in written if text.startswith("+")] == [f"+{part.num_tokens}" for part in step.scheduled]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACES)
def test_every_kind_of_step_shows_its_numbers(traces, name):
    trace = traces[name]
    for number in {0, len(trace) // 2, len(trace) - 1}:
        step, figure = trace[number], draw_step(trace, number)
        assert to_png(figure).startswith(b"\x89PNG")
        assert {f"running: {step.num_running}", f"waiting: {step.num_waiting}", f"batch: {len(step.scheduled)}"} <= set(
            texts(figure)
        )


def test_a_step_that_is_not_there_is_told(tiny):
    for number in (len(tiny), -len(tiny) - 1):
        with pytest.raises(ConfigError, match=f"There is no step {number} in the trace: it has steps 0 to {len(tiny) - 1}"):
            draw_step(tiny, number)
    with pytest.raises(ConfigError, match="it has no steps"):
        draw_step(EngineTrace(tiny.config), 0)


# -- the player --------------------------------------------------------------------------------------------------


def test_the_slider_changes_the_picture_to_that_of_draw_step(tiny):
    box = play(tiny)
    assert box.picture.value == to_png(draw_step(tiny, 0))
    box.slider.value = 4
    assert box.picture.value == to_png(draw_step(tiny, 4)) != to_png(draw_step(tiny, 0))


def test_playing_moves_the_slider_and_dragging_moves_what_plays(tiny):
    box = play(tiny, step=2)
    box.play.value += 1
    assert box.slider.value == 3
    assert box.picture.value == to_png(draw_step(tiny, 3))
    box.slider.value = 7
    assert box.play.value == 7
    assert box.play.max == box.slider.max == len(tiny) - 1


def test_buttons_go_one_step_and_stop_what_plays(tiny):
    box = play(tiny, step=1)
    box.play.playing = True
    box.forward.click()
    assert (box.slider.value, box.play.playing) == (2, False)
    for _ in range(3):
        box.back.click()
    assert box.slider.value == 0


def test_a_step_from_the_end_is_found(tiny):
    assert play(tiny, step=-1).slider.value == len(tiny) - 1
    with pytest.raises(ConfigError, match="There is no step 99"):
        play(tiny, step=99)


def test_a_picture_is_drawn_once(tiny, monkeypatch):
    drawn = []
    monkeypatch.setattr(player, "draw_step", lambda trace, step: drawn.append(step) or draw_step(trace, step))
    box = play(tiny)
    for step in (1, 0, 1, 2, 0):
        box.slider.value = step
    assert drawn == [0, 1, 2]


def test_speeds_are_told_to_what_plays(tiny):
    box = play(tiny)
    for interval, steps in reversed(player.SPEEDS.values()):
        box.speed.value = (interval, steps)
        assert (box.play.interval, box.play.step) == (interval, steps)


def test_short_traces_are_no_problem(tiny):
    empty = play(EngineTrace(tiny.config))
    assert empty.children[0].value == "The trace has no steps, so there is nothing to play."
    assert "image/png" not in empty._repr_mimebundle_()
    one = play(EngineTrace(tiny.config, tiny.steps[:1], tiny.requests))
    assert one.picture.value == to_png(draw_step(EngineTrace(tiny.config, tiny.steps[:1], tiny.requests), 0))


def test_a_page_without_widgets_shows_the_picture(tiny):
    for box in (play(tiny, step=3), knobs(lambda **values: tiny)):
        bundle = box._repr_mimebundle_()
        assert look_alike(base64.b64decode(bundle["image/png"]), box.picture.value)
        assert "as a figure" in bundle["text/plain"]
        assert "application/vnd.jupyter.widget-view+json" in bundle


def look_alike(one, other):
    """Whether two PNGs, the first of each if they move, differ by no more than their palettes."""
    pixels = [np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), dtype=int) for png in (one, other)]
    return pixels[0].shape == pixels[1].shape and np.abs(pixels[0] - pixels[1]).max() < 40


@pytest.mark.parametrize(
    ("step", "steps"),
    [
        pytest.param(0, range(8), marks=pytest.mark.long),
        (4, range(2, 10)),
        pytest.param(-1, range(-8, 0), marks=pytest.mark.long),
    ],
)
def test_a_page_without_widgets_shows_a_film_that_rests_on_the_chosen_step(tiny, step, steps):
    film = Image.open(io.BytesIO(base64.b64decode(play(tiny, step)._repr_mimebundle_()["image/png"])))
    assert film.n_frames == 1 + len(steps) and film.default_image
    resting = range(len(tiny))[step]
    for number, expected in enumerate(range(len(tiny))[slot] for slot in steps):
        film.seek(number + 1)
        if expected == resting or number in (0, len(steps) - 1):
            shown = io.BytesIO()
            film.convert("RGB").save(shown, "PNG")
            assert look_alike(shown.getvalue(), to_png(draw_step(tiny, expected)))
        assert (film.info["duration"] > 2000) == (expected == resting)


@pytest.mark.parametrize("make", [play, lambda trace: knobs(lambda **values: trace)])
def test_without_ipywidgets_it_says_what_to_do(tiny, make, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(WidgetError, match=r'run `pip install "minivllm\[course\]"`, or draw the same pictures with `draw_step'):
        make(tiny)


# -- the knobs ---------------------------------------------------------------------------------------------------


class Runs:
    """Runs that are noted: the trace depends on `max_num_seqs`, and a cache of 16 blocks is too small."""

    def __init__(self, traces):
        self.traces = traces
        self.values = []

    def __call__(self, **values):
        self.values.append(values)
        if values["num_gpu_blocks"] == 16:
            raise ConfigError("16 blocks are <too> few.")
        return self.traces["tiny" if values["max_num_seqs"] < 8 else "static"]


def test_a_knob_runs_with_what_is_shown(traces):
    runs = Runs(traces)
    box = knobs(runs)
    assert runs.values == [START]
    before = box.picture.value
    assert before == to_png(draw_run(traces["static"]))
    box.knobs["max_num_seqs"].value = 4
    box.knobs["scheduler"].value = "static"
    assert runs.values[1:] == [{**START, "max_num_seqs": 4}, {**START, "max_num_seqs": 4, "scheduler": "static"}]
    assert box.picture.value == to_png(draw_run(traces["tiny"])) != before


def test_knobs_can_be_others(tiny):
    seen = []

    def run(**values):
        seen.append(values)
        return tiny

    box = knobs(run, choices={"drafts": (0, 2, 4), "mode": ("swap", "recompute")}, start={"mode": "recompute"}, draw=draw_run)
    box.knobs["drafts"].value = 4
    assert seen == [{"drafts": 0, "mode": "recompute"}, {"drafts": 4, "mode": "recompute"}]
    with pytest.raises(ConfigError, match="drafts cannot start at 3: its choices are 0, 2, 4"):
        knobs(run, choices={"drafts": (0, 2, 4)}, start={"drafts": 3})


def test_moves_during_a_slow_run_are_made_up_for_by_one_run(traces):
    runs = Runs(traces)

    async def move():
        box = knobs(runs)
        for value in (1, 2, 4, 16, 32):
            box.knobs["max_num_seqs"].value = value
        assert len(runs.values) == 1  # the kernel is free to take in further moves
        await asyncio.sleep(0.3)
        box.knobs["block_size"].value = 8
        await asyncio.sleep(0.3)

    asyncio.run(move())
    assert runs.values == [START, {**START, "max_num_seqs": 32}, {**START, "max_num_seqs": 32, "block_size": 8}]


def test_what_goes_wrong_is_told_and_the_picture_stays(traces):
    box = knobs(Runs(traces))
    good = box.picture.value
    assert box.message.value == ""
    box.knobs["num_gpu_blocks"].value = 16
    assert "16 blocks are &lt;too&gt; few." in box.message.value
    assert "The picture still shows the last successful run." in box.message.value
    assert box.picture.value == good
    box.knobs["max_num_seqs"].value = 4
    box.knobs["num_gpu_blocks"].value = 64
    assert box.message.value == ""
    assert box.picture.value == to_png(draw_run(traces["tiny"]))


def test_a_first_run_that_fails_shows_no_broken_picture():
    def run(**values):
        raise ZeroDivisionError("division by zero")

    box = knobs(run)
    assert "ZeroDivisionError: division by zero" in box.message.value
    assert "still" not in box.message.value
    assert box.picture.layout.display == "none"


def test_pictures_need_no_main_thread(tiny):
    """JupyterLab may call widgets from a thread of their own."""
    box, results = play(tiny), []
    thread = threading.Thread(target=lambda: results.append(setattr(box.slider, "value", 5)))
    thread.start()
    thread.join()
    assert results == [None]
    assert box.picture.value == to_png(draw_step(tiny, 5))


# -- the simulator behind them -----------------------------------------------------------------------------------


def test_the_simulator_answers_to_every_knob():
    assert set(CHOICES) == set(START)
    default = summarize_trace(what_if())
    assert default == summarize_trace(what_if(**START))
    for name, choices in CHOICES.items():
        other = choices[0] if choices[0] != START[name] else choices[-1]
        if name in ("block_size", "num_gpu_blocks"):
            other = choices[-1]
        assert summarize_trace(what_if(**{name: other})) != default, name


def test_more_blocks_mean_fewer_preemptions_and_static_batching_takes_longer():
    assert summarize_trace(what_if(num_gpu_blocks=256)).num_preemptions == 0 < summarize_trace(what_if()).num_preemptions
    assert summarize_trace(what_if(scheduler="static")).latency.mean > 2 * summarize_trace(what_if()).latency.mean


def test_a_cache_too_small_is_told_by_the_widget():
    box = knobs(what_if)
    good = box.picture.value
    box.knobs["num_gpu_blocks"].value = 16
    assert "the whole cache holds only" in box.message.value
    assert box.picture.value == good


def test_the_summary_counts_what_the_requests_got(tiny):
    summary = summarize_trace(tiny)
    assert summary.completed == 3
    assert summary.output_tokens_per_second == pytest.approx((9 + 12 + 5) / summary.seconds)
    assert str(summary).startswith("3 requests in ")
    with pytest.raises(ConfigError, match="No request of this trace has finished"):
        draw_run(EngineTrace(tiny.config))
