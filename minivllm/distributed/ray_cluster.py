"""A Ray cluster: connecting to it, reserving places for actors, and what their processes inherit. Ray is imported only when it is asked for.

Mirrors `vllm/v1/executor/ray_utils.py` and `vllm/ray/ray_env.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import psutil

from minivllm import OPENMP_SPINS
from minivllm.errors import ConfigError
from minivllm.parallel_config import ParallelConfig

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

logger = logging.getLogger(__name__)

COPIED_VARIABLES = ("MINIVLLM_", "HF_", "NCCL_", "GLOO_", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "NUMBA_CPU_NAME")
"""Environment variables that begin like this are those of the driver in all actors, but for these:"""
NOT_COPIED = ("MINIVLLM_API_KEY", "HF_TOKEN", "GLOO_SOCKET_IFNAME")
"""Secrets, which no actor needs, and Ray shows to whoever asks what environment an actor was given; and what differs from machine to machine."""
CONNECT_SECONDS = 10.0
"""How long to wait for the head node to answer."""
SECONDS_FOR_PLACES = 60.0
"""How long to wait for places that the cluster has, but others use."""


@dataclass(frozen=True)
class Place:
    """A bundle of a placement group, and the node that holds it."""

    bundle: int
    node_id: str
    ip: str


def import_ray() -> ModuleType:
    """The module.

    Raises:
        ConfigError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"Ray is not installed here ({error}): `pip install 'minivllm[ray]'`, or use the backend 'mp'."
        ) from None
    return cast(ModuleType, ray)


def connect(address: str | None = None) -> None:
    """Connect this process to a cluster, unless it is connected.

    Args:
        address: Of the head node, such as "10.0.0.1:6379". None: RAY_ADDRESS says it, or a cluster runs on this machine, or one is started here, for
            as long as this process runs.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster at the address.
    """
    ray = import_ray()
    if ray.is_initialized():
        return
    quiet = {"log_to_driver": False, "logging_level": logging.WARNING}
    wanted = address or os.environ.get("RAY_ADDRESS")
    with _own_signal_handlers():
        try:
            _check_listens(wanted or "")
            ray.init(address=wanted or "auto", **quiet)
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().split("\n")[0].rstrip(".")
            if isinstance(error, RuntimeError):  # such as another version of Ray or Python
                raise ConfigError(f"Ray refuses to connect to {wanted or 'the cluster of this machine'}: {reason}.") from None
            if wanted:
                raise ConfigError(f"There is no Ray cluster at {wanted} ({reason}): `ray start --head` starts one.") from None
            if not isinstance(error, ConnectionError):
                raise ConfigError(f"The Ray cluster of this machine cannot be reached: {reason}.") from None
            logger.info("There is no Ray cluster on this machine, and none is named: one is started, of this machine alone.")
            ray.init(include_dashboard=False, **quiet)


def _check_listens(address: str) -> None:
    """Raise an OSError if nobody listens at "host:port": Ray would try for many minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep what this process does at SIGTERM: Ray would exit."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def own_address() -> str:
    """The address of this process's node, at which the others reach it."""
    ray = import_ray()
    return _nodes()[ray.get_runtime_context().get_node_id()]


def environment_of_actors(num_threads: int | None = None) -> dict[str, str]:
    """Environment variables for an actor, as `runtime_env={"env_vars": …}`: some of this process, its folders of modules, and the number of
    threads to compute with."""
    environment = {
        name: value for name, value in os.environ.items() if name.startswith(COPIED_VARIABLES) and name not in NOT_COPIED
    }
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    own = [str(path) for path in map(Path.resolve, map(Path, sys.path)) if not any(map(path.is_relative_to, installed))]
    environment["PYTHONPATH"] = os.pathsep.join([*own, "${PYTHONPATH}"])  # Ray puts in what it is on the node
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environment.keys():
        environment["GOMP_SPINCOUNT"] = OPENMP_SPINS
    if num_threads is not None:
        environment |= {"OMP_NUM_THREADS": str(num_threads), "NUMBA_NUM_THREADS": str(num_threads)}
    return environment


