"""The live page's server side: its events, how often they come, when they end, and its files. See test_dashboard_in_browser.py too."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from contextlib import aclosing
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from watched_engine import MODEL, make_engine

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.engine.core_client import ReplicaStatus
from minivllm.engine.core_messages import SchedulerStats
from minivllm.engine.metrics import Metrics, TokenRate
from minivllm.engine.trace import StepRecord
from minivllm.entrypoints.dashboard import live as live_module
from minivllm.entrypoints.dashboard.app import _FILES, HEADERS, add_dashboard
from minivllm.entrypoints.dashboard.live import live_events
from minivllm.errors import EngineDeadError
from minivllm.sampling_params import SamplingParams


def make_step(number):
    """A step in which nothing is computed."""
    return StepRecord(number, number + 0.5, "decode", [], num_running=0, num_waiting=0, num_swapped=0, num_free_blocks=10)


# -- the stream of events ----------------------------------------------------------------------------------------------


class ScriptedReplicas:
    """The replicas that a test wants."""

    def __init__(self, all_of_them):
        self.all = all_of_them

    def statuses(self):
        return self.all


class ScriptedEngine:
    """Has the steps that a test puts into it, and the end."""

    def __init__(self):
        self.model_config = SimpleNamespace(name=MODEL, max_model_len=64)
        self.scheduler_config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
        self.cache_config = CacheConfig(block_size=16)
        self.num_gpu_blocks = 20
        self.num_engines, self.replicas = 1, ScriptedReplicas([ReplicaStatus(0, "ready", 1, 20)])
        self.metrics = Metrics(MODEL, 2)
        self.stats_by_engine = {0: SchedulerStats(num_gpu_blocks=20)}
        self.num_unfinished = 0
        self.script = asyncio.Queue()
        self.num_watchers = 0

    def tokens_per_second(self, rank):
        return 10.0 * rank

    async def steps_of_all(self):
        self.num_watchers += 1
        try:
            while True:
                item = await self.script.get()
                if isinstance(item, Exception):
                    raise item
                yield item if isinstance(item, tuple) else (0, item)
        finally:
            self.num_watchers -= 1

    def num_unfinished_requests(self):
        return self.num_unfinished


def parse(event):
    name, content = re.fullmatch(rb"event: (\w+)\ndata: (.*)\n\n", event).groups()
    return name.decode(), json.loads(content)


def test_the_first_event_says_what_the_engine_is():
    async def main():
        async with aclosing(live_events(ScriptedEngine())) as events:
            return parse(await anext(events))

    name, content = asyncio.run(main())
    assert name == "engine"
    assert (content["model"], content["block_size"], content["num_gpu_blocks"], content["max_num_seqs"]) == (MODEL, 16, 20, 4)


def test_every_step_is_told_and_no_event_comes_sooner_than_it_may(monkeypatch):
    async def main():
        engine = make_engine(seconds=0.002)
        times, names, num_steps = [], [], 0
        try:
            async with aclosing(live_events(engine)) as events:
                await anext(events)
                assert parse(await anext(events))[0] == "idle"

                async def generate():
                    async for _ in engine.generate([1] * 20, SamplingParams(max_tokens=200)):
                        pass

                request = asyncio.create_task(generate())
                async for event in events:
                    name, content = parse(event)
                    times.append(asyncio.get_running_loop().time())
                    names.append(name)
                    if name == "idle":
                        break
                    num_steps += len(content["curve"]["end"])
                await request
        finally:
            engine.shutdown()
        return times, names, num_steps

    times, names, num_steps = asyncio.run(main())
    assert num_steps == 200
    assert names[-2:] == ["steps", "idle"]
    gaps = [after - before for before, after in itertools.pairwise(times[:-1])]
    assert len(gaps) > 2
    assert min(gaps) >= 0.95 * live_module.EVENT_PAUSE


def test_a_page_opened_midway_knows_how_long_requests_have_waited():
    async def main():
        engine = make_engine(seconds=0.01, max_num_seqs=1)

        async def generate(max_tokens):
            async for _ in engine.generate([1] * 20, SamplingParams(max_tokens=max_tokens)):
                pass

        try:
            requests = [asyncio.create_task(generate(40))]
            while engine.stats.num_running < 1:
                await asyncio.sleep(0.001)
            requests.append(asyncio.create_task(generate(3)))
            while engine.stats.num_steps < 15 or engine.stats.num_waiting < 1:
                await asyncio.sleep(0.01)
            firsts, ends = [], []
            async with aclosing(live_events(engine)) as events:
                async for event in events:
                    name, content = parse(event)
                    if name == "idle":
                        return firsts, ends
                    if name == "steps":
                        firsts += [seconds for _, seconds in content["first_tokens"]]
                        ends += [(item["number"], item["seconds"]) for item in content["happenings"]]
        finally:
            await asyncio.gather(*requests)
            engine.shutdown()

    firsts, ends = asyncio.run(main())
    (number, end), (other_number, other_end) = ends
    assert (number, other_number) == (0, 1)
    assert 0.01 < firsts[0] < end, "the page was opened after it"
    assert 0.2 < firsts[1] < other_end, "it waited until the first one's 40 steps were over"


def test_an_idle_engine_is_told_once_and_then_the_server_only_says_that_it_is_there(monkeypatch):
    monkeypatch.setattr(live_module, "SILENT_AFTER", 0.01)
    monkeypatch.setattr(live_module, "HEARTBEAT_PAUSE", 0.05)

    async def main():
        async with aclosing(live_events(ScriptedEngine())) as events:
            return [await anext(events) for _ in range(4)]

    _, idle, *rest = asyncio.run(main())
    assert parse(idle) == ("idle", {"num_running": 0, "num_waiting": 0, "num_swapped": 0, "num_used_blocks": 0})
    assert rest == [b": still here\n\n"] * 2


def test_an_engine_in_a_long_step_is_busy_and_not_idle(monkeypatch):
    monkeypatch.setattr(live_module, "SILENT_AFTER", 0.01)

    async def main():
        engine = ScriptedEngine()
        engine.num_unfinished = 3
        engine.stats_by_engine[0] = SchedulerStats(num_running=3, num_gpu_blocks=20)
        async with aclosing(live_events(engine)) as events:
            await anext(events)
            busy = parse(await anext(events))
            engine.num_unfinished, engine.stats_by_engine = 0, {}
            return busy, parse(await anext(events))

    busy, idle = asyncio.run(main())
    assert (busy[0], busy[1]["num_running"]) == ("busy", 3)
    assert idle[0] == "idle"


class ReplicatedEngine(ScriptedEngine):
    """As `ScriptedEngine`, with two replicas."""

    def __init__(self):
        super().__init__()
        self.num_engines = 2
        self.replicas.all = [ReplicaStatus(0, "ready", 1, 20), ReplicaStatus(1, "ready", 2, 30)]
        self.stats_by_engine[1] = SchedulerStats(num_gpu_blocks=20)


def test_a_page_shows_all_replicas_at_a_glance_and_the_steps_of_one(monkeypatch):
    monkeypatch.setattr(live_module, "SILENT_AFTER", 0.01)

    async def main():
        engine = ReplicatedEngine()
        told = []
        async with aclosing(live_events(engine, replica=1)) as events:
            engine.script.put_nowait((0, make_step(5)))
            engine.script.put_nowait((1, make_step(7)))
            engine.stats_by_engine[0] = SchedulerStats(num_running=4, num_used_blocks=3, num_gpu_blocks=20)
            async for event in events:
                told.append(parse(event))
                if told[-1][0] == "idle":
                    engine.replicas.all = [ReplicaStatus(0, "gone", 1, 20), ReplicaStatus(1, "draining", 2, 30)]
                if told[-1][0] == "replicas" and told[-1][1]["replicas"][0]["state"] == "gone":
                    return told

    told = asyncio.run(main())
    assert told[0][0] == "engine"
    assert (told[0][1]["num_engines"], told[0][1]["replica"], told[0][1]["num_gpu_blocks"]) == (2, 1, 30)
    assert [content["start"] for name, content in told if name == "steps"] == [7]
    seen = [content["replicas"] for name, content in told if name == "replicas"]
    counts = {(content["streams_resumed"], content["streams_lost"]) for name, content in told if name == "replicas"}
    told_of_each = ("rank", "state", "num_running", "num_used_blocks", "num_gpu_blocks", "tokens_per_second")
    assert [tuple(item[name] for name in told_of_each) for item in seen[0]] == [
        (0, "ready", 4, 3, 20, 0.0),
        (1, "ready", 0, 0, 30, 10.0),
    ]
    idle = [content for name, content in told if name == "idle"]
    assert idle, told
    assert idle[0]["num_running"] == 0, "the replica that is shown has nothing to do, though the other one has"
    assert [item["state"] for item in seen[-1]] == ["gone", "draining"]
    assert counts == {(0, 0)}


def test_the_rate_of_a_replica_is_that_of_the_last_seconds():
    rate = TokenRate()
    for now, num_tokens in ((10.0, 100), (11.0, 106), (12.0, 112)):
        rate.update(num_tokens, now)
    assert rate.rate(12.0) == 6.0
    assert rate.rate(12.5) == 3.0
    assert rate.rate(20.0) == 0.0
    rate.update(130, 21.0)
    rate.update(140, 21.5)
    rate.update(4, 22.0)  # another process
    rate.update(8, 22.5)
    assert rate.rate(22.5) == 2.0


def test_a_dead_engine_is_told_with_its_cause_and_the_stream_ends():
    async def main():
        engine = ScriptedEngine()
        engine.script.put_nowait(make_step(0))
        engine.script.put_nowait(EngineDeadError("The engine has ended: it was killed."))
        return [parse(event) async for event in live_events(engine)], engine.num_watchers

    events, num_watchers = asyncio.run(main())
    assert events[-1] == ("dead", {"message": "The engine has ended: it was killed."})
    assert num_watchers == 0


def test_the_last_steps_of_an_engine_are_told_before_its_death():
    async def main():
        engine = ScriptedEngine()
        events = live_events(engine)
        await anext(events)
        engine.script.put_nowait(make_step(0))
        engine.script.put_nowait(EngineDeadError("It died."))
        return [parse(event)[0] async for event in events]

    assert asyncio.run(main()) == ["steps", "dead"]


def test_a_step_that_ends_while_no_event_may_be_sent_is_told_before_the_death_that_follows_it():
    async def main():
        engine, told = ScriptedEngine(), []
        engine.script.put_nowait(make_step(0))
        async for event in live_events(engine):
            told.append(parse(event))
            if len(told) == 2:
                engine.script.put_nowait(make_step(1))
                engine.script.put_nowait(EngineDeadError("It died."))
        return [(name, content.get("end")) for name, content in told[1:]]

    assert asyncio.run(main()) == [("steps", 0.5), ("steps", 1.5), ("dead", None)]


# -- over HTTP ---------------------------------------------------------------------------------------------------------


async def call(app, path, *, stay=None, slow=None):
    """What an app sends for a GET. The client leaves when `stay` is set. Until `slow` is, it takes one event and no more."""
    sent = []

    async def receive():
        if stay is not None:
            await stay.wait()
        return {"type": "http.disconnect"} if stay is not None else {"type": "http.request"}

    async def send(message):
        if slow is not None and len(sent) == 2:
            await slow.wait()
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b"", "http_version": "1.1"}
    await app(
        {**scope, "asgi": {"spec_version": "2.3"}, "root_path": "", "scheme": "http", "server": ("test", 80)}, receive, send
    )
    return sent


def get(path):
    app = FastAPI()
    add_dashboard(app, ScriptedEngine)
    start, *body = asyncio.run(call(app, path))
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], headers, b"".join(part.get("body", b"") for part in body).decode()


def test_the_page_may_load_nothing_from_elsewhere():
    status, headers, _ = get("/")
    assert status == 200
    assert headers["content-security-policy"].startswith("default-src 'self';")
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", sorted(_FILES))
def test_no_file_of_the_page_names_another_server_or_needs_what_the_policy_forbids(name):
    status, headers, text = get(f"/dashboard/{name}")
    assert status == 200
    assert headers["content-security-policy"] == HEADERS["Content-Security-Policy"]
    assert not re.search(r"(https?:)?//[a-z]", text.replace("http://www.w3.org/2000/svg", ""))
    assert not re.search(r"<script>|<style|\sstyle=|\son\w+=|innerHTML|insertAdjacentHTML|\beval\(", text)


def test_all_that_the_files_import_is_there():
    for name, path in _FILES.items():
        text = path.read_text()
        named = re.findall(r'from "\./([^"]+)"', text) + re.findall(r'"dashboard/([^"]+)"', text)
        assert set(named) <= _FILES.keys(), name
    assert re.findall(r'"dashboard/([^"]+)"', _FILES["index.html"].read_text()) == ["icon.svg", "style.css", "main.js"]


@pytest.mark.parametrize("name", ["nothing.js", "..%2F__init__.py", "__init__.py", "live.py"])
def test_there_is_nothing_else_to_be_had(name):
    assert get(f"/dashboard/{name}")[0] == 404


def test_the_modules_are_short_enough_to_read_in_one_sitting():
    assert [name for name, path in _FILES.items() if len(path.read_text().splitlines()) > 400] == []


def test_the_page_has_the_colours_of_the_lessons():
    palette = pytest.importorskip("minivllm.viz.palette", reason="the lessons' pictures need matplotlib")
    cells = pytest.importorskip("minivllm.viz.cells")
    text = _FILES["palette.js"].read_text()
    listed = re.search(r"REQUEST_COLORS = \[(.*)\]", text).group(1)
    assert tuple(json.loads(f"[{listed}]")) == palette.REQUEST_COLORS
    assert float(re.search(r"ALLOCATED = ([\d.]+)", text).group(1)) == cells.ALLOCATED
    style = _FILES["style.css"].read_text()
    light = dict(re.findall(r"--(\w+): (#\w{6});", style.split("@media")[0]))
    assert (light["ink"], light["pale"], light["neutral"]) == (palette.INK.lower(), palette.PALE.lower(), palette.NEUTRAL.lower())


def test_the_api_does_not_describe_the_page():
    app = FastAPI()
    add_dashboard(app, ScriptedEngine)
    assert app.openapi()["paths"] == {}


def test_a_page_that_leaves_ends_its_stream_at_once():
    async def main():
        engine, app, stay = ScriptedEngine(), FastAPI(), asyncio.Event()
        add_dashboard(app, lambda: engine)
        page = asyncio.create_task(call(app, "/live", stay=stay))
        while not engine.num_watchers:
            await asyncio.sleep(0.01)
        stay.set()
        sent = await asyncio.wait_for(page, 5)
        return sent, engine.num_watchers

    sent, num_watchers = asyncio.run(main())
    headers = dict(sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert headers[b"cache-control"] == b"no-store"
    assert num_watchers == 0


def test_a_page_that_does_not_read_holds_nobody_up_and_leaves_nothing_behind():
    async def main():
        engine, app, stay, slow = make_engine(seconds=0.001), FastAPI(), asyncio.Event(), asyncio.Event()
        add_dashboard(app, lambda: engine)
        try:
            page = asyncio.create_task(call(app, "/live", stay=stay, slow=slow))
            quick = live_events(engine)
            await anext(quick)
            assert parse(await anext(quick))[0] == "idle"
            assert len(engine._outputs.watchers._queues) == 2
            async for _ in engine.generate([1] * 20, SamplingParams(max_tokens=300)):
                pass
            events = []
            while not events or events[-1][0] != "idle":
                events.append(parse(await anext(quick)))
            await quick.aclose()
            stay.set()
            sent = await asyncio.wait_for(page, 5)
            return events, sent, engine._outputs.watchers._queues, len(asyncio.all_tasks())
        finally:
            engine.shutdown()

    events, sent, watchers, num_tasks = asyncio.run(main())
    assert sum(len(content["curve"]["end"]) for name, content in events if name == "steps") == 300
    assert len(sent) == 2, "the headers, and the event that it took"
    assert (watchers, num_tasks) == (set(), 1)


def test_each_page_gets_the_engine_of_the_moment():
    async def main():
        engines = [ScriptedEngine(), ScriptedEngine()]
        engines[1].replicas.all = [ReplicaStatus(0, "ready", 1, 77)]
        for engine in engines:
            engine.script.put_nowait(EngineDeadError("It died."))
        app, restarted = FastAPI(), iter(engines)
        add_dashboard(app, lambda: next(restarted))
        pages = [await call(app, "/live", stay=asyncio.Event()) for _ in engines]
        return [parse(sent[1]["body"])[1]["num_gpu_blocks"] for sent in pages]

    assert asyncio.run(main()) == [20, 77]
