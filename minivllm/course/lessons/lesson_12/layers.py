"""The checks of lesson 12 for layers of which each rank has a part."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.course.lessons.lesson_02.situations import make_tensor
from minivllm.course.lessons.ranks import MemoryGroup, run_groups, situation
from minivllm.course.lessons.tensors import Suspect, expect_close
from minivllm.course.observations import expect, rounds
from minivllm.distributed.partition import split_heads, split_units

_SIZES = (1, 2, 2, 2, 3, 3, 4)
"""Numbers of ranks, the usual ones more often."""
_ROWS = "load: of each weight in the stack the rows of its range, counted from where that weight begins"
_KEPT = "what load keeps: a copy of this rank's part. A slice is a view, and keeps the whole weight in memory: .clone() it"
_ONE_SUM = "how often the ranks meet: one all_reduce, of the product of the second weight, and nothing before it"
_TOO_OFTEN = "the bias: it is added on every rank, and the sum has it as often"
_ONE_PART = "the sum over the ranks: this is one rank's part"
_HEADS = "the channels of a head: head h has the channels from h * head_dim on; queries, keys and values are separate parts of the stack"
_CHANNELS = "which channels a rank has: the same of gate, of up, and of down's inputs"
_ELSEWHERE = "tokens of other ranks: their rows are zeros here, and their numbers are not indices into this rank's rows"
_BEST = "the best score of each row (float64; of equal ones, the first rank's), and the id that belongs to it"


def expect_part(said: str, layer: Any, expected: Tensor, look: str, name: str = "weight") -> None:
    """Unless a layer holds this part of its weight, and no more, raise an AssertionError."""
    part = getattr(layer, name, None)
    if isinstance(part, Tensor):
        expect(said, f"shape of {name}", list(expected.shape), list(part.shape), look)
    expect_close(said, name, expected, part, look)
    held = part.untyped_storage().nbytes() if part is not None else None
    expect(said, f"bytes held of the {name}", expected.nbytes, held, _KEPT)


def expect_one_sum(said: str, groups: list[MemoryGroup], output: Tensor, look: str = _ONE_SUM) -> None:
    """Unless every rank has called all_reduce once, with a tensor of this shape, raise an AssertionError."""
    calls = [("all_reduce", list(output.shape))]
    for group in groups:
        expect(f"{said} Rank {group.rank}.", "operations of the group", calls, group.calls, look)


def _split_all(total: int, world_size: int) -> list[range]:
    return [split_units(total, world_size, rank) for rank in range(world_size)]


def _some_bias(rng: random.Random, size: int) -> Tensor | None:
    return make_tensor(rng, size) if rng.random() < 0.6 else None


def check_column(cls: Any) -> None:
    """Some rows of each of the fused weights, and of their biases."""
    for rng in rounds("column", 40):
        sizes = [rng.randint(3, 9) for _ in range(rng.randint(1, 3))]
        world_size, num_inputs, num_tokens = rng.randint(1, 3), rng.randint(2, 6), rng.randint(1, 4)
        weight, x = make_tensor(rng, sum(sizes), num_inputs), make_tensor(rng, num_tokens, num_inputs)
        bias = _some_bias(rng, sum(sizes))
        for rank in range(world_size):
            _check_columns(cls, sizes, [split_units(size, world_size, rank) for size in sizes], weight, bias, x)


def _check_columns(cls: Any, sizes: list[int], parts: list[range], weight: Tensor, bias: Tensor | None, x: Tensor) -> None:
    said = f"ColumnParallel({sizes}, {parts}), {'without' if bias is None else 'with'} bias."
    rows = [sum(sizes[:i]) + row for i, part in enumerate(parts) for row in part]
    with situation(said):
        layer = cls(sizes, parts)
        layer.load(weight.clone(), None if bias is None else bias.clone())
    expect_part(said, layer, weight[rows], _ROWS)
    if bias is not None:
        expect_part(said, layer, bias[rows], "the bias: its rows go with those of the weight", "bias")
    expected = F.linear(x, weight[rows], None if bias is None else bias[rows])
    suspects = [(F.linear(x, weight[rows]), "the bias: its rows go with those of the weight")]
    with situation(said):
        output = layer(x.clone())
    expect_close(said, "output", expected, output, "forward: x @ weight.T, and the bias if there is one", suspects)


def check_row(cls: Any) -> None:
    """Each rank multiplies its inputs; the sum over ranks, and the bias once."""
    for rng in rounds("row", 40):
        world_size, num_outputs, num_tokens = rng.choice(_SIZES), rng.randint(2, 6), rng.randint(1, 4)
        num_inputs = rng.randint(world_size, 9)
        weight, x = make_tensor(rng, num_outputs, num_inputs), make_tensor(rng, num_tokens, num_inputs)
        _check_rows(cls, _split_all(num_inputs, world_size), weight, _some_bias(rng, num_outputs), x)


def _check_rows(cls: Any, parts: list[range], weight: Tensor, bias: Tensor | None, x: Tensor) -> None:
    said = f"{x.shape[1]} inputs on {len(parts)} ranks ({parts}), {len(weight)} outputs, {'without' if bias is None else 'with'} bias."
    columns = [weight[:, part.start : part.stop].contiguous() for part in parts]
    inputs = [x[:, part.start : part.stop].contiguous() for part in parts]

    def run(group: MemoryGroup) -> tuple[Any, Tensor]:
        layer = cls(parts[group.rank], group)
        layer.load(weight.clone(), None if bias is None else bias.clone())
        return layer, layer(inputs[group.rank].clone())

    results, groups = run_groups(len(parts), run, said)
    product, added = F.linear(x, weight), 0.0 if bias is None else bias
    suspects: list[Suspect] = [(product + len(parts) * added, _TOO_OFTEN), (product, "the bias: nobody adds it")]
    for rank, (layer, output) in enumerate(results):
        where, alone = f"{said} Rank {rank}.", F.linear(inputs[rank], columns[rank]) + added
        expect_part(where, layer, columns[rank], "load: this rank's columns of the weight, which multiply its inputs")
        look = "forward: the product of this rank's inputs and its columns, summed by self.group.all_reduce"
        expect_close(where, "output", product + added, output, look, [*suspects, (alone, _ONE_PART)])
        expect(where, "equal bits on all ranks", True, torch.equal(output, results[0][1]), "what is added after the sum")
    expect_one_sum(said, groups, product)


def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU between the two products: the first half of the channels is the gate."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def check_mlp(cls: Any) -> None:
    """Gate and up by outputs, down by inputs, one sum."""
    for rng in rounds("mlp", 25):
        world_size, hidden, num_tokens = rng.choice(_SIZES), rng.randint(2, 6), rng.randint(1, 4)
        width = rng.randint(world_size, 11)
        up, down = make_tensor(rng, 2 * width, hidden), make_tensor(rng, hidden, width)
        _check_mlp(cls, world_size, up, down, make_tensor(rng, num_tokens, hidden))


def _check_mlp(cls: Any, world_size: int, up: Tensor, down: Tensor, x: Tensor) -> None:
    hidden, width = down.shape
    said = f"An MLP of {hidden} channels, {width} inside, on {world_size} ranks."

    def run(group: MemoryGroup) -> Tensor:
        mlp = cls(width, group)
        mlp.gate_up_proj.load(up.clone())
        mlp.down_proj.load(down.clone())
        output: Tensor = mlp(x.clone())
        return output

    results, groups = run_groups(world_size, run, said)
    expected = F.linear(silu_and_mul(F.linear(x, up)), down)
    expect_one_sum(said, groups, expected)
    for rank, output in enumerate(results):
        expect_close(f"{said} Rank {rank}.", "output", expected, output, _CHANNELS)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of grouped heads: `[tokens, heads, head_dim]` each."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), is_causal=True).transpose(0, 1)


def check_attention(cls: Any) -> None:
    """Whole heads: a rank attends with its own, and one sum puts them together."""
    for rng in rounds("attention", 25):
        num_kv_heads, group_size, head_dim = rng.randint(1, 3), rng.randint(1, 3), rng.choice((2, 4))
        num_heads, hidden, num_tokens = num_kv_heads * group_size, rng.randint(3, 8), rng.randint(1, 4)
        qkv = make_tensor(rng, (num_heads + 2 * num_kv_heads) * head_dim, hidden)
        o, x = make_tensor(rng, hidden, num_heads * head_dim), make_tensor(rng, num_tokens, hidden)
        _check_heads(cls, (num_heads, num_kv_heads, head_dim), rng.randint(1, num_heads), qkv, o, x)


def _attend_on(group: MemoryGroup, layer: Any, qkv: Tensor, o: Tensor, x: Tensor) -> tuple[Any, Any, Tensor]:
    """A rank's layer, the shapes that it gave to `attend`, and its output."""
    shapes: list[list[int]] = []

    def attend_here(*heads: Tensor) -> Tensor:
        shapes.extend(list(part.shape) for part in heads)
        return attend(*heads)

    layer.qkv_proj.load(qkv.clone())
    layer.o_proj.load(o.clone())
    output: Tensor = layer(x.clone(), attend_here)
    return layer, shapes or None, output


