"""The figures of lesson 10: the tree of prefixes, and the gaps between tokens."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from minivllm.bench.production import load_mooncake_trace
from minivllm.bench.workloads import WorkloadRequest
from minivllm.simulation.engine import simulate
from minivllm.viz.gaps import draw_gaps
from minivllm.viz.prefix_tree import draw_prefix_tree


def texts_of(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_blocks_that_are_shared_say_by_how_many():
    prompts = {"a": [1, 2, 3, 4, 5], "b": [1, 2, 3, 4, 9, 9], "c": [1, 2, 8, 8], "d": [7]}
    texts = texts_of(draw_prefix_tree(prompts, block_size=2))
    assert sorted(text for text in texts if "share" in text) == ["2 share it", "3 share it"]
    assert [text for text in texts if "share" not in text and text] == ["a + 1 token", "b", "c", "d + 1 token"]


def test_the_same_tokens_after_another_beginning_are_another_block():
    texts = texts_of(draw_prefix_tree({"a": [1, 2, 5, 6], "b": [3, 4, 5, 6]}, block_size=2))
    assert not any("share" in text for text in texts)


@pytest.mark.parametrize("prompts", [{}, {"a": []}, {"a": [1], "b": [1]}])
def test_prompts_without_blocks_are_drawn_too(prompts):
    assert len(texts_of(draw_prefix_tree(prompts, block_size=2))) == len(prompts)


def test_each_gap_is_a_line_and_the_longest_is_named():
    trace = simulate(
        [WorkloadRequest([1] * 4, 5), WorkloadRequest([2] * 4, 3), WorkloadRequest([3] * 4, 1)], max_num_seqs=3
    ).trace
    (axes,) = draw_gaps({"run": trace}).axes
    assert [len(lines.get_segments()) for lines in axes.collections] == [4, 2]
    heights = [segment[1][1] for lines in axes.collections for segment in lines.get_segments()]
    assert axes.get_title(loc="left") == f"run: the longest gap is {max(heights):,.0f} ms"
    (axes,) = draw_gaps({"run": trace}, leave_out=("0",)).axes
    assert len(axes.collections) == 1


def test_the_mooncake_trace_is_that_of_the_paper():
    trace = load_mooncake_trace()
    assert len(trace) == 12_031
    assert all(len(request.hash_ids) == -(-request.prompt_len // 512) for request in trace[:500])
    seen: set[int] = set()
    found = 0
    for request in trace:
        found += sum(block in seen for block in request.hash_ids)
        seen.update(request.hash_ids)
    assert round(100 * found / sum(len(request.hash_ids) for request in trace)) == 37
