"""The playground on this machine: `minivllm course play`."""

from __future__ import annotations

import contextlib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from minivllm.errors import CourseError


class _Files(SimpleHTTPRequestHandler):
    """Files, without a line for each."""

    extensions_map = SimpleHTTPRequestHandler.extensions_map | {".mjs": "text/javascript", ".wasm": "application/wasm"}

    def log_message(self, *_: Any) -> None:
        pass


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
        return ThreadingHTTPServer(("127.0.0.1", port), partial(_Files, directory=str(folder)))
    except (OSError, OverflowError) as error:
        raise CourseError(f"Port {port} cannot be used ({error}): choose another with --port.") from None


def serve_playground(folder: Path, port: int) -> None:
    """Serve it until Ctrl-C. Raises as `make_server`."""
    with make_server(folder, port) as server, contextlib.suppress(KeyboardInterrupt):
        print(f"The playground is at http://127.0.0.1:{server.server_port}/index.html. Ctrl-C ends it.", flush=True)
        server.serve_forever()
