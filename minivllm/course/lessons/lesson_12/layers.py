"""The checks of lesson 12 for layers of which each rank has a part."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.course.lessons.lesson_02.situations import make_tensor
from minivllm.course.lessons.ranks import MemoryGroup, run_groups
from minivllm.course.lessons.tensors import expect_close
from minivllm.course.observations import expect, rounds
from minivllm.distributed.partition import split_heads, split_units

_SIZES = (1, 2, 2, 2, 3, 3, 4)
"""Numbers of ranks, the usual ones more often."""
_ONE_SUM = "how often the ranks meet: one all_reduce, of the product of the second weight, and nothing before it"
_KEPT = "what load keeps: a copy of this rank's part. A slice is a view, and keeps the whole weight in memory: .clone() it"


def expect_part(said: str, layer: Any, expected: Tensor, look: str) -> None:
    """Unless a layer holds this part of its weight, and no more, raise an AssertionError."""
    weight = getattr(layer, "weight", None)
    expect_close(said, "weight", expected, weight, look)
    expect(said, "bytes held", expected.nbytes, weight.untyped_storage().nbytes(), _KEPT)


def check_column(cls: Any) -> None:
    """Some rows of each of the fused weights, and of their biases."""
    look = "load: of each weight in the stack the rows of its range, counted from where that weight begins"
    for rng in rounds("column", 40):
        sizes = [rng.randint(3, 9) for _ in range(rng.randint(1, 3))]
        world_size, num_inputs, num_tokens = rng.randint(1, 3), rng.randint(2, 6), rng.randint(1, 4)
        weight, x = make_tensor(rng, sum(sizes), num_inputs), make_tensor(rng, num_tokens, num_inputs)
        bias = make_tensor(rng, sum(sizes)) if rng.random() < 0.6 else None
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        for rank in range(world_size):
            parts = [split_units(size, world_size, rank) for size in sizes]
            said = f"ColumnParallel({sizes}, {parts}), {'with' if bias is not None else 'without'} bias."
            rows = [start + row for start, part in zip(starts, parts, strict=True) for row in part]
            layer = cls(sizes, parts)
            layer.load(weight.clone(), None if bias is None else bias.clone())
            expect_part(said, layer, weight[rows], look)
            expected = F.linear(x, weight[rows], None if bias is None else bias[rows])
            suspects = [(F.linear(x, weight[rows]), "the bias: its rows go with those of the weight")]
            expect_close(said, "output", expected, layer(x.clone()), "forward: x @ weight.T, and the bias if there is one", suspects)


def check_row(cls: Any) -> None:
    """Each rank multiplies its inputs; the sum over ranks, and the bias once."""
    look = "forward: the product of this rank's inputs and its columns, summed by self.group.all_reduce"
    for rng in rounds("row", 40):
        world_size, num_outputs, num_tokens = rng.choice(_SIZES), rng.randint(2, 6), rng.randint(1, 4)
        num_inputs = rng.randint(world_size, 9)
        weight, x = make_tensor(rng, num_outputs, num_inputs), make_tensor(rng, num_tokens, num_inputs)
        bias = make_tensor(rng, num_outputs) if rng.random() < 0.6 else None
        parts = [split_units(num_inputs, world_size, rank) for rank in range(world_size)]
        said = f"{num_inputs} inputs on {world_size} ranks ({parts}), {num_outputs} outputs, {'with' if bias is not None else 'without'} bias."

        def run(group: MemoryGroup) -> tuple[Any, Tensor]:
            layer, part = cls(parts[group.rank], group), parts[group.rank]
            layer.load(weight.clone(), None if bias is None else bias.clone())
            return layer, layer(x[:, part.start : part.stop].clone())

        results, groups = run_groups(world_size, run, said)
        product = F.linear(x, weight)
        expected = product if bias is None else product + bias
        suspects = [] if bias is None else [(product + world_size * bias, "the bias: it is added on every rank, and the sum has it as often"), (product, "the bias: nobody adds it")]  # fmt: skip
        parted = [F.linear(x[:, part.start : part.stop], weight[:, part.start : part.stop]) for part in parts]
        for rank, (layer, output) in enumerate(results):
            where = f"{said} Rank {rank}."
            columns = weight[:, parts[rank].start : parts[rank].stop].contiguous()
            expect_part(where, layer, columns, "load: this rank's columns of the weight, which multiply its inputs")
            alone = [(parted[rank] if bias is None else parted[rank] + bias, "the sum over the ranks: this is one rank's part")]
            expect_close(where, "output", expected, output, look, suspects + alone)
            expect(where, "equal bits on all ranks", True, bool(torch.equal(output, results[0][1])), "what is added after the sum")
        _expect_one_sum(said, groups, expected)


def _expect_one_sum(said: str, groups: list[MemoryGroup], output: Tensor) -> None:
    for group in groups:
        expect(f"{said} Rank {group.rank}.", "operations of the group", [("all_reduce", list(output.shape))], group.calls, _ONE_SUM)


def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU between the two products: the first half of the channels is the gate."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def check_mlp(cls: Any) -> None:
    """Gate and up by outputs, down by inputs, one sum."""
    look = "which channels a rank has: the same of gate, of up, and of down's inputs"
    for rng in rounds("mlp", 25):
        world_size, hidden, num_tokens = rng.choice(_SIZES), rng.randint(2, 6), rng.randint(1, 4)
        width = rng.randint(world_size, 11)
        gate, up, down = make_tensor(rng, width, hidden), make_tensor(rng, width, hidden), make_tensor(rng, hidden, width)
        x = make_tensor(rng, num_tokens, hidden)
        said = f"An MLP of {hidden} channels, {width} inside, on {world_size} ranks."

        def run(group: MemoryGroup) -> Tensor:
            mlp = cls(width, group)
            mlp.gate_up_proj.load(torch.cat([gate, up]))
            mlp.down_proj.load(down.clone())
            return mlp(x.clone())

        results, groups = run_groups(world_size, run, said)
        expected = F.linear(silu_and_mul(F.linear(x, torch.cat([gate, up]))), down)
        _expect_one_sum(said, groups, expected)
        for rank, output in enumerate(results):
            expect_close(f"{said} Rank {rank}.", "output", expected, output, look)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of grouped heads: `[tokens, heads, head_dim]` each."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), is_causal=True).transpose(0, 1)


def check_attention(cls: Any) -> None:
    """Whole heads: a rank attends with its own, and one sum puts them together."""
    look = "the channels of a head: head h has the channels from h * head_dim on; queries, keys and values are separate parts of the stack"
    for rng in rounds("attention", 25):
        num_kv_heads, group_size, head_dim = rng.randint(1, 3), rng.randint(1, 3), rng.choice((2, 4))
        num_heads, hidden, num_tokens = num_kv_heads * group_size, rng.randint(3, 8), rng.randint(1, 4)
        world_size = rng.randint(1, num_heads)
        sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        qkv, o, x = make_tensor(rng, sum(sizes), hidden), make_tensor(rng, hidden, sizes[0]), make_tensor(rng, num_tokens, hidden)
        said = f"{num_heads} query heads and {num_kv_heads} KV heads of {head_dim} channels on {world_size} ranks."
        seen: dict[int, Any] = {}

        def run(group: MemoryGroup) -> Tensor:
            def attend_here(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                seen[group.rank] = [list(part.shape) for part in (q, k, v)]
                return attend(q, k, v)

            layer = cls(num_heads, num_kv_heads, head_dim, group)
            layer.qkv_proj.load(qkv.clone())
            layer.o_proj.load(o.clone())
            return layer(x.clone(), attend_here)

        results, groups = run_groups(world_size, run, said)
        q, k, v = (part.view(num_tokens, -1, head_dim) for part in F.linear(x, qkv).split(sizes, dim=1))
        expected = F.linear(attend(q, k, v).reshape(num_tokens, -1), o)
        suspects = [(F.linear(attend(q, v, k).reshape(num_tokens, -1), o), "keys and values, which are exchanged")]
        for rank, output in enumerate(results):
            where, heads = f"{said} Rank {rank}.", split_heads(num_heads, num_kv_heads, world_size, rank)
            shapes = [[num_tokens, len(part), head_dim] for part in (heads.query, heads.kv, heads.kv)]
            expect(where, "shapes of q, k and v given to attend", shapes, seen.get(rank), "this rank's heads, split_heads(...)")
            expect_close(where, "output", expected, output, look, suspects)
        _expect_one_sum(said, groups, expected)


def check_embedding(cls: Any) -> None:
    """A rank looks up its own tokens; the others' rows are zeros there."""
    look = "tokens of other ranks: their rows are zeros here, and their numbers are not indices into this rank's rows"
    for rng in rounds("embedding", 30):
        world_size, hidden = rng.choice(_SIZES), rng.randint(2, 5)
        vocab_size = rng.randint(world_size, 20)
        weight = make_tensor(rng, vocab_size, hidden)
        ids = torch.tensor([0, vocab_size - 1, *(rng.randrange(vocab_size) for _ in range(4))])
        said = f"A vocabulary of {vocab_size} tokens on {world_size} ranks, tokens {ids.tolist()}."

        def run(group: MemoryGroup) -> tuple[Any, Tensor]:
            layer = cls(vocab_size, group)
            layer.load(weight.clone())
            return layer, layer(ids.clone())

        results, groups = run_groups(world_size, run, said)
        for rank, (layer, output) in enumerate(results):
            where, part = f"{said} Rank {rank}.", split_units(vocab_size, world_size, rank)
            expect_part(where, layer, weight[part.start : part.stop], "load: the rows of this rank's tokens")
            elsewhere = torch.tensor([token not in part for token in ids.tolist()]).unsqueeze(1)
            suspects = [(weight[ids].masked_fill(elsewhere, 0), "the sum over the ranks: this is one rank's part")]
            expect_close(where, "output", weight[ids], output, look, suspects)
        _expect_one_sum(said, groups, weight[ids])


