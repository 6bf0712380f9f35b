"""The learner's own parts of the engine, taken from the solved exercises that lie beside the notebook that asks.

    parts = my_parts()
    parts.scheduler_cls       # MyScheduler of exercise 07 if its last check has passed, else the package's Scheduler

A part is theirs once the check that runs it in the engine has passed and the notebook was saved; anything else would only fail later, and
further away from the mistake.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minivllm.course.exercise_cells import graded_cell, is_check, read_notebook
from minivllm.course.progress import has_passed
from minivllm.errors import CourseError


@dataclass(frozen=True)
class Source:
    """Where a part comes from.

    Attributes:
        lesson: Two digits.
        name: The learner's class.
        check_id: The check after which it counts as theirs.
        rooms: The parts of the engine's map that it stands for.
        load: The package's class.
    """

    lesson: str
    name: str
    check_id: str
    rooms: tuple[str, ...]
    load: Callable[[], type]


def _sampler() -> type:
    from minivllm.worker.sampler import Sampler

    return Sampler


def _detokenizer() -> type:
    from minivllm.engine.detokenizer import IncrementalDetokenizer

    return IncrementalDetokenizer


def _model() -> type:
    from minivllm.models.llama import LlamaForCausalLM

    return LlamaForCausalLM


def _block_manager() -> type:
    from minivllm.core.block_space_manager import BlockSpaceManager

    return BlockSpaceManager


def _attention() -> type:
    import torch

    from minivllm.layers.attention_backends import get_attention_backend

    return get_attention_backend("auto", torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _scheduler() -> type:
    from minivllm.core.scheduler import Scheduler

    return Scheduler


SOURCES = {
    "sampler_cls": Source("01", "MySampler", "check-sampler-text", ("Sampler",), _sampler),
    "detokenizer_cls": Source("01", "MyDetokenizer", "check-detokenizer-text", ("OutputProcessor",), _detokenizer),
    "model_cls": Source("02", "MyLlama", "check-text", ("Llama",), _model),
    "block_space_manager_cls": Source("04", "MyBlockSpaceManager", "check-text", ("BlockSpaceManager",), _block_manager),
    "attention_backend": Source("06", "MyBackend", "check-engine", ("Attention", "Kernels"), _attention),
    "scheduler_cls": Source("07", "MyScheduler", "check-11", ("Scheduler",), _scheduler),
}
"""The parts that an exercise builds, by their names in `EngineParts`."""


@dataclass(frozen=True)
class EngineParts:
    """Classes to make an engine of.

    Attributes:
        mine: The names of those that are the learner's.
        reasons: For each of the others, why it is the package's.
    """

    sampler_cls: type
    detokenizer_cls: type
    model_cls: type
    block_space_manager_cls: type
    attention_backend: type
    scheduler_cls: type
    mine: tuple[str, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def rooms(self) -> tuple[str, ...]:
        """The learner's rooms on the engine's map."""
        return tuple(room for name in self.mine for room in SOURCES[name].rooms)

    def with_packages(self, names: Iterable[str]) -> EngineParts:
        """The same parts, but those of these names from the package."""
        names = tuple(names)
        mine = tuple(name for name in self.mine if name not in names)
        return replace(self, **{name: SOURCES[name].load() for name in names}, mine=mine)

    def __str__(self) -> str:
        lines = []
        for name, source in SOURCES.items():
            whose = (
                f"yours, {source.name} of lesson {source.lesson}"
                if name in self.mine
                else f"the package's: {self.reasons.get(name, 'as asked')}"
            )
            lines.append(f"{' and '.join(source.rooms):22} {whose}")
        return "\n".join(lines)


def package_parts() -> EngineParts:
    """The package's classes throughout."""
    return EngineParts(**{name: source.load() for name, source in SOURCES.items()})


