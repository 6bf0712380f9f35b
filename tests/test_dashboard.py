"""The live page's server side: what it is told of the steps, how often, and when it ends. The page itself is in test_dashboard_in_browser.py."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from collections import Counter
from contextlib import aclosing
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from watched_engine import MODEL, WaitingExecutor, make_engine, model_config

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.engine.core_messages import EngineStats
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.trace import Finish, Preemption, SequenceKey, SequenceStep, StepRecord
from minivllm.entrypoints.dashboard import _FILES, HEADERS, add_dashboard
from minivllm.entrypoints.dashboard import live as live_module
from minivllm.entrypoints.dashboard.live import live_events
from minivllm.entrypoints.dashboard.step_view import MOST_STEPS, MOST_WAITING, StepView
from minivllm.errors import EngineDeadError
from minivllm.sampling_params import SamplingParams

A, B = SequenceKey("a"), SequenceKey("b")


def make_step(number, scheduled=(), tables=None, **fields):
    """A step that began at second `number` and took half a second; its parts are (key, action, tokens, context, new tokens)."""
    items = [SequenceStep(*key, action, *counts) for key, action, *counts in scheduled]
    defaults = {"num_running": len(tables or {}), "num_waiting": 0, "num_swapped": 0, "num_free_blocks": 10}
    return StepRecord(number, number + 0.5, "decode", items, block_tables=tables or {}, **{**defaults, **fields})


def report_of(*steps):
    view = StepView()
    for step in steps:
        view.take(step)
    return view.report()


def only(sequences):
    (sequence,) = sequences
    return sequence


# -- what a page is told of steps --------------------------------------------------------------------------------------


def test_nothing_is_told_before_the_first_step_and_after_the_last():
    view = StepView()
    assert view.report() is None
    view.take(make_step(0))
    assert view.report() is not None
    assert view.report() is None


def test_a_sequence_has_its_prompt_its_answer_and_its_blocks():
    report = report_of(
        make_step(0, [(A, "prefill", 20, 20)], {A: (3, 4)}, arrived=["a"]),
        make_step(1, [(A, "decode", 1, 21)], {A: (3, 4)}),
        make_step(2, [(A, "decode", 1, 22)], {A: (3, 4)}),
    )
    sequence = only(report["sequences"])
    assert (sequence["num_prompt_tokens"], sequence["num_generated"], sequence["context_len"]) == (20, 3, 22)
    assert (sequence["action"], sequence["num_tokens"], sequence["keep"], sequence["blocks"]) == ("decode", 1, 0, (3, 4))


def test_a_prompt_in_chunks_is_as_long_as_its_last_chunk_says():
    first = make_step(0, [(A, "prefill", 16, 16, 0)], {A: (0, 1)}, arrived=["a"])
    assert only(report_of(first)["sequences"])["num_prompt_tokens"] is None
    second = make_step(1, [(A, "prefill", 9, 25, 1)], {A: (0, 1)})
    assert only(report_of(first, second)["sequences"])["num_prompt_tokens"] == 25


def test_what_the_prefix_cache_spared_is_told():
    report = report_of(make_step(0, [(A, "prefill", 4, 36)], {A: (0, 1, 2)}, arrived=["a"]))
    sequence = only(report["sequences"])
    assert (sequence["num_prompt_tokens"], sequence["num_cached_tokens"]) == (36, 32)


def test_of_a_sequence_that_was_there_before_no_prompt_is_made_up():
    report = report_of(make_step(0, [(A, "decode", 1, 50)], {A: (1, 2, 3, 4)}))
    sequence = only(report["sequences"])
    assert (sequence["num_prompt_tokens"], sequence["num_generated"], sequence["context_len"]) == (None, None, 50)
    assert report["first_tokens"] == []


def test_a_sequence_that_is_not_computed_is_stalled():
    report = report_of(
        make_step(0, [(A, "decode", 1, 50)], {A: (1,)}), make_step(1, [(B, "prefill", 5, 5)], {A: (1,), B: (2,)}, arrived=["b"])
    )
    assert [(sequence["request_id"], sequence["action"]) for sequence in report["sequences"]] == [
        ("a", "stalled"),
        ("b", "prefill"),
    ]


def test_times_come_from_the_steps():
    report = report_of(
        make_step(0, [(A, "prefill", 20, 20)], {A: (3, 4)}, arrived=["a"]),
        make_step(1, [(B, "prefill", 20, 20)], {A: (3, 4), B: (5, 6)}, arrived=["b"]),
        make_step(4, [(A, "decode", 1, 21), (B, "decode", 1, 21)], {A: (3, 4), B: (5, 6)}, finished=[Finish("a", 0, "length")]),
    )
    assert report["first_tokens"] == [(0.5, 0.5), (1.5, 0.5)]
    assert report["curve"]["mean_gap"] == [None, None, 3.5]
    assert report["curve"]["max_gap"] == [None, None, 4.0]
    ended = only(report["happenings"])
    assert (ended["request_id"], ended["what"], ended["why"]) == ("a", "ended", "length")
    assert (ended["num_generated"], ended["seconds"]) == (2, 4.5)


def test_several_tokens_won_at_once_share_the_time_between_them():
    speculative = SequenceStep("a", 0, "decode", 4, 24, num_new_tokens=4, num_drafts=3, num_accepted=3)
    step = make_step(2, [], {A: (3, 4)})
    step.scheduled.append(speculative)
    report = report_of(make_step(0, [(A, "prefill", 20, 20)], {A: (3, 4)}, arrived=["a"]), step)
    assert report["curve"]["mean_gap"] == [None, 0.5]
    assert only(report["sequences"])["num_accepted"] == 3


def test_the_preempted_wait_again_and_keep_their_answer():
    view = StepView()
    view.take(make_step(0, [(A, "prefill", 20, 20)], {A: (3, 4)}, arrived=["a"]))
    view.take(make_step(1, [], {}, preempted=[Preemption("a", 0, "recompute")], num_waiting=1))
    report = view.report()
    waiting = only(report["waiting"])
    assert (waiting["request_id"], waiting["was_preempted"]) == ("a", True)
    assert only(report["happenings"])["what"] == "preempted"
    view.take(make_step(2, [(A, "prefill", 21, 21)], {A: (5, 6)}))
    report = view.report()
    assert report["waiting"] == []
    sequence = only(report["sequences"])
    assert (sequence["num_prompt_tokens"], sequence["num_generated"]) == (20, 2)
    assert report["first_tokens"] == [], "it has had its first token"


def test_those_that_wait_are_told_in_the_order_in_which_they_came():
    view = StepView()
    view.take(make_step(0, [(A, "prefill", 20, 20)], {A: (3, 4)}, arrived=["a", "b"], num_waiting=1))
    view.take(make_step(1, [], {}, preempted=[Preemption("a", 0, "recompute")], num_waiting=2))
    assert [item["request_id"] for item in view.report()["waiting"]] == ["a", "b"]


def test_what_is_swapped_out_is_told_with_its_blocks_on_the_host():
    swapped = make_step(1, [(B, "decode", 1, 9)], {B: (1,)}, swapped_tables={A: (7, 8)}, num_swapped=1)
    report = report_of(
        make_step(0, [(A, "prefill", 20, 20), (B, "prefill", 8, 8)], {A: (3, 4), B: (1,)}, arrived=["a", "b"]), swapped
    )
    assert [(s["request_id"], s["place"], s["blocks"]) for s in report["sequences"]] == [
        ("b", "running", (1,)),
        ("a", "swapped", (7, 8)),
    ]


def test_siblings_share_a_prompt_and_each_has_a_token():
    tables = {A: (3, 4), SequenceKey("a", 1): (3, 5)}
    report = report_of(
        make_step(0, [(A, "prefill", 20, 20)], {A: (3, 4)}, arrived=["a"]),
        make_step(1, [(key, "decode", 1, 21) for key in tables], tables, ref_counts={3: 2}),
    )
    assert [(s["index"], s["num_prompt_tokens"], s["num_generated"]) for s in report["sequences"]] == [(0, 20, 2), (1, 20, 2)]
    assert report["shared"] == {3: 2}


def test_the_aborted_are_gone():
    report = report_of(
        make_step(0, [(A, "prefill", 20, 20)], {A: (3, 4)}, arrived=["a", "b"], num_waiting=1), make_step(1, aborted=["a", "b"])
    )
    assert (report["sequences"], report["waiting"]) == ([], [])
    assert [(item["request_id"], item["why"]) for item in report["happenings"]] == [("a", "abort"), ("b", "abort")]


def test_no_ghosts_wait_after_a_step_that_was_missed():
    report = report_of(make_step(0, arrived=["a", "b", "c"], num_waiting=3), make_step(5, num_waiting=1))
    assert [item["request_id"] for item in report["waiting"]] == ["c"]


def test_a_view_keeps_nothing_of_what_has_ended():
    view = StepView()
    for number in range(50):
        name = f"{number}"
        tables = {SequenceKey(name): (1,)}
        finished = [Finish(name, 0, "stop")]
        view.take(make_step(number, [(SequenceKey(name), "prefill", 3, 3)], tables, arrived=[name], finished=finished))
        view.take(make_step(number + 0.5, aborted=["never seen"]))
    assert (view._sequences, view._waiting) == ({}, {})


def test_a_page_that_does_not_read_costs_no_memory():
    view = StepView()
    for number in range(3 * MOST_STEPS):
        finished = [Finish("a", 0, "stop")]
        view.take(make_step(number, [(A, "prefill", 3, 3)], {A: (1,)}, arrived=["a"], finished=finished))
    view.take(make_step(number + 1, arrived=[f"{i}" for i in range(500)], num_waiting=500))
    report = view.report()
    assert len(report["curve"]["end"]) == MOST_STEPS
    assert len(report["waiting"]) == MOST_WAITING
    assert report["num_waiting"] == 500
    assert len(json.dumps(report)) < 1_000_000


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_what_a_page_puts_together_is_what_the_last_step_says(enable_prefix_caching):
    rng = random.Random(3)
    engine = traced_engine(num_blocks=24, enable_prefix_caching=enable_prefix_caching)
    names = itertools.count()
    view, tables, cached, num_reports = StepView(), {}, set(), 0
    for _ in range(400):
        if rng.random() < 0.15:
            params = SamplingParams(max_tokens=rng.randint(1, 60), ignore_eos=True, n=rng.choice([1, 1, 2]))
            engine.add_request(f"{next(names)}", [rng.randint(1, 3)] * rng.randint(1, 90), params)
        if rng.random() < 0.02 and engine.scheduler.requests:
            engine.abort_request(rng.choice(list(engine.scheduler.requests)))
        engine.step()
        if not engine.trace.steps:
            continue
        step = engine.trace.steps.pop()
        view.take(step)
        if rng.random() < 0.6:
            continue
        report = view.report()
        num_reports += 1
        tables = {
            (s["request_id"], s["index"]): (*tables.get((s["request_id"], s["index"]), ())[: s["keep"]], *s["blocks"])
            for s in report["sequences"]
        }
        cached = (cached - set(report["uncached"])) | set(report["cached"])
        assert tables == {tuple(key): table for key, table in step.block_tables.items()}
        assert cached == step.cached_blocks
        assert len(report["waiting"]) == step.num_waiting
        held = Counter(block for table in tables.values() for block in table)
        assert report["shared"] == {block: count for block, count in held.items() if count > 1}
    assert num_reports > 50
    assert engine.block_manager.num_gpu_blocks == 24


def traced_engine(num_blocks, enable_prefix_caching):
    """An engine that records its steps, and takes no time for them."""
    cache = CacheConfig(enable_prefix_caching=enable_prefix_caching)
    scheduler = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=2048)
    return LLMEngine(model_config(), cache, scheduler, WaitingExecutor(num_blocks, 0.0), None, trace=True)


# -- the stream of events ----------------------------------------------------------------------------------------------


class ScriptedEngine:
    """Has the steps that a test puts into it, and the end."""

    def __init__(self):
        self.model_config = SimpleNamespace(name=MODEL, max_model_len=64)
        self.scheduler_config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
        self.args = SimpleNamespace(block_size=16, enable_prefix_caching=False)
        self.num_gpu_blocks = 20
        self.stats = EngineStats(num_gpu_blocks=20)
        self.num_unfinished = 0
        self.script = asyncio.Queue()
        self.num_watchers = 0

    async def steps(self):
        self.num_watchers += 1
        try:
            while True:
                item = await self.script.get()
                if isinstance(item, Exception):
                    raise item
                yield item
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
        times, names, num_steps, last = [], [], 0, None
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
                    last = content
                await request
        finally:
            engine.shutdown()
        return times, names, num_steps, last

    times, names, num_steps, last = asyncio.run(main())
    assert num_steps == last["number"] == 200
    assert names[-2:] == ["steps", "idle"]
    gaps = [after - before for before, after in itertools.pairwise(times[:-1])]
    assert len(gaps) > 2
    assert min(gaps) >= 0.95 * live_module.EVENT_PAUSE


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
        engine.stats = EngineStats(num_running=3, num_gpu_blocks=20)
        async with aclosing(live_events(engine)) as events:
            await anext(events)
            busy = parse(await anext(events))
            engine.num_unfinished = 0
            return busy, parse(await anext(events))

    busy, idle = asyncio.run(main())
    assert (busy[0], busy[1]["num_running"]) == ("busy", 3)
    assert idle[0] == "idle"


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
            assert len(engine._watchers) == 2
            async for _ in engine.generate([1] * 20, SamplingParams(max_tokens=300)):
                pass
            events = []
            while not events or events[-1][0] != "idle":
                events.append(parse(await anext(quick)))
            await quick.aclose()
            stay.set()
            sent = await asyncio.wait_for(page, 5)
            return events, sent, engine._watchers, len(asyncio.all_tasks())
        finally:
            engine.shutdown()

    events, sent, watchers, num_tasks = asyncio.run(main())
    assert sum(len(content["curve"]["end"]) for name, content in events if name == "steps") == 300
    assert len(sent) == 2, "the headers, and the event that it took"
    assert (watchers, num_tasks) == ({}, 1)


def test_each_page_gets_the_engine_of_the_moment():
    async def main():
        engines = [ScriptedEngine(), ScriptedEngine()]
        engines[1].num_gpu_blocks = 77
        for engine in engines:
            engine.script.put_nowait(EngineDeadError("It died."))
        app, restarted = FastAPI(), iter(engines)
        add_dashboard(app, lambda: next(restarted))
        pages = [await call(app, "/live", stay=asyncio.Event()) for _ in engines]
        return [parse(sent[1]["body"])[1]["num_gpu_blocks"] for sent in pages]

    assert asyncio.run(main()) == [20, 77]
