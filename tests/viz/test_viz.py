"""The figures drawn from traces: what is drawn is compared with what a trace says, computed here by other means."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import logging
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from cpu_kernels import kernel_points, peaks
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from test_invariants import run, workloads
from viz_traces import TRACES, forking, params, preempting, prompt, record, tiny

from minivllm.engine.trace import EngineTrace, RequestRecord, SequenceKey, SequenceStep, StepRecord, TraceConfig
from minivllm.errors import ConfigError
from minivllm.scheduler_output import FREED_BLOCK
from minivllm.viz.batches import draw_batches
from minivllm.viz.block_map import draw_block_map, paint_block_map
from minivllm.viz.blocks import describe_step, find_blocks
from minivllm.viz.cache_use import draw_cache_use, find_cache_use
from minivllm.viz.curves import draw_curves
from minivllm.viz.drawing import Labels, short_name
from minivllm.viz.latency import draw_latencies
from minivllm.viz.palette import REQUEST_COLORS, STATE_LOOKS, request_color, request_colors, tint
from minivllm.viz.roofline import draw_roofline
from minivllm.viz.run import draw_run
from minivllm.viz.spans import STATES, Span, find_context_lens, find_spans, step_times, time_origin
from minivllm.viz.step import draw_step
from minivllm.viz.timeline import draw_requests, draw_timelines

FIGURES = {
    "requests": draw_requests,
    "batches": draw_batches,
    "curves": draw_curves,
    "cache use": draw_cache_use,
    "block map": lambda trace: draw_block_map(trace, len(trace) // 2),
}
COMPOSED = {
    "latencies": lambda trace: draw_latencies({"a run": trace, "the same": trace}),
    "timelines": lambda trace: draw_timelines({"a run": trace}),
    "run": draw_run,
    "step": lambda trace: draw_step(trace, len(trace) // 2),
}
FEW = settings(max_examples=max(5, settings().max_examples // 4))


@pytest.fixture(autouse=True)
def no_log():
    """Steps that fail on purpose are not reported."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def traces() -> dict[str, EngineTrace]:
    logging.disable(logging.CRITICAL)
    return {name: make() for name, make in TRACES.items()}


@st.composite
def random_traces(draw, late: bool = False) -> EngineTrace:
    """Of the shadow engine under random limits, with forks, preemption, aborts and failures; `late`: begun amid the run."""
    engine, _, jobs = draw(workloads(with_failures=True))
    trace = engine.start_trace()
    if late:
        begin = draw(st.integers(1, 15))
        count = 0

        def after_step(_) -> None:
            nonlocal trace, count
            count += 1
            if count == begin:
                trace = engine.start_trace()

        run(engine, jobs, after_step)
    else:
        run(engine, jobs)
    return trace


def boxes_of(axes, label: str) -> list[tuple[float, float, float, float]]:
    """(left, right, bottom, top) of the boxes in a collection, in their order."""
    for collection in axes.collections:
        if collection.get_label() == label:
            corners = [path.vertices for path in collection.get_paths()]
            return [(*np.sort(c[:, 0])[[0, -1]], *np.sort(c[:, 1])[[0, -1]]) for c in corners]
    return []


def colors_of(axes, label: str) -> list[str]:
    """The faces of the boxes in a collection."""
    for collection in axes.collections:
        if collection.get_label() == label:
            faces = [to_hex(color).upper() for color in collection.get_facecolor()]
            return faces * len(collection.get_paths()) if len(faces) == 1 else faces
    return []


def texts_of(axes) -> list[tuple[float, float, str]]:
    """What `Labels` write, and where."""
    return [
        (*p, t) for item in axes.collections if isinstance(item, Labels) for p, t in zip(item.points, item.texts, strict=True)
    ]


# -- spans -------------------------------------------------------------------------------------------------------


