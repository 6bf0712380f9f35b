"""The checks of lesson 03 for rows, padded batches and the runner."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import Tensor

from minivllm.course.lessons.lesson_03.situations import CorrectCache, count, isolate, lay_out
from minivllm.course.lessons.padded_steps import PaddedStep
from minivllm.course.lessons.tensors import expect_close
from minivllm.course.observations import expect, require, rounds

_ROUNDS = 30


# -- rows ------------------------------------------------------------------------------------------------------------


def check_rows(cls: Any) -> None:
    """`take`, `advance` and `release` against a dict of lengths, and the two calls that must be refused."""
    for rng in rounds("rows", _ROUNDS):
        num_rows = rng.randint(2, 5)
        cache = cls(2, num_rows, 8, 1, 4)
        for part in cache.layers[1]:
            part.fill_(3.0)
        lengths: dict[int, int] = {}  # in the order in which rows were taken
        done: list[str] = []
        for _ in range(25):
            action = rng.choice(("take", "take", "advance", "advance", "release", "release a free one"))
            done.append(_act(cache, action, lengths, num_rows, rng, done))
            said = f"{num_rows} rows. {_last(done)}"
            got = [*(cache.lengths.get(row) for row in lengths), len(cache.lengths)]
            require([*lengths.values(), len(lengths)], got, _explain(said, lengths, cache.lengths))
            expect(f"{said}.", "num_free", num_rows - len(lengths), cache.num_free, "which rows can be taken again")
            same = all(bool((part == 3.0).all()) for part in cache.layers[1])
            require(True, same, f"After {_last(done)}: the memory in `layers` has changed. No method here touches it.")


def _act(cache: Any, action: str, lengths: dict[int, int], num_rows: int, rng: random.Random, done: list[str]) -> str:
    """Call a method of a learner's cache, and change the lengths as it should. Returns the call."""
    taken, free = list(lengths), [row for row in range(num_rows) if row not in lengths]
    if action == "take" and free:
        are_taken = f"{sorted(taken)} are" if taken else "none is"
        said = f"{num_rows} rows, of which {are_taken} taken. {_last([*done, 'take()'])}"
        row = cache.take()
        require(True, isinstance(row, int), f"{said}: expected the number of a row, got {row!r}. Look at what `take` returns.")
        require(True, row in range(num_rows), f"{said}: expected a row from 0 to {num_rows - 1}, got {row}.")
        require(True, row in free, f"{said}: expected a free row, got row {row}, which another text has.")
        lengths[row] = 0
        return "take()"
    if action == "advance" and taken:
        rows = rng.sample(taken, rng.randint(1, len(taken)))
        counts = [rng.randint(1, 3) for _ in rows]
        cache.advance(list(rows), list(counts))
        lengths |= {row: lengths[row] + new for row, new in zip(rows, counts, strict=True)}
        return f"advance({rows}, {counts})"
    if action == "release" and taken:
        row = rng.choice(taken)
        cache.release(row)
        del lengths[row]
        return f"release({row})"
    if free:
        row = rng.choice(free)
        return _refuse(cache, "release", (row,), f"row {row} is free")
    return _refuse(cache, "take", (), f"all {num_rows} rows are taken")


def _refuse(cache: Any, method: str, arguments: tuple[int, ...], why: str) -> str:
    """Make a call that must raise a ValueError, and change nothing. Returns the call."""
    before = dict(cache.lengths), cache.num_free
    call, came = f"{method}({', '.join(map(str, arguments))})", "ValueError"
    try:
        came = f"returned {getattr(cache, method)(*arguments)!r}"
    except ValueError:
        pass
    except (IndexError, KeyError) as error:
        came = f"raised {error!r}"
    require(True, came == "ValueError", f"{call} must raise a ValueError, because {why}, but {came}.")
    after = dict(cache.lengths), cache.num_free
    rule = f"{call} has raised a ValueError, because {why}.\nExpected (lengths, num_free): {before}\nGot (lengths, num_free): {after}"
    require(True, after == before, f"{rule}\nLook at what it changes before it raises.")
    return f"{call}, which raises a ValueError"


def _explain(said: str, expected: dict[int, int], got: dict[int, int]) -> str:
    """What differs in the lengths."""
    look = "`take` and `release`: a row with a text is in `lengths`, a free one is not"
    if expected.keys() == got.keys():
        look = "`advance`, which adds counts[i] to rows[i] and to no other, and `take`, which begins with 0"
    wanted, came = dict(sorted(expected.items())), dict(sorted(got.items()))
    return f"{said}.\nExpected lengths: {wanted}\nGot lengths: {came}\nLook at {look}."


def _last(done: list[str]) -> str:
    """The last few calls."""
    return ("… " if len(done) > 4 else "") + ", ".join(done[-4:])


# -- a padded batch --------------------------------------------------------------------------------------------------


def make_token_lists(rng: random.Random) -> tuple[list[list[int]], list[int]]:
    """Lists of new tokens of different lengths, and how many tokens come before each."""
    lengths = [rng.choice((1, rng.randint(2, 7))) for _ in range(rng.randint(1, 5))]
    starts = [rng.choice((0, rng.randint(1, 40))) for _ in lengths]
    return [[rng.randint(1, 999) for _ in range(length)] for length in lengths], starts


