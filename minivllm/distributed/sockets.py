"""The sockets between API servers, the coordinator and replicas: files on one machine, TCP between several.

Over TCP they are encrypted with CURVE, and both ends must have the same key file. Without one, nothing listens on an address that another
machine can reach.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import logging
import math
import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from minivllm.errors import ConfigError

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How often to look whether files of sockets are there."""
PING_SECONDS, LOST_SECONDS = 1.0, 10.0
"""A silent connection is pinged. If nothing arrives within `LOST_SECONDS`, it is lost, and made again."""


MAX_MESSAGE_BYTES, MAX_HANDSHAKE_BYTES = 64 * 2**20, 64 * 2**10
"""Longer messages end their connection: a peer without a key must not fill the memory."""


HANDSHAKE_SECONDS, MAX_STRANGERS = 5.0, 64
"""How long a connection may take to show a key, and how many that have not may be there: each takes a file descriptor."""


class KeyPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A CURVE key pair, as text. All ends use the same."""

    public: str
    secret: str


def make_key() -> KeyPair:
    """A new key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def make_key_file(path: Path) -> None:
    """Write a new key pair that only this user may read.

    Raises:
        ConfigError: The file exists, or cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): name a new file.") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(make_key())) + b"\n")


def load_key_file(path: Path) -> KeyPair:
    """The key pair in a file.

    Raises:
        ConfigError: There is none, or others may read it.
    """
    try:
        mode, content = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"There is no key file {path} that can be read ({error.strerror}): `minivllm make-key {path}` makes one."
        ) from None
    if mode & 0o077:
        raise ConfigError(f"Other users may read the key in {path}: `chmod 600 {path}`, or make another.")
    try:
        key = msgspec.json.decode(content, type=KeyPair)
        if zmq.curve_public(key.secret.encode()).decode() != key.public:
            raise ValueError("its two halves do not belong together")
    except (ValueError, zmq.ZMQError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} is not a key file ({error}): `minivllm make-key {path}` makes one.") from None
    return key


def check_may_listen(host: str, key: KeyPair | None) -> None:
    """Raise a ConfigError if another machine could connect without a key, or none could."""
    try:
        found = {str(item[4][0]).partition("%")[0] for item in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise ConfigError(f"data_parallel_address is {host!r}, which is no address ({error.strerror}).") from None
    addresses = [ipaddress.ip_address(address) for address in found]
    if any(address.is_unspecified for address in addresses):
        raise ConfigError(f"data_parallel_address is {host}, to which nobody can connect: use this machine's address.")
    if key is None and not all(address.is_loopback for address in addresses):
        raise ConfigError(
            f"data_parallel_address is {host}, where other machines can connect, and there is no data_parallel_key_file: anyone could use "
            "the replicas. `minivllm make-key FILE` makes one; copy it to all machines."
        )


def make_private_folder(folder: Path) -> None:
    """Make a folder that only this user may enter, unless it is there. Raises OSError if it cannot be made, or belongs to somebody else."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "others have made a folder there")