def _check_heads(cls: Any, sizes: tuple[int, int, int], world_size: int, qkv: Tensor, o: Tensor, x: Tensor) -> None:
    num_heads, num_kv_heads, head_dim = sizes
    said = f"{num_heads} query heads and {num_kv_heads} KV heads of {head_dim} channels on {world_size} ranks."
    results, groups = run_groups(world_size, lambda group: _attend_on(group, cls(*sizes, group), qkv, o, x), said)
    q, k, v = F.linear(x, qkv).view(len(x), -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    expected, exchanged = (F.linear(attend(*heads).flatten(1), o) for heads in ((q, k, v), (q, v, k)))
    for rank, (layer, seen, output) in enumerate(results):
        where, heads = f"{said} Rank {rank}.", split_heads(num_heads, num_kv_heads, world_size, rank)
        counts, kept = [len(heads.query), len(heads.kv)], [getattr(layer, name, None) for name in ("num_heads", "num_kv_heads")]
        expect(where, "num_heads and num_kv_heads", counts, kept, "__init__: how many heads this rank has")
        shapes = [[len(x), len(part), head_dim] for part in (heads.query, heads.kv, heads.kv)]
        expect(where, "shapes of q, k and v given to attend", shapes, seen, "this rank's heads, split_heads(...)")
        expect_close(where, "output", expected, output, _HEADS, [(exchanged, "keys and values, which are exchanged")])
    expect_one_sum(said, groups, expected)


def check_embedding(cls: Any) -> None:
    """A rank looks up its own tokens; the others' rows are zeros there."""
    for rng in rounds("embedding", 30):
        world_size, hidden = rng.choice(_SIZES), rng.randint(2, 5)
        vocab_size = rng.randint(world_size, 20)
        ids = torch.tensor([0, vocab_size - 1, *(rng.randrange(vocab_size) for _ in range(4))])
        _check_lookup(cls, _split_all(vocab_size, world_size), make_tensor(rng, vocab_size, hidden), ids)


def _check_lookup(cls: Any, parts: list[range], weight: Tensor, ids: Tensor) -> None:
    said = f"A vocabulary of {len(weight)} tokens on {len(parts)} ranks, tokens {ids.tolist()}."

    def run(group: MemoryGroup) -> tuple[Any, Tensor]:
        layer = cls(len(weight), group)
        layer.load(weight.clone())
        return layer, layer(ids.clone())

    results, groups = run_groups(len(parts), run, said)
    for rank, (layer, output) in enumerate(results):
        where, part = f"{said} Rank {rank}.", parts[rank]
        expect_part(where, layer, weight[part.start : part.stop], "load: the rows of this rank's tokens")
        elsewhere = torch.tensor([token not in part for token in ids.tolist()]).unsqueeze(1)
        suspects = [(weight[ids].masked_fill(elsewhere, 0), _ONE_PART)]
        expect_close(where, "output", weight[ids], output, _ELSEWHERE, suspects)
    expect_one_sum(said, groups, weight[ids], "how often the ranks meet: one all_reduce, of the rows")


ChooseInPart = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def _make_choice(rng: random.Random, num_rows: int, vocab_size: int) -> ChooseInPart:
    """A way to choose: the best of logit + luck, where the luck of a token depends on its id, and is tiny but decides ties."""
    luck = torch.tensor([[rng.random() for _ in range(vocab_size)] for _ in range(num_rows)], dtype=torch.float64)
    scale = rng.choice((0.0, 1e-9, 1.0))

    def choose_in_part(logits: Tensor, first: int) -> tuple[Tensor, Tensor]:
        scores, ids = (logits.double() + scale * luck[:, first : first + logits.shape[1]]).max(dim=1)
        return scores, ids + first

    return choose_in_part


def check_head(cls: Any) -> None:
    """All logits on rank 0, or only the best of each part."""
    for rng in rounds("head", 40):
        world_size, hidden, num_rows = rng.choice(_SIZES), rng.randint(2, 5), rng.randint(1, 4)
        vocab_size = rng.randint(world_size, 20)
        # whole numbers, so that products are exact in whatever way they are computed
        weight, x = make_tensor(rng, vocab_size, hidden, scale=3.0).round(), make_tensor(rng, num_rows, hidden, scale=3.0).round()
        if rng.random() < 0.6:  # tokens with equal logits, on all ranks
            weight[:] = weight[0]
        _check_head(cls, _split_all(vocab_size, world_size), weight, x, _make_choice(rng, num_rows, vocab_size))


def _check_head(cls: Any, parts: list[range], weight: Tensor, x: Tensor, choose_in_part: ChooseInPart) -> None:
    said = f"{len(x)} rows, a vocabulary of {len(weight)} tokens on {len(parts)} ranks."

    def run(group: MemoryGroup) -> tuple[Any, Any, Any, int]:
        head = cls(len(weight), group)
        head.load(weight.clone())
        logits, before = head.compute_logits(x.clone()), len(group.calls)
        chosen = head.choose(x.clone(), choose_in_part)
        return head, logits, chosen, sum(torch.Size(shape).numel() for _, shape in group.calls[before:])

    results, _ = run_groups(len(parts), run, said)
    for rank, (head, *returned, _) in enumerate(results):
        part = weight[parts[rank].start : parts[rank].stop]
        expect_part(f"{said} Rank {rank}.", head, part, "load: the rows of this rank's tokens")
        if rank > 0:
            expect(f"{said} Rank {rank}.", "compute_logits and choose", [None, None], returned, "what other ranks return: None")
    _, logits, chosen, sent = results[0]
    look = "compute_logits: parts of different sizes, which `sizes` lists for all ranks"
    expect_close(f"{said} Rank 0.", "logits", F.linear(x, weight), logits, look)
    got = chosen.tolist() if isinstance(chosen, Tensor) and chosen.dtype == torch.int64 else repr(chosen)[:100]
    expect(f"{said} Rank 0.", "tokens", _best_tokens(F.linear(x, weight), parts, choose_in_part), got, _BEST)
    expect(f"{said} Rank 0.", "numbers sent to choose", 2 * len(x), sent, "what is gathered: a score and an id for each row")


def _best_tokens(logits: Tensor, parts: list[range], choose_in_part: ChooseInPart) -> list[int]:
    chosen = [choose_in_part(logits[:, part.start : part.stop], part.start) for part in parts]
    scores, ids = (torch.stack(numbers) for numbers in zip(*chosen, strict=True))  # [ranks, rows] each
    winners = [max(range(len(parts)), key=lambda rank: (float(scores[rank, row]), -rank)) for row in range(len(logits))]
    return [int(ids[rank, row]) for row, rank in enumerate(winners)]
