"""The map of the engine: its parts, the file of each, and the lesson that builds it."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

LAYERS = {
    "meets you": "#009E73",
    "decides": "#E69F00",
    "computes": "#0072B2",
}
"""Role of a part of the engine, and its colour on the map."""


@dataclass(frozen=True)
class Part:
    """A box on the map: its centre in map units, its file, and the lessons that build it."""

    name: str
    file: str
    layer: str
    x: float
    y: float
    lessons: tuple[int, ...]
    role: str


PARTS = (
    Part("LLM", "entrypoints/llm.py", "meets you", 5.0, 9.4, (0, 8), "takes prompts, waits for all texts"),
    Part("Tokenizer", "engine/tokenizer.py", "meets you", 1.6, 8.0, (1,), "text ↔ tokens"),
    Part("LLMEngine", "engine/llm_engine.py", "meets you", 5.0, 8.0, (8,), "runs all requests, step by step"),
    Part("OutputProcessor", "engine/output_processor.py", "meets you", 8.4, 8.0, (1, 8), "streams text, finds stops"),
    Part("Scheduler", "core/scheduler.py", "decides", 3.3, 6.4, (7, 9, 10), "who computes in this step?"),
    Part("BlockSpaceManager", "core/block_space_manager.py", "decides", 7.0, 6.4, (4, 10), "where do keys and values lie?"),
    Part("Executor", "executor/uniproc.py", "computes", 5.0, 4.6, (8, 12), "hands the step to a device"),
    Part("Worker", "worker/worker.py", "computes", 3.3, 3.2, (8,), "owns the device"),
    Part("CacheEngine", "worker/cache_engine.py", "computes", 7.0, 3.2, (3, 4), "the memory of the KV cache"),
    Part("ModelRunner", "worker/model_runner.py", "computes", 1.6, 1.8, (8,), "lays out the ragged batch"),
    Part("Llama", "models/llama.py", "computes", 5.0, 1.8, (2,), "layers, weights, logits"),
    Part("Sampler", "worker/sampler.py", "computes", 8.4, 1.8, (1,), "logits → next token"),
    Part("Attention", "layers/attention.py", "computes", 3.3, 0.4, (6,), "reads K and V through block tables"),
    Part("Kernels", "kernels/reference.py", "computes", 7.0, 0.4, (5, 6), "tensors in, tensors out"),
)

ARROWS = (
    ("LLM", "LLMEngine"),
    ("Tokenizer", "LLMEngine"),
    ("LLMEngine", "OutputProcessor"),
    ("LLMEngine", "Scheduler"),
    ("Scheduler", "BlockSpaceManager"),
    ("Scheduler", "Executor"),
    ("Executor", "Worker"),
    ("Worker", "CacheEngine"),
    ("Worker", "ModelRunner"),
    ("ModelRunner", "Llama"),
    ("Llama", "Sampler"),
    ("Llama", "Attention"),
    ("Attention", "Kernels"),
)
"""Who calls whom or hands on to whom."""

_WIDTH, _HEIGHT = 2.9, 0.96


def draw_engine_map(lesson: int | None = None) -> Figure:
    """The engine on one page.

    Args:
        lesson: Highlight the parts that this lesson builds and grey out the others. None highlights all.
    """
    figure = Figure(figsize=(9, 8.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(-0.1, 10.1)
    axes.set_ylim(-0.35, 10.2)
    axes.axis("off")
    places = {part.name: part for part in PARTS}
    for source, target in ARROWS:
        _arrow(axes, places[source], places[target])
    axes.axhline(5.5, color="#555555", linestyle=(0, (4, 4)), linewidth=1)
    axes.text(0.0, 5.6, "above the line: plain Python, the same for every device", fontsize=8, color="#555555", va="bottom")
    axes.text(0.0, 5.4, "below it: tensors", fontsize=8, color="#555555", va="top")
    for part in PARTS:
        _box(axes, part, lit=lesson is None or lesson in part.lessons)
    for i, (layer, color) in enumerate(LAYERS.items()):
        axes.text(0.0, 10.0 - 0.3 * i, f"■ {layer}", fontsize=9, color=color, va="center", weight="bold")
    axes.text(0.0, 10.0 - 0.3 * len(LAYERS), "numbers: the lessons that build it", fontsize=8, color="#555555", va="center")
    return figure


def _box(axes: Axes, part: Part, lit: bool) -> None:
    color = LAYERS[part.layer] if lit else "#CFCFCF"
    corner = (part.x - _WIDTH / 2, part.y - _HEIGHT / 2)
    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(
        FancyBboxPatch(corner, _WIDTH, _HEIGHT, boxstyle=style, facecolor="white", edgecolor=color, linewidth=2, zorder=2)
    )
    ink = "black" if lit else "#9A9A9A"
    axes.text(
        part.x,
        part.y + 0.25,
        part.name,
        ha="center",
        va="center",
        fontsize=11,
        weight="bold",
        color=color if lit else ink,
        zorder=3,
    )
    axes.text(part.x, part.y - 0.02, part.role, ha="center", va="center", fontsize=7.5, color=ink, zorder=3)
    lessons = ", ".join(f"{number:02}" for number in part.lessons)
    text = f"{part.file}  ·  {lessons}"
    axes.text(part.x, part.y - 0.29, text, ha="center", va="center", fontsize=6.5, color=ink, family="monospace", zorder=3)


def _arrow(axes: Axes, source: Part, target: Part) -> None:
    if source.y == target.y:
        sign = 1 if target.x > source.x else -1
        start, end = (source.x + sign * _WIDTH / 2, source.y), (target.x - sign * _WIDTH / 2, target.y)
    else:
        shift = 0.25 * (target.x - source.x)
        start, end = (source.x + shift, source.y - _HEIGHT / 2), (target.x - shift, target.y + _HEIGHT / 2)
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#555555", "linewidth": 1.2}, zorder=1)