def tcp_address(host: str, port: int) -> str:
    """A TCP address as ZeroMQ writes it."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class Sockets:
    """Makes sockets of one ZeroMQ context, encrypted with the key; without one, only this user, or this machine, must be able to reach them."""

    def __init__(self, key: KeyPair | None = None) -> None:
        self.context = zmq.Context()
        self.key = key
        self._authenticator: ThreadAuthenticator | None = None
        self._files: list[tuple[zmq.Socket[bytes], Path]] = []
        """The sockets that listen on a file."""
        self._next_look, self._are_lost = 0.0, False

    def bind(self, kind: int, address: str, **options: int) -> tuple[zmq.Socket[bytes], str]:
        """A socket that listens, and its address, in which port 0 has become a free one."""
        made = self.make(kind, **options)
        if self.key is not None:
            self._start_authenticator()
            made.setsockopt(zmq.CURVE_SERVER, 1)
            made.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE_SECONDS))
            made.setsockopt(zmq.ZAP_DOMAIN, b"minivllm")
            made.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without the authenticator all are refused, not accepted
        _watch_over_tcp(made, address)
        made.bind(address)
        endpoint = made.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        if address.startswith("ipc://"):
            self._files.append((made, Path(address.removeprefix("ipc://"))))
        return made, endpoint.rstrip(b"\0").decode()

    def restore_files(self, unless: Callable[[], bool] = lambda: False) -> str | None:
        """Listen again on files that somebody has removed, perhaps a cleaner of /tmp: connections outlive them, but nobody can make another.

        Call this often, in the thread of the sockets. It looks once a second. Returns what was done, or why it cannot be, once, in words.
        Files that are gone stay so if `unless` says that this process is about to exit: others have removed them, as they exit, too.
        """
        if (now := time.monotonic()) < self._next_look:
            return None
        self._next_look = now + LOOK_SECONDS
        lost = [(listening, path) for listening, path in self._files if not path.exists()]
        if lost and unless():
            return None
        had_lost, self._are_lost = self._are_lost, bool(lost)
        try:
            for listening, path in lost:
                make_private_folder(path.parent)
                listening.bind(f"ipc://{path}")
        except (OSError, zmq.ZMQError) as error:
            why = f"Sockets in {lost[0][1].parent} were removed, and cannot be made again ({error.strerror})"
            return None if had_lost else f"{why}: processes that are started from now on cannot connect."
        self._are_lost = False
        return f"Sockets in {lost[0][1].parent} were removed, perhaps by a cleaner, and made again." if lost else None

    def connect(self, kind: int, address: str, **options: Any) -> zmq.Socket[bytes]:
        """A socket that connects, now or as soon as there is a listener."""
        made = self.make(kind, **options)
        self.connect_to(made, address)
        return made

    def connect_to(self, made: zmq.Socket[bytes], address: str) -> None:
        """Connect a socket of `make`."""
        if self.key is not None:
            made.setsockopt(zmq.CURVE_SERVERKEY, self.key.public.encode())
        _watch_over_tcp(made, address)
        made.connect(address)

    def close(self, linger: int = 0) -> None:
        """Close all sockets."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self.context.destroy(linger=linger)

    def make(self, kind: int, **options: Any) -> zmq.Socket[bytes]:
        """A socket that is not connected yet, with options by their names in `zmq`."""
        made = self.context.socket(kind)
        made.setsockopt(zmq.IPV6, 1)
        made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, int(1000 * LOST_SECONDS / 2))
        if self.key is not None:
            made.setsockopt(zmq.CURVE_PUBLICKEY, self.key.public.encode())
            made.setsockopt(zmq.CURVE_SECRETKEY, self.key.secret.encode())
        for name, value in options.items():
            made.setsockopt(getattr(zmq, name), value)
        return made

    def _start_authenticator(self) -> None:
        """Only a peer that has our key may connect: one that knows only the public half may not."""
        if self._authenticator is None:
            assert self.key is not None
            quiet = logging.getLogger("zmq.auth")
            quiet.setLevel(logging.CRITICAL + 1)  # it logs in a thread of its own, and loggers here may use sockets
            self._authenticator = ThreadAuthenticator(self.context, log=quiet)
            self._authenticator.start()
            ours = self.key.public.encode()
            only_ours = SimpleNamespace(callback=lambda domain, key: hmac.compare_digest(key, ours))
            self._authenticator.configure_curve_callback("minivllm", only_ours)


def _watch_over_tcp(made: zmq.Socket[bytes], address: str) -> None:
    """Ping over TCP. On one machine a connection ends with a process, and one whose process is stopped must not be given up."""
    if address.startswith("tcp:"):
        made.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * PING_SECONDS))
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * LOST_SECONDS))


class RefusalLog:
    """Logs connections to a listening socket that were refused: with another key, or that speak another protocol. If too many have not shown
    a key yet, the socket takes no new ones until these have had their time. Those that are there stay."""

    EVENTS = (
        zmq.EVENT_ACCEPTED
        | zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    )
    PAUSE_SECONDS = 10.0
    """Not more than one line in this time: who is refused tries again."""

    def __init__(self, watched: zmq.Socket[bytes]) -> None:
        self.monitor = watched.get_monitor_socket(self.EVENTS)
        self._count, self._said = 0, -math.inf
        self._socket, self._num_strangers = watched, 0
        endpoint = watched.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self._address = endpoint.rstrip(b"\0").decode()
        self._listens_from: float | None = None
        """When to listen again; None while it listens."""

    def take(self) -> None:
        """Count what there is, and log it now and then. Call this often, in the thread of the socket."""
        while self.monitor.poll(0):
            message = recv_monitor_message(self.monitor)
            endpoint, event = message["endpoint"].decode(), message["event"]
            self._num_strangers = max(0, self._num_strangers + (1 if event == zmq.EVENT_ACCEPTED else -1))
            if event in (zmq.EVENT_ACCEPTED, zmq.EVENT_HANDSHAKE_SUCCEEDED):
                continue
            self._count += 1
            if time.monotonic() - self._said > self.PAUSE_SECONDS:
                times = "once" if self._count == 1 else f"{self._count} times"
                logger.warning("Refused a connection to %s, %s: it has another key, or none, or is no replica.", endpoint, times)
                self._count, self._said = 0, time.monotonic()
        self._limit_strangers(time.monotonic())

    @property
    def is_full(self) -> bool:
        """Whether it takes no new connections."""
        return self._listens_from is not None

    def _limit_strangers(self, now: float) -> None:
        if self._listens_from is None and self._num_strangers > MAX_STRANGERS and self._address.startswith("tcp:"):
            logger.warning("More than %d connections to %s show no key: no new ones for a moment.", MAX_STRANGERS, self._address)
            self._socket.unbind(self._address)
            self._listens_from = now + HANDSHAKE_SECONDS
        elif self._listens_from is not None and now >= self._listens_from:
            try:
                self._socket.bind(self._address)
            except zmq.ZMQError:  # no file descriptor is left, or the port is still in use
                self._listens_from = now + 1.0
            else:
                self._listens_from, self._num_strangers = None, 0