def expected_states(trace: EngineTrace) -> list[dict[SequenceKey, str]]:
    """The state of every living sequence in each step, from the queues and tables of that step and the events before it."""
    states, alive, seen = [], {}, set()
    for step in trace:
        for name in step.arrived:
            alive[SequenceKey(name)] = "waiting"
        alive = {key: state for key, state in alive.items() if key.request_id not in step.aborted}
        lost = {SequenceKey(item.request_id, item.index): item.mode for item in step.preempted}
        alive.update(dict.fromkeys([*step.block_tables, *lost]))  # a sibling can be forked and lose its blocks at once
        seen.update(lost)
        now = {}
        for key in alive:
            if key in step.block_tables:
                now[key] = next((item.action for item in step.scheduled if item.key == key), "stalled")
            elif key in step.swapped_tables:
                now[key] = "swapped"
            else:
                now[key] = "swapped" if lost.get(key) == "swap" else "preempted" if key in seen else "waiting"
        seen.update(step.block_tables)
        states.append(now)
        for finish in step.finished:
            alive.pop(SequenceKey(finish.request_id, finish.index), None)
    return states


@pytest.mark.slow
@given(random_traces(), st.booleans())
def test_spans_contexts_and_the_use_of_the_cache_are_what_the_steps_say(trace, merge):
    """All claims about each trace, since it takes longer to make than to check."""
    in_every_step_each_sequence_has_the_one_span_that_the_step_says(trace, merge)
    spans_of_a_sequence_follow_each_other_from_its_arrival(trace, merge)
    context_lengths_are_what_the_steps_compute(trace)
    the_use_of_the_cache_adds_up_and_is_that_of_the_blocks(trace)
    shares_blocks = any(step.ref_counts for step in trace)
    event(f"shares blocks: {shares_blocks}")
    if not shares_blocks:
        what_is_reserved_is_filled_and_what_is_wasted_is_not(trace)


def in_every_step_each_sequence_has_the_one_span_that_the_step_says(trace, merge):
    spans = find_spans(trace, merge)
    for step, expected in zip(trace, expected_states(trace), strict=True):
        middle = (step.start + step.end) / 2
        assert step.end > step.start
        found = [(span.key, span.state) for span in spans if span.start < middle < span.end]
        assert Counter(found) == Counter(expected.items())


def spans_of_a_sequence_follow_each_other_from_its_arrival(trace, merge):
    spans = find_spans(trace, merge)
    assert all(span.state in STATES and span.end > span.start for span in spans)
    for key in {span.key for span in spans}:
        own = [span for span in spans if span.key == key]
        assert all(a.end <= b.start for a, b in itertools.pairwise(own))
        if key.index == 0:
            assert own[0].start == trace.requests[key.request_id].arrival_time
        if merge:
            assert all(a.state != b.state for a, b in itertools.pairwise(own))
    in_steps = {(item.key, item.action, step.start, step.end) for step in trace for item in step.scheduled}
    if not merge:
        assert in_steps == {(s.key, s.state, s.start, s.end) for s in spans if s.state in ("prefill", "decode")}


@pytest.mark.slow
@FEW
@given(random_traces(late=True))
def test_a_trace_that_begins_late_has_what_its_steps_say(trace):
    spans = find_spans(trace)
    for step in trace:
        middle = (step.start + step.end) / 2
        found = {span.key: span.state for span in spans if span.start < middle < span.end}
        for key in step.block_tables:
            assert found[key] == next((item.action for item in step.scheduled if item.key == key), "stalled")
        for key in step.swapped_tables:
            assert found[key] == "swapped"
    if len(trace):
        draw_requests(trace), draw_cache_use(trace), draw_block_map(trace, 0)


def test_a_request_waits_is_prefilled_and_stalls_while_another_is():
    trace = tiny()
    spans = {request_id: [span for span in find_spans(trace) if span.request_id == request_id] for request_id in "ABC"}
    assert [span.state for span in spans["A"]] == ["prefill", "decode", "stalled", "decode"]
    assert [span.state for span in spans["C"]] == ["waiting", "prefill", "decode"]
    assert spans["C"][0].start == 0.04
    assert spans["A"][2][3:] == spans["C"][1][3:]
    assert [len(find_spans(trace, merge)) for merge in (True, False)] == [11, 1 + sum(len(s.block_tables) for s in trace)]


