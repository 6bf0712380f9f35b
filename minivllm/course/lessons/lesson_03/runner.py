"""The checks of lesson 03 for rows, padded batches and the runner."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from minivllm.course.lessons.lesson_03.situations import CorrectCache, count, expect, isolate, lay_out

_ROUNDS = 30


# -- rows ------------------------------------------------------------------------------------------------------------


def check_rows(cls: Any) -> None:
    """`take`, `advance` and `release` against a dict of lengths, and the two invalid calls."""
    for seed in range(_ROUNDS):
        rng = random.Random(f"rows {seed}")
        num_rows = rng.randint(2, 5)
        cache = cls(2, num_rows, 8, 1, 4)
        for part in cache.layers[1]:
            part.fill_(3.0)
        lengths: dict[int, int] = {}
        done: list[str] = []
        for _ in range(25):
            action = rng.choice(("take", "take", "advance", "advance", "release"))
            if action == "take" and len(lengths) < num_rows:
                done.append("take()")
                row = cache.take()
                said = f"{num_rows} rows, of which {_rows(lengths)} taken. {_last(done)}"
                assert isinstance(row, int), f"{said}: expected the number of a row, got {row!r}. Look at what `take` returns."
                assert row in range(num_rows), f"{said}: expected a row from 0 to {num_rows - 1}, got {row}."
                assert row not in lengths, f"{said}: expected a free row, got row {row}, which another text has."
                lengths[row] = 0
            elif action == "advance" and lengths:
                rows = rng.sample(sorted(lengths), rng.randint(1, len(lengths)))
                counts = [rng.randint(1, 3) for _ in rows]
                done.append(f"advance({rows}, {counts})")
                cache.advance(list(rows), list(counts))
                for row, new in zip(rows, counts, strict=True):
                    lengths[row] += new
            elif action == "release" and lengths:
                row = rng.choice(sorted(lengths))
                done.append(f"release({row})")
                cache.release(row)
                del lengths[row]
            else:
                continue
            _compare(cache, lengths, num_rows, f"{num_rows} rows. {_last(done)}")
            for part in cache.layers[1]:
                assert bool((part == 3.0).all()), (
                    f"After {_last(done)}: the memory in `layers` has changed. No method here touches it."
                )
        _check_refusals(cls, num_rows)


def _check_refusals(cls: Any, num_rows: int) -> None:
    """Taking a row when none is free, and releasing a free one."""
    cache = cls(1, num_rows, 8, 1, 4)
    rows = [cache.take() for _ in range(num_rows)]
    _refuse(cache, "take", (), f"all {num_rows} rows are taken")
    cache.release(rows[0])
    _refuse(cache, "release", (rows[0],), f"row {rows[0]} is free")


def _refuse(cache: Any, method: str, arguments: tuple[int, ...], why: str) -> None:
    before = dict(cache.lengths), cache.num_free
    call = f"{method}({', '.join(map(str, arguments))})"
    try:
        got = getattr(cache, method)(*arguments)
    except ValueError:
        pass
    except (IndexError, KeyError) as error:
        raise AssertionError(f"{call} must raise a ValueError, because {why}, but raised {error!r}.") from None
    else:
        raise AssertionError(f"{call} must raise a ValueError, because {why}, but returned {got!r}.")
    after = dict(cache.lengths), cache.num_free
    expect(
        f"{call} has raised a ValueError, because {why}.",
        "(lengths, num_free)",
        before,
        after,
        "what it changes before it raises",
    )


def _compare(cache: Any, lengths: dict[int, int], num_rows: int, said: str) -> None:
    look = {
        False: "`take` and `release`: a row with a text is in `lengths`, a free one is not",
        True: "`advance`, which adds counts[i] to rows[i] and to no other, and `take`, which begins with 0",
    }[set(cache.lengths) == set(lengths)]
    expect(f"{said}.", "lengths", dict(sorted(lengths.items())), dict(sorted(cache.lengths.items())), look)
    expect(f"{said}.", "num_free", num_rows - len(lengths), cache.num_free, "which rows can be taken again")


def _rows(lengths: dict[int, int]) -> str:
    return f"{sorted(lengths)} are" if lengths else "none is"


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
    for seed in range(_ROUNDS):
        token_lists, starts = make_token_lists(random.Random(f"layout {seed}"))
        call = f"lay_out({token_lists}, {starts})."
        got = cls.__new__(cls).lay_out([list(tokens) for tokens in token_lists], list(starts))
        assert isinstance(got, (tuple, list)) and len(got) == 2, (
            f"{call} It must return input_ids and positions, but returned {got!r}."
        )
        hints = (
            ("input_ids", "which side the padding is on, and that it is token 0"),
            ("positions", "positions: they continue from starts[i]; padding has position 0 and does not count"),
        )
        for (name, look), mine, wanted in zip(hints, got, lay_out(None, token_lists, starts), strict=True):
            assert isinstance(mine, Tensor), f"{call} {name} must be a tensor, but is {mine!r}."
            expect(call, f"dtype of {name}", torch.int64, mine.dtype, "the dtype of the tensors you make")
            expect(call, name, wanted.tolist(), mine.tolist(), look)


# -- through the model -----------------------------------------------------------------------------------------------


class FakeModel:
    """Records its calls. Its hidden states say which token they belong to.

    Args:
        cache: Its lengths are recorded at each call.
    """

    def __init__(self, cache: CorrectCache) -> None:
        self.cache = cache
        self.calls: list[dict[str, Any]] = []
        self.asked: list[list[float]] = []

    def __call__(self, input_ids: Tensor, positions: Tensor, kv_caches: Any, metadata: Any) -> Tensor:
        """One hidden state for each token: its place in the batch, its token and its position."""
        self.calls.append(
            {
                "shapes of input_ids and positions": [list(input_ids.shape), list(positions.shape)],
                "input_ids": input_ids.flatten().tolist(),
                "positions": positions.flatten().tolist(),
                "kv_caches": kv_caches,
                "metadata": {name: [int(x) for x in getattr(metadata, name)] for name in ("rows", "starts", "counts")},
                "lengths while the model runs": dict(sorted(self.cache.lengths.items())),
            }
        )
        return torch.stack([torch.arange(len(input_ids.flatten())), input_ids.flatten(), positions.flatten()], dim=1).float()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`[n, hidden_size]` in, `[n, vocab_size]` out."""
        self.asked.append(hidden[..., 0].flatten().tolist())
        return torch.cat([hidden, -hidden], dim=-1)