def check_layout(cls: Any) -> None:
    """`lay_out`: tokens on the left, zeros on the right, positions of the whole text."""
    looks = {
        "input_ids": "which side the padding is on, and that it is token 0",
        "positions": "positions: they continue from starts[i]; padding has position 0 and does not count",
    }
    for rng in rounds("layout", _ROUNDS):
        token_lists, starts = make_token_lists(rng)
        call = f"lay_out({token_lists}, {starts})"
        got = cls.__new__(cls).lay_out([list(tokens) for tokens in token_lists], list(starts))
        are_two = isinstance(got, (tuple, list)) and len(got) == 2
        require(True, are_two, f"{call} must return input_ids and positions, but returned {got!r}.")
        for (name, look), mine, wanted in zip(looks.items(), got, lay_out(None, token_lists, starts), strict=True):
            require(True, isinstance(mine, Tensor), f"{call}: {name} must be a tensor, but is {mine!r}.")
            expect(f"{call}.", f"dtype of {name}", "torch.int64", str(mine.dtype), "the dtype of the tensors you make")
            expect(f"{call}.", name, wanted.tolist(), mine.tolist(), look)


# -- through the model -----------------------------------------------------------------------------------------------


class FakeModel:
    """Records its calls. Its hidden states say which token they belong to.

    Args:
        cache: Its lengths are recorded at each call.
    """

    def __init__(self, cache: CorrectCache) -> None:
        self.cache = cache
        self.calls: list[dict[str, Any]] = []
        self.asked: list[int] = []
        """Of which tokens there were to be logits, by their places in the batch."""

    def lengths(self) -> dict[int, int]:
        """Of the cache, by row."""
        return dict(sorted(self.cache.lengths.items()))

    def __call__(self, input_ids: Tensor, positions: Tensor, kv_caches: Any, metadata: Any) -> Tensor:
        """One hidden state for each token: its place in the batch, its token and its position."""
        self.calls.append(
            {
                "shapes of input_ids and positions": [list(input_ids.shape), list(positions.shape)],
                "input_ids": input_ids.flatten().tolist(),
                "positions": positions.flatten().tolist(),
                "kv_caches": kv_caches,
                "metadata": {name: [int(x) for x in getattr(metadata, name)] for name in ("rows", "starts", "counts")},
                "lengths while the model runs": self.lengths(),
            }
        )
        return torch.stack([torch.arange(len(input_ids.flatten())), input_ids.flatten(), positions.flatten()], dim=1).float()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`[n, hidden_size]` in, `[n, vocab_size]` out."""
        self.asked += [int(place) for place in hidden[..., 0].flatten()]
        return torch.cat([hidden, -hidden], dim=-1)


def make_runner_case(rng: random.Random) -> tuple[CorrectCache, list[int], list[list[int]]]:
    """A cache with texts in it, the rows of a step, and the new tokens of each."""
    cache = CorrectCache(6, rng)
    for row in [cache.take() for _ in range(5)]:
        cache.lengths[row] = rng.choice((0, rng.randint(1, 30)))
    token_lists, _ = make_token_lists(rng)
    return cache, rng.sample(sorted(cache.lengths), len(token_lists)), token_lists


def step(model: FakeModel, rows: list[int], token_lists: list[list[int]]) -> Tensor:
    """A correct `step`."""
    starts, counts = [model.cache.lengths[row] for row in rows], [len(tokens) for tokens in token_lists]
    input_ids, positions = lay_out(None, token_lists, starts)
    hidden = model(input_ids.flatten(), positions.flatten(), model.cache.layers, PaddedStep(rows, starts, counts))
    model.cache.advance(rows, counts)
    return model.compute_logits(hidden[[i * max(counts) + new - 1 for i, new in enumerate(counts)]])


_LOOKS = {
    "shapes of input_ids and positions": "flattening: the model takes flat tokens",
    "input_ids": "what `lay_out` gives, row after row",
    "positions": "the starts passed to `lay_out`: the lengths of these rows",
    "kv_caches": "self.cache.layers",
    "metadata": "the PaddedStep: counts without padding",
    "lengths while the model runs": "when `advance` is called: after the model",
}


def check_runner(cls: Any) -> None:
    """`step`: one call of the model on the flat batch, lengths that grow after it, and the logits of each text's last token."""
    made = isolate(cls, lay_out=lay_out)
    for rng in rounds("runner", _ROUNDS):
        cache, rows, token_lists = make_runner_case(rng)
        model, right = FakeModel(cache), FakeModel(copy.deepcopy(cache))
        said = f"lengths {model.lengths()}, step({rows}, {token_lists})."
        logits = step(right, rows, token_lists)
        got = made(model, cache).step(list(rows), [list(tokens) for tokens in token_lists])
        expect(said, "calls of the model", 1, len(model.calls), "how often `step` calls self.model: all texts are one batch")
        for what, look in _LOOKS.items():
            expect(said, what, right.calls[0][what], model.calls[0][what], look)
        look = "`advance`, once, with the real tokens of each text"
        expect(said, "lengths after the step", right.lengths(), model.lengths(), look)
        look = f"the last real token of each text, in a flat batch of width {max(map(len, token_lists))}"
        if len(model.asked) > len(rows):
            look = f"compute_logits: it was asked for {count(len(model.asked), 'row')} of logits, where {len(rows)} would do"
        expect(said, "places in the flat batch whose logits are computed", right.asked, model.asked, look)
        look = "what `step` returns: the result of compute_logits, one row for each text, in the order of `rows`"
        expect_close(said, "logits", logits, got, look)