def test_a_request_that_never_ran_waits_until_it_is_given_up_or_the_trace_ends():
    trace = tiny()
    for name, finished in (("late", None), ("gone", 0.1), ("never", None)):
        arrival = 99.0 if name == "never" else 0.05
        trace.requests[name] = RequestRecord(name, arrival, [1], 5, finished_time=finished)
    spans = [span for span in find_spans(trace) if span.request_id in ("late", "gone", "never")]
    assert spans == [Span("late", 0, "waiting", 0.05, trace[-1].end), Span("gone", 0, "waiting", 0.05, 0.1)]
    render(draw_requests(trace))


def test_steps_may_name_requests_that_the_trace_does_not_have():
    steps = [StepRecord(float(i), i + 1.0, "decode", [SequenceStep("x", 0, "decode", 1, 3 + i)], 1, 0, 0, 5) for i in (0, 1, 3)]
    trace = EngineTrace(empty_trace().config, steps)
    assert find_spans(trace) == [Span("x", 0, "decode", 0.0, 4.0)]
    for figure in FIGURES.values():
        render(figure(trace))


def context_lengths_are_what_the_steps_compute(trace):
    for step, lens in zip(trace, find_context_lens(trace), strict=True):
        assert set(lens) == {*step.block_tables, *step.swapped_tables}
        for key, length in lens.items():
            before = [
                item.context_len
                for earlier in trace
                if earlier.start <= step.start
                for item in earlier.scheduled
                if item.key == key
                or ((item.request_id, item.index) == (key.request_id, 0) and item.num_new_tokens and not key.index)
            ]
            assert not before or length == before[-1]
            assert 0 < length <= len(step.block_tables.get(key) or step.swapped_tables[key]) * trace.config.block_size


def test_a_sibling_that_stalls_has_what_its_parent_had_computed():
    requests = [("a", 0.0, prompt(6, 1), params(4, n=2)), ("b", 0.001, prompt(3, 2), params(2))]
    trace = record(requests, num_gpu_blocks=20)
    assert [item.request_id for item in trace[1].scheduled] == ["b"]
    assert find_context_lens(trace)[1] == {("a", 0): 6, ("a", 1): 6, ("b", 0): 3}


# -- the use of the cache ----------------------------------------------------------------------------------------


def the_use_of_the_cache_adds_up_and_is_that_of_the_blocks(trace):
    size = trace.config.block_size
    for number, (step, use) in enumerate(zip(trace, find_cache_use(trace), strict=True)):
        assert min(use) >= 0
        assert sum(use[:5]) == trace.config.num_gpu_blocks * size
        assert use.free + use.cached == step.num_free_blocks * size
        blocks = find_blocks(trace, number)
        assert use.used == sum(block.num_tokens for block in blocks)
        assert use.cached == size * sum(block.cached and not block.owners for block in blocks)
        assert use.unshared >= use.used


def what_is_reserved_is_filled_and_what_is_wasted_is_not(trace):
    """Followed forward, block by block, for those that never are shared."""
    size = trace.config.block_size
    lens, uses = find_context_lens(trace), find_cache_use(trace)
    for number, step in enumerate(trace):
        reserved = 0
        for key, table in step.block_tables.items():
            for place, block in enumerate(table):
                held = [min(size, max(0, lens[number][key] - place * size))]
                later = number + 1
                while later < len(trace) and trace[later].block_tables.get(key, ())[place : place + 1] == (block,):
                    held.append(min(size, max(0, lens[later][key] - place * size)))
                    later += 1
                reserved += max(held) - held[0]
        assert uses[number].reserved == reserved


def test_shared_blocks_count_once():
    """poem has 3 x 12 tokens, of which all share 8; chat has 7; song has 2 x 7, of which both share 4."""
    use = find_cache_use(forking())[3]
    assert (use.used, use.unshared) == (20 + 7 + 10, 36 + 7 + 14)
    assert (use.used + use.reserved + use.wasted, use.free) == (40, 40)


