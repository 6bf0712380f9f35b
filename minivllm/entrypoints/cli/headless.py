"""`minivllm serve --headless`: runs replicas on this machine for an API server on another.

Ctrl-C or SIGTERM   the replicas get no more requests, finish what they have, and end
a second            they end now
"""

from __future__ import annotations

import logging
import signal
import threading
import time
import uuid
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from minivllm.config import EngineArgs
from minivllm.data_parallel import messages
from minivllm.data_parallel.messages import VERSION, HelloNode, NodeWelcome, Refused, hash_config
from minivllm.data_parallel.processes import LocalReplicas
from minivllm.distributed.sockets import Sockets, load_key_file, tcp_address
from minivllm.engine.engine_config import EngineConfig
from minivllm.entrypoints.server.request_log import say
from minivllm.errors import ConfigError

logger = logging.getLogger(__name__)

POLL_MS = 50
NOTICE_SECONDS = 10.0
"""How often to say that the API server does not answer."""
GONE_SECONDS = 60.0
"""The replicas end when the API server has been gone for this long."""


def run_headless(args: EngineArgs, *, restart: bool) -> int:
    """Run this machine's replicas until a signal, or until the API server or all of them are gone.

    Args:
        args: The same as the API server's, except for what this machine has of its own.
        restart: Start another replica when one dies.

    Returns:
        The exit status: 0 after a signal, 1 otherwise.

    Raises:
        ConfigError: The API server refuses them, or the arguments cannot work.
        ModelLoadError: There is no such model here.
    """
    parallel = args.parallel_config()
    if not parallel.local_ranks:
        raise ConfigError("There is nothing to run without replicas on this machine: raise --data-parallel-size-local.")
    key = load_key_file(Path(parallel.data_parallel_key_file)) if parallel.data_parallel_key_file else None
    config = EngineConfig.from_engine_args(args)
    stop = _Signals()
    sockets = Sockets(key)
    try:
        address = tcp_address(parallel.data_parallel_address, parallel.data_parallel_rpc_port)
        node_id = uuid.uuid4().hex
        connection = _Connection(sockets, address, node_id)
        welcome = connection.introduce(HelloNode(VERSION, hash_config(config), list(parallel.local_ranks), node_id), stop)
        if welcome is None:
            return 0
        offset = time.perf_counter() - welcome.clock
        names = ", ".join(map(str, parallel.local_ranks))
        say(f"minivllm: replicas {names} start, for the API server at {address}, until Ctrl-C.")
        replicas = LocalReplicas(config, welcome, sockets, node_id, restart=restart, clock_offset=offset)
        return _supervise(replicas, connection, stop)
    finally:
        sockets.close()


class _Signals:
    """Counts SIGINT and SIGTERM."""

    def __init__(self) -> None:
        self.count = 0
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._add)

    def _add(self, number: int, frame: object) -> None:
        self.count += 1


class _Connection:
    """To the API server's machine, watched."""

    EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED

    def __init__(self, sockets: Sockets, address: str, node_id: str) -> None:
        self._address = address
        self._socket = sockets.make(zmq.DEALER, LINGER=0, IDENTITY=node_id.encode())
        self._monitor = self._socket.get_monitor_socket(self.EVENTS)
        sockets.connect_to(self._socket, address)
        self.lost_since: float | None = time.monotonic()

    def introduce(self, hello: HelloNode, stop: _Signals) -> NodeWelcome | None:
        """Wait until the API server is there and welcomes the replicas. None after a signal."""
        self._socket.send(messages.encode(hello))
        notice = time.monotonic() + NOTICE_SECONDS
        while not self._socket.poll(POLL_MS):
            if stop.count:
                return None
            if time.monotonic() > notice:
                notice += NOTICE_SECONDS
                say(
                    f"minivllm: waiting for the API server at {self._address}. If it runs, check the address, the port and the key."
                )
        answer = messages.decode_from_handshake(self._socket.recv())
        if isinstance(answer, Refused):
            raise ConfigError(f"The API server at {self._address} refuses the replicas of this machine. {answer.message}")
        assert isinstance(answer, NodeWelcome)
        return answer

    def check(self) -> None:
        """Note whether the connection is there."""
        while self._monitor.poll(0):
            is_there = recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.lost_since = None if is_there else (self.lost_since or time.monotonic())

    def find_refusal(self) -> str | None:
        """Why the API server wants the replicas no longer, if it does not."""
        if self._socket.poll(0) and isinstance(answer := messages.decode_from_handshake(self._socket.recv()), Refused):
            return answer.message
        return None


def _supervise(replicas: LocalReplicas, connection: _Connection, stop: _Signals) -> int:
    is_draining = False
    try:
        while not replicas.is_done:
            time.sleep(POLL_MS / 1000)
            connection.check()
            if reason := connection.find_refusal():
                say(f"minivllm: the replicas of this machine end. {reason}")
                return 1
            if stop.count and not is_draining:
                is_draining = True
                say("minivllm: the replicas finish what they have; Ctrl-C again ends them now.")
                replicas.drain()
            if stop.count > 1:
                return 1
            if connection.lost_since is not None and time.monotonic() - connection.lost_since > GONE_SECONDS:
                say(f"minivllm: the API server has been gone for {GONE_SECONDS:.0f} seconds.")
                return 1
            for died in replicas.find_ended():
                say(f"minivllm: replica {died.engine_index}: {died.end}.")
        return 0 if is_draining else 1
    finally:
        replicas.shutdown(told=())