def my_parts(folder: Path | str = ".") -> EngineParts:
    """The learner's classes where they are done, the package's where they are not.

    Args:
        folder: Where the notebooks of the exercises lie: beside the one that asks, if not said.
    """
    parts, mine, reasons = dict[str, Any](), [], dict[str, str]()
    for name, source in SOURCES.items():
        found = load_part(Path(folder), source)
        if isinstance(found, str):
            reasons[name] = found
            parts[name] = source.load()
        else:
            mine.append(name)
            parts[name] = found
    return EngineParts(**parts, mine=tuple(mine), reasons=reasons)


def load_part(folder: Path, source: Source) -> Any:
    """The learner's class, or one sentence on why there is none."""
    path = next(iter(sorted(folder.glob(f"{source.lesson}_*.ipynb"))), None)
    if path is None:
        return f"there is no exercise {source.lesson} in this folder"
    try:
        cells = read_notebook(path)["cells"]
        check = next((cell for cell in cells if is_check(cell) and graded_cell(cell).cell_id == source.check_id), None)
        if check is None or not has_passed(check):
            said = "its last check" if check is None else f"“{graded_cell(check).name}”"
            return f"in exercise {source.lesson}, {said} had not passed when it was last saved"
        return take_class(path.name, cells, source.name)
    except CourseError as error:
        return str(error)
    except Exception as error:  # whatever a learner's cell may do
        return f"exercise {source.lesson} raised {type(error).__name__}: {error}"


def take_class(notebook: str, cells: list[Any], name: str) -> Any:
    """Run what a class of a notebook is made of, and nothing else of it: no checks, no figures, no models.

    Args:
        notebook: The file's name, for error messages.
        cells: The notebook's.
        name: The class.

    Raises:
        CourseError: The notebook does not define it.
    """
    statements = [item for number, cell in enumerate(cells) if _is_code(cell) for item in _definitions(notebook, number, cell)]
    wanted, seen, needed = [name], {name}, set[int]()
    while wanted:
        looked_for = wanted.pop()
        for i, statement in enumerate(statements):
            if looked_for in statement.defines and i not in needed:
                needed.add(i)
                wanted += statement.uses - seen
                seen |= statement.uses
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for i in sorted(needed):
        exec(statements[i].code, namespace)
    if not isinstance(namespace.get(name), type):
        raise CourseError(f"there is no class {name} in {notebook}")
    return namespace[name]


@dataclass(frozen=True)
class _Statement:
    """A statement at the top level of a cell, compiled: the names that it defines, and those that it uses."""

    defines: frozenset[str]
    uses: frozenset[str]
    code: Any


def _is_code(cell: Any) -> bool:
    return cell["cell_type"] == "code" and not is_check(cell)


def _definitions(notebook: str, number: int, cell: Any) -> list[_Statement]:
    """The statements of a cell that define something. A cell that is not Python (or not yet) defines nothing."""
    source = "\n".join("pass" if line.startswith(("%", "!")) else line for line in cell["source"].split("\n"))
    file = f"{notebook}, cell {number}"
    try:
        tree = ast.parse(source, file)
    except SyntaxError:
        return []
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for tracebacks, and for Triton
    found = []
    for node in tree.body:
        defines = _defined_names(node)
        if defines:
            uses = frozenset(item.id for item in ast.walk(node) if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Load))
            found.append(_Statement(defines, uses, compile(ast.Module([node], []), file, "exec")))
    return found


def _defined_names(node: ast.stmt) -> frozenset[str]:
    """The names that a statement gives a value, or an attribute."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return frozenset((item.asname or item.name).split(".")[0] for item in node.names)
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return frozenset({node.name})
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, (ast.AnnAssign, ast.AugAssign))
        else []
    )
    if isinstance(node, (ast.If, ast.Try, ast.With, ast.For)):  # `if not torch.cuda.is_available(): os.environ[...] = ...`
        return frozenset().union(
            *(_defined_names(item) for item in ast.walk(node) if isinstance(item, ast.stmt) and item is not node)
        )
    return frozenset(item.id for target in targets for item in ast.walk(target) if isinstance(item, ast.Name))