def test_what_lives_when_the_trace_ends_may_still_be_filled():
    """B ends in its last step with 14 tokens in four blocks; a step earlier nobody knows yet."""
    trace = tiny()
    assert (find_cache_use(trace)[-1].reserved, find_cache_use(trace)[-1].wasted) == (0, 2)
    trace.steps.pop()
    trace.requests["B"].finished_time = None
    assert (find_cache_use(trace)[-1].reserved, find_cache_use(trace)[-1].wasted) == (3, 0)


def test_an_engine_that_idles_holds_nothing():
    trace = record([("a", 0.0, prompt(4, 1), params(3)), ("b", 5.0, prompt(4, 2), params(3))], num_gpu_blocks=8)
    times = step_times(trace)
    assert [end < start for (_, end), (start, _) in itertools.pairwise(times)] == [False, False, True, False, False]
    line = draw_curves(trace).axes[1].lines[0]
    inside = [y for x, y in zip(*line.get_data(), strict=True) if times[2][1] <= x < 5.0]
    assert inside == [0.0]


# -- blocks ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@FEW
@given(random_traces(), st.data())
def test_every_block_has_the_colours_of_its_owners_and_the_bar_of_its_tokens(trace, data):
    assume(len(trace))
    step = data.draw(st.integers(0, len(trace) - 1))
    record_, size = trace[step], trace.config.block_size
    figure = draw_block_map(trace, step)
    grid, colors = figure.axes[0], request_colors(trace)
    columns = round(grid.get_xlim()[1])

    def block_at(box) -> int | None:
        row = int((box[2] + box[3]) / 2)
        number = row * columns + int((box[0] + box[1]) / 2)
        return number if row < math.ceil(trace.config.num_gpu_blocks / columns) else None  # below are the host's

    owners = {}
    for key, table in record_.block_tables.items():
        for block in set(table) - {FREED_BLOCK}:
            owners.setdefault(block, {})[key.request_id] = None
    drawn = {}
    tokens = Counter()
    for box, color in zip(boxes_of(grid, "tokens"), colors_of(grid, "tokens"), strict=True):
        drawn.setdefault(block_at(box), []).append(color)
        tokens[block_at(box)] = box[1] - box[0]
    assert drawn == {block: [colors[name].upper() for name in list(names)[:4]] for block, names in owners.items()}
    widths = {round(box[1] - box[0], 6) for label in ("owned", "shared", "free") for box in boxes_of(grid, label)}
    (width,) = widths
    for i, block in enumerate(find_blocks(trace, step)):
        assert tokens[i] == pytest.approx(width * block.num_tokens / size)
    shared = {block_at(box) for box in boxes_of(grid, "shared")} - {None}
    assert shared == {block for block in owners if record_.ref_counts.get(block, 1) > 1}
    cached = {block_at(box) for box in boxes_of(grid, "lid")}
    assert cached == set(record_.cached_blocks)
    written = {block_at(box) for box in boxes_of(grid, "written")} - {None}
    assert written == {block for _, block in record_.blocks_to_copy + record_.blocks_to_swap_in}
    free = {block_at(box) for box in boxes_of(grid, "free")} - {None}
    assert free == set(range(trace.config.num_gpu_blocks)) - set(owners)


def test_a_copy_on_write_has_an_arrow_and_shared_blocks_their_counts():
    trace = forking()
    step = next(i for i, record_ in enumerate(trace) if record_.blocks_to_copy)
    grid = draw_block_map(trace, step).axes[0]
    assert len([patch for patch in grid.patches if type(patch).__name__ == "FancyArrowPatch"]) == len(trace[step].blocks_to_copy)
    counts = Counter(text for _, _, text in texts_of(grid) if text.startswith("×"))
    assert counts == Counter(f"×{count}" for count in trace[step].ref_counts.values())


