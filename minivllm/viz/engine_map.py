"""The map of the engine: its parts, the file of each, and the lesson that builds it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from minivllm.viz.palette import INK

LAYERS = {
    "talks to you": "#009E73",
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
    Part("LLM", "entrypoints/llm.py", "talks to you", 3.8, 9.9, (0, 8), "takes prompts, returns their completions"),
    Part("API server", "entrypoints/server/api_server.py", "talks to you", 8.2, 9.9, (11,), "OpenAI's protocol over HTTP"),
    Part("LLMEngine", "engine/llm_engine.py", "talks to you", 3.8, 8.5, (8,), "takes requests, steps the core"),
    Part("AsyncLLMEngine", "engine/async_llm_engine.py", "talks to you", 8.2, 8.5, (11,), "a stream for each request"),
    Part(
        "InputProcessor", "engine/input_processor.py", "talks to you", 1.6, 7.1, (8,), "checks a request, gives it a random seed"
    ),
    Part("Tokenizer", "engine/tokenizer.py", "talks to you", 6.0, 7.1, (1,), "text ↔ token ids"),
    Part("OutputProcessor", "engine/output_processor.py", "talks to you", 10.4, 7.1, (1, 8), "text, stop strings, logprobs"),
    Part("InprocClient", "engine/core_client.py", "talks to you", 3.8, 5.7, (8,), "calls the core directly"),
    Part("AsyncMPClient", "engine/core_client.py", "talks to you", 8.2, 5.7, (11, 13), "messages to another process"),
    Part("EngineCore", "engine/engine_core.py", "decides", 3.8, 4.2, (8, 14), "schedule, execute, update"),
    Part("EngineCoreProc", "engine/engine_core_proc.py", "decides", 8.2, 4.2, (11, 13), "runs a core in its own process"),
    Part("Scheduler", "core/scheduler.py", "decides", 6.0, 2.8, (7, 9, 10, 14), "who computes in this step?"),
    Part("BlockSpaceManager", "core/block_space_manager.py", "decides", 10.4, 2.8, (4, 10), "which blocks hold whose tokens?"),
    Part("Executor", "executor/uniproc.py", "computes", 1.6, 1.1, (8, 12), "hands the step to a device"),
    Part("Worker", "worker/worker.py", "computes", 6.0, 1.1, (8,), "owns the device"),
    Part("CacheEngine", "worker/cache_engine.py", "computes", 10.4, 1.1, (3, 4), "the tensors of the KV cache"),
    Part("ModelRunner", "worker/model_runner.py", "computes", 6.0, -0.3, (8,), "lays out the ragged batch"),
    Part("Llama", "models/llama.py", "computes", 1.6, -0.3, (2, 14), "layers, weights, logits"),
    Part("Sampler", "worker/sampler.py", "computes", 10.4, -0.3, (1,), "logits → next token"),
    Part("Attention", "layers/attention.py", "computes", 1.6, -1.7, (6,), "reads K and V through block tables"),
    Part("Kernels", "kernels/reference.py", "computes", 6.0, -1.7, (5, 6, 14), "tensors in, tensors out"),
)

OTHER_FILES = {
    (12, "Executor"): "executor/multiproc.py",
    (13, "AsyncMPClient"): "data_parallel/client.py",
    (13, "EngineCoreProc"): "data_parallel/engine_core_proc.py",
    (14, "Llama"): "models/compiled_llama.py",
    (14, "Kernels"): "kernels/cpu/linear_int8.py",
}
"""The file of a part in a lesson that builds another form of it."""

USED = {15: ("AsyncMPClient", "EngineCoreProc", "EngineCore", "Scheduler", "BlockSpaceManager")}
"""The parts that a lesson is about without building them."""

ARROWS = (
    ("LLM", "LLMEngine"),
    ("API server", "AsyncLLMEngine"),
    ("LLMEngine", "InputProcessor"),
    ("LLMEngine", "OutputProcessor"),
    ("LLMEngine", "InprocClient"),
    ("AsyncLLMEngine", "InputProcessor"),
    ("AsyncLLMEngine", "OutputProcessor"),
    ("AsyncLLMEngine", "AsyncMPClient"),
    ("InputProcessor", "Tokenizer"),
    ("OutputProcessor", "Tokenizer"),
    ("InprocClient", "EngineCore"),
    ("AsyncMPClient", "EngineCoreProc"),
    ("EngineCoreProc", "EngineCore"),
    ("EngineCore", "Scheduler"),
    ("EngineCore", "Executor"),
    ("Scheduler", "BlockSpaceManager"),
    ("Executor", "Worker"),
    ("Worker", "CacheEngine"),
    ("Worker", "ModelRunner"),
    ("ModelRunner", "Llama"),
    ("ModelRunner", "Sampler"),
    ("Llama", "Attention"),
    ("Attention", "Kernels"),
)
"""Who calls whom."""

_WIDTH, _HEIGHT = 2.95, 0.96
_NOTE = {"fontsize": 8, "color": "#555555"}
_TENSORS = 1.95
"""Where the line above the executor is drawn, in map units."""
_PROCESSES = 4.95
"""Where the line between two processes is drawn."""


def draw_engine_map(
    lesson: int | None = None, *, mine: Collection[str] | None = None, seconds: Mapping[str, float] | None = None
) -> Figure:
    """The engine on one page.

    Args:
        lesson: Highlight the parts that this lesson builds or uses and grey out the others. None highlights all.
        mine: Names of the parts that a learner wrote: they are filled, and marked as theirs.
        seconds: What each part took: parts that took any time are highlighted, darker for more, with the number. Takes precedence
            over `mine`, which takes precedence over `lesson`.
    """
    unknown = {*(mine or ()), *(seconds or {})} - {part.name for part in PARTS}
    if unknown:
        raise ValueError(f"The map has no part {', '.join(sorted(unknown))}; it has {', '.join(part.name for part in PARTS)}.")
    total = sum((seconds or {}).values())
    figure = Figure(figsize=(10, 10), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(0.05, 11.95)
    axes.set_ylim(-2.25, 10.5)
    axes.axis("off")
    places = {part.name: part for part in PARTS}
    for source, target in ARROWS:
        _arrow(axes, places[source], places[target])
    dashes = {"color": "#555555", "linestyle": (0, (4, 4)), "linewidth": 1}
    axes.axhline(_TENSORS, **dashes)
    axes.text(11.9, _TENSORS + 0.08, "above the line: plain Python, the same for every device", **_NOTE, ha="right", va="bottom")
    axes.text(11.9, _TENSORS - 0.08, "below it: tensors", **_NOTE, ha="right", va="top")
    axes.plot((6.0, 11.9), (_PROCESSES, _PROCESSES), **dashes)
    axes.text(11.9, _PROCESSES + 0.08, "the server's process", **_NOTE, ha="right", va="bottom")
    axes.text(11.9, _PROCESSES - 0.08, "the core's process", **_NOTE, ha="right", va="top")
    for part in PARTS:
        if seconds is not None:
            taken = seconds.get(part.name)
            share = taken / total if taken is not None and total else 0.0
            _box(axes, part, lit=taken is not None, filled=share, note="" if taken is None else _milliseconds(taken))
        elif mine is not None:
            _box(axes, part, lit=True, filled=0.35 if part.name in mine else 0.0, note="yours" if part.name in mine else "")
        else:
            shown = replace(part, file=OTHER_FILES.get((lesson or 0, part.name), part.file))
            _box(axes, shown, lit=lesson is None or lesson in part.lessons or part.name in USED.get(lesson, ()))
    for i, (layer, color) in enumerate(LAYERS.items()):
        axes.text(0.1, 10.3 - 0.33 * i, f"■ {layer}", fontsize=9, color=color, va="center", weight="bold")
    axes.text(0.1, 10.3 - 0.33 * len(LAYERS), "arrows: who calls whom", **_NOTE, va="center")
    axes.text(0.1, 10.3 - 0.33 * (len(LAYERS) + 1), "numbers: lessons", **_NOTE, va="center")
    if seconds is not None:
        axes.text(0.1, 10.3 - 0.33 * (len(LAYERS) + 2), "bold: its own time", **_NOTE, va="center")
    return figure


def _milliseconds(seconds: float) -> str:
    """Two digits that mean something: "0.05 ms", "1.3 ms", "120 ms"."""
    number = 1000 * seconds
    return f"{number:,.0f} ms" if number >= 9.95 else f"{number:.1f} ms" if number >= 0.095 else f"{number:.2f} ms"


def _box(axes: Axes, part: Part, lit: bool, filled: float = 0.0, note: str = "") -> None:
    """Draw a part; `filled` is how much of its colour is inside, from 0 to 1, and `note` stands in its corner."""
    color = LAYERS[part.layer] if lit else "#CFCFCF"
    corner = (part.x - _WIDTH / 2, part.y - _HEIGHT / 2)
    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(
        FancyBboxPatch(
            corner, _WIDTH, _HEIGHT, boxstyle=style, facecolor=_tint(color, filled), edgecolor=color, linewidth=2, zorder=2
        )
    )
    if note:
        paper = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
        place = (part.x + _WIDTH / 2 - 0.15, part.y + _HEIGHT / 2)
        axes.text(*place, note, ha="right", va="center", fontsize=8, weight="bold", color=INK, bbox=paper, zorder=4)
    ink = "black" if lit else "#9A9A9A"
    axes.text(
        part.x,
        part.y + 0.25,
        part.name,
        ha="center",
        va="center",
        fontsize=11,
        weight="bold",
        color=color if lit and not filled else ink,
        zorder=3,
    )
    axes.text(part.x, part.y - 0.02, part.role, ha="center", va="center", fontsize=7.5, color=ink, zorder=3)
    lessons = ", ".join(f"{number:02}" for number in part.lessons)
    text = f"{part.file}  ·  {lessons}"
    axes.text(part.x, part.y - 0.29, text, ha="center", va="center", fontsize=6.5, color=ink, family="monospace", zorder=3)


def _tint(color: str, share: float) -> str:
    """White tinted with a colour, lightly enough that black text on it stays legible."""
    strength = 0.5 * min(1.0, max(0.0, share)) ** 0.5
    return to_hex([1 - strength * (1 - channel) for channel in to_rgb(color)])


def _arrow(axes: Axes, source: Part, target: Part) -> None:
    if source.y == target.y:
        sign = 1 if target.x > source.x else -1
        start, end = (source.x + sign * _WIDTH / 2, source.y), (target.x - sign * _WIDTH / 2, target.y)
    else:
        shift = max(-1.2, min(0.25 * (target.x - source.x), 1.2))
        start, end = (source.x + shift, source.y - _HEIGHT / 2), (target.x - shift, target.y + _HEIGHT / 2)
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#555555", "linewidth": 1.2}, zorder=1)
