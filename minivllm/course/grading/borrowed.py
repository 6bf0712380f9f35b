"""Finds answers that may be the package's own: cells that import the engine's core, or look into the lesson's checks.

Findings cost no points; they are reported to teacher and learner. Only the text of the cells is read, so it can be evaded.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from IPython.core.inputtransformer2 import TransformerManager

from minivllm.course.grading.submissions import Cell

_CORE = (
    "minivllm.core",
    "minivllm.course.lessons",
    "minivllm.engine.detokenizer",
    "minivllm.kernels",
    "minivllm.layers",
    "minivllm.models",
    "minivllm.worker.sampler",
)
"""The engine's counterparts of the exercises, and what the checks compare with."""
_CORE_NAMES = frozenset(["BlockAllocator", "BlockSpaceManager", "Scheduler", "StaticBatchScheduler"])
_ALLOWED = frozenset(
    f"minivllm.worker.sampler.{name}" for name in ("random_key", "exponential_noise", "SampledToken", "SamplingRow")
)
"""Names from these modules that the exercises provide."""
_INSIDES = _CORE_NAMES | {
    *(
        "attention",
        "block_manager",
        "cases",
        "detokenizer",
        "engine",
        "filters",
        "loops",
        "runner",
        "sampler",
        "scheduler",
        "situations",
        "stages",
        "swapping",
        "tables",
        "observe",
    )
}
"""Modules of a lesson's checks, and what they import of the core."""


def find_borrowed(cells: Sequence[Cell], numbers: dict[int, int]) -> list[str]:
    """A sentence for each learner's cell that uses the engine's core or the internals of checks.

    Args:
        cells: The submission as it is graded.
        numbers: The execution count of each code cell, by index.
    """
    said = []
    for index, cell in enumerate(cells):
        if cell.cell_type != "code" or cell.kind not in ("answer", "own"):
            continue
        names = sorted(dict.fromkeys(_borrowed_names(cell.source)))
        if names:
            said.append(
                f"Cell {numbers[index]} uses {', '.join(names)}, which this exercise asks you to rebuild: its points may not be for your own work."
            )
    return said


def _borrowed_names(source: str) -> list[str]:
    try:
        tree = ast.parse(TransformerManager().transform_cell(source))
    except (SyntaxError, ValueError, RecursionError):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if _is_core(alias.name)]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            whole = [name for alias in node.names if (name := f"{module}.{alias.name}") not in _ALLOWED]
            found += [module] if _is_core(module) and whole else [name for name in whole if _is_core(name)]
            if module == "minivllm":
                found += [name for name in whole if name.rpartition(".")[2] in _CORE_NAMES]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_core(node.value):
            found.append(node.value)
        elif isinstance(node, ast.Attribute) and _looks_into_a_lesson(ast.unparse(node).split(".")):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "minivllm" and node.attr in {*_CORE_NAMES, "core"}:
            found.append(f"minivllm.{node.attr}")
    return found


def _looks_into_a_lesson(names: list[str]) -> bool:
    """Whether an attribute such as `lesson_07.stages.correct_fits` is one that the lesson itself does not use."""
    return names[0].startswith("lesson_") and any(name.startswith("_") or name in _INSIDES for name in names[1:])


def _is_core(name: str) -> bool:
    return any(f"{name}.".startswith(f"{core}.") for core in _CORE)