def test_block_tables_are_written_out_with_the_tokens_in_them():
    trace = preempting("swap")
    step = next(i for i, record_ in enumerate(trace) if record_.swapped_tables)
    axes, lens = draw_block_map(trace, step).axes[1], find_context_lens(trace)[step]
    rows: dict[int, list[str]] = {}
    for x, y, text in sorted(item for item in texts_of(axes) if item[0] > 0):
        assert int(x) % 4 == 2
        rows.setdefault(int(y), []).append(text)
    tables = trace[step].block_tables | trace[step].swapped_tables
    keys = sorted(tables)
    assert [[int(text) for text in rows[row]] for row in range(len(keys))] == [list(tables[key]) for key in keys]
    names = [text for x, _, text in texts_of(axes) if x < 0]
    assert names == [key.request_id + " (host)" * (key in trace[step].swapped_tables) for key in keys]
    bars = {int(box[2]): box[1] for label in ("tokens", "tokens on the host") for box in boxes_of(axes, label)}
    assert [bars[row] for row in range(len(keys))] == [lens[key] for key in keys]


def test_sequences_that_have_no_room_are_counted():
    requests = [(f"r{i}", 0.0, prompt(6, i), params(8)) for i in range(64)]
    trace = record(requests, num_gpu_blocks=400, max_num_seqs=64)
    axes = draw_block_map(trace, 3).axes[1]
    shown = [text for x, _, text in texts_of(axes) if x < 0]
    assert shown[-1] == "…"
    assert [text.get_text() for text in axes.texts] == [f"and {64 - len(shown) + 1} more sequences"]


@pytest.mark.slow
def test_nothing_moves_from_step_to_step(traces):
    for name in ("swap", "forks", "prefixes"):
        trace = traces[name]
        limits = set()
        for step in range(len(trace)):
            figure = draw_block_map(trace, step, title="x")
            limits.add(tuple((*a.get_xlim(), *a.get_ylim(), a.yaxis.labelpad, a.get_position().bounds) for a in figure.axes))
        assert len(limits) == 1


def test_maps_of_four_and_of_two_thousand_blocks():
    for num_blocks in (1, 2, 4, 100, 2000):
        trace = record([("a", 0.0, prompt(3, 1), params(2))], num_gpu_blocks=num_blocks, block_size=4)
        grid = draw_block_map(trace, 0).axes[0]
        assert len(boxes_of(grid, "free")) == num_blocks - 1
        assert (len(texts_of(grid)) >= num_blocks) == (num_blocks <= 100)


def test_steps_are_counted_from_either_end_and_others_refused():
    trace = tiny()
    assert describe_step(trace, -1) == describe_step(trace, len(trace) - 1)
    assert describe_step(trace, 0) == "step 0 / 12, at 0.000 s: prefill of 2 sequences, 9 tokens; 9 of 12 blocks free"
    for figure_of, text in (
        (lambda: draw_block_map(trace, 13), "no step 13 in the trace: it has steps 0 to 12"),
        (lambda: paint_block_map(*Figure().subplots(1, 2), trace, -14), "no step -14"),
        (lambda: draw_block_map(empty_trace(), 0), "it has no steps"),
    ):
        with pytest.raises(ConfigError, match=text):
            figure_of()


# -- requests, batches, curves -----------------------------------------------------------------------------------


def test_the_row_of_a_request_has_its_spans(traces):
    for trace in traces.values():
        axes = draw_requests(trace).axes[0]
        origin, spans = time_origin(trace), find_spans(trace)
        for state in STATES:
            own = [span for span in spans if span.state == state]
            assert [box[:2] for box in boxes_of(axes, state)] == [
                pytest.approx((span.start - origin, span.end - origin)) for span in own
            ]
            faces = [tint(request_colors(trace)[span.request_id], STATE_LOOKS[state].whiteness).upper() for span in own]
            assert colors_of(axes, state) == faces
        labels = [text for _, _, text in texts_of(axes)]
        assert labels == list(trace.requests)