def _make_choice(rng: random.Random, num_rows: int, vocab_size: int) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
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
        choose_in_part = _make_choice(rng, num_rows, vocab_size)
        said = f"{num_rows} rows, a vocabulary of {vocab_size} tokens on {world_size} ranks."

        def run(group: MemoryGroup) -> tuple[Any, ...]:
            head = cls(vocab_size, group)
            head.load(weight.clone())
            logits = head.compute_logits(x.clone())
            before = len(group.calls)
            return head, logits, head.choose(x.clone(), choose_in_part), group.calls[before:]

        results, _ = run_groups(world_size, run, said)
        logits = F.linear(x, weight)
        scores = [choose_in_part(logits[:, part.start : part.stop], part.start) for part in (split_units(vocab_size, world_size, rank) for rank in range(world_size))]  # fmt: skip
        best = [max(range(world_size), key=lambda rank: (float(scores[rank][0][row]), -rank)) for row in range(num_rows)]
        tokens = [int(scores[rank][1][row]) for row, rank in enumerate(best)]
        for rank, (head, all_logits, chosen, calls) in enumerate(results):
            where, part = f"{said} Rank {rank}.", split_units(vocab_size, world_size, rank)
            expect_part(where, head, weight[part.start : part.stop], "load: the rows of this rank's tokens")
            if rank > 0:
                expect(where, "compute_logits and choose", [None, None], [all_logits, chosen], "what other ranks than 0 return: None")
                continue
            expect_close(where, "logits", logits, all_logits, "compute_logits: parts of different sizes, which `sizes` lists for all ranks")
            got = chosen.tolist() if isinstance(chosen, Tensor) else repr(chosen)[:100]
            expect(where, "tokens", tokens, got, "the best score of each row (float64; of equal ones, the first rank's), and the id that belongs to it")
            sent = sum(torch.Size(shape).numel() for _, shape in calls)
            expect(where, "numbers that a rank sends to choose", 2 * num_rows, sent, "what is gathered: a score and an id for each row")
