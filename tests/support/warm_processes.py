"""Processes of an engine that begin with everything imported: most of what a small one costs is importing torch.

A process that has imported the modules forks a copy of itself for each process that the package starts. The copy becomes a child of the
tests, gets the files and the environment that it would have had, and runs the same module. At night all processes start as they do for
users; with --long, those of some files do (see conftest.py).

    python tests/support/warm_processes.py minivllm serve ...    does the same for the processes of a server
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import inspect
import os
import pickle
import runpy
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

MODULES = (
    "fastapi",
    "torch",
    "uvicorn",
    "minivllm.data_parallel.client",
    "minivllm.data_parallel.routing",
    "minivllm.engine.engine_core",
    "minivllm.executor.multiproc",
    "minivllm.executor.uniproc",
    "minivllm.kernels.cpu",
    "minivllm.models.llama",
    "minivllm.worker.worker",
)
"""None of them may import prometheus_client, which decides at its import whether several processes share their metrics."""
FIXED = ("CUDA", "GOMP", "LD_", "MALLOC", "MINIVLLM", "MKL", "NUMBA", "OMP", "PYTHONDEV", "PYTHONHASH", "TORCH_", "TRITON")
"""What variables begin with that are read when something is imported."""
_SET_CHILD_SUBREAPER = 36
_ROOM = 20_000
"""Bytes for the arguments and the environment that others see of a copy."""
_lock = threading.Lock()
is_used = False
"""Whether processes are started so."""
is_paused = False
"""Whether they are not, for a while."""


def are_used() -> bool:
    """Whether the next process is a copy."""
    return is_used and not is_paused


def is_possible() -> bool:
    """Linux alone gives children of a child to whom it is told."""
    return sys.platform == "linux"


def _fixed(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(FIXED) and name != "NUMBA_NUM_THREADS"}


class Nursery:
    """The process that is copied. It is a child of this one from the start, since some tests count those."""

    def __init__(self) -> None:
        self.environment = _fixed(dict(os.environ))
        self.socket, theirs = socket.socketpair()
        path = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), "room for the arguments of a copy".center(100)],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path, "ROOM": "x" * _ROOM},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    def fork(self, module: list[str], environment: dict[str, str], descriptors: dict[int, int]) -> int:
        """Start a copy that runs a module. Returns its process id.

        Args:
            module: Its name, and the arguments that it gets.
            environment: All its variables.
            descriptors: Files of this process, by the numbers that the new one has them under.
        """
        request = pickle.dumps((module, environment, str(Path.cwd()), list(descriptors), os.getpid()))
        with _lock:
            prctl = ctypes.CDLL(None).prctl
            prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self.socket, [struct.pack("q", len(request))], list(descriptors.values()))
                self.socket.sendall(request)
                return struct.unpack("q", _receive(self.socket, 8))[0]
            finally:
                prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def close(self) -> None:
        """End the process that is copied; copies go on."""
        self.socket.close()
        self.process.wait()


def use(nursery: Nursery) -> None:
    """Let the package start its processes from it, where the variables that count are the same."""
    from minivllm.executor import processes

    class Popen(subprocess.Popen):
        """`_execute_child` is what differs: the pipes and the waiting are as ever."""

        def _execute_child(self, *arguments, **options):
            given = inspect.signature(subprocess.Popen._execute_child).bind(self, *arguments, **options).arguments
            environment = given["env"]
            if (status := nursery.process.poll()) is not None:
                raise RuntimeError(f"The process that is copied has ended with status {status}: see what it wrote.")
            if is_paused or _fixed(environment) != nursery.environment:
                super()._execute_child(*arguments, **options)
                return
            descriptors = {number: number for number in given["pass_fds"]}
            for number, place in ((0, "p2cread"), (1, "c2pwrite"), (2, "errwrite")):
                descriptors[number] = given[place] if given[place] != -1 else number
            self.pid = nursery.fork(given["args"][2:], environment, descriptors)
            self._child_created = True
            self._close_pipe_fds(*(given[x] for x in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")))

    global is_used
    is_used = True
    processes.subprocess = types.SimpleNamespace(**vars(subprocess) | {"Popen": Popen})


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def serve(control: socket.socket) -> list[str]:
    """Fork whenever asked to. Returns in each copy alone, with the module that it is to run, and its arguments."""
    while True:
        header, files, _, _ = socket.recv_fds(control, 8, 100)
        if not header:
            os._exit(0)
        module, environment, folder, numbers, parent = pickle.loads(_receive(control, struct.unpack("q", header)[0]))
        reader, writer = os.pipe()
        if between := os.fork():
            os.close(writer)
            os.waitpid(between, 0)
            control.sendall(os.read(reader, 8))
            for file in (reader, *files):
                os.close(file)
            continue
        if child := os.fork():
            os.write(writer, struct.pack("q", child))
            os._exit(0)
        while os.getppid() != parent:  # who is between has not ended yet
            time.sleep(0.0005)
        os.setsid()
        files = [_move_up(file) for file in files]
        os.closerange(3, 500)
        for file, number in zip(files, numbers, strict=True):
            os.dup2(file, number)
            os.close(file)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        _show(module, environment)
        sys.path[:] = [
            *environment["PYTHONPATH"].split(os.pathsep),
            *(path for path in sys.path if path not in environment["PYTHONPATH"]),
        ]
        return module


def _show(module: list[str], environment: dict[str, str]) -> None:
    """Write arguments and environment where other processes look for them."""
    start, end, env_start, env_end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49])
    command = "\0".join((sys.executable, "-m", *module)).encode()[: end - start]
    variables = b"".join(f"{name}={value}\0".encode() for name, value in environment.items())
    ctypes.memmove(start, command.ljust(end - start, b"\0"), end - start)
    if len(variables) <= env_end - env_start:
        ctypes.memmove(env_start, variables.ljust(env_end - env_start, b"\0"), env_end - env_start)


def _move_up(file: int) -> int:
    """A file under a number that nothing else has."""
    import fcntl

    return fcntl.fcntl(file, fcntl.F_DUPFD, 500)


def run_server(arguments: list[str]) -> None:
    """Run `minivllm` with these arguments, and its processes as copies."""
    from minivllm.entrypoints.cli.main import main

    nursery = Nursery()
    use(nursery)
    sys.exit(main(arguments))


if __name__ == "__main__":
    if sys.argv[1] == "minivllm":
        run_server(sys.argv[2:])
    connection = socket.socket(fileno=int(sys.argv[1]))
    for name in MODULES:
        importlib.import_module(name)
    assert "prometheus_client" not in sys.modules
    gc.collect()
    gc.freeze()
    sys.argv = serve(connection)
    connection.detach()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