def test_continuations_lie_above_each_other_in_the_row_of_their_request():
    axes = draw_requests(forking()).axes[0]
    middles = {text: y for _, y, text in texts_of(axes)}
    rows = Counter()
    for box in boxes_of(axes, "decode"):
        rows[min(middles, key=lambda name: abs(middles[name] - (box[2] + box[3]) / 2))] += box[1] - box[0] > 0
    assert len({box[2:] for box in boxes_of(axes, "decode")}) == 6
    assert set(rows) == {"poem", "chat", "song"}


def test_what_was_given_up_ends_with_a_cross(traces):
    trace = traces["troubled"]
    (marks,) = [line for line in draw_requests(trace).axes[0].lines if line.get_label() == "aborted or failed"]
    lost = [r for r in trace.requests.values() if {"abort", "error"} & set(r.finish_reasons)]
    assert sorted(marks.get_xdata()) == pytest.approx(sorted(r.finished_time - time_origin(trace) for r in lost))
    assert {"r1", "r5"} < {r.request_id for r in lost}


def test_many_requests_have_rows_without_names():
    requests = [(f"request-with-a-long-name-{i}", 0.0, prompt(4, i), params(2)) for i in range(65)]
    trace = record(requests, num_gpu_blocks=400, max_num_seqs=64)
    assert texts_of(draw_requests(trace).axes[0]) == []
    del trace.requests["request-with-a-long-name-64"]
    assert short_name("request-with-a-long-name-7") == "reques…ame-7"


@FEW
@given(random_traces())
def test_the_bars_of_a_step_are_its_tokens_and_its_sequences(trace):
    tokens_axes, sequences_axes = draw_batches(trace).axes

    def heights(axes, *labels) -> list[float]:
        totals = Counter()
        for label in labels:
            for box in boxes_of(axes, label):
                totals[round((box[0] + box[1]) / 2)] += box[3] - box[2]
        return [totals[i] for i in range(len(trace))]

    assert heights(tokens_axes, "prefill", "decode", "rejected") == [step.num_tokens for step in trace]
    rejected = [sum(item.num_drafts - item.num_accepted for item in step.scheduled) for step in trace]
    assert heights(tokens_axes, "rejected") == rejected
    prefill = [
        sum(item.num_tokens - item.num_drafts + item.num_accepted for item in step.scheduled if item.action == "prefill")
        for step in trace
    ]
    assert heights(tokens_axes, "prefill") == prefill
    assert heights(sequences_axes, "prefill", "decode", "stalled") == [len(step.block_tables) for step in trace]
    assert heights(sequences_axes, "prefill", "decode") == [len(step.scheduled) for step in trace]


def test_curves_are_the_queues_and_preemptions_are_marked(traces):
    for name in ("recompute", "swap", "fifty"):
        trace = traces[name]
        queue_axes, cache_axes = draw_curves(trace).axes
        lines = {line.get_label(): line for line in (*queue_axes.lines, *cache_axes.lines)}
        origin = time_origin(trace)
        for label, field in (("running", "num_running"), ("waiting", "num_waiting"), ("swapped out", "num_swapped")):
            values = [getattr(step, field) for step in trace]
            assert (label in lines) == (any(values) or label != "swapped out")
            if label in lines:
                drawn = dict(zip(*lines[label].get_data(), strict=True))
                assert [drawn[step.start - origin] for step in trace] == values
        for mode in ("recompute", "swap"):
            times = [step.start - origin for step in trace if mode in {item.mode for item in step.preempted}]
            label = f"preemption by {mode}"
            assert (list(lines[label].get_xdata()) if label in lines else []) == times


# -- all figures -------------------------------------------------------------------------------------------------


def empty_trace() -> EngineTrace:
    return EngineTrace(TraceConfig("model", "Scheduler", "BlockSpaceManager", 4, 10, 0, 0.01, False, 100, 50, {}))


def render(figure: Figure) -> None:
    """Draw all of it."""
    figure.savefig(io.BytesIO(), format="png", dpi=40)