def make_runner_case(rng: random.Random) -> tuple[CorrectCache, list[int], list[list[int]]]:
    """A cache with texts in it, the rows of a step, and the new tokens of each."""
    cache = CorrectCache(6, rng)
    for row in [cache.take() for _ in range(5)]:
        cache.lengths[row] = rng.choice((0, rng.randint(1, 30)))
    token_lists, _ = make_token_lists(rng)
    return cache, rng.sample(sorted(cache.lengths), len(token_lists)), token_lists


def check_runner(cls: Any) -> None:
    """`step`: one call of the model on the flat batch, lengths that grow after it, and the logits of each text's last token."""
    made = isolate(cls, lay_out=lay_out)
    for seed in range(_ROUNDS):
        cache, rows, token_lists = make_runner_case(random.Random(f"runner {seed}"))
        starts, counts = [cache.lengths[row] for row in rows], [len(tokens) for tokens in token_lists]
        before = dict(sorted(cache.lengths.items()))
        model = FakeModel(cache)
        got = made(model, cache).step(list(rows), [list(tokens) for tokens in token_lists])
        said = f"lengths {before}, step({rows}, {token_lists})."
        input_ids, positions = lay_out(None, token_lists, starts)
        expect(said, "calls of the model", 1, len(model.calls), "how often `step` calls self.model: all texts are one batch")
        tokens = len(input_ids.flatten())
        wanted = {
            "shapes of input_ids and positions": ([[tokens], [tokens]], "flattening: the model takes flat tokens"),
            "input_ids": (input_ids.flatten().tolist(), "what `lay_out` gives, row after row"),
            "positions": (positions.flatten().tolist(), "the starts passed to `lay_out`: the lengths of these rows"),
            "kv_caches": (cache.layers, "self.cache.layers"),
            "metadata": ({"rows": rows, "starts": starts, "counts": counts}, "the PaddedStep: counts without padding"),
            "lengths while the model runs": (before, "when `advance` is called: after the model"),
        }
        for what, (expected, look) in wanted.items():
            expect(said, what, expected, model.calls[0][what], look)
        for row, new in zip(rows, counts, strict=True):
            before[row] += new
        look = "`advance`, once, with the real tokens of each text"
        expect(said, "lengths after the step", before, dict(sorted(cache.lengths.items())), look)
        width = input_ids.shape[1]
        last = [i * width + new - 1 for i, new in enumerate(counts)]
        asked = [int(place) for places in model.asked for place in places]
        look = f"the last real token of each text, in a flat batch of width {width}"
        if len(asked) > len(last):
            look = f"compute_logits: it was asked for {count(len(asked), 'row')} of logits, where {len(last)} would do"
        expect(said, "places in the flat batch whose logits are computed", last, asked, look)
        hidden = torch.stack([torch.tensor(last), input_ids.flatten()[last], positions.flatten()[last]], dim=1).float()
        logits = torch.cat([hidden, -hidden], dim=-1)
        assert isinstance(got, Tensor), f"{said} It must return a tensor of logits, but returned {got!r}."
        expect(
            said,
            "shape of what `step` returns",
            list(logits.shape),
            list(got.shape),
            "the result of compute_logits: one row for each text",
        )
        assert torch.equal(got, logits), (
            f"{said} It must return the result of compute_logits, in the order of `rows`, but the numbers differ."
        )
