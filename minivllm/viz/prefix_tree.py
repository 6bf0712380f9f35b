"""What prompts have in common, as a tree: each node is a full block, and prompts that share the path to it can share the block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minivllm.viz.drawing import WIDTH, add_boxes
from minivllm.viz.palette import INK, PALE, request_color, tint


@dataclass
class _Node:
    """A block of the tree.

    Attributes:
        names: The prompts that pass through it.
        children: By their tokens.
        row: Its row, counted from the top.
    """

    depth: int
    names: list[str] = field(default_factory=list)
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    row: float = 0.0


def draw_prefix_tree(prompts: Mapping[str, Sequence[int]], block_size: int) -> Figure:
    """Draw the full blocks of some prompts as a tree.

    Args:
        prompts: Their tokens, by name.
        block_size: Tokens in a block.

    Returns:
        A figure. A block that several prompts share is dark, and says how many; one that belongs to a single prompt has its colour. At the
        end of each branch is the prompt's name, with the tokens that do not fill a block.
    """
    root = _Node(0)
    ends: dict[str, _Node] = {}
    for name, tokens in prompts.items():
        node = root
        for end in range(block_size, len(tokens) + 1, block_size):
            block = tuple(tokens[end - block_size : end])
            node = node.children.setdefault(block, _Node(node.depth + 1))
            node.names.append(name)
        ends[name] = node
    rows: dict[str, float] = {}
    _place(root, ends, rows)
    deepest = max((node.depth for node in ends.values()), default=0)
    figure = Figure(figsize=(WIDTH, 0.5 + 0.42 * max(len(prompts), 1)), layout="constrained")
    axes = figure.add_subplot()
    colors = {name: request_color(number) for number, name in enumerate(prompts)}
    _paint(axes, root, colors)
    for name, node in ends.items():
        rest = len(prompts[name]) % block_size
        axes.plot((node.depth + 0.45, node.depth + 0.62), (node.row, rows[name]), color=PALE, linewidth=1, zorder=1)
        text = f"{name}" + (f" + {rest} token{'' if rest == 1 else 's'}" if rest else "")
        axes.text(node.depth + 0.66, rows[name], text, va="center", fontsize=8, color=INK)
    axes.set(xlim=(-0.1, deepest + 1.9), ylim=(max(rows.values(), default=0) + 0.7, -0.7), yticks=[])
    axes.set_xticks(
        range(1, deepest + 1), [f"{(depth - 1) * block_size}–{depth * block_size - 1}" for depth in range(1, deepest + 1)]
    )
    axes.set_xlabel("positions of the block's tokens", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def _place(node: _Node, ends: Mapping[str, _Node], rows: dict[str, float]) -> None:
    """Give each prompt a row, and each block the middle of its branches."""
    own = [name for name, end in ends.items() if end is node]
    places = []
    for child in node.children.values():
        _place(child, ends, rows)
        places.append(child.row)
    for name in own:
        rows[name] = float(len(rows))
        places.append(rows[name])
    node.row = sum(places) / len(places) if places else 0.0


def _paint(axes: Axes, node: _Node, colors: Mapping[str, str]) -> None:
    for child in node.children.values():
        if node.depth:
            axes.plot((node.depth + 0.4, child.depth - 0.4), (node.row, child.row), color=PALE, linewidth=1.2, zorder=1)
        shared = len(child.names) > 1
        color = "#555555" if shared else tint(colors[child.names[0]], 0.25)
        add_boxes(
            axes, [(child.depth - 0.4, child.depth + 0.4, child.row + 0.3, child.row - 0.3)], color, edge=INK, line_width=0.6
        )
        if shared:
            axes.text(
                child.depth,
                child.row,
                f"{len(child.names)} share it",
                ha="center",
                va="center",
                fontsize=7.5,
                color="white",
                zorder=5,
            )
        _paint(axes, child, colors)
