"""The playground on this machine: `minivllm course play`."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from minivllm.entrypoints.playground.exercise import LESSONS
from minivllm.errors import CourseError

PACKAGED = Path(__file__).parent / "site"
"""The playground in an installed package: `make release` puts it there."""
HEADERS = {
    "Content-Security-Policy": "default-src 'self' blob: data:; script-src 'self' 'wasm-unsafe-eval'; style-src 'self' 'unsafe-inline'; object-src 'none'",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
}
"""The page, and code that a link brings, may contact only this server."""


class _Files(SimpleHTTPRequestHandler):
    """Files, without a line for each."""

    extensions_map = SimpleHTTPRequestHandler.extensions_map | {".mjs": "text/javascript", ".wasm": "application/wasm"}

    def end_headers(self) -> None:
        in_book = (Path(self.directory) / "playground").is_dir()
        if not in_book or self.path.startswith(
            "/playground/"
        ):  # the book's pages have scripts within them, and run nobody's code
            for name, value in HEADERS.items():
                self.send_header(name, value)
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        pass

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        if code == HTTPStatus.NOT_FOUND:
            explain = (
                "If it is a page of the book: the book is not in the package. `make book` makes it, in a copy of the repository."
            )
        super().send_error(code, message, explain)


class _Server(ThreadingHTTPServer):
    """One that says nothing about pages which were closed while they loaded."""

    def handle_error(self, *_: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(*_)


def make_server(folder: Path, port: int) -> ThreadingHTTPServer:
    """A server of the playground's files, or of a book with them, for this machine only; port 0 takes a free one.

    Raises:
        CourseError: The files are not there, or the port cannot be used.
    """
    if not any((place / "files.json").is_file() for place in (folder, folder / "playground")):
        raise CourseError(
            f"There is no playground in {folder}: run `make book` in a copy of the repository, or name its folder with --folder."
        )
    try:
        return _Server(("127.0.0.1", port), partial(_Files, directory=str(folder)))
    except (OSError, OverflowError) as error:
        raise CourseError(f"Port {port} cannot be used ({error}): choose another with --port.") from None


def serve_playground(folder: Path, port: int) -> None:
    """Serve it until Ctrl-C, with the book if that is around it. Raises as `make_server`."""
    book = folder.resolve().parent if (folder / "../searchindex.js").is_file() else None
    with make_server(book or folder, port) as server, contextlib.suppress(KeyboardInterrupt):
        address = f"http://127.0.0.1:{server.server_port}/{'playground/' if book else ''}"
        exercises = ", ".join(f"{address}exercise.html#{lesson}" for lesson in LESSONS)
        print(f"The playground is at {address}index.html. Ctrl-C ends it.\nExercises: {exercises}", flush=True)
        server.serve_forever()
