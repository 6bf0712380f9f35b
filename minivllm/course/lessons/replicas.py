"""Replicas of a learner's in real processes, with the learner's client in front of them: for the last check of lesson 13."""

from __future__ import annotations

import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
from numba import cloudpickle

from minivllm.config import EngineArgs
from minivllm.course.lessons.in_flight import Delta
from minivllm.course.lessons.replica_process import LOAD, Setup
from minivllm.engine.core_handle import make_socket_folder
from minivllm.engine.core_messages import (
    AddRequest,
    CoreFailed,
    CoreReady,
    EngineCoreOutputs,
    KillReplica,
    ReplicaLoad,
    Shutdown,
    decode_from_core,
    encode,
)
from minivllm.engine.engine_config import EngineConfig
from minivllm.engine.input_processor import InputProcessor
from minivllm.executor.processes import ChildProcess
from minivllm.sampling_params import SamplingParams

OPTIONS: dict[str, Any] = {
    "model": "smollm2-135m", "dtype": "float32", "max_num_seqs": 8, "max_model_len": 256, "num_gpu_blocks_override": 128, "enforce_eager": True,
}  # fmt: skip
PATIENCE, PATIENCE_AT_START = 30.0, 300.0
"""Seconds without a message after which nothing more will come; a process may have to compile kernels first."""


@dataclass
class Replica:
    """A process, and the sockets to it."""

    process: ChildProcess
    to_core: Any
    from_core: Any


class Replicas:
    """Processes of a learner's replica class, by rank. Use it in a `with` statement, which ends them."""

    def __init__(self, replica_cls: Any, size: int = 2, **options: Any) -> None:
        self.config = EngineConfig.from_engine_args(EngineArgs(**OPTIONS | options))
        self.tokenizer = self.config.load_tokenizer()
        cache = self.config.cache_config
        self.cache_tokens = cache.block_size * (cache.num_gpu_blocks_override or 0)
        self._cls, self._context, self._num_started = cloudpickle.dumps(replica_cls), zmq.Context(), 0
        self.folder = make_socket_folder()
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, True)
        self.alive: dict[int, Replica] = {}
        self._old: list[tuple[int, Replica]] = []
        """Processes that have ended; what they have sent may still be there."""
        self._size = size

    def start(self, rank: int) -> None:
        """Start a process. It says when it is ready."""
        self._num_started += 1
        addresses = [f"ipc://{self.folder}/{name}-{self._num_started}" for name in ("to", "from")]
        sockets: list[Any] = [self._context.socket(kind) for kind in (zmq.PUSH, zmq.PULL)]
        for made, address in zip(sockets, addresses, strict=True):
            made.bind(address)
        setup = Setup(self.config.to_bytes(), self._cls, self.folder, *addresses)
        self.alive[rank] = Replica(ChildProcess("minivllm.course.lessons.replica_process", setup, 1), *sockets)

    def send(self, rank: int, message: Any) -> None:
        """Send a message to a replica; it is lost if that is gone."""
        if rank in self.alive:
            self.alive[rank].to_core.send(encode(message))

    def kill(self, rank: int) -> None:
        """The process gets a SIGKILL, from itself, whatever its other threads do: there is no time for a last word."""
        self.send(rank, KillReplica())

    def messages(self) -> Iterator[tuple[int, Any]]:
        """What has come: a rank, and a message, a load, or how its process has ended, in words."""
        for rank, replica in [*self._old, *self.alive.items()]:
            while replica.from_core.poll(0):
                kind, data = replica.from_core.recv_multipart()
                yield rank, msgspec.msgpack.decode(data, type=ReplicaLoad) if kind == LOAD else decode_from_core(data)
        for rank, replica in list(self.alive.items()):
            if (end := replica.process.poll()) is not None:
                self._old.append((rank, self.alive.pop(rank)))
                yield rank, end

    def __enter__(self) -> Replicas:
        try:
            for rank in range(self._size):
                self.start(rank)
        except BaseException:  # also an interrupt: nobody else would end them
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for rank in list(self.alive):
            self.send(rank, Shutdown())
        for replica in self.alive.values():
            replica.process.wait(2.0)
            replica.process.shutdown()  # a process ends when its standard input is closed, whatever the learner's threads do
        self._context.destroy(linger=0)
        self._remove()


