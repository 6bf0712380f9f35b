"""What replicas, the coordinator and API servers say to each other besides requests and outputs, as strict MessagePack.

At the start, on the coordinator's handshake socket (DEALER to ROUTER):

    API server   HelloFrontend  ─►  FrontendWelcome, or Refused           where loads are published
                 ScaleReplicas  ─►  the loads tell it to all
    node         HelloNode      ─►  NodeWelcome, or Refused               where its replicas connect to

From then on, replicas report (PUSH to PULL), and the coordinator publishes (XPUB to SUB). Mirrors the handshake of
`vllm/v1/engine/utils.py`, where each engine makes it for itself; here the command that starts a node's replicas does, and says what is wrong.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from minivllm import __version__
from minivllm.core.async_scheduler import AsyncScheduler
from minivllm.core.pipeline_scheduler import PipelineScheduler
from minivllm.core.scheduler import Scheduler
from minivllm.engine.core_messages import ReplicaLoad
from minivllm.engine.engine_config import EngineConfig
from minivllm.executor.processes import LogMessage, Message

VERSION = __version__
"""Replicas and API servers must have the same."""


class HelloFrontend(Message):
    """An API server, and where it listens: for replicas to take requests from, and to send outputs to."""

    client_index: int
    input_address: str
    output_address: str


class FrontendWelcome(Message):
    """Where an API server gets the loads."""

    publish_address: str


class HelloNode(Message):
    """A node wants to start replicas of these ranks, which are made with a configuration of this hash.

    From then on it must say `NodeAlive` under the same id, every second.
    """

    version: str
    config_hash: str
    ranks: list[int]
    node_id: str


class NodeWelcome(Message):
    """Where replicas connect to.

    Attributes:
        input_addresses, output_addresses: Sockets of each API server, in their order.
        clock: The time on the API servers' machine, in seconds of `time.perf_counter`.
        epoch: Larger than that of any node that was welcomed before, for `ReplicaProcess.incarnation`.
    """

    input_addresses: list[str]
    output_addresses: list[str]
    report_address: str
    clock: float
    epoch: int = 0


class ScaleReplicas(Message):
    """There are to be so many replicas. The coordinator publishes it with the loads, and the API server that starts them acts."""

    size: int


class Refused(Message):
    """Why a node or an API server cannot take part."""

    message: str


class LoadReport(Message):
    """How busy a replica is; None when it ends."""

    engine_index: int
    load: ReplicaLoad | None


class NodeAlive(Message):
    """A node has these ranks, whether their replicas run or not: no other node may take them. If one has, because this node was out of reach,
    the coordinator answers with a `Refused` on the handshake socket."""

    node_id: str
    ranks: list[int]


class ReplicaDied(Message):
    """A replica's process has ended: said by the node that started it, and passed on to all API servers.

    Attributes:
        end: How, in words.
        has_died: Whether it ended by itself, and not because it was to leave.
        was_killed: Whether it was killed by SIGKILL, and not by its node.
        num_deaths: How often processes of this rank have died on that node.
        outlook: As in `Peer`: whether another one is started.
    """

    engine_index: int
    incarnation: int
    end: str
    has_died: bool
    was_killed: bool
    num_deaths: int
    outlook: str


class Loads(Message):
    """How busy all replicas are, by rank; and how many there are to be."""

    loads: dict[int, ReplicaLoad]
    size: int


class CoordinatorLog(LogMessage):
    """A log record for the API servers' log."""


Report = LoadReport | NodeAlive | ReplicaDied
Published = Loads | ReplicaDied | CoordinatorLog
ToHandshake = HelloFrontend | HelloNode | ScaleReplicas
FromHandshake = FrontendWelcome | NodeWelcome | Refused

_HEADER, _IDENTITY = struct.Struct("<QQ"), struct.Struct("<cHQ")
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: ToHandshake | FromHandshake | Report | Published) -> bytes:
    """A message as MessagePack."""
    return _ENCODER.encode(message)