def resources_of_worker(device: str) -> dict[str, float]:
    """What a worker takes of its node: a GPU if it computes on one, and a processor."""
    ray = import_ray()
    on_gpu = device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
    return {"GPU": 1.0, "CPU": 1.0} if on_gpu else {"CPU": 1.0}


def resources_of_replica(parallel_config: ParallelConfig, device: str) -> dict[str, float]:
    """What a replica takes of its node for its workers: nothing if these are actors, which have places of their own."""
    count = 0 if parallel_config.distributed_executor_backend == "ray" else parallel_config.world_size
    return {name: count * amount for name, amount in resources_of_worker(device).items()}


def reserve(bundles: Sequence[dict[str, float]], strategy: str) -> tuple[PlacementGroup, list[Place]]:
    """A placement group with these bundles, and where they are: this process's node first, then the nodes with most bundles.

    Raises:
        ConfigError: The cluster has too little for them, or it was not free within `SECONDS_FOR_PLACES`.
    """
    ray = import_ray()
    group = ray.util.placement_group(list(bundles), strategy=strategy)
    deadline = time.monotonic() + SECONDS_FOR_PLACES
    try:
        while not group.wait(0.2):
            wanted, has, nodes = _total(bundles), ray.cluster_resources(), _nodes()
            is_hopeless = any(has.get(name, 0) < amount for name, amount in wanted.items())
            if is_hopeless or (strategy == "STRICT_SPREAD" and len(bundles) > len(nodes)) or time.monotonic() > deadline:
                free = ray.available_resources()
                raise ConfigError(
                    f"The Ray cluster cannot place {len(bundles)} workers ({strategy}), which need {_describe(wanted, wanted)}: it has "
                    f"{_describe(has, wanted)} on {_count(len(nodes), 'node')}, of which {_describe(free, wanted)} are free. "
                    "Add nodes, or use fewer workers."
                )
        return group, find_places(group)
    except BaseException:  # Ctrl-C, too
        ray.util.remove_placement_group(group)
        raise


def find_places(group: PlacementGroup) -> list[Place]:
    """The bundles of a placement group that is ready, in the order of ranks: as for `reserve`. Raises a ConfigError if a node has just been lost."""
    ray = import_ray()
    nodes, here = _nodes(), ray.get_runtime_context().get_node_id()
    table = ray.util.placement_group_table(group)["bundles_to_node_id"]
    if not nodes.keys() >= set(table.values()):
        raise ConfigError("A node of the Ray cluster was lost while workers were placed: try again.")
    places = [Place(bundle, node_id, nodes[node_id]) for bundle, node_id in table.items()]
    sizes = Counter(place.node_id for place in places)
    return sorted(places, key=lambda place: (place.node_id != here, -sizes[place.node_id], place.ip, place.node_id, place.bundle))


def are_there(resources: dict[str, float]) -> bool:
    """Whether all nodes together have so much, used or not."""
    has = import_ray().cluster_resources()
    return all(has.get(name, 0) >= amount for name, amount in resources.items())


def num_cpus_of_node(node_id: str) -> int:
    """How many processors Ray has on a node; at least 1."""
    ray = import_ray()
    found: dict[str, Any] = next((node for node in ray.nodes() if node["NodeID"] == node_id), {"Resources": {}})
    return max(1, int(found["Resources"].get("CPU", 1)))


def share_of_processors(num_actors: int) -> int:
    """The processors of this process's node for each of so many actors, if these are spread evenly over the nodes; at least 1."""
    ray = import_ray()
    num_nodes: int = sum(node["Alive"] and node["Resources"].get("CPU", 0) >= 1 for node in ray.nodes())
    own = num_cpus_of_node(ray.get_runtime_context().get_node_id())
    return max(1, own // -(-num_actors // max(1, num_nodes)))


def interface_of(ip: str) -> str | None:
    """The network interface of this machine that has an address; None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == ip for address in addresses):
            return str(name)
    return None


def _nodes() -> dict[str, str]:
    """The addresses of the nodes that are alive, by their ids."""
    ray = import_ray()
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def _total(bundles: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in bundles[0]}


def _describe(resources: dict[str, Any], names: dict[str, float]) -> str:
    return " and ".join(f"{resources.get(name, 0):g} {name}" for name in names)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
