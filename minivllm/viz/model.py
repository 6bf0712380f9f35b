"""Figures about a Llama-like model: shapes through a layer, where parameters and operations are, angles, heads, the logit lens.

They take plain numbers and arrays, whatever computed them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from minivllm.viz.drawing import WIDTH, add_legend, tidy
from minivllm.viz.palette import INK, PALE, REQUEST_COLORS, ink_on, tint

BLUE, ORANGE, GREEN, PINK, SKY = REQUEST_COLORS[:5]
_PARTS = {
    "MLP": (ORANGE, "////"),
    "projections of attention": (BLUE, ""),
    "embedding = head": (GREEN, "...."),
    "scores and sums": (PINK, "xxxx"),
}
"""Parts of a model: a colour, and a hatch for black and white."""


# -- shapes through a layer ------------------------------------------------------------------------------------------

_BOXES = (
    ("input_layernorm", "norm", 1.0, 1.6, BLUE),
    ("q", "queries", 2.55, 2.62, BLUE),
    ("k", "keys", 2.55, 1.6, BLUE),
    ("v", "values", 2.55, 0.58, BLUE),
    ("scores", "scores", 4.1, 2.1, BLUE),
    ("heads", "weighted\nvalues", 5.55, 1.6, BLUE),
    ("attention", "o_proj", 6.95, 1.6, BLUE),
    ("post_attention_layernorm", "norm", 8.7, 1.6, ORANGE),
    ("gate", "gate", 10.25, 2.2, ORANGE),
    ("up", "up", 10.25, 1.0, ORANGE),
    ("product", "silu(gate)\n× up", 11.85, 1.6, ORANGE),
    ("mlp", "down_proj", 13.3, 1.6, ORANGE),
)
"""Key of the shape, label, centre, colour of the block."""
_FLOW = (
    ("input_layernorm", "q"), ("input_layernorm", "k"), ("input_layernorm", "v"), ("q", "scores"), ("k", "scores"), ("scores", "heads"),
    ("v", "heads"), ("heads", "attention"), ("post_attention_layernorm", "gate"), ("post_attention_layernorm", "up"),
    ("gate", "product"), ("up", "product"), ("product", "mlp"),
)  # fmt: skip
_BOX = (1.22, 0.86)
_STREAM_Y = -0.45


def draw_layer_shapes(shapes: Mapping[str, Sequence[int]], stream: Sequence[int]) -> Figure:
    """The path through one decoder layer, with the shape of every tensor.

    Args:
        shapes: By the names in the figure: "input_layernorm", "q", "k", "v", "scores", "heads", "attention",
            "post_attention_layernorm", "gate", "up", "product", "mlp".
        stream: The shape of the residual stream.
    """
    figure = Figure(figsize=(WIDTH, 3.2))
    axes = figure.add_axes((0.005, 0.01, 0.99, 0.98))
    axes.set_xlim(-0.15, 14.75)
    axes.set_ylim(-1.05, 3.6)
    axes.axis("off")
    places = {key: (x, y) for key, _, x, y, _ in _BOXES}
    for source, target in _FLOW:
        (x, y), (to_x, to_y) = places[source], places[target]
        _arrow(axes, (x + _BOX[0] / 2, y), (to_x - _BOX[0] / 2, to_y))
    axes.annotate("", (14.7, _STREAM_Y), (-0.1, _STREAM_Y), arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 5})
    axes.text(-0.1, _STREAM_Y - 0.2, f"residual stream {_say(stream)}", fontsize=9, color=INK, va="top", weight="bold")
    for norm, last, name in (("input_layernorm", "attention", "attention"), ("post_attention_layernorm", "mlp", "MLP")):
        (x, y), (to_x, _) = places[norm], places[last]
        _arrow(axes, (x, _STREAM_Y), (x, y - _BOX[1] / 2))
        _arrow(axes, (to_x, y - _BOX[1] / 2), (to_x, _STREAM_Y + 0.16))
        axes.text(to_x, _STREAM_Y, "+", fontsize=13, weight="bold", ha="center", va="center", color="white", zorder=5,
                  bbox={"boxstyle": "circle,pad=0.12", "facecolor": INK, "edgecolor": "white"})  # fmt: skip
        axes.text((x + to_x) / 2, 3.4, name, fontsize=10, weight="bold", color=INK, ha="center", va="center")
    for key, label, x, y, color in _BOXES:
        corner = (x - _BOX[0] / 2, y - _BOX[1] / 2)
        style = "round,pad=0,rounding_size=0.08"
        patch = FancyBboxPatch(
            corner, *_BOX, boxstyle=style, facecolor=tint(color, 0.82), edgecolor=color, linewidth=1.5, zorder=3
        )
        axes.add_patch(patch)
        lines = label.count("\n")
        axes.text(x, y + 0.17 + 0.01 * lines, label, fontsize=8, ha="center", va="center", color=INK, zorder=4, linespacing=0.95)
        axes.text(
            x,
            y - 0.2 - 0.07 * lines,
            _say(shapes[key]),
            fontsize=7.5,
            ha="center",
            va="center",
            color=INK,
            zorder=4,
            family="monospace",
        )
    return figure


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate(
        "", end, start, arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0}, zorder=2
    )


def _say(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


# -- parameters and operations ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Parameters of a model, and floating-point operations: a multiplication and an addition count as two.

    Args:
        hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim, vocab_size: Of the model; its head is tied.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    def parameters(self) -> dict[str, int]:
        """By part; the norms, a few thousand numbers, are left out."""
        return {
            "MLP": self.num_layers * 3 * self.hidden_size * self.intermediate_size,
            "projections of attention": self.num_layers
            * self.hidden_size
            * self.head_dim
            * 2
            * (self.num_heads + self.num_kv_heads),
            "embedding = head": self.vocab_size * self.hidden_size,
        }

    def prefill(self, num_tokens: int) -> dict[str, int]:
        """Operations for a prompt of `num_tokens` tokens, and the logits of the last one."""
        parts = {name: 2 * count * num_tokens for name, count in self.parameters().items()}
        parts["embedding = head"] //= num_tokens
        pairs = num_tokens * (num_tokens + 1) // 2  # query and key; masked pairs are not counted
        return parts | {"scores and sums": 4 * self.num_layers * self.num_heads * self.head_dim * pairs}

    def decode(self, num_tokens: int) -> dict[str, int]:
        """Operations for one new token over a context of `num_tokens`, itself included, with keys and values cached."""
        parts = {name: 2 * count for name, count in self.parameters().items()}
        return parts | {"scores and sums": 4 * self.num_layers * self.num_heads * self.head_dim * num_tokens}


def draw_parameters(costs: Costs) -> Figure:
    """One bar: what the parameters are for."""
    figure = Figure(figsize=(WIDTH, 1.5), layout="constrained")
    axes = figure.add_subplot()
    start, total = 0.0, sum(costs.parameters().values())
    for name, count in costs.parameters().items():
        color, hatch = _PARTS[name]
        millions = count / 1e6
        axes.barh(
            0, millions, left=start, height=0.8, color=tint(color, 0.35), edgecolor=INK, hatch=hatch, linewidth=0.6, label=name
        )
        axes.text(start + millions / 2, 0, f"{millions:.1f} M\n{count / total:.0%}", ha="center", va="center", fontsize=9, color=INK,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})  # fmt: skip
        start += millions
    tidy(axes, "parameters (millions)", "")
    axes.set(yticks=[], xlim=(0, start))
    axes.spines["left"].set_visible(False)
    add_legend(axes, axes.get_legend_handles_labels()[0])
    return figure


def draw_operations(costs: Costs, lengths: Sequence[int]) -> Figure:
    """Operations for one token, against the context length: of a prompt (prefill), and of one new token (decode)."""
    figure = Figure(figsize=(WIDTH, 3.1), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, title, count, divide in (
        (panels[0], "prefill: a prompt, all tokens at once", costs.prefill, True),
        (panels[1], "decode: one more token", costs.decode, False),
    ):
        heights = {name: [count(n)[name] / (n if divide else 1) / 1e9 for n in lengths] for name in _PARTS}
        layers = axes.stackplot(
            lengths, heights.values(), colors=[tint(color, 0.35) for color, _ in _PARTS.values()], labels=list(_PARTS)
        )
        for layer, (_, hatch) in zip(layers, _PARTS.values(), strict=True):
            layer.set(hatch=hatch, edgecolor=INK, linewidth=0.6)
        tidy(axes, "context length (tokens)", "GFLOP for each token" if divide else "")
        axes.set_title(title, fontsize=9)
        axes.set_xlim(lengths[0], lengths[-1])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    return figure


# -- rotary positions ------------------------------------------------------------------------------------------------


def draw_rotation(frequencies: Sequence[float], pairs: Sequence[int], positions: Sequence[int]) -> Figure:
    """Clock faces: a row for each pair of channels, a column for each position, with the hand at the pair's angle.

    Args:
        frequencies: Angle per position of every pair, in radians.
        pairs: The pairs to draw.
        positions: The positions to draw.
    """
    figure = Figure(figsize=(WIDTH, 0.8 * len(pairs) + 0.55))
    axes = figure.add_axes((0.13, 0.02, 0.86, 0.86))
    axes.set_xlim(-0.6, len(positions) - 0.4)
    axes.set_ylim(len(pairs) - 0.5, -0.5)
    axes.set_aspect("equal")
    circle = np.linspace(0, 2 * np.pi, 60)
    for row, pair in enumerate(pairs):
        for column, position in enumerate(positions):
            angle = frequencies[pair] * position
            axes.plot(column + 0.38 * np.cos(circle), row + 0.38 * np.sin(circle), color=PALE, linewidth=1)
            axes.annotate(
                "", (column + 0.38 * np.cos(angle), row - 0.38 * np.sin(angle)), (column, row),
                arrowprops={"arrowstyle": "-|>", "color": BLUE, "linewidth": 2, "shrinkA": 0, "shrinkB": 0},
            )  # fmt: skip
    axes.set_xticks(range(len(positions)), [str(position) for position in positions])
    axes.set_yticks(range(len(pairs)), [f"pair {pair}:\n{np.degrees(frequencies[pair]):.2g}° a step" for pair in pairs])
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("position", fontsize=9)
    axes.tick_params(labelsize=8, length=0)
    axes.spines[:].set_visible(False)
    return figure


# -- heads -----------------------------------------------------------------------------------------------------------


def draw_heads(tokens: Sequence[str], weights: Mapping[str, np.ndarray]) -> Figure:
    """What heads look at: for each head a grid, with a row for each token that looks and a column for each it looks at.

    Args:
        tokens: As text.
        weights: Title to `[num_tokens, num_tokens]`, rows that add up to 1.
    """
    count, size = len(weights), len(tokens)
    height = (WIDTH / count if count > 1 else 5.2) + 0.85
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    panels = figure.subplots(1, count, squeeze=False)[0]
    font = 7 if count > 1 else 9
    for number, (axes, (title, grid)) in enumerate(zip(panels, weights.items(), strict=True)):
        picture = axes.imshow(np.sqrt(grid), cmap="Blues", vmin=0, vmax=1, interpolation="none")
        axes.set_title(title, fontsize=9)
        axes.set_xticks(range(size), tokens, rotation=90, fontsize=font)
        axes.set_yticks(range(size), tokens if number == 0 else [], fontsize=font)
        axes.set_xlabel("is looked at", fontsize=9)
        if number == 0:
            axes.set_ylabel("looks", fontsize=9)
        axes.set_xticks(np.arange(-0.5, size), minor=True)
        axes.set_yticks(np.arange(-0.5, size), minor=True)
        axes.grid(which="minor", color="#EEEEEE", linewidth=0.5)
        axes.tick_params(which="both", length=0)
    bar = figure.colorbar(picture, ax=list(panels), shrink=0.7, aspect=25, pad=0.01)
    shares = (0.0, 0.05, 0.25, 0.5, 1.0)
    bar.set_ticks([share**0.5 for share in shares], labels=[f"{share:.0%}" for share in shares], fontsize=7)
    bar.set_label("share of the weight", fontsize=8)
    return figure


# -- the logit lens --------------------------------------------------------------------------------------------------


def draw_lens(columns: Sequence[str], rows: Sequence[str], words: Sequence[Sequence[str]], shares: np.ndarray) -> Figure:
    """A table: the word that the stream would predict after each layer, coloured by its probability.

    Args:
        columns: The token at each position, as text.
        rows: The layers, from the first to the last; the last is drawn on top.
        words: `[rows][columns]`, the most probable next token.
        shares: `[rows, columns]`, its probability.
    """
    figure = Figure(figsize=(WIDTH, 0.26 * len(rows) + 1.1), layout="constrained")
    axes = figure.add_subplot()
    picture = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto", origin="lower", interpolation="none")
    for row, line in enumerate(words):
        for column, word in enumerate(line):
            color = picture.cmap(float(shares[row, column]))
            axes.text(column, row, word[:9], ha="center", va="center", fontsize=7, color=ink_on(color[:3]))
    axes.set_xticks(range(len(columns)), columns, fontsize=8)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_xlabel("token at this position: the table says what would come next", fontsize=9)
    axes.set_ylabel("stream after", fontsize=9)
    axes.tick_params(length=0)
    bar = figure.colorbar(picture, ax=axes, shrink=0.8, aspect=30, pad=0.01)
    bar.set_label("probability", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return figure
