"""Runs a submission's cells in a kernel of their own, and stops cells that run too long, print too much or use too much memory.

A cell that hangs is interrupted, and the rest still runs. If a cell takes the kernel down, everything is rerun in a new kernel without
that cell, so a learner keeps the points for what works.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

from minivllm.course.grading import bubblewrap
from minivllm.course.grading.limits import CellRun, Limits, Output, Surroundings, Watch
from minivllm.course.grading.submissions import Cell

_START_SECONDS = 180
_LAST_WORDS_SECONDS = 1.0
"""How long to wait for output after the kernel has reported the end of a cell."""
_MOST_STARTS = 12
_LARGEST_MESSAGE = 16_000_000
MOST_WAITED = 0.2
"""A cell that ran too long is retried if it waited for a processor for more than this share of the time."""
_ENDS_KERNEL = frozenset({"deaf", "dead", "memory", "disk"})


class KernelDidNotStart(RuntimeError):  # noqa: N818
    """The kernel of a submission did not respond."""


def run_cells(cells: Sequence[Cell], surroundings: Surroundings, limits: Limits, stopped: Event) -> dict[int, CellRun]:
    """Run the code cells of a notebook, until `stopped` is set.

    Returns:
        The outcome of each cell that was run, by its index in `cells`.

    Raises:
        KernelDidNotStart: A kernel did not start, or `stopped` was set.
    """
    runs: dict[int, CellRun] = {}
    ended: set[int] = set()
    seconds_left = limits.total_seconds
    for _ in range(_MOST_STARTS):
        with Kernel(surroundings, limits, stopped) as kernel:
            start = time.monotonic()
            last = _run_once(kernel, cells, runs, ended, seconds_left)
            seconds_left -= time.monotonic() - start
        if last is None or seconds_left <= 0:
            break
        ended |= {last} | {index for index in runs if cells[index].kind == "check"}
    return runs


def _run_once(kernel: Kernel, cells: Sequence[Cell], runs: dict[int, CellRun], skip: set[int], seconds: float) -> int | None:
    """Run all cells except `skip`; return the index of the cell that took the kernel down, if one did.

    A check that hangs has all the time of a cell. Those after it get less, so that the time for the notebook lasts for those that pass.
    """
    deadline = time.monotonic() + seconds
    number = 0
    for index, cell in enumerate(cells):
        if cell.cell_type != "code":
            continue
        number += 1
        if index in skip:
            continue
        hangs = any(run.status in ("slow", "deaf") for index, run in runs.items() if cells[index].kind == "check")
        most = kernel.surroundings.seconds_after_a_hang(cell) if hangs and cell.kind == "check" else math.inf
        run = kernel.run(cell, number, deadline, most_seconds=most)
        if run.passed:
            kernel.observe(cell, number, deadline, run)
        runs[index] = run
        if run.status == "late":
            return None
        if run.status in _ENDS_KERNEL:
            return index
    return None


class Kernel:
    """A kernel in its own temporary folder.

    Args:
        surroundings, limits: Of the submission.
        stopped: Ends it early.
    """

    def __init__(self, surroundings: Surroundings, limits: Limits, stopped: Event) -> None:
        import zmq
        from jupyter_client.blocking import BlockingKernelClient
        from jupyter_client.connect import write_connection_file

        self._limits = limits
        self._stopped = stopped
        self.surroundings = surroundings
        self._stack = contextlib.ExitStack()
        # Short, because paths of sockets are limited to about a hundred characters.
        folder = tempfile.TemporaryDirectory(prefix="grade-", ignore_cleanup_errors=True)
        self._folder = Path(self._stack.enter_context(folder)).resolve()
        self._workplace = self._folder / "work"
        context = zmq.Context()
        context.setsockopt(zmq.MAXMSGSIZE, _LARGEST_MESSAGE)
        context.setsockopt(zmq.LINGER, 0)
        self._stack.callback(context.destroy, linger=0)
        file = str(self._folder / "k.json")
        write_connection_file(file, ip=str(self._folder / "k"), key=secrets.token_hex(16).encode(), transport="ipc")
        self._client = BlockingKernelClient(context=context)
        self._client.load_connection_file(file)
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> Kernel:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()
        self._stack.close()

    def _start(self) -> None:
        workplace = self._workplace
        workplace.mkdir()
        settings = {
            "workplace": str(workplace),
            "preload": self.surroundings.preload,
            "imports": self.surroundings.imports,
            "unreadable": [str(path) for path in self.surroundings.unreadable],
            "unwritable": [str(path) for path in self.surroundings.unwritable],
            "writable": [str(bubblewrap.COMPILED)] if self.surroundings.sandboxed else [],
            "kept_output": self._limits.kept_output,
            "most_output": self._limits.most_output,
            "most_file_bytes": self._limits.written_bytes,
        }
        (self._folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
        package = str(Path(__file__).resolve().parents[3])
        # With pytest's variable set, ipykernel would not capture output at the file descriptor level.
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        environment |= {
            "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
            # Spinning threads would slow down its neighbours.
            "OMP_NUM_THREADS": str(self.surroundings.num_threads),
            "NUMBA_NUM_THREADS": str(self.surroundings.num_threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "IPYTHONDIR": str(self._folder / "ipython"),
            "JUPYTER_CONFIG_DIR": str(self._folder / "config"),
            "TMPDIR": str(workplace),
        }
        code = "from minivllm.course.grading.kernel import main; main()"
        options = ["-f", str(self._folder / "k.json"), "--HistoryManager.enabled=False"]
        command = [sys.executable, "-c", code, str(self._folder / "settings.json"), *options]
        if self.surroundings.sandboxed:
            command = bubblewrap.wrap(command, self._folder, environment)
        else:
            environment["JPY_PARENT_PID"] = str(os.getpid())  # it exits with the grader
        self._process = subprocess.Popen(
            command, cwd=workplace, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._iopub, self._shell = self._client.connect_iopub(), self._client.connect_shell()
        deadline = time.monotonic() + _START_SECONDS
        heard = answered = False
        while not (heard and answered):  # output sent before the subscription is lost
            if self._stopped.is_set() or time.monotonic() > deadline or self._process.poll() is not None:
                raise KernelDidNotStart("Python could not be started for this notebook.")
            self._client.session.send(self._shell, "kernel_info_request", {})
            self._wait(0.5)
            while message := self._receive(self._shell):
                answered = answered or message["msg_type"] == "kernel_info_reply"
            while self._receive(self._iopub):
                heard = True

    def observe(self, cell: Cell, number: int, deadline: float, run: CellRun) -> None:
        """Run a check that passed once more, with other input, and add what it saw to its run."""
        observer = self.surroundings.observer
        if observer is None:
            return
        order = {"kind": "observe", "seed": observer.seed}
        observed = self.run(replace(cell, source=observer.sources.get(cell.cell_id, cell.source)), number, deadline, order)
        run.observations, run.observer_run = observed.observations or "", observed
        run.starved = run.starved or observed.starved
        if observed.status in _ENDS_KERNEL or observed.status == "late":
            run.status = observed.status

    def run(
        self, cell: Cell, number: int, deadline: float, more: dict[str, Any] | None = None, most_seconds: float = math.inf
    ) -> CellRun:
        """Run one cell.

        Args:
            cell: A code cell.
            number: Its execution count.
            deadline: When the time for the whole notebook is up, in seconds of `time.monotonic`.
            more: Further fields of the order to the kernel.
            most_seconds: Its time, if that is less than a cell may take.
        """
        receipt = secrets.token_hex(16)
        order = {"kind": cell.kind, "number": number, "receipt": receipt} | (more or {})
        content = {"code": cell.source, "silent": False, "store_history": True, "user_expressions": order}
        content |= {"allow_stdin": False, "stop_on_error": False}
        now = time.monotonic()
        limit = min(self._limits.cell_seconds, most_seconds)
        watch = Watch(min(now + limit, deadline), is_last=deadline < now + limit)
        if now >= deadline:
            return CellRun("late")
        message_id = self._client.session.send(self._shell, "execute_request", content)["header"]["msg_id"]
        output = Output(self._limits)
        waited = self._waited_seconds()
        self._waited_at_limit: float | None = None
        reply = self._await_reply(message_id, output, watch)
        run = CellRun(outputs=output.kept, seconds=time.monotonic() - now, limit=limit)
        if self._waited_at_limit is not None:
            run.starved = self._waited_at_limit - waited > MOST_WAITED * (watch.deadline - now)
        if reply is None:
            run.status = watch.reason or "dead"
            if run.status in ("slow", "loud"):
                run.status = "deaf"
            return run
        until = time.monotonic() + _LAST_WORDS_SECONDS
        while not output.is_idle and time.monotonic() < until:
            self._wait(0.05)
            self._listen(message_id, output)
        run.error = str(reply.get("ename") or ""), str(reply.get("evalue") or "")
        run.status = watch.reason or (
            "loud" if run.error[0] == "TooMuchOutput" else "ok" if reply.get("status") == "ok" else "error"
        )
        refused = reply.get("refused")
        run.refused = [str(what) for what in refused] if isinstance(refused, list) else []
        answer, observations = reply.get("receipt"), reply.get("observations")
        run.observations = observations if isinstance(observations, str) else None
        run.passed = (
            order["kind"] == "check"
            and watch.reason is None
            and isinstance(answer, str)
            and hmac.compare_digest(answer.encode(), receipt.encode())
        )
        return run

    def _await_reply(self, message_id: str, output: Output, watch: Watch) -> dict[str, Any] | None:
        """The kernel's reply at the end of a cell; None if the kernel exited or was killed."""
        while True:
            self._wait(0.1)
            if self._stopped.is_set():
                raise KernelDidNotStart("Grading was stopped.")
            self._listen(message_id, output)
            while message := self._receive(self._shell):
                if message["parent_header"].get("msg_id") == message_id and message["msg_type"] == "execute_reply":
                    return message["content"]
            if self._process.poll() is not None:
                return None
            if watch.is_due("memory", 0.2) and self._memory() > self._limits.memory_bytes:
                watch.reason = "memory"
                self._kill()
                return None
            if watch.is_due("disk", 2) and self._written() > self._limits.written_bytes:
                watch.reason = "disk"
                self._kill()
                return None
            reason = watch.look(output)
            if watch.reason in ("slow", "late") and self._waited_at_limit is None:
                self._waited_at_limit = self._waited_seconds()
            if reason == "interrupt":
                self._interrupt()
            elif reason == "kill":
                self._kill()
                return None

    def _wait(self, seconds: float) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(self._shell, zmq.POLLIN)
        poller.register(self._iopub, zmq.POLLIN)
        poller.poll(seconds * 1000)

    def _listen(self, message_id: str, output: Output) -> None:
        for _ in range(200):  # then check the time
            message = self._receive(self._iopub)
            if message is None:
                return
            if message["parent_header"].get("msg_id") == message_id:
                output.add(message)

    def _receive(self, socket: Any) -> dict[str, Any] | None:
        """The next message, or None; malformed or wrongly signed ones are skipped."""
        import zmq

        for _ in range(100):
            try:
                _, message = self._client.session.recv(socket, mode=zmq.NOBLOCK)
            except Exception:
                continue
            if message is None:
                return None
            parts = (message.get("parent_header"), message.get("content"))
            if all(isinstance(part, dict) for part in parts) and isinstance(message.get("msg_type"), str):
                return message
        return None

    def _family(self) -> list:
        import psutil

        try:
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.Error:
            return []

    def _memory(self) -> int:
        import psutil

        total = 0
        for process in self._family():
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    def _waited_seconds(self) -> float:
        """How long the kernel was ready to run while something else had the processor, for its longest-waiting thread so far.

        Linux counts that; elsewhere it is 0.
        """
        process_id = bubblewrap.kernel_process(self._process.pid) if self.surroundings.sandboxed else self._process.pid
        waited = [0.0]
        for file in Path(f"/proc/{process_id}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                waited.append(int(file.read_text().split()[1]) / 1e9)
        return max(waited)

    def _written(self) -> int:
        """Bytes on disk in the kernel's folder; stops counting above the limit."""
        total = 0
        for folder, _, names in os.walk(self._folder):
            for name in names:
                with contextlib.suppress(OSError):
                    total += (Path(folder) / name).lstat().st_blocks * 512
            if total > self._limits.written_bytes:
                break
        return total

    def _interrupt(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.surroundings.sandboxed:
                os.kill(bubblewrap.kernel_process(self._process.pid), signal.SIGINT)
            else:
                os.killpg(self._process.pid, signal.SIGINT)

    def _kill(self) -> None:
        """Kill the kernel and everything it started."""
        import psutil

        if self._process is None:
            return
        family = self._family()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in (*family, *([] if self.surroundings.sandboxed else self._strays())):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()

    def _strays(self) -> list:
        """Processes that left the kernel's process tree, recognized by its folder in their environment."""
        import psutil

        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get("TMPDIR") == str(self._workplace):
                    found.append(process)
        return found
