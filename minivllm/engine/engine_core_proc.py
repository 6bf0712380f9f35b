"""An `EngineCore` in a process of its own, so that neither waits for the other: the model for HTTP, nor HTTP for the model.

    socket ─► input thread: decode ─► input_queue ─► main thread: busy loop ─► output_queue ─► output thread: encode ─► socket

The frontend starts the process as `python -m minivllm.engine.engine_core_proc`, writes one line of JSON to its standard input
(`CoreSetup`), and keeps that pipe open: when it closes, the frontend is gone, and so goes the process. Mirrors `EngineCoreProc` in
`vllm/v1/engine/core.py`.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import msgspec
import zmq

from minivllm.config import EngineArgs
from minivllm.engine.core_messages import CoreFailed, CoreLog, decode_to_core, encode
from minivllm.engine.engine_core import EngineCore
from minivllm.engine.llm_engine import LLMEngine
from minivllm.errors import ConfigError

logger = logging.getLogger(__name__)

_CLASS = "class:"
"""What a class becomes on its way into the process: this, its module, a colon and its name."""


class CoreSetup(msgspec.Struct, forbid_unknown_fields=True):
    """What the process is told at its start: the engine's arguments, the sockets, and where Python finds modules."""

    engine_args: dict[str, Any]
    socket_folder: str
    input_address: str
    output_address: str
    sys_path: list[str]
    log_level: int


def pack_engine_args(args: EngineArgs) -> dict[str, Any]:
    """Engine arguments as JSON has them.

    Raises:
        ConfigError: A class is defined where another process cannot import it.
    """
    return {field.name: _pack(field.name, getattr(args, field.name)) for field in fields(args)}


def _pack(name: str, value: Any) -> Any:
    if not isinstance(value, type):
        return str(value) if name == "model" else value
    if value.__module__ == "__main__" or "<locals>" in value.__qualname__:
        raise ConfigError(
            f"{name} is {value.__qualname__}, which another process cannot import from where it is defined: put the class into "
            f"a module, or run the engine in this process (in_process=True)."
        )
    return f"{_CLASS}{value.__module__}:{value.__qualname__}"


def unpack_engine_args(packed: dict[str, Any]) -> EngineArgs:
    """The arguments that `pack_engine_args` was given."""
    return EngineArgs(**{name: _unpack(value) for name, value in packed.items()})


def _unpack(value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith(_CLASS):
        return value
    module, _, name = value.removeprefix(_CLASS).partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


class LogToFrontend(logging.Handler):
    """Sends what is logged to the frontend, whose log has a form of its own.

    Args:
        put: Where the messages go.
    """

    def __init__(self, put: Callable[[CoreLog], object]) -> None:
        super().__init__()
        self.put = put

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record, with its traceback if it has one."""
        self.put(CoreLog(record.levelno, record.name, self.format(record)))


class EngineCoreProc:
    """The process: a core between two sockets.

    Args:
        setup: What the frontend wrote.
    """

    def __init__(self, setup: CoreSetup) -> None:
        self._context = zmq.Context()
        self._input = self._context.socket(zmq.PULL)
        self._input.connect(setup.input_address)
        self._output = self._context.socket(zmq.PUSH)
        self._output.setsockopt(zmq.SNDHWM, 0)
        self._output.connect(setup.output_address)
        self._engine_args = setup.engine_args
        self._log = LogToFrontend(lambda message: self._output.send(encode(message)))
        logging.basicConfig(level=setup.log_level, format="%(message)s", handlers=[self._log])

    def run(self) -> int:
        """Load the engine and serve until told to stop. Returns the exit status."""
        try:
            core = EngineCore(LLMEngine.from_engine_args(unpack_engine_args(self._engine_args)))
        except Exception as error:
            self._output.send(encode(CoreFailed(type(error).__name__, str(error))))
            self._context.destroy(linger=1000)
            return 1
        self._log.put = core.output_queue.put  # from here on, the socket is the output thread's
        threading.Thread(target=self._receive, args=(core,), daemon=True).start()
        sender = threading.Thread(target=self._send, args=(core,))
        sender.start()
        was_told = core.run_busy_loop()
        sender.join()
        self._context.term()  # returns when the last message has gone out
        return 0 if was_told else 1

    def _receive(self, core: EngineCore) -> None:
        """The input thread."""
        try:
            while True:
                data = self._input.recv()
                try:
                    core.input_queue.put(decode_to_core(data))
                except (msgspec.ValidationError, msgspec.DecodeError) as error:
                    logger.error("A message that cannot be read was dropped: %s", error)
        except zmq.ContextTerminated:
            self._input.close(linger=0)
        except Exception:
            _end_at_once()

    def _send(self, core: EngineCore) -> None:
        """The output thread: it ends after the core's last message."""
        try:
            while (message := core.output_queue.get()) is not None:
                self._output.send(encode(message))
            self._output.close(linger=1000)
        except Exception:
            _end_at_once()


def _end_at_once() -> None:
    """A thread has failed: the frontend sees the process end, but would wait for ever for one that only steps."""
    traceback.print_exc()  # the way of the log may be what has failed
    os._exit(1)


def _end_with_the_frontend(socket_folder: str) -> None:
    """Wait until standard input closes: only the frontend holds its other end. It may have had no time to tidy up."""
    while os.read(0, 1024):
        pass
    shutil.rmtree(socket_folder, ignore_errors=True)
    os._exit(1)


def main() -> int:
    """Read the setup from standard input and run."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 65536)
        if not part:
            return 1
        line += part
    setup = msgspec.json.decode(line, type=CoreSetup)
    sys.path[:] = setup.sys_path
    threading.Thread(target=_end_with_the_frontend, args=(setup.socket_folder,), daemon=True).start()
    return EngineCoreProc(setup).run()


if __name__ == "__main__":
    sys.exit(main())
