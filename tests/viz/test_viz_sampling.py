"""The pictures of lesson 01: where a text is cut into tokens, and what each step from logits to a token leaves."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.errors import ConfigError
from minivllm.viz.sampling import draw_arrivals, draw_stages, play_filters
from minivllm.viz.tokens import draw_tokens

TOKENS = [" cat", " $5", "\n", "<b>"]
STAGES = {"first": [0.4, 0.3, 0.2, 0.1], "then": [0.5, 0.5, 0.0, 0.0], "last": [1.0, 0.0, 0.0, 0.0]}


def spelled(piece) -> bytes:
    return piece.text.encode() if piece.is_whole else bytes.fromhex(piece.text)


@given(text=st.one_of(st.text(max_size=20), st.text("aé€🌳 \n<&", max_size=12)))
def test_the_boxes_spell_the_text_and_are_as_many_as_its_tokens(tokenizer, text):
    picture = draw_tokens(tokenizer, {"a text": text})
    pieces = picture.pieces["a text"]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(spelled, pieces)) == tokenizer.decode(token_ids, skip_special_tokens=False).encode()
    assert len(pieces) == len(token_ids)


def test_a_part_of_a_character_shows_its_bytes(tokenizer):
    pieces = draw_tokens(tokenizer, {"": "a 🌳"}).pieces[""]
    assert [piece.is_whole for piece in pieces] == [True, False, False, False]
    assert " ".join(piece.text for piece in pieces[1:]).split()[-4:] == ["F0", "9F", "8C", "B3"]


def test_the_picture_is_svg_that_any_reader_takes(tokenizer):
    picture = draw_tokens(tokenizer, {"<&> \u0928": "<script>&amp;\n\t" * 30})
    root = ElementTree.fromstring(picture._repr_svg_())
    boxes = root.findall("{*}rect")[1:]
    assert len(boxes) == len(picture.pieces["<&> \u0928"])
    assert all(float(box.get("x")) + float(box.get("width")) <= float(root.get("width")) for box in boxes)
    assert max(float(box.get("y")) + float(box.get("height")) for box in boxes) <= float(root.get("height"))
    assert "⏎" in picture._repr_svg_() and "⏎" not in repr(picture)


def test_each_row_of_bars_has_the_probabilities_of_its_step():
    figure = draw_stages(TOKENS, STAGES)
    for axes, probs in zip(figure.axes, STAGES.values(), strict=True):
        assert [bar.get_height() for bar in axes.patches[: len(probs)]] == pytest.approx(probs)
    assert [label.get_text() for label in figure.axes[-1].get_xticklabels()] == ["·cat", r"·\$5", r"\n", "<b>"]


def test_what_a_step_removes_is_crossed_out_once():
    crosses = [[list(line.get_xdata()) for line in axes.lines] for axes in draw_stages(TOKENS, STAGES).axes]
    assert crosses == [[], [[2, 3]], [[1]]]


def test_a_race_shows_all_times_and_names_who_is_first():
    times = [[0.5, 2.0, 3.0, 4.0], [9.0, 0.1, 0.2, 7.0]]
    (axes,) = draw_arrivals(TOKENS, times).axes
    assert [text.get_text() for text in axes.texts] == ["·cat", r"·\$5"]
    places = [dots.get_offsets().tolist() for dots in axes.collections if len(dots.get_offsets())]
    assert places == [[[times[0][token], 0], [times[1][token], 1]] for token in range(4)]


def test_the_sliders_repeat_the_steps_with_their_values():
    asked = []

    def apply(**values):
        asked.append(values)
        return STAGES

    box = play_filters(TOKENS, apply, temperature=0.8)
    assert asked == [{"temperature": 0.8, "min_p": 0.0, "top_k": 0, "top_p": 1.0}]
    assert bytes(box.picture.value).startswith(b"\x89PNG")
    box.knobs["top_k"].value = 3
    assert asked[-1] == {"temperature": 0.8, "min_p": 0.0, "top_k": 3, "top_p": 1.0}


def test_a_slider_cannot_start_where_it_has_no_place():
    with pytest.raises(ConfigError, match="top_k cannot start at 7"):
        play_filters(TOKENS, lambda **values: STAGES, top_k=7)
