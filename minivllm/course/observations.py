"""What a check sees of a learner's code. A check is written once: it makes random situations, calls the code, and compares what comes out.

    def check_count_blocks(count_blocks):
        for rng in rounds("count", 40):
            num_tokens, block_size = rng.randint(1, 99), rng.choice((1, 4, 16))
            got = count_blocks(num_tokens, block_size)
            said = f"count_blocks({num_tokens}, {block_size})."
            expect(said, "number of blocks", -(-num_tokens // block_size), got, "how you round: a block that is begun is a block")

In a notebook the situations are the same each time, and the first difference is what the learner reads. But a learner's process belongs to
the learner, and whatever it says can be forged. So `minivllm grade` runs each check that has passed once more, with a seed that nobody
knows, and keeps what was seen (`recording`). It does the same with the lesson's own solution, in another process, and compares the two.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Real
from operator import index
from typing import Any, NoReturn

import msgspec

Hint = str | Callable[[], str]
"""Where to look; a function if it takes long to find out."""
NEAR, WITHIN = "near", "within"
"""The names under which numbers are kept that may be rounded, and by how much they may differ."""
_MOST_SHOWN = 700
_NOTHING = "nothing"


class Recording:
    """What the checks see while it lasts.

    Attributes:
        seed: Mixed into the random numbers of `rounds` and `seeded`; None to leave them as they are in a notebook.
        observations: Plain data, in order.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed = seed
        self.observations: list[Any] = []

    def to_json(self) -> str:
        """As text."""
        return json.dumps(self.observations)


_recording: Recording | None = None


@contextmanager
def recording(seed: int | None) -> Iterator[Recording]:
    """Let the checks in this block take their random numbers from a seed, and keep what they see."""
    global _recording
    _recording = Recording(seed)
    try:
        yield _recording
    finally:
        _recording = None


def is_recording() -> bool:
    """Whether the grader is looking, with a seed of its own; then a slow check may make do with fewer situations."""
    return _recording is not None and _recording.seed is not None


def seeded(name: str) -> random.Random:
    """Random numbers that belong to a name, such as "append 3": the same ones each time, but others for the grader."""
    return random.Random(seed_of(name))


def seed_of(name: str) -> str:
    """The seed that belongs to a name."""
    return name if _recording is None or _recording.seed is None else f"{name} {_recording.seed}"


def rounds(name: str, count: int) -> Iterator[random.Random]:
    """Random numbers for each round of a check."""
    for number in range(count):
        yield seeded(f"{name} {number}")


def see(value: Any) -> None:
    """Keep an observation that is the same for every right answer; `expect` and `require` do so themselves."""
    if _recording is not None:
        _recording.observations.append(plain(value))


def see_numbers(got: Any, *, largest: float, tolerance: float) -> None:
    """Keep numbers that may be rounded: a right answer differs from the exact one by the tolerance at most, relative to the largest."""
    if _recording is not None:
        numbers = [float(number) / (largest or 1.0) for number in got]
        shown = [number if math.isfinite(number) else str(number) for number in numbers]
        _recording.observations.append({NEAR: shown, WITHIN: 2.5 * tolerance})  # two right answers differ by twice as much


def fail(message: str) -> NoReturn:
    """Raise an AssertionError with this message, and let the grader see that it was raised, whoever catches it."""
    see("failed")
    raise AssertionError(message)


def require(expected: Any, got: Any, message: Hint) -> None:
    """Unless the two are equal, raise an AssertionError with this message, a whole sentence or more."""
    see(got)
    if expected != got:
        raise AssertionError(message if isinstance(message, str) else message())


def expect(said: str, what: str, expected: Any, got: Any, look: Hint) -> None:
    """Unless the two are equal, raise an AssertionError that says what was expected, what came, and where to look.

    Of two dicts only the first entry that differs is shown.

    Args:
        said: The situation, in whole sentences.
        what: The name of what is compared, such as "free blocks, in order".
        expected, got: The right value and the learner's: plain data.
        look: Continues "Look at …"; no full stop.
    """
    see([what, got])
    if expected == got:
        return
    if isinstance(expected, dict) and isinstance(got, dict):
        name = next(name for name in [*expected, *got] if expected.get(name, _NOTHING) != got.get(name, _NOTHING))
        what, expected, got = f"{what}, for {name!r}", expected.get(name, _NOTHING), got.get(name, _NOTHING)
    look = look if isinstance(look, str) else look()
    raise AssertionError(f"{said}\nExpected {what}: {show(expected)}\nGot {what}: {show(got)}\nLook at {look}.")


def expect_number(
    said: str,
    what: str,
    expected: float,
    got: Any,
    look: Hint,
    mistakes: Mapping[str, float] | None = None,
    tolerance: float = 1e-9,
) -> None:
    """As `expect`, for a number that may be rounded. A number that is known to be wrong says how it came about.

    Args:
        mistakes: What common mistakes give, by the words that continue "That is …".
        tolerance: Relative to the number.
    """
    is_number = isinstance(got, Real)
    see([what, type(got).__name__ if not is_number else None])
    if is_number:
        see_numbers([got], largest=max(1.0, abs(expected)), tolerance=tolerance)
    if is_number and math.isclose(expected, got, rel_tol=tolerance, abs_tol=tolerance):
        return
    names = [
        name
        for name, wrong in (mistakes or {}).items()
        if is_number and math.isclose(wrong, got, rel_tol=tolerance, abs_tol=tolerance)
    ]
    known = f" That is {names[0]}." if len(names) == 1 else ""
    shown = f"{float(got):.6g}" if is_number and not isinstance(got, bool) else repr(got)[:300]
    look = look if isinstance(look, str) else look()
    raise AssertionError(f"{said}\nExpected {what}: {expected:.6g}\nGot {what}: {shown}.{known}\nLook at {look}.")


def show(value: Any) -> str:
    """A value for a reader: a list of names without brackets and quotes, and what is long is cut off."""
    is_names = isinstance(value, list) and all(isinstance(item, str) for item in value)
    text = (", ".join(value) or "none") if is_names else str(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 10] + " …"


def plain(value: Any) -> Any:
    """A value as JSON can hold it; what it cannot hold becomes the name of its type."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return sorted(([plain(name), plain(item)] for name, item in value.items()), key=repr)
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value), key=repr)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        return [plain(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, msgspec.Struct):
        return [plain(getattr(value, name)) for name in value.__struct_fields__]
    if hasattr(value, "tolist"):  # of NumPy and torch
        return plain(value.tolist())
    try:
        return index(value)
    except TypeError:
        return type(value).__name__