UNITS = ("(s)", "(tokens", "(number)", "(per step)", "(%", "tokens)", "request", "block")


@pytest.mark.slow
@settings(max_examples=6)
@given(random_traces())
def test_every_trace_is_drawn_with_all_its_requests_and_spans(trace):
    for name, figure_of in FIGURES.items():
        if len(trace) or name != "block map":
            render(figure_of(trace))
    (axes,) = draw_requests(trace).axes
    assert {text for _, _, text in texts_of(axes)} == {short_name(request_id) for request_id in request_colors(trace)}
    for state in STATES:
        assert len(boxes_of(axes, state)) == sum(span.state == state for span in find_spans(trace))


def test_a_trace_without_steps_gives_figures_that_say_so():
    for name, figure_of in FIGURES.items():
        if name != "block map":
            figure = figure_of(empty_trace())
            render(figure)
            assert any("no " in text.get_text() for axes in figure.axes for text in axes.texts)
    render(draw_timelines({"none": empty_trace()}))


@pytest.mark.parametrize("name", FIGURES)
def test_axes_have_units_and_a_title_is_drawn(traces, name):
    for trace in traces.values():
        for axes in FIGURES[name](trace).axes:
            assert any(unit in axes.get_ylabel() for unit in UNITS)
            assert any(unit in axes.get_xlabel() for unit in UNITS) or not any(t.get_visible() for t in axes.get_xticklabels())
    for draw in (draw_requests, draw_batches, draw_curves, draw_cache_use):
        assert draw(traces["tiny"], title="Three requests")._suptitle.get_text() == "Three requests"


def test_a_request_has_one_colour_in_all_figures(traces):
    for name in ("tiny", "swap", "forks", "prefixes", "static"):
        trace = traces[name]
        colors = request_colors(trace)
        assert list(colors) == list(trace.requests)
        assert list(colors.values()) == list(REQUEST_COLORS[: len(colors)])
        wanted = {color.upper() for color in colors.values()}
        assert set(colors_of(draw_requests(trace).axes[0], "decode")) == wanted
        assert set(colors_of(draw_batches(trace).axes[0], "decode")) == wanted
        bars = {color for step in range(0, len(trace), 3) for color in colors_of(draw_block_map(trace, step).axes[1], "tokens")}
        assert bars == wanted
        in_timeline = {to_hex(bar.get_facecolor()).upper() for bar in draw_timelines({"": trace}).axes[0].patches}
        assert wanted <= in_timeline


def test_two_dozen_requests_have_different_colours():
    colors = [request_color(number) for number in range(25)]
    assert len(set(colors[:24])) == 24
    assert colors[24] == colors[0] == REQUEST_COLORS[0]


def test_states_differ_without_their_colours():
    looks = [(look.whiteness > 0.5, look.height, look.hatch) for name, look in STATE_LOOKS.items() if name in STATES]
    assert len(set(looks)) == len(STATES)
    assert tint("#000000", 0.0) == "#000000"
    assert tint("#000000", 1.0) == "#ffffff"
    light = [sum(to_rgb(tint(request_color(number), 0.72))) for number in range(24)]
    assert min(light) > 2.1, "black numbers must be readable on the light part of every block"


def test_names_that_look_like_a_formula_are_written_as_they_are():
    names = ["$x_1$ \\frac", "<b>é日"]
    trace = record([(name, 0.0, prompt(5, i), params(4, n=2)) for i, name in enumerate(names, start=1)], num_gpu_blocks=20)
    for figure_of in FIGURES.values():
        render(figure_of(trace))
    assert {text for _, _, text in texts_of(draw_requests(trace).axes[0])} == set(names)


