"""A learner's predictions, written down before a cell gives the answer, and compared with it afterwards.

They stand in a cell of the notebook, so they are kept with it, and can be read on GitHub.
"""

from __future__ import annotations

from numbers import Real

_CLOSE = 1.1
"""A prediction within this factor of the answer is close."""


class Prediction:
    """What a learner predicts; see `predict`."""

    def __init__(self, guesses: dict[str, float | None]) -> None:
        self.guesses = guesses

    def compare(self, **answers: float) -> None:
        """Print each prediction next to its answer.

        Args:
            answers: By the names given to `predict`.
        """
        if answers.keys() != self.guesses.keys():
            raise ValueError(f"Predicted were {', '.join(self.guesses)}, but the answers are {', '.join(answers)}.")
        width = max(len(name) for name in answers)
        print(f"{'':{width}}  predicted    answer")
        for name, answer in answers.items():
            guess = self.guesses[name]
            shown = "-" if guess is None else _show(guess)
            print(f"{name.replace('_', ' '):{width}}  {shown:>9}  {_show(answer):>8}  {_judge(guess, answer)}".rstrip())
        if None in self.guesses.values():
            print("(Write your own numbers in place of None in the cell above, and run it and this one.)")


def predict(**guesses: float | None) -> Prediction:
    """Write predictions down, to compare them later: `guess = predict(steps=12)`, and below `guess.compare(steps=len(trace))`.

    Args:
        guesses: A number for each name; None for one that is still to be made.

    Raises:
        TypeError: A guess is not a number.
    """
    for name, guess in guesses.items():
        if guess is not None and (isinstance(guess, bool) or not isinstance(guess, Real)):
            raise TypeError(f"Write a number, such as {name}=12, in place of {guess!r}.")
    return Prediction(guesses)


def _show(number: float) -> str:
    return f"{number:,.3g}" if abs(number) < 1000 else f"{number:,.0f}"


def _judge(guess: float | None, answer: float) -> str:
    """How good a guess is, in a few words."""
    if guess is None:
        return ""
    if _show(guess) == _show(answer):
        return "right"
    way = "high" if guess > answer else "low"
    if guess <= 0 or answer <= 0:
        return f"too {way}"
    factor = max(guess / answer, answer / guess)
    return f"close, a little {way}" if factor <= _CLOSE else f"too {way} by a factor of {factor:,.2g}"
