"""The playground on this machine: `minivllm course play`."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from minivllm.errors import CourseError

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
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    """One that says nothing about pages which were closed while they loaded."""

    def handle_error(self, *_: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(*_)


def make_server(folder: Path, port: int) -> ThreadingHTTPServer:
    """A server of the playground's files, for this machine only; port 0 takes a free one.

    Raises:
        CourseError: The files are not there, or the port cannot be used.
    """
    if not (folder / "files.json").is_file():
        raise CourseError(
            f"There is no playground in {folder}: run `make book` in the project, or name its folder with --folder."
        )
    try:
        return _Server(("127.0.0.1", port), partial(_Files, directory=str(folder)))
    except (OSError, OverflowError) as error:
        raise CourseError(f"Port {port} cannot be used ({error}): choose another with --port.") from None


def serve_playground(folder: Path, port: int) -> None:
    """Serve it until Ctrl-C. Raises as `make_server`."""
    with make_server(folder, port) as server, contextlib.suppress(KeyboardInterrupt):
        print(f"The playground is at http://127.0.0.1:{server.server_port}/index.html. Ctrl-C ends it.", flush=True)
        server.serve_forever()
