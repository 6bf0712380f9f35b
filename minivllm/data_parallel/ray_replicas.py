"""Replicas on the nodes of a Ray cluster, as seen from the command that serves.

    RayReplica  ── introduce ─►  ReplicaActor                        as soon as a node has room for it
                ── start     ─►               ──►  ReplicaProcess    the one that a replica has without Ray
                ◄─ watch     ──               ◄──  notes, signs of life, its end

A `RayReplica` stands where a `ReplicaProcess` stands for one on this machine. None of its methods waits for the cluster. Mirrors
`CoreEngineActorManager` in `vllm/v1/engine/utils.py`, where the actor is the engine core itself.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from minivllm import __version__
from minivllm.data_parallel.engine_core_proc import Note, ReplicaSetup
from minivllm.data_parallel.liveness import HOPELESS
from minivllm.data_parallel.replica_actor import ActorPlace, Clock, ProcessNews, ReplicaActor
from minivllm.distributed import ray_cluster
from minivllm.engine.engine_config import EngineConfig
from minivllm.executor.processes import GRACE_SECONDS, SIGN_SECONDS, START_SECONDS

logger = logging.getLogger(__name__)

NOTICE_SECONDS, LONG_SECONDS = 10.0, 60.0
"""A replica that has no place after so long says so if the cluster is too small, and after the longer time anyway: others may use it."""
UNAVAILABLE_SECONDS = 3.0
"""How long an actor may be out of reach."""
AVOID_SECONDS = 120.0
"""How long no replica is placed on a node that seems lost."""
_NODE_DIED = "its node has died"
"""In the text of Ray's error."""
_KILLED = -9
"""The exit status of a process that was lost with its actor, which nobody could see."""
_FAILED = 1


class RayReplicas:
    """Makes the actors of replicas. Connects to the cluster.

    Attributes:
        ip: The address at which other nodes reach this one.
        num_replicas: How many there are to be.

    Raises:
        ConfigError: There is no Ray, or no cluster.
    """

    def __init__(self, config: EngineConfig) -> None:
        parallel = config.parallel_config
        self.ray = ray_cluster.import_ray()
        ray_cluster.connect(parallel.ray_address)
        self.ip, self.num_replicas = ray_cluster.own_address(), parallel.data_parallel_size
        self._resources = ray_cluster.resources_of_replica(parallel, config.worker_config.device)
        self.patience = max(HOPELESS * parallel.replica_timeout, START_SECONDS)
        self._lost_nodes: dict[str, float] = {}
        """Nodes of which replicas were lost, and when: Ray may take half a minute to notice, and would place others there."""

    def start(self, setup: ReplicaSetup, num_threads: int | None) -> RayReplica:
        """Ask for a place for a replica. It starts as soon as there is one. Ray divides the GPUs."""
        return RayReplica(self, setup, num_threads)

    def make_actor(self) -> Any:
        """Ask for a place for a replica's actor."""
        now, more = time.monotonic(), {}
        if avoided := [node_id for node_id, since in self._lost_nodes.items() if now - since < AVOID_SECONDS]:
            more["label_selector"] = {"ray.io/node-id": f"!in({','.join(avoided)})"}
        actor = self.ray.remote(ReplicaActor).options(
            num_cpus=self._resources["CPU"],
            num_gpus=self._resources.get("GPU", 0),
            scheduling_strategy="SPREAD",
            max_concurrency=4,
            runtime_env={"env_vars": ray_cluster.environment_of_actors()},
            **more,
        )
        return actor.remote()

    def note_lost(self, node_id: str) -> None:
        """A node has been lost, or so it seems."""
        self._lost_nodes[node_id] = time.monotonic()

    def look_for_room(self) -> concurrent.futures.Future[bool]:
        """Whether all nodes together have what all replicas need. Ray does not tell whether an actor that has not begun has its place.

        True also if Ray does not answer. A program that ends does not wait for the answer.
        """
        wanted = {name: self.num_replicas * amount for name, amount in self._resources.items()}
        answer: concurrent.futures.Future[bool] = concurrent.futures.Future()

        def ask() -> None:
            try:
                answer.set_result(ray_cluster.are_there(wanted))
            except Exception as error:
                logger.debug("Ray does not say what the cluster has: %s", error)
                answer.set_result(True)

        threading.Thread(target=ask, name="minivllm looks for room", daemon=True).start()
        return answer

    @property
    def needs(self) -> str:
        """What a replica needs of its node, in words."""
        names = {"CPU": "free CPU", "GPU": "free GPU"}
        parts = [f"{amount:g} {names[name]}{'s' * (amount != 1)}" for name, amount in self._resources.items() if amount]
        return " and ".join(parts) or "some memory"


