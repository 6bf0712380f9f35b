"""The kernel in which a submission is graded: an IPython kernel that runs checks itself and limits output.

A check passes only if it returns its receipt, which is issued by a statement appended to its `with check(...)` block: nothing that a
cell prints counts. Before each check the course's modules are restored, and the check is compiled here, bypassing any hooks that cells
may have installed in IPython. All that can be undone from within the process; `observe.py` cannot be.
"""

from __future__ import annotations

import ast
import builtins
import json
import secrets
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ipykernel.iostream import OutStream
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core.inputtransformer2 import TransformerManager
from traitlets import Type

from minivllm.course.grading.sandbox import Fence, Pristine
from minivllm.course.observations import recording

_MOST_ERROR = 5000


class TooMuchOutput(RuntimeError):  # noqa: N818 - shown to the learner
    """A cell printed too much."""


class LimitedOutStream(OutStream):
    """Standard output and error that truncate what a cell prints, and stop a cell that goes on printing."""

    kept = most = 1 << 62
    written = 0

    def write(self, string: str) -> int | None:
        """Print a text, or as much of it as may still be kept."""
        limits = LimitedOutStream
        if isinstance(string, str):
            room = max(0, limits.kept - limits.written)
            limits.written += len(string)
            if limits.written > limits.most and threading.current_thread() is threading.main_thread():
                raise TooMuchOutput(f"this cell printed more than {limits.most / 10**6:g} MB")
            string = string[:room]
            if not string:
                return 0
        return super().write(string)


class GradingShell(ZMQInteractiveShell):
    """An IPython shell in which `exit` ends the cell, not the kernel."""

    def ask_exit(self) -> None:
        """Called by `exit` and `quit`."""
        raise SystemExit


class GradingKernel(IPythonKernel):
    """A kernel that is told the kind of each cell (in `user_expressions`) and reports in its reply whether a check passed."""

    shell_class = Type(GradingShell)
    fence: Fence
    pristine: Pristine
    imports: list[str]

    async def do_execute(
        self,
        code: str,
        silent: bool,
        store_history: bool = True,
        user_expressions: dict[str, Any] | None = None,
        allow_stdin: bool = False,
        **more: Any,
    ) -> dict[str, Any]:
        """Run a cell. The reply has the `receipt` of a check that passed, and what was `refused`."""
        order = user_expressions or {}
        self.fence.refused.clear()
        self.fence.is_checking = order.get("kind") in ("check", "observe")
        if order.get("kind") == "given":
            self.fence.given.add(self.shell.compile.get_code_name(code, self.shell.transform_cell(code), order.get("number", 1)))
        LimitedOutStream.written = 0
        self.shell.execution_count = order.get("number", 1)
        if order.get("kind") == "check":
            reply = self._run_check(code, order)
        elif order.get("kind") == "observe":
            reply = self._run_observer(code, order)
        else:
            try:
                reply = await super().do_execute(code, silent, store_history, {}, allow_stdin, **more)
            except Exception as error:  # a cell broke IPython itself; the client must not wait forever
                reply = {"status": "error", "ename": type(error).__name__, "evalue": str(error), "traceback": []}
        # The client would wait forever for a reply that is too long to send.
        reply |= {"traceback": [], "payload": [], "evalue": _sendable(reply.get("evalue", ""))}
        reply["refused"] = list(self.fence.refused)
        return reply

    def _run_check(self, source: str, order: dict[str, Any]) -> dict[str, Any]:
        name, passed = f"_{secrets.token_hex(8)}", []
        namespace = self.shell.user_ns

        def run() -> dict[str, Any]:
            namespace[name] = lambda: passed.append(name)
            try:
                self._exec(source, order["number"], name)
            finally:
                namespace.pop(name, None)
            return {"receipt": order["receipt"]} if passed else {}

        return self._answer(order, run, shown=True)

    def _run_observer(self, source: str, order: dict[str, Any]) -> dict[str, Any]:
        """Run a check once more, with other input, and return what it saw."""

        def run() -> dict[str, Any]:
            with recording(order["seed"]) as seen:
                self._exec(source, order["number"])
            return {"observations": seen.to_json()}

        return self._answer(order, run)

    def _exec(self, source: str, number: int, receipt: str = "") -> None:
        """Run a check's cell, which calls the function `receipt` if the check passes."""
        namespace = self.shell.user_ns
        namespace["__builtins__"] = builtins
        for statement in self.imports:
            exec(statement, namespace)
        file = self.shell.compile.cache(source, number)
        exec(compile(with_receipt(source, receipt) if receipt else source, file, "exec"), namespace)

    def _answer(self, order: dict[str, Any], run: Callable[[], dict[str, Any]], *, shown: bool = False) -> dict[str, Any]:
        """The reply to an order, with what `run` returns or the error that it raised."""
        self.pristine.restore()
        reply = {"status": "ok", "execution_count": order["number"], "user_expressions": {}, "payload": []}
        try:
            return reply | run()
        except BaseException as error:
            reply |= {"status": "error", "ename": type(error).__name__, "evalue": "", "traceback": []}
            with suppress(Exception):
                reply["evalue"] = str(error)
                if shown:
                    self.shell.showtraceback()
        return reply


def _sendable(text: str) -> str:
    """The start of a text, without unpaired surrogates."""
    return text[:_MOST_ERROR].encode("utf-8", "replace").decode("utf-8")


def with_receipt(source: str, name: str) -> ast.Module:
    """A check cell with a call of `name` appended to its `with check(...)` block, or to the cell if it has no such block.

    Raises:
        SyntaxError: The cell is not valid Python.
    """
    tree = ast.parse(source)
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.With) and _calls_check(node)]
    place = blocks[-1].body if blocks else tree.body
    call = ast.Expr(ast.Call(ast.Name(name, ast.Load()), [], []))
    if place:
        ast.copy_location(call, place[-1])
    place.append(call)
    return ast.fix_missing_locations(tree)


def _calls_check(block: ast.With) -> bool:
    calls = [item.context_expr for item in block.items if isinstance(item.context_expr, ast.Call)]
    return any(ast.unparse(call.func).split(".")[-1] == "check" for call in calls)


def find_imports(sources: Iterable[str], package: str) -> list[str]:
    """The import statements in a lesson's own cells that import from a package."""
    found = []
    for source in sources:
        try:
            tree = ast.parse(TransformerManager().transform_cell(source))  # lessons use magics
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(f"{name}.".startswith(f"{package}.") for name in names):
                found.append(ast.unparse(node))
    return found


def main() -> None:
    """Start the kernel. The first argument is its settings file, the rest are ipykernel's."""
    settings = json.loads(Path(sys.argv.pop(1)).read_text(encoding="utf-8"))
    with suppress(ImportError):  # not on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (settings["most_file_bytes"],) * 2)
    for statement in settings["preload"]:
        with suppress(Exception):  # the cell that imports it will report the error
            exec(statement, {})
    app = IPKernelApp.instance(kernel_class=GradingKernel, quiet=True)
    app.outstream_class = f"{__name__}.{LimitedOutStream.__name__}"
    app.initialize(sys.argv[1:])
    LimitedOutStream.kept, LimitedOutStream.most = settings["kept_output"], settings["most_output"]
    kernel = app.kernel
    kernel.imports = settings["imports"]
    kernel.fence = Fence(settings["workplace"], settings["unreadable"], settings["unwritable"], settings["writable"])
    kernel.pristine = Pristine()
    kernel.fence.close()
    app.start()
