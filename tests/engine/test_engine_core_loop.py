"""The busy loop of an engine core with several API servers: how it leaves, whom it ignores, and when it is stuck."""

from __future__ import annotations

import queue
import threading
import time

import pytest
from watched_engine import WaitingExecutor, model_config

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.engine import engine_core_loop
from minivllm.engine.core_messages import (
    AbortClientRequests,
    AddRequest,
    ClientDrained,
    CoreDraining,
    CoreReady,
    Drain,
    DropClient,
    EngineCoreOutputs,
    Shutdown,
)
from minivllm.engine.engine_core import EngineCore
from minivllm.engine.engine_core_loop import EngineCoreLoop
from minivllm.request import EngineCoreRequest
from minivllm.sampling_params import SamplingParams


class Loop:
    """A loop with two API servers, in a thread."""

    def __init__(self, seconds=0.002):
        configs = (model_config(), CacheConfig(), SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=2048))
        self.loop = EngineCoreLoop(EngineCore(*configs, WaitingExecutor(100, seconds)))
        self.loop.num_clients = 2
        assert isinstance(self.loop.output_queue.get(), CoreReady)
        self.thread = threading.Thread(target=self.loop.run_busy_loop)
        self.thread.start()

    def send(self, *messages):
        for message in messages:
            self.loop.input_queue.put(message)

    def add(self, name, client=0, max_tokens=2000):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.send(AddRequest(EngineCoreRequest(name, [1], params, 1 + max_tokens, client_index=client)))

    def until(self, condition, seconds=10):
        """What it says until something is so."""
        heard, end = [], time.monotonic() + seconds
        while not condition(heard):
            assert time.monotonic() < end, heard[-3:]
            try:
                heard.append(self.loop.output_queue.get(timeout=0.05))
            except queue.Empty:
                continue
        return heard

    def requests(self):
        return set(self.loop.core.scheduler.requests)


@pytest.fixture
def loop():
    made = Loop()
    yield made
    made.send(Shutdown())
    made.thread.join(10)
    assert not made.thread.is_alive()


def leavings(heard):
    return [message for message in heard if isinstance(message, CoreDraining)]


def test_it_leaves_when_it_has_finished_and_every_api_server_has_said_farewell(loop):
    loop.add("a", max_tokens=20)
    loop.send(Drain(), ClientDrained(0))
    loop.until(lambda heard: any(isinstance(message, EngineCoreOutputs) and message.outputs for message in heard))
    time.sleep(0.3)
    assert loop.thread.is_alive(), "one has not said farewell"
    loop.add("b", client=1, max_tokens=5)  # sent before it heard of it
    loop.send(ClientDrained(1))
    heard = loop.until(lambda heard: None in heard)
    finished = {output.request_id for message in heard if isinstance(message, EngineCoreOutputs) for output in message.outputs}
    assert finished >= {"b"}
    assert leavings(heard)[-1] == CoreDraining(is_drained=True)


def test_it_waits_for_an_api_server_that_says_nothing_but_not_for_ever(loop, monkeypatch):
    monkeypatch.setattr(engine_core_loop, "CLIENT_DRAIN_SECONDS", 0.3)
    loop.send(Drain(), ClientDrained(0))
    start = time.monotonic()
    loop.until(lambda heard: None in heard)
    assert time.monotonic() - start >= 0.3


@pytest.mark.parametrize(
    ("messages", "returns"),
    [
        ([Drain(returns=True)], True),
        ([Drain(returns=True), Drain(returns=True)], True),
        ([Drain()], False),
        ([Drain(), Drain(returns=True)], False),
        ([Drain(returns=True), Drain()], False),
    ],
)
def test_another_follows_only_if_nobody_wanted_it_to_end(loop, messages, returns):
    loop.send(*messages, ClientDrained(0), ClientDrained(1))
    heard = loop.until(lambda heard: None in heard)
    assert leavings(heard) == [CoreDraining(), CoreDraining(is_drained=True, returns=returns)]


def test_an_api_server_that_has_died_needs_nothing_more(loop):
    loop.add("a", client=0)
    loop.add("b", client=1)
    loop.send(DropClient(1))
    loop.add("c", client=1)  # it was on its way
    loop.until(lambda heard: loop.requests() == {"a"} and loop.loop.input_queue.empty())
    loop.send(AbortClientRequests(0), Drain(), ClientDrained(0))
    loop.until(lambda heard: None in heard)


def test_what_an_api_server_wants_to_begin_anew_is_its_own(loop):
    loop.add("a", client=0)
    loop.add("b", client=1)
    loop.until(lambda heard: loop.requests() == {"a", "b"})
    loop.send(AbortClientRequests(0))
    loop.until(lambda heard: loop.requests() == {"b"})


def test_a_step_that_takes_too_long_is_noticed(monkeypatch):
    monkeypatch.setattr(engine_core_loop, "MAX_STEP_SECONDS", 0.1)
    slow = Loop(seconds=0.5)
    assert not slow.loop.is_stuck
    slow.add("a", max_tokens=2)
    slow.until(lambda heard: slow.loop.is_stuck)
    slow.until(lambda heard: not slow.loop.core.has_unfinished_requests() and not slow.loop.is_stuck)
    slow.send(Shutdown())
    slow.thread.join(10)
