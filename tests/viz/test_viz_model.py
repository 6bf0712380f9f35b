"""The figures of a model show the numbers they are given, and the costs are those of the real model."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from minivllm.viz.model import Costs, draw_heads, draw_layer_shapes, draw_lens, draw_operations, draw_parameters, draw_rotation

SMOLLM2 = Costs(576, 1536, 30, 9, 3, 64, 49152)


def texts_of(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_parameters_are_counted_by_part():
    parts = SMOLLM2.parameters()
    assert sum(parts.values()) + 61 * 576 == 134_515_008  # 61 norms
    assert parts["embedding = head"] == 49152 * 576
    texts = texts_of(draw_parameters(SMOLLM2))
    assert "79.6 M\n59%" in texts and "28.3 M\n21%" in texts


def test_a_small_model_is_counted_by_hand():
    """One layer of width 2 with one head of 2, an MLP of width 3, 5 tokens."""
    tiny = Costs(2, 3, 1, 1, 1, 2, 5)
    assert tiny.parameters() == {"MLP": 18, "projections of attention": 16, "embedding = head": 10}
    assert tiny.decode(4) == {"MLP": 36, "projections of attention": 32, "embedding = head": 20, "scores and sums": 4 * 2 * 4}
    assert tiny.prefill(4) == {"MLP": 144, "projections of attention": 128, "embedding = head": 20, "scores and sums": 4 * 2 * 10}
    assert tiny.prefill(1) == tiny.decode(1)


def test_operations_are_drawn_for_each_token_and_stacked():
    lengths = range(1, 2000, 100)
    figure = draw_operations(SMOLLM2, lengths)
    prefill, decode = figure.axes
    assert prefill.get_ylabel() == "GFLOP for each token" and decode.get_xlabel() == "context length (tokens)"
    for axes, expected in (
        (prefill, sum(SMOLLM2.prefill(1901).values()) / 1901e9),
        (decode, sum(SMOLLM2.decode(1901).values()) / 1e9),
    ):
        top = axes.collections[-1].get_paths()[0].vertices
        assert top[top[:, 0] == 1901][:, 1].max() == pytest.approx(expected)


def test_every_box_has_its_shape():
    keys = [
        "input_layernorm",
        "q",
        "k",
        "v",
        "scores",
        "heads",
        "attention",
        "post_attention_layernorm",
        "gate",
        "up",
        "product",
        "mlp",
    ]
    texts = texts_of(draw_layer_shapes({key: (7, number) for number, key in enumerate(keys)}, stream=(7, 99)))
    assert {f"[7, {number}]" for number in range(len(keys))} <= set(texts)
    assert "residual stream [7, 99]" in texts


def test_hands_point_where_the_pair_has_been_turned_to():
    figure = draw_rotation([np.pi / 2, 0.0], pairs=(0, 1), positions=(0, 1, 2))
    (axes,) = figure.axes
    hands = [(text.xy[0] - text.xyann[0], -(text.xy[1] - text.xyann[1])) for text in axes.texts]
    assert np.allclose(hands, [(0.38, 0), (0, 0.38), (-0.38, 0), (0.38, 0), (0.38, 0), (0.38, 0)])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["pair 0:\n90° a step", "pair 1:\n0° a step"]


@pytest.mark.parametrize("count", [1, 3])
def test_heads_are_grids_of_shares(count):
    grid = np.array([[1.0, 0.0], [0.25, 0.75]])
    figure = draw_heads(["a", "b"], {f"head {number}": grid for number in range(count)})
    panels = figure.axes[:count]
    for axes in panels:
        assert np.allclose(axes.images[0].get_array() ** 2, grid)
        assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b"]
    assert panels[0].get_ylabel() == "looks"


def test_the_lens_is_a_table_of_words():
    figure = draw_lens(
        ["x", "y"], ["layer 0", "layer 1"], [["one", "two"], ["three", "extraordinarily"]], np.array([[0.1, 0.9], [0.5, 0.0]])
    )
    assert texts_of(figure) == ["one", "two", "three", "extraordi"]
    assert figure.axes[0].images[0].get_array().max() == 0.9
