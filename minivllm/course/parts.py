"""The learner's own parts of the engine, taken from the solved exercises in the notebook's folder.

    parts = my_parts()
    parts.scheduler_cls       # MyScheduler of exercise 07 if its last check has passed, else the package's Scheduler

A part is used once the check that runs it in the engine has passed and the notebook was saved; otherwise it would only fail later,
further away from the mistake.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import linecache
import symtable
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType
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
        check_id: The check that must have passed.
        components: What it implements, by the names on the engine's map.
        load: The package's class.
    """

    lesson: str
    name: str
    check_id: str
    components: tuple[str, ...]
    load: Callable[[], type]


def _attention() -> type:
    import torch

    from minivllm.layers.attention_backends import get_attention_backend

    return get_attention_backend("auto", torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _package(module: str, name: str) -> Callable[[], type]:
    """Import a class of the package on demand."""
    return lambda: getattr(importlib.import_module(f"minivllm.{module}"), name)


SOURCES = {
    "sampler_cls": Source("01", "MySampler", "check-sampler-text", ("Sampler",), _package("worker.sampler", "Sampler")),
    "detokenizer_cls": Source(
        "01",
        "MyDetokenizer",
        "check-detokenizer-text",
        ("OutputProcessor",),
        _package("engine.detokenizer", "IncrementalDetokenizer"),
    ),
    "model_cls": Source("02", "MyLlama", "check-text", ("Llama",), _package("models.llama", "LlamaForCausalLM")),
    "block_space_manager_cls": Source(
        "04",
        "MyBlockSpaceManager",
        "check-text",
        ("BlockSpaceManager",),
        _package("core.block_space_manager", "BlockSpaceManager"),
    ),
    "attention_backend": Source("06", "MyBackend", "check-engine", ("Attention", "Kernels"), _attention),
    "scheduler_cls": Source("07", "MyScheduler", "check-11", ("Scheduler",), _package("core.scheduler", "Scheduler")),
}
"""The parts that an exercise builds, by their names in `EngineParts`."""


@dataclass(frozen=True)
class EngineParts:
    """Classes to build an engine from.

    Attributes:
        mine: The names of the learner's own.
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
    def components(self) -> tuple[str, ...]:
        """The learner's components on the engine's map."""
        return tuple(component for name in self.mine for component in SOURCES[name].components)

    def with_packages(self, names: Iterable[str]) -> EngineParts:
        """The same parts, with the named ones replaced by the package's."""
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
            lines.append(f"{' and '.join(source.components):22} {whose}")
        return "\n".join(lines)


def package_parts() -> EngineParts:
    """The package's classes throughout."""
    return EngineParts(**{name: source.load() for name, source in SOURCES.items()})


def my_parts(folder: Path | str = ".") -> EngineParts:
    """The learner's classes where they are done, the package's where they are not.

    Args:
        folder: The folder of the exercises' notebooks; by default that of the current notebook.
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
    """The learner's class, or a sentence saying why there is none."""
    path = min(
        folder.glob(f"{source.lesson}_*.ipynb"), key=lambda path: (len(path.name), path.name), default=None
    )  # not a "-Copy1"
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
    except (Exception, SystemExit) as error:  # whatever a learner's cell may do
        return f"exercise {source.lesson} raised {type(error).__name__}: {error}"


def take_class(notebook: str, cells: list[Any], name: str) -> Any:
    """Run only what a notebook's class needs: the statements that define it and every name they use. No checks, no figures.

    Args:
        notebook: The file's name, for error messages.
        cells: The notebook's.
        name: The class.

    Raises:
        CourseError: The notebook does not define it.
    """
    statements = [
        statement
        for cell in cells
        if cell["cell_type"] == "code" and not is_check(cell)
        for statement in _statements(notebook, cell)
    ]
    imported = frozenset[str]().union(*(statement.defines for statement in statements if statement.is_import))
    needed = {i for i, statement in enumerate(statements) if statement.is_always_run}
    wanted, seen = [name, *(used for i in needed for used in statements[i].uses)], {name}
    while wanted:
        looked_for = wanted.pop()
        for i, statement in enumerate(statements):
            is_call = isinstance(statement.node, ast.Expr)  # of a method: a module or a package's class is not changed by it
            is_changed = looked_for in statement.changes and not (is_call and looked_for in imported)
            if i not in needed and (looked_for in statement.defines or is_changed):
                needed.add(i)
                wanted += statement.uses - seen
                seen |= statement.uses
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for i in sorted(needed):
        exec(statements[i].compile(), namespace)
    if not isinstance(namespace.get(name), type):
        raise CourseError(f"there is no class {name} in {notebook}")
    return namespace[name]


@dataclass(frozen=True)
class _Statement:
    """A statement at the top level of a cell.

    Attributes:
        node, file: What it is, and the name of its cell.
        defines: Names that it assigns.
        changes: Names of objects that it changes: `X.attribute = …`, `X.append(…)`, `setattr(X, …)`.
        uses: Global names that it reads, also from within functions and classes.
        is_always_run: Whether names cannot tell what needs it: `from … import *`, and environment variables.
        flags: Of the compiler.
    """

    node: ast.stmt
    file: str
    defines: frozenset[str]
    changes: frozenset[str]
    uses: frozenset[str]
    is_always_run: bool
    flags: int

    @property
    def is_import(self) -> bool:
        """Whether it imports."""
        return isinstance(self.node, (ast.Import, ast.ImportFrom))

    def compile(self) -> CodeType:
        """As code, with the lines that it has in its cell."""
        return compile(ast.Module([self.node], []), self.file, "exec", flags=self.flags, dont_inherit=True)


def _statements(notebook: str, cell: Any) -> Iterator[_Statement]:
    """The statements of a cell. A cell that is not valid Python (yet) has none."""
    from IPython.core.inputtransformer2 import TransformerManager

    source = cell["source"]
    first = source.lstrip().split("\n")[0].split(" ")[0]
    if first.startswith("%%") and first not in ("%%time", "%%timeit", "%%capture"):
        return
    file = f"{notebook}, cell {cell.get('id', '')}"
    try:
        text = source.lstrip().partition("\n")[2] if first.startswith("%%") else TransformerManager().transform_cell(source)
        tree = ast.parse(text, file)
    except SyntaxError:
        return
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for tracebacks, and for Triton
    flags = __future__.annotations.compiler_flag if "from __future__ import annotations" in text else 0
    for node in tree.body:
        try:
            table = symtable.symtable(ast.unparse(node), file, "exec")
        except SyntaxError:  # such as `await` outside of a function
            continue
        symbols = table.get_symbols()
        yield _Statement(
            node,
            file,
            frozenset(symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()),
            _changed_names(node),
            _used_names(table),
            _is_always_run(node),
            flags,
        )


def _used_names(table: symtable.SymbolTable) -> frozenset[str]:
    """Global names that are read in a scope and in those within it."""
    is_top = table.get_type() == "module"
    own = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced() and (is_top or symbol.is_global())}
    return frozenset(own).union(*map(_used_names, table.get_children()))


def _changed_names(node: ast.stmt) -> frozenset[str]:
    """The names at the beginning of what a statement assigns to, or calls a method of."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        targets = [node.target]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        call = node.value
        is_setattr = isinstance(call.func, ast.Name) and call.func.id == "setattr"
        targets = call.args[:1] if is_setattr else [call.func] if isinstance(call.func, ast.Attribute) else []
    return frozenset(filter(None, (_base(target) for target in targets)))


def _base(target: ast.expr) -> str | None:
    """`X` of `X.a`, `X[3]` and `X.a[3].b`."""
    while isinstance(target, (ast.Attribute, ast.Subscript)):
        target = target.value
    return target.id if isinstance(target, ast.Name) else None


def _is_always_run(node: ast.stmt) -> bool:
    if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
        return True
    return any(
        isinstance(item, ast.Subscript) and isinstance(item.ctx, ast.Store) and ast.unparse(item.value) == "os.environ"
        for item in ast.walk(node)
    )
