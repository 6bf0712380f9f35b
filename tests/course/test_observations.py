"""What a check sees: the same situations each time, others for the grader; plain data; and messages that say where to look."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pytest
import torch

from minivllm.course.grading.observe import find_difference
from minivllm.course.lessons.tensors import expect_close
from minivllm.course.observations import expect, expect_number, fail, plain, recording, require, rounds, see, see_numbers, seeded


class Colour(Enum):
    RED = 1


@dataclass
class Point:
    x: int
    y: list


def test_situations_are_the_same_but_for_the_grader():
    def numbers():
        return [rng.random() for rng in rounds("a", 3)] + [seeded("b").random()]

    usual = numbers()
    assert usual == numbers() and len(set(usual)) == 4
    with recording(None):
        assert numbers() == usual
    with recording(1):
        graded = numbers()
        assert graded == numbers()
    assert not set(graded) & set(usual)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((1, (2, None)), [1, [2, None]]),
        ({"b": 1, "a": {3, 2}}, [["a", [2, 3]], ["b", 1]]),
        (Point(1, [Colour.RED]), [1, ["RED"]]),
        (np.arange(3), [0, 1, 2]),
        (torch.tensor([[1.5]]), [[1.5]]),
        (np.int64(3), 3),
        ([float("nan"), float("-inf")], ["nan", "-inf"]),
        (object(), "object"),
        (b"x", "bytes"),
    ],
)
def test_values_become_plain_data(value, expected):
    assert plain(value) == expected
    json.dumps(plain(value))


def test_what_is_compared_is_seen_before_it_is_judged():
    class Liar(int):
        __eq__ = lambda self, other: True  # noqa: E731
        __ne__ = lambda self, other: False  # noqa: E731
        __hash__ = int.__hash__

    with recording(1) as seen:
        expect("A situation.", "number", 3, Liar(4), "it")
        with pytest.raises(AssertionError):
            require(1, 2, "a sentence")
        with pytest.raises(AssertionError, match="stopped"):
            fail("stopped")
        see_numbers([0.5, float("nan")], largest=2.0, tolerance=0.1)
        expect_number("A situation.", "mean", 0.5, 0.5, "it")
        expect_close("A situation.", "x", torch.ones(2), torch.ones(2), "it")
    assert json.loads(seen.to_json())[:4] == [["number", 4], 2, "failed", {"near": [0.25, "nan"], "within": 0.25}]
    see("nobody is looking")


def test_a_message_says_what_was_expected_what_came_and_where_to_look():
    with pytest.raises(AssertionError) as error:
        expect("A situation.", "queues", {"a": ["x", "y"], "b": []}, {"a": ["x", "y"], "b": ["z"]}, lambda: "the second queue")
    assert str(error.value) == "A situation.\nExpected queues, for 'b': none\nGot queues, for 'b': z\nLook at the second queue."
    with pytest.raises(AssertionError) as error:
        expect_number("A situation.", "mean", 0.5, 1, "the divisor", {"the sum": 1.0, "the count": 2.0})
    assert str(error.value) == "A situation.\nExpected mean: 0.5\nGot mean: 1. That is the sum.\nLook at the divisor."
    with pytest.raises(AssertionError, match="Look at the sign"):
        expect_close("A situation.", "x", torch.ones(2), -torch.ones(2), "it", [(-torch.ones(2), "the sign")])


def near(numbers, within=0.01):
    return json.dumps([["x", {"near": numbers, "within": within}]])


HALF = near([0.5, "nan"])


@pytest.mark.parametrize(
    ("expected", "seen"),
    [
        *(('[[1, {"a": 2}], 3]', seen) for seen in ("", "[]", "null", "{}", "nan", '"x"', "[" * 100_000, "[[1]]", "7")),
        *((HALF, seen) for seen in (near([0.55, "nan"]), near([0.55, "nan"], 9), near([0.5, 1]), near([0.5]), '[["x", [0.5, null]]]')),
    ],
)  # fmt: skip
def test_what_was_not_observed_differs(expected, seen):
    assert find_difference(expected, seen)


@pytest.mark.parametrize(("expected", "seen"), [("[3, 1]", "[3.0, true]"), (HALF, near([0.505, "nan"]))])
def test_equal_numbers_of_another_kind_are_equal_and_rounded_ones_where_a_check_says_so(expected, seen):
    assert find_difference(expected, seen) is None


def test_a_difference_is_shown_short():
    assert find_difference('[1, ["b", 3]]', '[1, ["b", 4]]') == 'at observation 2 of 2 it gave ["b", 4] instead of ["b", 3]'
    assert len(find_difference(json.dumps(["x" * 10**5]), json.dumps(["y" * 10**5]))) < 500
