"""Two network namespaces with a link between them that takes its time and loses packets. Needs neither root nor a kernel module but tun."""

from __future__ import annotations

import contextlib
import heapq
import os
import random
import select
import socket
import subprocess
import sys
import textwrap
import threading
import time

MAKE_NAMESPACE = """
import fcntl, os, socket, struct, subprocess, sys
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
tun = os.open("/dev/net/tun", os.O_RDWR)
fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", b"link0", IFF_TUN | IFF_NO_PI))
for command in ("ip link set lo up", f"ip addr add {sys.argv[1]}/24 dev link0", "ip link set link0 up"):
    subprocess.run(command.split(), check=True)
with socket.socket(fileno=int(sys.argv[2])) as channel:
    socket.send_fds(channel, [b"ready"], [tun])
sys.stdin.read()
"""


class Node:
    """A namespace with an address."""

    def __init__(self, address: str) -> None:
        self.address = address
        ours, theirs = socket.socketpair()
        with theirs:
            code = textwrap.dedent(MAKE_NAMESPACE)
            command = ["unshare", "-Urn", sys.executable, "-c", code, address, str(theirs.fileno())]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(theirs.fileno(),))
        with ours:
            ours.settimeout(20)
            message, descriptors, _, _ = socket.recv_fds(ours, 16, 1)
        assert message == b"ready"
        (self.tun,) = descriptors

    def command(self, *arguments: str) -> list[str]:
        """What runs a command in this namespace."""
        return ["nsenter", "--preserve-credentials", "-U", "-n", "-t", str(self._process.pid), "--", *arguments]

    def close(self) -> None:
        """Remove it."""
        self._process.communicate()
        os.close(self.tun)


class Link:
    """Carries packets between two nodes, each after a delay, and loses some: all of them while `is_cut`."""

    def __init__(self, nodes: tuple[Node, Node], delay: float, loss: float, seed: int = 0) -> None:
        self._others = {nodes[0].tun: nodes[1].tun, nodes[1].tun: nodes[0].tun}
        self._delay, self._loss, self._rng = delay, loss, random.Random(seed)
        self.num_carried = self.num_lost = 0
        self.is_cut = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _carry(self) -> None:
        queue: list[tuple[float, int, int, bytes]] = []
        while not self._over.is_set():
            wait = max(0.0, queue[0][0] - time.monotonic()) if queue else 0.1
            for tun in select.select(list(self._others), [], [], wait)[0]:
                packet = os.read(tun, 65536)
                if self.is_cut or self._rng.random() < self._loss:
                    self.num_lost += 1
                    continue
                self.num_carried += 1
                heapq.heappush(queue, (time.monotonic() + self._delay, self.num_carried, self._others[tun], packet))
            while queue and queue[0][0] <= time.monotonic():
                _, _, tun, packet = heapq.heappop(queue)
                with contextlib.suppress(OSError):
                    os.write(tun, packet)

    def close(self) -> None:
        """Carry nothing any more."""
        self._over.set()
        self._thread.join()


@contextlib.contextmanager
def two_nodes(delay: float, loss: float):
    """Two nodes and the link between them."""
    nodes: list[Node] = []
    try:
        for address in ("10.77.0.1", "10.77.0.2"):
            nodes.append(Node(address))
        link = Link((nodes[0], nodes[1]), delay, loss)
        try:
            yield nodes[0], nodes[1], link
        finally:
            link.close()
    finally:
        for node in nodes:
            node.close()


def why_not() -> str | None:
    """Why there can be no namespaces here."""
    try:
        subprocess.run(["unshare", "-Urn", "ip", "link"], check=True, capture_output=True, timeout=20)
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except (OSError, subprocess.SubprocessError) as error:
        return f"no network namespaces: {error}"
    return None