class RayReplica:
    """A replica of the model in a process on some node of the cluster. Its attributes are those of `ReplicaProcess`."""

    def __init__(self, cluster: RayReplicas, setup: ReplicaSetup, num_threads: int | None) -> None:
        self.incarnation, self.process_id = setup.incarnation, 0
        self.exit_status: int | None = None
        self.ready_since: float | None = None
        self.notes: set[Note] = set()
        self.was_killed = False
        self.is_waiting = False
        """Whether it waits for a node with room."""
        self._cluster, self._ray, self._setup, self._num_threads = cluster, cluster.ray, setup, num_threads
        self._news: ProcessNews | None = None
        self._end: str | None = None
        self._since = self._latest_look = time.monotonic()
        self._killed_since: float | None = None
        self._has_told_of_silence = False
        self._room: concurrent.futures.Future[bool] | None = None
        self._next_notice = self._since + NOTICE_SECONDS
        self._actor: Any = None
        self._find_place()

    def _find_place(self) -> None:
        self._place: ActorPlace | None = None
        self._unavailable_since: float | None = None
        self._heard = time.monotonic()
        try:
            self._actor = self._cluster.make_actor()
            self._ask(self._actor.introduce.remote)
        except Exception as error:  # the head node does not answer
            self._note_end(f"could not be started: {_last_line(error)}", _FAILED)

    def poll(self) -> str | None:
        """How it ended, in words that follow "its process"; None while it runs, or waits for its place."""
        if self._end is None and self._answer.done():
            self._take(self._answer)
        now = time.monotonic()
        if self._end is None and self._unavailable_since is not None and now - self._unavailable_since > UNAVAILABLE_SECONDS:
            self._lose_node()
        if self._end is None and self._killed_since is not None and now - self._killed_since > GRACE_SECONDS:
            self._kill_actor()
            self._note_end("does not answer on its node, and was given up", _KILLED)
        if self._place is None and self._end is None and now >= self._next_notice:
            self._look_for_room(now)
        return self._end

    def _look_for_room(self, now: float) -> None:
        """Find out whether it waits for room, and not only for a process to start. Say so once."""
        if self._room is None:
            self._room = self._cluster.look_for_room()
        if not self._room.done():
            return
        has_room, self._room, self._next_notice = self._room.result(), None, now + NOTICE_SECONDS
        is_waiting = not has_room or now - self._since > LONG_SECONDS
        if is_waiting and not self.is_waiting:
            logger.warning("Replica %d waits for a node with %s.", self._setup.engine_index, self._cluster.needs)
        self.is_waiting = is_waiting

    def _take(self, answer: concurrent.futures.Future[ActorPlace | ProcessNews]) -> None:
        """The actor has answered, or is lost."""
        errors, now = self._ray.exceptions, time.monotonic()
        try:
            found = answer.result()
        except errors.ActorUnavailableError:  # the connection broke: the actor is back soon, or its node is lost
            self._unavailable_since = self._unavailable_since or now
            self._ask(self._again)
        except errors.RayActorError as error:
            if _NODE_DIED in str(error):
                self._lose_node()
            elif self._place is None:  # such as on a node without minivllm
                self._note_end(f"could not be started: {_last_line(error)}", _FAILED)
            else:
                self._note_end(f"was lost with its Ray actor{self._at}", _KILLED, was_killed=self._killed_since is None)
        except Exception as error:
            self._note_end(f"could not be started{self._at}: {_last_line(getattr(error, 'cause', None) or error)}", _FAILED)
        else:
            self._heard, self._unavailable_since = now, None
            if isinstance(found, ActorPlace):
                self._start(found)
            else:
                self._note(found)

    def _lose_node(self) -> None:
        """The node is lost. If nothing had been started there, look for another place."""
        if self._place is not None:
            self._cluster.note_lost(self._place.node_id)
        self._kill_actor()
        if self._news is None and self._killed_since is None:
            self._find_place()
        else:
            self._note_end(f"was lost with its node{self._at}", _KILLED, was_killed=self._killed_since is None)

    def _start(self, place: ActorPlace) -> None:
        self._place, self.is_waiting = place, False
        if place.version != __version__:
            self._note_end(f"could not be started{self._at}: minivllm {place.version} is there, and {__version__} here", _FAILED)
            return
        cluster = self._cluster
        start = partial(self._actor.start.remote, self._setup, self._num_threads, cluster.num_replicas, cluster.patience)
        self._ask(lambda: start(Clock.now()))

    def _note(self, news: ProcessNews) -> None:
        self._news, self.process_id = news, news.process_id
        self.notes |= news.notes
        if self.ready_since is None and Note.READY in self.notes:
            self.ready_since = self._heard
        if news.end is None:
            self._ask(lambda: self._actor.watch.remote(news))
        else:
            self._note_end(f"{news.end}{self._at}", news.exit_status or 0, was_killed=news.was_killed)

    def _ask(self, question: Callable[[], Any]) -> None:
        self._again, self._answer = question, question().future()

    def _note_end(self, end: str, status: int, *, was_killed: bool = False) -> None:
        self._end, self.exit_status, self.was_killed = end, status, was_killed

    @property
    def _at(self) -> str:
        return f" on {self._place.ip}" if self._place is not None else ""

    def kill_if_silent(self, limit: float) -> bool:
        """As for `ReplicaProcess`: its actor kills it if it is silent, and this one the actor. It may wait for its place for as long as it takes."""
        now = time.monotonic()
        if self._news is not None and self._news.is_silent and not self._has_told_of_silence:
            self._has_told_of_silence = True
            return True
        if self._place is None or now - self._latest_look > 2 * SIGN_SECONDS:
            self._heard = now
        self._latest_look = now
        if now - self._heard <= max(limit, START_SECONDS) or self._killed_since is not None or self._end is not None:
            return False
        self._killed_since = now
        self._kill_actor()
        return True

    def kill(self) -> None:
        """Kill it, without waiting until it has ended."""
        self._killed_since = self._killed_since or time.monotonic()
        if self._news is None:
            self._kill_actor()
        else:
            self._tell(self._actor.kill)

    def drain(self) -> None:
        """Let it finish what it has, and end."""
        if self._news is None:
            self.kill()
        else:
            self._tell(self._actor.drain)

    def shutdown(self, grace: float = 0.0) -> None:
        """Wait some seconds until it has ended, as it was told to; then kill it."""
        end = time.monotonic() + grace
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        self._kill_actor()

    def _tell(self, method: Any) -> None:
        with contextlib.suppress(Exception):  # it has just been lost
            method.remote()

    def _kill_actor(self) -> None:
        """End the actor's process, and with it the replica's."""
        with contextlib.suppress(Exception):  # the program ends, and Ray has ended before
            if self._actor is not None and self._ray.is_initialized():
                self._ray.kill(self._actor)


def _last_line(error: object) -> str:
    """What is wrong, at the end of Ray's long messages."""
    return str(error).strip().split("\n")[-1].strip().rstrip(".")