# Each raises a `msgspec.DecodeError` for anything else.
decode_to_handshake: Callable[[bytes], ToHandshake] = msgspec.msgpack.Decoder(ToHandshake).decode
decode_from_handshake: Callable[[bytes], FromHandshake] = msgspec.msgpack.Decoder(FromHandshake).decode
decode_report: Callable[[bytes], Report] = msgspec.msgpack.Decoder(Report).decode
decode_published: Callable[[bytes], Published] = msgspec.msgpack.Decoder(Published).decode


def identity_of(rank: int, incarnation: int) -> bytes:
    """The name of a replica's process, by which API servers send to it. A process that is back after a cut cannot take its successor's place."""
    return _IDENTITY.pack(b"r", rank, incarnation)


def replica_name(rank: int, size: int) -> str:
    """What people call one of `size` replicas, at the start of a sentence."""
    return "The engine" if size == 1 else f"Replica {rank}"


def read_identity(data: bytes) -> tuple[int, int] | None:
    """Rank and incarnation of the process with this name; None if it is no replica's."""
    if len(data) != _IDENTITY.size or data[:1] != b"r":
        return None
    _, rank, incarnation = _IDENTITY.unpack(data)
    return rank, incarnation


def message_header(incarnation: int, number: int) -> bytes:
    """The first frame of a message from a replica: which process sent it, and how many messages that process had sent before."""
    return _HEADER.pack(incarnation, number)


def read_header(data: bytes) -> tuple[int, int]:
    """Incarnation and number in a message's first frame. Raises ValueError if it is none."""
    if len(data) != _HEADER.size:
        raise ValueError(f"a header has {_HEADER.size} bytes, and this one {len(data)}")
    incarnation, number = _HEADER.unpack(data)
    return incarnation, number


def _describe_weights(path: Path) -> list[tuple[str, int, str]]:
    """Name, size, and a hash of some parts of each of a model's files: to read all of gigabytes would take too long."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return [(file.name, file.stat().st_size, _hash_parts(file)) for file in files]


def _hash_parts(file: Path, count: int = 16, length: int = 2**16) -> str:
    """A hash of `count` parts of a file, including its first and last bytes."""
    size, found = file.stat().st_size, hashlib.sha256()
    with file.open("rb") as opened:
        for part in range(count):
            opened.seek(max(0, size - length) * part // (count - 1))
            found.update(opened.read(length))
    return found.hexdigest()


def _name(value: object) -> str:
    return value.__qualname__ if isinstance(value, type) else str(value)


def hash_config(config: EngineConfig) -> str:
    """The same for configurations whose replicas give the same answers to the same requests, and have caches of the same layout.

    Paths, devices and the number of workers may differ from node to node.
    """
    model = config.model_config
    # These depend on the device, and the answers do not depend on these.
    scheduler_config = replace(
        config.scheduler_config, max_num_batched_tokens=2**40, async_scheduling=False, pipeline_parallel_size=1
    )
    scheduler_cls = Scheduler if config.scheduler_cls in (AsyncScheduler, PipelineScheduler) else config.scheduler_cls
    relevant = {
        "weights": _describe_weights(model.path),
        "architecture": model.architecture,
        "hf_config": model.hf_config,
        "max_model_len": model.max_model_len,
        "vocab_size": model.vocab_size,
        "eos_token_ids": model.eos_token_ids,
        "block_size": config.cache_config.block_size,
        "enable_prefix_caching": config.cache_config.enable_prefix_caching,
        "dtype": config.worker_config.dtype,
        "quantization": config.worker_config.quantization,
        "attention_backend": _name(config.worker_config.attention_backend),
        "classes": [_name(scheduler_cls), _name(config.block_space_manager_cls), _name(config.worker_config.sampler_cls)],
        "scheduler": msgspec.to_builtins(scheduler_config),
    }
    return hashlib.sha256(msgspec.json.encode(relevant, order="sorted", enc_hook=str)).hexdigest()
