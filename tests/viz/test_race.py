"""The figures of lesson 09: who sits where at a moment, how many seats are taken, and when requests and their tokens come."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from minivllm import SamplingParams
from minivllm.bench.workloads import WorkloadRequest
from minivllm.course.lessons.timing import RequestTimes, request_times
from minivllm.engine.trace import EngineTrace
from minivllm.errors import ConfigError
from minivllm.simulation.engine import make_simulated_engine, simulate
from minivllm.viz.race import draw_race, play_race
from minivllm.viz.request_times import draw_arrivals, draw_request_times
from minivllm.viz.utilisation import draw_utilisation

REQUESTS = [WorkloadRequest([i + 1] * 10, length) for i, length in enumerate((4, 20, 4, 4, 12, 3))]


@pytest.fixture(scope="module")
def traces() -> dict[str, EngineTrace]:
    return {name: simulate(REQUESTS, scheduler=name, max_num_seqs=2).trace for name in ("static", "continuous")}


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


def test_a_race_counts_who_is_answered_and_who_waits(traces):
    end = {name: trace[-1].end for name, trace in traces.items()}
    assert titles(draw_race(traces, 0.0)) == [f"{name}: 0 of 6 answered after 0.00 s" for name in traces]
    late = max(end.values()) + 1
    assert titles(draw_race(traces, late)) == [f"{name}: 6 of 6 answered after {late:.2f} s" for name in traces]
    begin = draw_race(traces, 0.01)
    assert [[label.get_text() for label in axes.get_yticklabels()] for axes in begin.axes] == [["0", "1", "4 wait"]] * 2


def test_a_seat_that_is_empty_though_somebody_waits_is_hatched(traces):
    first = next(stop for stop in (step.end for step in traces["static"]) if stop > 0.2)
    hatched = [any(item.get_hatch() for item in axes.collections) for axes in draw_race(traces, first).axes]
    assert hatched == [True, False]


def test_a_race_shows_when_requests_come(traces):
    requests = [WorkloadRequest([1] * 10, 5, moment) for moment in (10.0, 10.5, 20.0)]
    trace = simulate(requests, max_num_seqs=2).trace
    assert titles(draw_race({"one": trace}, 9.0)) == ["one: 2 of 3 answered after 9.00 s"]


def test_a_player_has_a_picture_for_each_moment(traces):
    pytest.importorskip("ipywidgets")
    box = play_race(traces, num_moments=5, moment=2)
    assert (box.slider.value, box.slider.max, box.slider.description) == (2, 4, "moment")
    first = bytes(box.picture.value)
    box.slider.value = 4
    assert bytes(box.picture.value) != first and bytes(box.picture.value).startswith(b"\x89PNG")


def test_who_never_ran_waits_and_who_was_aborted_is_not_answered():
    engine = make_simulated_engine(max_num_seqs=1)
    trace = engine.trace
    for name in "abc":
        engine.add_request(name, [1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
    for _ in range(5):
        engine.step()
    (axes,) = draw_race({"run": trace}, trace[-1].end - 1e-6).axes
    assert axes.get_title(loc="left").startswith("run: 0 of 3 answered")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "2 wait"]
    engine.abort_request("a")
    engine.step()
    (axes,) = draw_race({"run": trace}, trace[-1].end).axes
    assert axes.get_title(loc="left").startswith("run: 0 of 3 answered")


def test_each_panel_has_its_own_seats():
    requests = [WorkloadRequest([1] * 4, 6)] * 6
    traces = {str(seats): simulate(requests, max_num_seqs=seats).trace for seats in (1, 3)}
    one, three = draw_race(traces, 0.05).axes
    assert not any(item.get_hatch() for item in one.collections)
    assert [len(axes.get_yticklabels()) for axes in (one, three)] == [4, 4]


@pytest.mark.parametrize(
    "draw",
    [
        lambda traces: play_race(traces, num_moments=0),
        lambda traces: draw_race(traces, float("nan")),
        lambda traces: draw_utilisation({}, 2),
        lambda traces: draw_utilisation(traces, 0),
        lambda traces: draw_utilisation(traces, 1),
        lambda traces: draw_request_times([RequestTimes(0.0, 0.5, (1.0,))], []),
        lambda traces: draw_request_times([RequestTimes(0.0, 0.5, ())], ["a"]),
        lambda traces: draw_arrivals({}, 1),
        lambda traces: draw_arrivals({"a": []}, float("inf")),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_a_sentence(traces, draw):
    with pytest.raises(ConfigError):
        draw(traces)


def test_a_race_without_steps_is_refused():
    with pytest.raises(ConfigError, match="runs that have steps"):
        draw_race({"one": EngineTrace.from_json(simulate(REQUESTS[:1]).trace.to_json()), "none": empty()}, 0.0)
    with pytest.raises(ConfigError, match="runs that have steps"):
        draw_race({}, 0.0)


def empty() -> EngineTrace:
    from minivllm.simulation.engine import make_simulated_engine

    return make_simulated_engine().start_trace()


def test_utilisation_is_the_share_of_seats_that_are_taken(traces):
    one = simulate(REQUESTS, max_num_seqs=1).trace
    texts = titles(draw_utilisation({"one": one, **traces}, num_seats=2))
    shares = [int(text.split(": ")[1].split("%")[0]) for text in texts]
    assert shares[0] == 50 and shares[1] < shares[2] <= 100


def test_request_times_have_a_line_for_each_token():
    records = request_times(simulate(REQUESTS, max_num_seqs=2).trace)
    figure = draw_request_times(records, list("abcdef"))
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == list("abcdef")
    tokens = [len(collection.get_segments()) for collection in axes.collections]
    assert tokens == [len(times.tokens) for times in records]
    assert {"TTFT", "ITL", "latency (end to end)"} <= {text.get_text() for text in axes.texts}


def test_requests_of_single_tokens_have_no_brackets():
    figure = draw_request_times([RequestTimes(0.0, 0.5, (1.0,))], ["a"])
    assert "ITL" not in {text.get_text() for text in figure.axes[0].texts}


def test_arrivals_are_ticks():
    (axes,) = draw_arrivals({"a": [0.5, 1.0, 99.0], "b": []}, seconds=2).axes
    assert [len(collection.get_segments()) for collection in axes.collections] == [2, 0]
    assert axes.get_xlim() == (0, 2)
