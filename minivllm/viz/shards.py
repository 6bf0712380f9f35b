"""A model sharded over ranks: which rank holds which part of each weight and of the KV cache, and how each rank spends a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minivllm.config import ModelConfig
from minivllm.distributed.partition import split, split_heads
from minivllm.engine.trace import EngineTrace
from minivllm.errors import ConfigError
from minivllm.viz.blocks import step_number
from minivllm.viz.drawing import WIDTH, Box, Labels, add_boxes, add_legend, new_figure, tidy
from minivllm.viz.palette import INK, PALE, REQUEST_COLORS, ink_on

MOST_RANKS = len(REQUEST_COLORS)
_GAP = 0.09
"""The gap between two weights, as a share of their total width."""


@dataclass(frozen=True)
class Shard:
    """A rectangle of a weight, as it stands in `x @ W.T`: inputs from the top, outputs from the left.

    Attributes:
        rank: The rank that holds it.
        inputs, outputs: Its input and output indices.
    """

    rank: int
    inputs: range
    outputs: range

    @property
    def num_weights(self) -> int:
        """How many numbers."""
        return len(self.inputs) * len(self.outputs)


@dataclass(frozen=True)
class DividedWeight:
    """A weight, or several fused ones, and its shards."""

    name: str
    num_inputs: int
    num_outputs: int
    shards: list[Shard]
    seams: tuple[int, ...] = ()
    """Outputs at which the next of the fused weights begins."""


def find_shards(config: ModelConfig, tensor_parallel_size: int) -> dict[str, DividedWeight]:
    """The weights of a layer and of the vocabulary, and which rank holds which part.

    Args:
        config: Of a model of this package.
        tensor_parallel_size: The number of ranks.
    """
    hidden_size = config.hf_config["hidden_size"]
    width = config.hf_config.get("intermediate_size") or config.hf_config["ffn_dim"]
    has_gate = "intermediate_size" in config.hf_config
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    ranks, hidden, head_dim = range(tensor_parallel_size), range(hidden_size), config.head_dim
    qkv, out, up, down, vocabulary = ([] for _ in range(5))
    for rank in ranks:
        heads = split_heads(config.num_heads, config.num_kv_heads, tensor_parallel_size, rank)
        query, kv = (range(part.start * head_dim, part.stop * head_dim) for part in (heads.query, heads.kv))
        qkv.append(Shard(rank, hidden, query))
        qkv += [Shard(rank, hidden, _moved(kv, start)) for start in (q_size, q_size + kv_size)]
        out.append(Shard(rank, query, hidden))
        channels = split(width, tensor_parallel_size, rank)
        up += [Shard(rank, hidden, _moved(channels, start)) for start in ((0, width) if has_gate else (0,))]
        down.append(Shard(rank, channels, hidden))
        vocabulary.append(Shard(rank, hidden, split(config.vocab_size, tensor_parallel_size, rank)))
    return {
        "qkv": DividedWeight("q, k, v", hidden_size, q_size + 2 * kv_size, qkv, (q_size, q_size + kv_size)),
        "out": DividedWeight("o", q_size, hidden_size, out),
        "up": DividedWeight(
            "gate, up" if has_gate else "up", hidden_size, (1 + has_gate) * width, up, (width,) if has_gate else ()
        ),
        "down": DividedWeight("down", width, hidden_size, down),
        "vocabulary": DividedWeight("embedding, head", hidden_size, config.vocab_size, vocabulary),
    }


def draw_shards(config: ModelConfig, tensor_parallel_size: int) -> Figure:
    """Draw one layer, its part of the KV cache, and the vocabulary, coloured by rank. Weights of a layer are to scale.

    The first weight of each half is split by output, the second by input: between them no communication is needed, and after them an
    all-reduce sums the partial outputs.

    Args:
        config: Of a model of this package, such as `llm.llm_engine.model_config`.
        tensor_parallel_size: The number of ranks, up to eight.

    Raises:
        ConfigError: There are too many ranks to tell their colours apart, or to give each a shard.
    """
    width = config.hf_config.get("intermediate_size") or config.hf_config["ffn_dim"]
    most = min(MOST_RANKS, config.num_heads, width, config.vocab_size)
    if not isinstance(tensor_parallel_size, int) or not 1 <= tensor_parallel_size <= most:
        raise ConfigError(f"tensor_parallel_size is {tensor_parallel_size!r}, but this figure shows 1 to {most} ranks.")
    weights = find_shards(config, tensor_parallel_size)
    layer = [weights[key] for key in ("qkv", "out", "up", "down")]
    widths = [weight.num_outputs for weight in layer]
    gap = _GAP * sum(widths)
    total, tallest = sum(widths) + 6 * gap, max(weight.num_inputs for weight in layer)
    inches = (WIDTH - 0.4) / total  # of one channel
    height = max(2.6, tallest * inches + 1.3)
    figure = new_figure(
        height + 0.5, f"One layer of {config.name} on {_ranks(tensor_parallel_size)}", left=0.2, top=0.35, bottom=0.1
    )
    axes = figure.subplots()
    middle, left, between = tallest / 2, 0.0, []
    for number, weight in enumerate(layer):
        _draw_weight(axes, weight, left, middle, inches)
        left += weight.num_outputs
        between.append((left, left + (2 if number in (0, 1) else 1) * gap))
        left = between[-1][1]
    _draw_cache(axes, config, tensor_parallel_size, between[0], middle, inches)
    for start, end in (between[1], between[3]):
        _write(axes, (start + end) / 2, middle, "all-\nreduce", 8.5)
    top = (height - 0.45) / inches
    _draw_vocabulary(axes, weights["vocabulary"], total, tallest + 0.3 / inches, 0.22 / inches)
    axes.set(xlim=(0, total), ylim=(top, -0.35 / inches))
    axes.axis("off")
    num_weights = [sum(shard.num_weights for weight in layer for shard in weight.shards if shard.rank == rank) for rank in range(tensor_parallel_size)]  # fmt: skip
    patches = [
        Patch(facecolor=REQUEST_COLORS[rank], edgecolor=INK, linewidth=0.5, label=f"rank {rank}: {count / sum(num_weights):.0%} of the layer")
        for rank, count in enumerate(num_weights)
    ]  # fmt: skip
    add_legend(axes, patches, columns=min(4, tensor_parallel_size))
    return figure


def draw_ranks(trace: EngineTrace, step: int, first_ms: float = 0.0, last_ms: float | None = None) -> Figure:
    """Draw what each rank does in a step: computing, or in an operation with the others, which is mostly spent waiting for the slowest.

    Args:
        trace: Of an engine with several workers.
        step: Its number, from 0; negative numbers count from the end.
        first_ms, last_ms: The part of the step to show, in milliseconds since the first rank began; all of it if None.

    Raises:
        ConfigError: There is no such step, or only one worker has run it.
    """
    number = step_number(trace, step)
    ranks = trace[number].ranks
    if not ranks:
        raise ConfigError(f"Step {number} has run on one worker: record a trace with tensor_parallel_size=2 or more.")
    origin = min(rank.start for rank in ranks)
    end = (max(rank.end for rank in ranks) - origin) * 1e3
    last_ms = end if last_ms is None else min(last_ms, end)
    count = trace[number].num_tokens
    figure = new_figure(
        1.3 + 0.42 * len(ranks), f"Step {number}: {trace[number].phase}, {count} token{'s' if count != 1 else ''}", top=0.35
    )
    axes = figure.subplots()
    for row, rank in enumerate(ranks):
        moments = [rank.start, *(moment for span in rank.communication for moment in span), rank.end]
        times = [(moment - origin) * 1e3 for moment in moments]
        boxes: tuple[list[Box], list[Box]] = ([], [])  # computing and communication, which take turns
        for i, (start, end) in enumerate(pairwise(times)):
            if end > first_ms and start < last_ms:
                boxes[i % 2].append((start, end, row + 0.38, row - 0.38))
        computing, waiting = boxes
        add_boxes(axes, waiting, "#FFFFFF", edge=PALE, line_width=0.4, label="communication")
        add_boxes(axes, computing, REQUEST_COLORS[row % MOST_RANKS], label="computing", zorder=3)
    shares = [rank.communication_seconds / max(rank.end - rank.start, 1e-9) for rank in ranks]
    axes.set(xlim=(first_ms, max(last_ms, first_ms + 1e-3)), ylim=(len(ranks) - 0.5, -0.5), yticks=range(len(ranks)))
    axes.set_yticklabels([f"rank {rank}" for rank in range(len(ranks))])
    tidy(axes, "milliseconds of the step", "")
    axes.tick_params(axis="y", length=0)
    words = [f"rank {rank}: {share:.0%} of its time in communication" for rank, share in enumerate(shares)]
    patches = [Patch(facecolor=REQUEST_COLORS[row % MOST_RANKS], label=text) for row, text in enumerate(words)]
    add_legend(axes, [*patches, Patch(facecolor="#FFFFFF", edgecolor=PALE, label="communication")], columns=3)
    return figure


def _moved(part: range, distance: int) -> range:
    return range(part.start + distance, part.stop + distance)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _write(axes: Axes, x: float, y: float, text: str, size: float = 8.0) -> None:
    axes.text(x, y, text, fontsize=size, ha="center", va="center", color=INK)


def _draw_parts(axes: Axes, boxes: Sequence[Box], ranks: Sequence[int], smallest: float) -> None:
    """Boxes in the colours of their ranks, with the rank's number in boxes at least this large."""
    add_boxes(axes, boxes, [REQUEST_COLORS[rank] for rank in ranks], edge="#FFFFFF", line_width=0.8, label="shards")
    labels = [
        ((left + right) / 2, (bottom + top) / 2, rank)
        for (left, right, bottom, top), rank in zip(boxes, ranks, strict=True)
        if min(right - left, bottom - top) >= smallest
    ]
    colors = [ink_on(REQUEST_COLORS[rank]) for _, _, rank in labels]
    axes.add_collection(
        Labels(axes, [(x, y) for x, y, _ in labels], [str(rank) for *_, rank in labels], 8.0, colors), autolim=False
    )