HASHES = {
    "tiny, requests": "609e24f470",
    "tiny, batches": "0cd147591c",
    "tiny, curves": "5bcf5aec39",
    "tiny, cache use": "e469fe3751",
    "tiny, block map": "70baffe21f",
    "tiny, latencies": "2dffe37558",
    "tiny, timelines": "a89b77f719",
    "tiny, run": "f30e5a360c",
    "tiny, step": "ebd80a7769",
    "swap, requests": "8431f8a5f9",
    "swap, batches": "25673ef9f5",
    "swap, curves": "9a6509c6b9",
    "swap, cache use": "70a00c2444",
    "swap, block map": "3dae274707",
    "swap, latencies": "a83731128f",
    "swap, timelines": "d8a0cc80f0",
    "swap, run": "c1b290e5dd",
    "swap, step": "d775769bdd",
    "forks, requests": "eb19839e99",
    "forks, batches": "8c3b060339",
    "forks, curves": "d758429e20",
    "forks, cache use": "900feafeef",
    "forks, block map": "ef6a14118c",
    "forks, latencies": "348dffdf14",
    "forks, timelines": "2f1c3860c1",
    "forks, run": "2aea2aa2fa",
    "forks, step": "ac221e0d29",
    "prefixes, requests": "3c2ecbec86",
    "prefixes, batches": "b19c85871e",
    "prefixes, curves": "edbb5b7210",
    "prefixes, cache use": "8e70fb35c7",
    "prefixes, block map": "c1fd5644b3",
    "prefixes, latencies": "9205e31b5b",
    "prefixes, timelines": "463ed4e4a5",
    "prefixes, run": "8ea5774de1",
    "prefixes, step": "cd6a824b5b",
    "roofline": "21c47f0f4b",
}
"""Of what is drawn, not of pixels: those depend on the machine's fonts.

To renew them, `PYTHONPATH=tests/support:tests/core:benchmarks python tests/viz/test_viz.py` prints them and saves the figures in out/figures: look at those whose hash is another.
"""


def drawn_hash(figure: Figure) -> str:
    """Of all boxes, lines and texts of a figure: places to a thousandth of the axes, colours, words."""
    parts: list[str] = []
    for axes in figure.axes:
        (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
        scale = np.array([right - left, top - bottom])
        for collection in axes.collections:
            if isinstance(collection, Labels):
                parts += [text for _, _, text in texts_of(axes)]
                continue
            parts.append(collection.get_label() if not collection.get_label().startswith("_") else "")
            parts += [str(np.rint(path.vertices / scale * 1000).astype(int).tolist()) for path in collection.get_paths()]
            parts += [to_hex(color) for color in collection.get_facecolor()]
        for patch in axes.patches:
            vertices = patch.get_patch_transform().transform(patch.get_path().vertices)
            parts += [str(np.rint(vertices / scale * 1000).astype(int).tolist()), to_hex(patch.get_facecolor())]
        for line in axes.lines:
            data = np.column_stack(line.get_data()).astype(float) / scale
            parts.append(str(np.rint(data * 1000).astype(int).tolist()))
        parts += [axes.get_xlabel(), axes.get_ylabel(), *(text.get_text() for text in axes.texts)]
    return hashlib.md5("|".join(parts).encode()).hexdigest()[:10]


def guarded_figures():
    """The figures whose drawn data is compared, by the names that they have in HASHES."""
    for name in ("tiny", "swap", "forks", "prefixes"):
        trace = TRACES[name]()
        for figure, draw in (FIGURES | COMPOSED).items():
            yield f"{name}, {figure}", lambda draw=draw, trace=trace: draw(trace)
    results = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "kernels_2026-11-21.json").read_text())
    points = kernel_points(results)
    yield "roofline", lambda: draw_roofline(points, *peaks(results), "kernels")


def test_figures_are_those_that_were_looked_at():
    hashes = {name: drawn_hash(draw()) for name, draw in guarded_figures()}
    assert hashes == HASHES, "see the words below HASHES"


if __name__ == "__main__":
    folder = Path("out/figures")
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in guarded_figures():
        figure = draw()
        figure.savefig(folder / f"{name.replace(', ', '_').replace(' ', '_')}.png", dpi=100)
        print(f'    "{name}": "{drawn_hash(figure)}",')
