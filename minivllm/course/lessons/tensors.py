"""Comparisons of tensors that may be rounded, for checks. Whatever differs the most is shown, and what common mistakes give is recognized."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from minivllm.course.observations import Hint, expect, see_numbers

Suspect = tuple[Tensor, str]
"""What a common mistake gives, and where to look then."""
_MOST_SEEN = 512


def expect_close(
    said: str, what: str, expected: Tensor, got: Any, look: Hint, suspects: Iterable[Suspect] = (), tolerance: float = 1e-4
) -> None:
    """Unless the two tensors are equal up to rounding, raise an AssertionError as `expect` does.

    If the tensor equals a suspect, the message says so; otherwise it shows the number that differs the most.

    Args:
        said, what, look: As of `expect`.
        expected, got: Of the same shape and dtype.
        suspects: Common mistakes; a generator makes them only if the tensor is wrong.
        tolerance: Relative to the largest number, or to 1 if that is larger.
    """
    kind = "Tensor" if isinstance(got, Tensor) else type(got).__name__
    expect(said, f"type of {what}", "Tensor", kind, f"what is returned as {what}")
    is_alike = got.shape == expected.shape and got.dtype == expected.dtype
    is_right = is_alike and is_close(expected, got, tolerance)
    hint = None if is_right else next((hint for wrong, hint in suspects if is_suspect(wrong, expected, got, tolerance)), None)
    expect(said, f"shape of {what}", list(expected.shape), list(got.shape), hint or f"the shapes on the way to {what}")
    expect(said, f"dtype of {what}", str(expected.dtype), str(got.dtype), f"the dtypes on the way to {what}")
    see_tensor(expected, got, tolerance)
    if is_right:
        return
    difference = (expected.detach().double() - got.detach().double()).abs().nan_to_num(nan=torch.inf)
    place = [int(i) for i in torch.unravel_index(difference.argmax(), difference.shape)]
    where = f"{what}{place}"
    wanted, came = float(expected.detach()[tuple(place)]), float(got.detach()[tuple(place)])
    hint = hint or (look if isinstance(look, str) else look())
    raise AssertionError(f"{said}\nExpected {where}: {wanted:.5g}\nGot {where}: {came:.5g}\nLook at {hint}.")


def see_tensor(expected: Tensor, got: Tensor, tolerance: float) -> None:
    """Let the grader see numbers of a tensor: all of a small one, and some of a large one, in no regular pattern."""
    right, mine = expected.detach().double().flatten(), got.detach().double().flatten()
    if len(mine) > _MOST_SEEN:
        places = torch.randperm(len(mine), generator=torch.Generator().manual_seed(len(mine)))[:_MOST_SEEN]
        mine = mine[places]
    finite = right[right.isfinite()]
    see_numbers(mine.tolist(), largest=max(1.0, float(finite.abs().max()) if len(finite) else 1.0), tolerance=tolerance)


def is_close(expected: Tensor, got: Tensor, tolerance: float = 1e-4) -> bool:
    """Whether two tensors of one shape differ by no more than rounding."""
    limit = tolerance * max(1.0, float(expected.detach().abs().nan_to_num(nan=0.0).max()))
    one, other = (x.detach().double().nan_to_num(nan=1e30) for x in (expected, got))
    return bool(((one - other).abs() <= limit).all())


def is_suspect(wrong: Tensor, expected: Tensor, got: Tensor, tolerance: float) -> bool:
    """Whether a result is what a mistake gives, and not what is right."""
    if wrong.shape != got.shape or not is_close(wrong, got, tolerance):
        return False
    return wrong.shape != expected.shape or not is_close(wrong, expected, tolerance)
