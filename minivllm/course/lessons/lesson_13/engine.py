"""The check of lesson 13 on the real model: one of two processes is killed, and its streams go on."""

from __future__ import annotations

import random
from typing import Any

from minivllm.course.lessons.fake_replicas import Cluster, FakeCore, Wire, within
from minivllm.course.lessons.replicas import Replicas, Service, Written
from minivllm.course.observations import expect
from minivllm.engine.core_messages import ReplicaLoad, decode_from_core
from minivllm.sampling_params import SamplingParams

PROMPTS = (
    "The capital of France is", "Once upon a time", "Water boils when", "1, 2, 3, 4,", "My favourite colour is", "Ships float because",
    "The best way to learn is", "Roses are red,",
)  # fmt: skip
PARAMS = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True) for i in range(len(PROMPTS))]


def compare_written(said: str, expected: Written, got: Written) -> None:
    """Raise an AssertionError unless all users have read the same, and have heard once that it ended."""
    for number, prompt in enumerate(PROMPTS):
        name = f"r{number}"
        assert (got.texts[name], got.ends[name]) == (expected.texts[name], expected.ends[name]), (
            f"{said} {name} begins with {prompt!r}.\nExpected text: {expected.texts[name]!r} {expected.ends[name]}\n"
            f"Got text: {got.texts[name]!r} {got.ends[name]}\nLook at what `to_send` takes along, and what `take` lets through."
        )


def rehearse(replica_cls: Any, client_cls: Any, router_cls: Any, coordinator_cls: Any) -> None:
    """A moment without a model: what is not written yet is noticed before processes load one."""
    wire = Wire()
    wire.to_core.put(None)
    within(wire.replica(replica_cls, FakeCore()).run, "The socket is closed at once.", "`run`")
    first = [type(decode_from_core(data)).__name__ for data in wire.sent[:1]]
    look = "`run`, whose first message says that it is ready"
    expect("The socket is closed at once.", "sent first", ["CoreReady"], first, look)
    cluster = Cluster(client_cls, random.Random(0), 2)
    cluster.submit(2)
    cluster.kill(0)
    cluster.run()
    router, coordinator = router_cls(), coordinator_cls(0.0)
    router.open(0)
    router.finish(router.route([1, 2, 3]))
    coordinator.report(0, ReplicaLoad(), 0.0)
    for replica, load in coordinator.publish(0.1).items():
        router.update(replica, load)
    coordinator.forget(0)


def check_kill(replica_cls: Any, client_cls: Any, router_cls: Any, coordinator_cls: Any) -> list[str]:
    """Two processes write eight texts; then they write them again, and one is killed at some token. The texts are the same, to the byte.

    Returns:
        Lines that say what happened.
    """
    rehearse(replica_cls, client_cls, router_cls, coordinator_cls)
    with Replicas(replica_cls) as replicas:
        service = Service(replicas, client_cls, router_cls(), coordinator_cls)
        service.wait(2)
        expected = service.write(PROMPTS, PARAMS)
        killed, after = random.randrange(2), random.randint(8, 120)
        got = service.write(PROMPTS, PARAMS, after, killed)
    said = f"Eight streams from two processes; replica {killed} was killed after {after} tokens."
    compare_written(said, expected, got)
    lines = [f"{prompt}{got.texts[f'r{number}']}" for number, prompt in enumerate(PROMPTS[:3])]
    return [said, f"{got.moved} of its streams went on at the other one, and all eight texts are the same, to the byte.", *lines]
