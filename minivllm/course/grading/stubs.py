"""Puts back the stubs of what a lesson asks for and a submission does not define, so that it cannot come from the package instead.

A class that lacks a method inherits it, in some lessons from the package's own class; and `MyPool = type(manager.pool)` is the package's
class itself. Only the text of the cells is read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from minivllm.course.exercise_cells import BEGIN_SOLUTION

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def find_asked(source: str) -> dict[str, bool]:
    """The functions and methods of a solved answer that learners write, such as "Admitting.can_allocate", and whether each is a property."""
    lines, asked = source.split("\n"), dict[str, bool]()
    for owner, node in _functions(parse(source)):
        if any(BEGIN_SOLUTION in line for line in lines[node.lineno - 1 : node.end_lineno]):
            asked[owner + node.name] = any(ast.unparse(decorator).endswith("property") for decorator in node.decorator_list)
    return asked


def find_defined(sources: Iterable[str]) -> set[str]:
    """The functions, classes ("Admitting.") and methods that cells define, also with `name = lambda` and `Class.name = function`."""
    trees = [parse(source) for source in sources]
    defined = {name for tree in trees for owner, node in _functions(tree) for name in (owner + node.name, owner)}
    for tree in trees:
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        defined |= {f"{node.name}." for node in classes}
        owned = [("", node) for node in ast.walk(tree) if isinstance(node, ast.Assign)]
        owned += [(f"{owner.name}.", node) for owner in classes for node in owner.body if isinstance(node, ast.Assign)]
        for owner, node in owned:
            if isinstance(node.value, ast.Lambda) or (isinstance(node.value, ast.Name) and node.value.id in defined):
                defined |= {owner + ast.unparse(target) for target in node.targets}
    return defined


def make_stubs(asked: dict[str, bool], defined: set[str]) -> tuple[str, list[str]]:
    """A cell with a stub for each function and method that is not defined, and their names."""
    missing = [name for name in asked if name not in defined]
    lines: list[str] = []
    for name in missing:
        owner, _, function = name.rpartition(".")
        stub = f"def {function}(*arguments, **options):\n    raise NotImplementedError('write this')"
        if not owner:
            lines.append(stub)
            continue
        if f"{owner}." not in defined:
            defined.add(f"{owner}.")
            lines.append(
                f"class {owner}:\n    def __init__(self, *arguments, **options):\n        raise NotImplementedError('write this')"
            )
        made = f"property(_Stub.{function})" if asked[name] else f"_Stub.{function}"
        lines.append("class _Stub:\n    " + stub.replace("\n", "\n    ") + f"\n{owner}.{function} = {made}")
    return "\n".join(lines), missing


def parse(source: str) -> ast.Module:
    """A cell's syntax tree; that of nothing if it is not valid Python."""
    from IPython.core.inputtransformer2 import TransformerManager  # of the extra "course"

    first, _, rest = source.lstrip().partition("\n")
    try:
        return ast.parse(TransformerManager().transform_cell(rest if first.startswith("%%") else source))
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _functions(tree: ast.Module) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions that stand in no other function, each with the class in which it stands ("Admitting.") or ""."""
    found, todo = [], [("", node) for node in tree.body]
    while todo:
        owner, node = todo.pop(0)
        if isinstance(node, _Function):
            found.append((owner, node))
        else:
            inside = f"{node.name}." if isinstance(node, ast.ClassDef) else owner
            todo += [(inside, child) for child in ast.iter_child_nodes(node)]
    return found