@dataclass
class Written:
    """What users have read.

    Attributes:
        texts: By request.
        ends: By request, why it ended.
        events: When each piece came, in seconds, of which request, and from which replica.
        deaths: When which replica died.
        sent: The requests in the order in which they were sent to replicas; one that was sent again is there again.
    """

    texts: dict[str, str] = field(default_factory=dict)
    ends: dict[str, list[str]] = field(default_factory=dict)
    events: list[tuple[float, str, int]] = field(default_factory=list)
    deaths: list[tuple[float, int]] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)

    @property
    def moved(self) -> int:
        """How many requests were sent more than once."""
        return len(self.sent) - len(set(self.sent))

    def add(self, deltas: list[Delta], rank: int, now: float) -> None:
        """The users read."""
        for delta in deltas:
            self.events.append((now, delta.request_id, rank))
            self.texts[delta.request_id] = self.texts.get(delta.request_id, "") + delta.text
            if delta.finish_reason is not None:
                self.ends.setdefault(delta.request_id, []).append(delta.finish_reason)


class Service:
    """A learner's client in front of a learner's replicas, and the learner's coordinator between them."""

    def __init__(self, replicas: Replicas, client_cls: Any, router: Any, coordinator_cls: Any) -> None:
        self.replicas = replicas
        self.client = client_cls(router, self._send, replicas.tokenizer)
        self.router, self.coordinator = router, coordinator_cls(time.monotonic())
        configs = replicas.config.model_config, replicas.config.scheduler_config
        self._process = InputProcessor(*configs, replicas.tokenizer, replicas.cache_tokens).process_inputs
        self._written = Written()
        self._early_end = ""
        """Of a process that ended before it took requests: what is to be said of it."""

    def _send(self, rank: int, message: Any) -> None:
        if isinstance(message, AddRequest):
            self._written.sent.append(message.request.request_id)
        self.replicas.send(rank, message)

    def wait(self, size: int) -> None:
        """Until so many replicas are ready."""
        self._run(Written(), lambda: len(self.client.replicas) >= size, PATIENCE_AT_START)

    def write(
        self, prompts: tuple[str, ...], params: list[SamplingParams], kill_after: int | None = None, rank: int = 0
    ) -> Written:
        """Continue the prompts; after so many tokens kill a replica."""
        now = time.monotonic()
        self._run(Written(), lambda: time.monotonic() > now + 0.3)  # until the loads of what was written before are forgotten
        written = self._written = Written()
        for number, (prompt, how) in enumerate(zip(prompts, params, strict=True)):
            self.client.submit(self._process(f"r{number}", prompt, how).core_request)

        def is_done() -> bool:
            if kill_after is not None and not written.deaths and len(written.events) >= kill_after:
                written.deaths.append((time.monotonic(), rank))
                self.replicas.kill(rank)
            return not self.client.requests and (kill_after is None or bool(written.deaths))

        self._run(written, is_done)
        return written

    def _run(self, written: Written, is_done: Callable[[], bool], patience: float = PATIENCE) -> None:
        """Hand on messages until all is done."""
        latest = time.monotonic()
        while not is_done():
            now = time.monotonic()
            for rank, message in self.replicas.messages():
                written.add(self._take(rank, message, now) or [], rank, now)
                latest = now
            if now >= self.coordinator.due:
                for rank, load in self.coordinator.publish(now).items():
                    self.router.update(rank, load)
            if now - latest > (1.0 if self._early_end else patience):  # its last words may still be on the way
                raise AssertionError(
                    f"Two processes, of which {len(self.client.replicas)} take requests; {len(self.client.requests)} requests are in flight.\n"
                    f"Expected: they end\nGot: {self._early_end or f'nothing has come for {patience:g} seconds'}.\n"
                    "Look at `run` of the replica, whose first message is CoreReady, and at `retry` and `take` of the client."
                )
            time.sleep(0.001)

    def _take(self, rank: int, message: Any, now: float) -> list[Delta]:
        if isinstance(message, ReplicaLoad):
            self.coordinator.report(rank, message, now)
        elif isinstance(message, CoreReady):
            self.client.join(rank, self.replicas.cache_tokens)
        elif isinstance(message, EngineCoreOutputs):
            return [delta for output in message.outputs for delta in self.client.take(rank, output)]
        elif isinstance(message, CoreFailed):
            raise AssertionError(
                f"The process of replica {rank} has failed: {message.cause}\nLook at MyReplica, around which it runs."
            )
        elif rank in self.client.replicas:  # how it has ended
            self.coordinator.forget(rank)
            return self.client.lose(rank) or []
        else:
            self._early_end = f"the process of replica {rank} {message} before it took requests"
        return []
