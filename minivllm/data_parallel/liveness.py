"""Which process has each rank, and whether to believe what it says: a frontend's view of its replicas, without sockets, threads or a clock.

    absent ──ready and connected──► ready ──drains──► draining ──has left──► absent
       ▲                            │  ▲                  │
       └─────────── died ───────────┤  └─heard again─┐    │
                                    └─ silent, or messages lost ──► fenced

Events go in, decisions come out. Every process that has a rank has an incarnation of its own: a later one is a larger number. So a message
that comes late is never taken for the message of another process. A replica that is fenced may be alive, but what it has counts for nothing
any more: its requests are elsewhere. When it is heard again, it starts with none.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from minivllm.engine.core_messages import CoreDraining, CoreFailed, CoreReady, FromCore, Heartbeat

HOPELESS = 3
"""A process that has been silent for this many timeouts will not be heard again."""
MAX_REPLICAS = 1024
"""As many ranks there may be besides those of the start."""
MAX_DEAD = 64
"""Incarnations of a rank that are remembered to be dead."""


class PeerState(enum.Enum):
    """What a frontend may do with a replica."""

    ABSENT = "absent"
    READY = "ready"
    DRAINING = "draining"
    FENCED = "fenced"


@dataclass(frozen=True)
class Join:
    """A replica takes requests from now on. First it must abort what this frontend has sent it earlier."""

    rank: int
    num_gpu_blocks: int


@dataclass(frozen=True)
class Withdraw:
    """A draining replica gets no more requests, and must be told so: again and again, since that message may be lost, too.

    If it was ready before, it finishes what it has. If it was draining, it has been told before. Otherwise it must abort what this
    frontend has sent it earlier.
    """

    rank: int
    previous: PeerState


@dataclass(frozen=True)
class Lose:
    """The requests of a replica go on elsewhere.

    Attributes:
        has_died: Its process has ended, perhaps because of a request.
        was_killed: By SIGKILL.
        has_left: It was told to leave. If it has neither died nor left, it is out of reach, perhaps for a moment.
    """

    rank: int
    cause: str
    has_died: bool = False
    was_killed: bool = False
    has_left: bool = False


Decision = Join | Withdraw | Lose


@dataclass
class Peer:
    """The process that has a rank, and how those before it have fared.

    Attributes:
        incarnation: Which process; 0 if none was heard yet.
        connected: The latest process to which messages can be sent; 0 if there is none yet.
        is_ready: Whether it has said that it has loaded the model.
        ready: What it said of itself then; until then, what the process before it said.
        last_heard: When it said something, in seconds.
        next_number: That of its next message.
        outlook: While none is there: "starting" (another will come), "given up" (it died too often), or "gone".
    """

    outlook: str
    incarnation: int = 0
    state: PeerState = PeerState.ABSENT
    connected: int = 0
    is_ready: bool = False
    ready: CoreReady = field(default_factory=lambda: CoreReady(0))
    is_draining: bool = False
    last_heard: float = 0.0
    next_number: int = 0
    num_deaths: int = 0
    dead: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_DEAD))

    @property
    def is_member(self) -> bool:
        """Whether it may have requests."""
        return self.state in (PeerState.READY, PeerState.DRAINING)

    @property
    def may_return(self) -> bool:
        """Of one that is no member: whether it, or a process in its place, may be there again."""
        return self.state is PeerState.FENCED or self.outlook == "starting"


class ReplicaLiveness:
    """Decides whether each replica takes requests and is believed, from what is heard of it.

    Attributes:
        size: How many replicas there are to be.
        peers: By rank. More than that, while those that are too many leave, and when they have left.

    Args:
        timeout: Seconds of silence after which a replica is fenced.
        restarts: Whether a replica that dies is started again, until its launcher says otherwise.
        expected: Ranks that are being started.
    """

    def __init__(self, size: int, timeout: float, *, restarts: bool, expected: range = range(0)) -> None:
        self.timeout, self._restarts, self.size = timeout, restarts, size
        self.peers = [Peer("starting" if rank in expected else "gone") for rank in range(size)]

    def state_of(self, rank: int) -> str:
        """For people: "ready", "draining", "unreachable", "starting", "given up" or "gone"."""
        peer = self.peers[rank]
        names = {PeerState.ABSENT: peer.outlook, PeerState.FENCED: "unreachable"}
        return names.get(peer.state, peer.state.value)

    def make_room(self, rank: int) -> bool:
        """Have a peer of this rank. False if there is no such rank: who says so is mistaken."""
        if not 0 <= rank < max(len(self.peers), MAX_REPLICAS):
            return False
        self.peers += [Peer("gone") for _ in range(len(self.peers), rank + 1)]
        return True

    def resize(self, size: int) -> list[int]:
        """There are to be so many replicas. Returns the ranks of those that are being started."""
        started = []
        self.make_room(size - 1)
        for rank, peer in enumerate(self.peers):
            if rank in range(self.size, size) and peer.state is PeerState.ABSENT:
                peer.outlook = "starting"
                started.append(rank)
            elif rank >= size and peer.state is PeerState.ABSENT:
                peer.outlook = "gone"
        self.size = size
        return started

    # -- events --------------------------------------------------------------------------------------------------

    def connect(self, rank: int, incarnation: int) -> list[Decision]:
        """A process with this rank has made a connection to send to. If it had one before, what was sent there may be lost."""
        peer = self.peers[rank]
        peer.connected = max(peer.connected, incarnation)
        if incarnation != peer.incarnation:  # it will be admitted when it is heard, unless its successor was
            return []
        if peer.is_member:
            return self._fence(rank, "its connection broke, and messages to it may be lost")
        return self._admit(rank)

    def hear(self, rank: int, incarnation: int, number: int, message: FromCore, now: float) -> list[Decision]:
        """A process has sent a message. It numbers them from 0 on."""
        peer, decisions = self.peers[rank], list[Decision]()
        if incarnation in peer.dead or (peer.is_member and incarnation < peer.incarnation):  # another has taken its place
            return []
        if incarnation != peer.incarnation:
            decisions += self._lose(rank, "another process has taken its place", has_died=True, was_killed=True)  # who knows
            if peer.incarnation:
                peer.dead.append(peer.incarnation)
            peer.incarnation, peer.is_ready, peer.is_draining, peer.state = incarnation, False, False, PeerState.ABSENT
        elif number != peer.next_number:
            decisions += self._fence(rank, "messages from it were lost")
        peer.next_number, peer.last_heard = number + 1, now
        if isinstance(message, CoreReady | Heartbeat):
            peer.is_ready, peer.ready = True, CoreReady(message.num_gpu_blocks, rank, message.process_id)
            peer.is_draining |= isinstance(message, Heartbeat) and message.is_draining
            decisions += self._admit(rank)
        elif isinstance(message, CoreDraining) and message.is_drained:
            decisions += self._lose(rank, "it left", has_left=True)
            self._end(peer, incarnation, "starting" if message.returns else "gone")
        elif isinstance(message, CoreDraining):
            peer.is_draining = True
            decisions += self._admit(rank)
        elif isinstance(message, CoreFailed):
            decisions += self._lose(rank, message.cause, has_died=True, was_killed=message.was_killed)
            self._end(peer, incarnation, self._default_outlook)
        return decisions

    def is_believed(self, rank: int, incarnation: int) -> bool:
        """Whether the outputs of a process count: it has its rank, and has not been fenced or lost."""
        peer = self.peers[rank]
        return peer.incarnation == incarnation and peer.is_member

    def note_death(
        self, rank: int, incarnation: int, cause: str, *, has_died: bool = True, was_killed: bool = False, outlook: str = ""
    ) -> list[Decision]:
        """A process has ended, says who started it. The outlook is as in `Peer`; "" if it is not known."""
        peer = self.peers[rank]
        if incarnation < peer.incarnation:
            peer.dead.append(incarnation)
            return []
        decisions = self._lose(rank, cause, has_died=has_died, was_killed=was_killed, has_left=not has_died)
        self._end(peer, incarnation, outlook or self._default_outlook)
        return decisions

    def find_silent(self, now: float) -> list[Decision]:
        """Fence the replicas that have been silent for too long."""
        silent = [rank for rank, peer in enumerate(self.peers) if peer.is_member and now - peer.last_heard > self.timeout]
        return [
            decision
            for rank in silent
            for decision in self._fence(rank, f"nothing was heard from it for {self.timeout:g} seconds")
        ]

    def find_hopeless(self, now: float) -> list[tuple[int, int]]:
        """Ranks and incarnations of processes that should have ended: they have been silent for too long, or failed too long ago."""
        return [
            (rank, peer.incarnation)
            for rank, peer in enumerate(self.peers)
            if (peer.is_ready or peer.incarnation in peer.dead) and now - peer.last_heard > HOPELESS * self.timeout
        ]

    def excuse_silence(self, now: float) -> None:
        """Nobody was listened to for a while: that was not their silence."""
        for peer in self.peers:
            peer.last_heard = now

    # -- decisions -----------------------------------------------------------------------------------------------

    def _admit(self, rank: int) -> list[Decision]:
        """A replica that is there takes requests, as soon as messages can be sent to it. A draining one is told once more."""
        peer = self.peers[rank]
        if not peer.is_ready or peer.connected != peer.incarnation:
            return []
        previous, peer.state = peer.state, PeerState.DRAINING if peer.is_draining else PeerState.READY
        if peer.is_draining:
            return [Withdraw(rank, previous)]
        return [] if previous is PeerState.READY else [Join(rank, peer.ready.num_gpu_blocks)]

    def _fence(self, rank: int, cause: str) -> list[Decision]:
        """A replica is out of reach, or was for a moment: do without it until it is heard again."""
        decisions = self._lose(rank, cause)
        if decisions:
            self.peers[rank].state = PeerState.FENCED
        return decisions

    def _lose(
        self, rank: int, cause: str, *, has_died: bool = False, was_killed: bool = False, has_left: bool = False
    ) -> list[Decision]:
        return [Lose(rank, cause, has_died, was_killed, has_left)] if self.peers[rank].is_member else []

    def _end(self, peer: Peer, incarnation: int, outlook: str) -> None:
        """A process is gone for good."""
        if incarnation not in peer.dead:
            peer.dead.append(incarnation)
        peer.state, peer.is_ready, peer.outlook = PeerState.ABSENT, False, outlook

    @property
    def _default_outlook(self) -> str:
        return "starting" if self._restarts else "gone"
