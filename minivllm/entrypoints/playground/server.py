"""The playground on this machine: `minivllm course play`."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

from minivllm.entrypoints.playground.exercise import LESSONS
from minivllm.errors import CourseError

BUILT = Path(__file__).parents[3] / "out/book/html/playground"
"""Where `make book` writes the playground, in a copy of the repository."""
PACKAGED = Path(__file__).parent / "built"
"""The playground in a release."""
HEADERS = {
    "Content-Security-Policy": "default-src 'self' blob: data:; script-src 'self' 'wasm-unsafe-eval'; style-src 'self' 'unsafe-inline'; object-src 'none'",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
}
"""The page, and code that a link brings, may contact only this server."""


class _Files(SimpleHTTPRequestHandler):
    """Files, without a line for each."""

    extensions_map = SimpleHTTPRequestHandler.extensions_map | {".mjs": "text/javascript", ".wasm": "application/wasm"}

    def __init__(self, *arguments: Any, playground: Path, **options: Any) -> None:
        self.playground = playground
        super().__init__(*arguments, **options)

    def end_headers(self) -> None:
        # The book's own pages have scripts within them, and run nobody's code.
        path = getattr(self, "path", "")  # a request that is none has no path
        if "%00" not in path and Path(self.translate_path(path)).resolve().is_relative_to(self.playground):
            for name, value in HEADERS.items():
                self.send_header(name, value)
        super().end_headers()

    def send_head(self) -> Any:
        if "%00" in self.path:
            return self.send_error(HTTPStatus.NOT_FOUND)
        return super().send_head()

    def log_message(self, *_: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    """One that says nothing about pages which were closed while they loaded."""

    def handle_error(self, *_: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(*_)


def make_server(folder: Path, port: int, root: Path | None = None) -> ThreadingHTTPServer:
    """A server of the playground's files, or of a folder `root` around them, for this machine only; port 0 takes a free one.

    Raises:
        CourseError: The files are not there, or the port cannot be used.
    """
    if not (folder / "files.json").is_file():
        raise CourseError(
            f"There is no playground in {folder}: run `make book` in a copy of the repository, or name its folder with --folder."
        )
    folder = folder.resolve()
    try:
        return _Server(("127.0.0.1", port), partial(_Files, directory=str(root or folder), playground=folder))
    except (OSError, OverflowError) as error:
        raise CourseError(f"Port {port} cannot be used ({error}): choose another with --port.") from None


def serve_playground(folder: Path | None, port: int) -> None:
    """Serve it until Ctrl-C, with the book if that is around it.

    Args:
        folder: That of the playground, or of a book with one; None for the one of `make book` or of the release.
        port: See `make_server`, as for what is raised.
    """
    if folder is None:
        folder = PACKAGED if PACKAGED.exists() and not BUILT.exists() else BUILT
    elif (folder / "playground").is_dir():
        folder = folder / "playground"
    folder = folder.resolve()
    book = folder.parent if (folder.parent / "searchindex.js").is_file() else None
    with make_server(folder, port, book) as server, contextlib.suppress(KeyboardInterrupt):
        address = f"http://127.0.0.1:{server.server_port}/{f'{quote(folder.name)}/' if book else ''}"
        exercises = ", ".join(f"{address}exercise.html#{lesson}" for lesson in LESSONS)
        print(f"The playground is at {address}index.html. Ctrl-C ends it.\nExercises: {exercises}", flush=True)
        server.serve_forever()
