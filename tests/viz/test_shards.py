"""The figures of a divided model: every weight belongs to somebody, and what is drawn is what the ranks did."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("matplotlib")
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from viz_traces import TRACES

from minivllm.errors import ConfigError
from minivllm.scheduler_output import RankTiming
from minivllm.viz.chrome import to_chrome
from minivllm.viz.palette import REQUEST_COLORS
from minivllm.viz.shards import draw_ranks, draw_shards, find_shards


def config_of(num_heads=9, num_kv_heads=3, head_dim=64, hidden_size=576, vocab_size=49152, **more):
    hf_config = {"hidden_size": hidden_size, **(more or {"intermediate_size": 1536})}
    return SimpleNamespace(
        name="a model",
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        hf_config=hf_config,
    )


@given(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.data())
def test_every_weight_is_held_by_somebody(num_kv_heads, group, is_opt, data):
    num_heads = num_kv_heads * group
    more = {"ffn_dim": 40} if is_opt else {"intermediate_size": 56}
    config = config_of(num_heads, num_kv_heads, 4, 24, 50, **more)
    size = data.draw(st.integers(1, num_heads))
    for name, weight in find_shards(config, size).items():
        held = np.zeros((weight.num_inputs, weight.num_outputs), int)
        for shard in weight.shards:
            held[shard.inputs.start : shard.inputs.stop, shard.outputs.start : shard.outputs.stop] += 1
        assert held.min() == 1
        if name != "qkv" or size <= num_kv_heads:
            assert held.max() == 1


def areas_of(figure):
    """Drawn area by colour, of all boxes of shards."""
    areas = {}
    for collection in figure.axes[0].collections:
        if collection.get_label() == "shards":
            colors = [to_hex(color) for color in collection.get_facecolor()]
            for path, color in zip(collection.get_paths(), colors, strict=True):
                (left, top), (right, bottom) = path.vertices.min(axis=0), path.vertices.max(axis=0)
                areas.setdefault(color, []).append((right - left) * (bottom - top))
    return areas


@pytest.mark.parametrize("size", range(1, 9))
def test_shards_are_drawn_to_scale(size):
    config = config_of()
    figure = draw_shards(config, size)
    areas = areas_of(figure)
    assert set(areas) == {color.lower() for color in REQUEST_COLORS[:size]}
    weights = find_shards(config, size)
    layer = sum(weights[key].num_inputs * weights[key].num_outputs for key in ("qkv", "out", "up", "down"))
    drawn = sum(sum(of_rank) for of_rank in areas.values())
    assert layer < drawn < 1.6 * layer  # the cache and the vocabulary are not to scale
    texts = " ".join(text.get_text() for text in figure.axes[0].texts)
    assert "576 × 3072" in texts and texts.count("all-") == 2 and "49,152 tokens" in texts
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert len(labels) == size and sum(int(label.split(": ")[1].split("%")[0]) for label in labels) == pytest.approx(
        100, abs=size
    )


@pytest.mark.parametrize("size", [0, 9, 10])
def test_a_figure_of_too_many_ranks_is_refused(size):
    with pytest.raises(ConfigError, match=f"tensor_parallel_size is {size}, but this figure shows 1 to 8 ranks"):
        draw_shards(config_of(), size)


def trace_of_ranks():
    trace = TRACES["tiny"]()
    for step in trace:
        middle = (step.start + step.end) / 2
        quarter = (step.start + middle) / 2
        step.ranks = [
            RankTiming(step.start, step.end, 1000, [(quarter, middle)]),
            RankTiming(step.start, middle, 1000, [(step.start, quarter), (quarter, middle)]),
        ]
    return trace


def test_what_ranks_did_is_drawn():
    trace = trace_of_ranks()
    figure = draw_ranks(trace, 1)
    step = trace[1]
    whole = (step.end - step.start) * 1e3
    lengths = {}
    for collection in figure.axes[0].collections:
        for path in collection.get_paths():
            (left, top), (right, _) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            lengths.setdefault((collection.get_label(), round(top + 0.38)), []).append((right - left) / whole)
    assert sum(lengths["computing", 0]) == pytest.approx(0.75)
    assert sum(lengths["communication", 0]) == pytest.approx(0.25)
    assert sum(lengths["communication", 1]) == pytest.approx(0.5)
    assert sum(lengths.get(("computing", 1), [0])) == pytest.approx(0)
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert texts[:2] == ["rank 0: 25% of its time in communication", "rank 1: 100% of its time in communication"]
    assert draw_ranks(trace, 1, first_ms=0.5 * whole, last_ms=2 * whole).axes[0].get_xlim() == pytest.approx((0.5 * whole, whole))


def test_a_step_of_one_worker_has_no_ranks_to_draw():
    with pytest.raises(ConfigError, match="Step 0 has run on one worker"):
        draw_ranks(TRACES["tiny"](), 0)


def test_ranks_are_saved_and_exported():
    trace = trace_of_ranks()
    again = type(trace).from_json(trace.to_json())
    assert [step.ranks for step in again] == [step.ranks for step in trace]
    events = [event for event in to_chrome(again)["traceEvents"] if event["pid"] == 3]
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {"rank 0", "rank 1"}
    assert len([event for event in events if event["name"] == "communication"]) == 3 * len(trace)
    content = trace.to_json()
    _, end, num_bytes, communication = content["steps"][0]["ranks"][0]
    content["steps"][0]["ranks"][0] = [end + 1, end, num_bytes, communication]
    with pytest.raises(ConfigError, match="step 0 has a rank whose times are not in order"):
        type(trace).from_json(content)