def _draw_weight(axes: Axes, weight: DividedWeight, left: float, middle: float, inches: float) -> None:
    """A box for each shard. One that several ranks hold is divided."""
    top, boxes = middle - weight.num_inputs / 2, []
    for shard in weight.shards:
        holders = [other.rank for other in weight.shards if (other.inputs, other.outputs) == (shard.inputs, shard.outputs)]
        height = len(shard.inputs) / len(holders)
        start = top + shard.inputs.start + height * holders.index(shard.rank)
        boxes.append((left + shard.outputs.start, left + shard.outputs.stop, start + height, start))
    _draw_parts(axes, boxes, [shard.rank for shard in weight.shards], 0.12 / inches)
    for seam in weight.seams:
        axes.plot([left + seam] * 2, [top, top + weight.num_inputs], color=INK, linewidth=1.2, zorder=4)
    axes.text(left + weight.num_outputs / 2, top, f"{weight.name}\n{weight.num_inputs} × {weight.num_outputs}", fontsize=8, ha="center", va="bottom", color=INK)  # fmt: skip


def _draw_cache(
    axes: Axes, config: ModelConfig, tensor_parallel_size: int, between: tuple[float, float], middle: float, inches: float
) -> None:
    """A small box for each KV head; one that several ranks hold is divided."""
    holders: list[list[int]] = [[] for _ in range(config.num_kv_heads)]
    for rank in range(tensor_parallel_size):
        for head in split_heads(config.num_heads, config.num_kv_heads, tensor_parallel_size, rank).kv:
            holders[head].append(rank)
    start, end = between
    left, right = start + 0.25 * (end - start), end - 0.25 * (end - start)
    size = min((right - left) * 0.8, 0.9 * config.hf_config["hidden_size"] / config.num_kv_heads)
    top = middle - size * config.num_kv_heads / 2
    boxes, ranks = [], []
    for head, of_head in enumerate(holders):
        width = (right - left) / len(of_head)
        for i, rank in enumerate(of_head):
            boxes.append((left + i * width, left + (i + 1) * width, top + (head + 0.95) * size, top + (head + 0.05) * size))
            ranks.append(rank)
    _draw_parts(axes, boxes, ranks, 0.12 / inches)
    axes.text((left + right) / 2, top, f"KV cache\n{config.num_kv_heads} heads", fontsize=8, ha="center", va="bottom", color=INK)


def _draw_vocabulary(axes: Axes, weight: DividedWeight, total: float, top: float, height: float) -> None:
    """A strip as wide as the layer, not to scale."""
    scale = total / weight.num_outputs
    boxes = [(shard.outputs.start * scale, shard.outputs.stop * scale, top + height, top) for shard in weight.shards]
    _draw_parts(axes, boxes, [shard.rank for shard in weight.shards], 0.0)
    text = f"{weight.name}: {weight.num_outputs:,} tokens × {weight.num_inputs} (not to scale)"
    axes.text(total / 2, top + 1.15 * height, text, fontsize=8, ha="center", va="top", color=INK)
