"""What the playground runs, in this Python: the engine on a virtual clock, and the reader's code in place of its classes."""

from __future__ import annotations

import dataclasses
import http.client
import json
import re
import socket
import subprocess
import sys
import textwrap
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.entrypoints.cli.main import main
from minivllm.entrypoints.playground import server as server_module
from minivllm.entrypoints.playground import session as session_module
from minivllm.entrypoints.playground.exercise import LESSONS
from minivllm.entrypoints.playground.race import Race
from minivllm.entrypoints.playground.server import make_server
from minivllm.entrypoints.playground.session import Session, Settings
from minivllm.entrypoints.playground.site import PACKAGE, PARTS, STATIC, make_page
from minivllm.errors import ConfigError
from minivllm.simulation.engine import simulate

BASE = "from minivllm.core.scheduler import Scheduler as Base\n\n\nclass Scheduler(Base):\n"
LATE_FOR_3 = f"""{BASE}
    def _admit(self, output):
        kept = [seq for request in self.requests.values() for seq in request.sequences if request.request_id == "3"]
        kept = [seq for seq in kept if seq.num_output_tokens == 0 and seq.num_computed_tokens == 0]
        for seq in kept:
            self.waiting.remove(seq)
        super()._admit(output)
        for seq in kept:
            self.waiting.add(seq)
"""


def run(session, steps_at_a_time=16):
    """All answers until everything has ended."""
    answers = []
    while not (answers and answers[-1]["done"]):
        answers.append(session.advance(steps_at_a_time))
    return answers


@pytest.mark.parametrize("options", [{}, {"preemption_mode": "swap", "num_gpu_blocks": 40, "arrivals": "at-once"}])
@pytest.mark.parametrize("steps_at_a_time", [1, 64])
def test_a_session_makes_the_steps_of_the_simulator(options, steps_at_a_time):
    chosen = Settings(num_requests=24, **options)
    expected = simulate(chosen.requests(), **chosen.engine_options())
    answers = run(Session(chosen), steps_at_a_time)
    assert answers[-1]["num_steps"] == len(expected.trace)
    assert answers[-1]["now"] == pytest.approx(expected.trace[-1].end)
    assert sum(happening["what"] == "ended" for a in answers if a["report"] for happening in a["report"]["happenings"]) == 24
    assert not any(answer["starving"] for answer in answers)


def test_a_report_names_every_sequence_that_holds_blocks():
    session = Session(Settings(arrivals="at-once", num_requests=16, num_gpu_blocks=512))
    report = session.advance(2)["report"]
    assert [sequence["number"] for sequence in report["sequences"]] == list(range(16))
    held = [block for sequence in report["sequences"] for block in sequence["blocks"]]
    assert len(held) == len(set(held)) == 512 - report["num_free_blocks"]


def test_the_readers_scheduler_runs_and_who_it_starves_is_named():
    session, said = Session(Settings(), LATE_FOR_3), set()
    with pytest.raises(RuntimeError, match="1 request is unfinished"):
        while True:
            said.update(session.advance(16)["starving"])
    assert said == {"Request #3 has waited for its first token while more than 8 that came later have finished."}


def test_who_gets_a_first_token_and_then_no_other_is_named_too():
    code = f"""{BASE}
    def _schedule_decodes(self, output):
        kept = [seq for seq in self.running if seq.request.request_id == "3" and seq.num_output_tokens]
        for seq in kept:
            self.running.remove(seq)
        super()._schedule_decodes(output)
        for seq in kept:
            self.running.append(seq)
"""
    session, said = Session(Settings(), code), set()
    with pytest.raises(RuntimeError, match="1 request is unfinished"):
        while True:
            said.update(session.advance(16)["starving"])
    assert said == {"Request #3 has waited for its next token while more than 8 that came later have finished."}


def test_the_readers_block_manager_runs():
    code = (PACKAGE / "core/block_space_manager.py").read_text()
    assert "        self.watermark_blocks = int(watermark * num_gpu_blocks)" in code
    session = Session(Settings(), code.replace("int(watermark * num_gpu_blocks)", "num_gpu_blocks // 2"))
    assert session.engine.block_manager.watermark_blocks == 48
    assert type(session.engine.block_manager).__module__ == "reader"
    assert run(session)[-1]["done"]


def tell(message):
    return json.loads(session_module.call(json.dumps(message)))


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("x = 1", "The code defines neither a class Scheduler nor a class BlockSpaceManager, so there is nothing to run."),
        ("from minivllm.core.scheduler import Scheduler", "The code defines neither"),
        ("class Scheduler(:", "Line 1: invalid syntax."),
        ("import torch_of_my_own", "ModuleNotFoundError: No module named 'torch_of_my_own'\nline 1, in <module>: import torch"),
        (
            f"{BASE}    def schedule(self):\n        return self.nothing",
            "no attribute 'nothing'\nline 6, in schedule: return self.nothing",
        ),
        (f"{BASE}    def schedule(self):\n        return None", "Error"),
        (
            f"{BASE}    def __init__(self, *args):\n        self.nothing()",
            "no attribute 'nothing'\nline 6, in __init__: self.nothing()",
        ),
        (
            f"{BASE}    def add_request(self, request):\n        1 / 0",
            "ZeroDivisionError: division by zero\nline 6, in add_request: 1 / 0",
        ),
    ],
)
def test_code_that_cannot_run_is_told_with_its_line(code, sentence):
    answer = tell({"begin": {}, "code": code})
    if "error" not in answer:
        answer = tell({"advance": 10})
    assert sentence in answer["error"]


def test_what_the_code_prints_is_shown_and_dataclasses_work():
    code = "from __future__ import annotations\nfrom dataclasses import dataclass\n\n@dataclass\nclass Point:\n    x: int\n\nprint(Point(3))\n"
    assert tell({"begin": {}, "code": f"{code}{BASE}    pass\n"})["printed"] == "Point(x=3)\n"
    noisy = f"{BASE}    def schedule(self):\n        print('x' * 1000)\n        return super().schedule()\n"
    assert tell({"begin": {}, "code": noisy})["printed"] == ""
    assert tell({"advance": 5})["printed"] == (("x" * 1000 + "\n") * 5)[-2000:]


@settings(max_examples=30)
@given(
    st.fixed_dictionaries(
        {
            "num_gpu_blocks": st.integers(4, 300), "block_size": st.integers(1, 64), "max_num_seqs": st.integers(1, 64),
            "max_num_batched_tokens": st.integers(16, 2048), "enable_chunked_prefill": st.booleans(), "enable_prefix_caching": st.booleans(),
            "preemption_mode": st.sampled_from(["recompute", "swap"]), "scheduler": st.sampled_from(["continuous", "static"]),
            "num_requests": st.integers(1, 20), "arrivals": st.sampled_from(["poisson", "bursts", "at-once"]),
            "distribution": st.sampled_from(["longtail", "uniform"]), "mean_prompt_len": st.integers(1, 4096), "mean_output_len": st.integers(1, 64),
        }
    )
)  # fmt: skip
def test_any_settings_of_the_form_run_to_the_end_or_are_refused_in_a_sentence(chosen):
    answer = tell({"begin": chosen, "code": ""})
    while "error" not in answer and not answer.get("done"):
        answer = tell({"advance": 64})
    if "error" in answer:
        assert "max_num_batched_tokens" in answer["error"] and chosen["max_num_batched_tokens"] < chosen["max_num_seqs"]


def test_settings_out_of_range_are_told_in_a_sentence():
    with pytest.raises(ConfigError, match="max_num_seqs"):
        Session(Settings(max_num_seqs=0))


def test_calls_are_json_in_and_out():
    begun = json.loads(session_module.call(json.dumps({"begin": {"num_gpu_blocks": 64}, "code": ""})))
    assert begun["engine"]["num_gpu_blocks"] == 64
    assert json.loads(session_module.call('{"advance": 3}'))["num_steps"] == 3
    assert "block_size" in json.loads(session_module.call('{"begin": {"block_size": 0}, "code": ""}'))["error"]


def test_the_page_begins_with_the_same_settings():
    found = re.search(r"DEFAULTS = (\{.*?\});", (STATIC / "presets.js").read_text(), flags=re.DOTALL)[1]
    shown = json.loads(re.sub(r",\s*\}", "}", re.sub(r"(\w+):", r'"\1":', found)))
    known = dataclasses.asdict(Settings())
    assert shown == {name: known[name] for name in shown}
    assert known.keys() - shown.keys() == {"num_cpu_blocks"}
    page = make_page()
    for name in shown:
        assert page.count(f'name="{name}"') == 1


def test_a_lessons_situation_makes_the_steps_of_the_lesson():
    """That of lesson 07 with nine blocks: request 2 gives way in step 19, counted from 0."""
    presets = (STATIC / "presets.js").read_text()
    found = re.search(r'name: "three requests, nine blocks".*?settings: (\{.*?\})', presets, flags=re.DOTALL)[1]
    session = Session(Settings(**json.loads(re.sub(r"(\w+):", r'"\1":', found))))
    happenings = [(step, one) for step in range(20) for one in session.advance(1)["report"]["happenings"]]
    assert [(step, one["number"]) for step, one in happenings if one["what"] == "preempted"] == [(19, 2)]


IMPORTS = """
import importlib, pkgutil, sys
from minivllm.entrypoints.playground.exercise import LESSONS
from minivllm.entrypoints.playground import session
session.Session(session.Settings()).advance(5)
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"tqdm", "psutil", "torch", "asyncio"}))
session.begin_race([{"name": "a run", "settings": {}, "code": ""}] * 2)
for number in LESSONS:
    lesson = importlib.import_module(f"minivllm.course.lessons.lesson_{number}")
    for module in pkgutil.iter_modules(lesson.__path__):
        importlib.import_module(f"{lesson.__name__}.{module.name}")
import minivllm.course.lessons.block_tables, minivllm.course.lessons.budget
print(*(module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "minivllm"), sep="\\n")
"""


@pytest.fixture(scope="module")
def imports():
    """Packages that a run has imported, of those that are large; and files of this package that all there is has."""
    packages, *files = subprocess.run(
        [sys.executable, "-c", IMPORTS], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return packages, {Path(file) for file in files}


def test_the_package_in_the_browser_has_all_that_it_imports_there(imports):
    files = {path for part in PARTS for path in PACKAGE.glob(part)}
    imported = imports[1]
    assert len(imported) > 60
    assert imported <= files


def test_a_run_waits_for_no_package_that_it_does_not_need(imports):
    assert imports[0] == ""


def test_a_folder_without_a_playground_and_a_port_in_use_are_told(tmp_path, capsys):
    assert main(["course", "play", "--folder", str(tmp_path)]) == 2
    assert f"There is no playground in {tmp_path}: run `make book`" in capsys.readouterr().err
    (tmp_path / "files.json").write_text("[]")
    with make_server(tmp_path, 0) as server:
        assert main(["course", "play", "--folder", str(tmp_path), "--port", str(server.server_port)]) == 2
    assert f"Port {server.server_port} cannot be used" in capsys.readouterr().err


@pytest.fixture
def book(tmp_path):
    """A book with a playground in it."""
    (tmp_path / "playground").mkdir()
    for name in ("searchindex.js", "index.html", "playground/files.json", "playground/index.html"):
        (tmp_path / name).write_text("[]")
    return tmp_path


@pytest.mark.parametrize(
    "path", ["playground/index.html", "%70layground/index.html", "/playground/index.html", "x/../playground/"]
)
def test_a_page_of_the_playground_may_contact_only_its_server_however_it_is_named(book, path):
    with make_server(book / "playground", 0, book) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        headers = {}
        for name in (path, "index.html"):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
            connection.request("GET", f"/{name}")
            headers[name] = connection.getresponse().headers
            connection.close()
        server.shutdown()
    assert "default-src 'self'" in headers[path]["Content-Security-Policy"]
    assert headers["index.html"]["Content-Security-Policy"] is None, "the book's pages have scripts within them"


def test_what_is_no_request_gets_an_error_and_no_traceback(book, capfd):
    with make_server(book / "playground", 0, book) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        not_utf8, too_short = b"\x16\x03\x01\x00\r\n\r\n", b"GET\r\n\r\n"
        too_long, no_name = b"GET /" + b"a" * 70_000, b"GET /%00 HTTP/1.0\r\n\r\n"
        for sent, status in ((not_utf8, b"400"), (too_short, b"400"), (too_long, b"414"), (no_name, b"404")):
            with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                assert status in connection.makefile("rb").read(), sent
        server.shutdown()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("folder", ["playground", "."])
def test_course_play_says_where_the_playground_is(book, folder, monkeypatch, capsys):
    monkeypatch.setattr(server_module._Server, "serve_forever", lambda self: None)
    assert main(["course", "play", "--port", "0", "--folder", str(book / folder)]) == 0
    assert re.search(r"The playground is at http://127.0.0.1:\d+/playground/index.html", printed := capsys.readouterr().out)
    monkeypatch.chdir(book / "playground")
    assert main(["course", "play", "--port", "0", "--folder", "."]) == 0
    assert "/playground/index.html" in capsys.readouterr().out
    (book / "searchindex.js").unlink()
    assert main(["course", "play", "--port", "0", "--folder", str(book / folder)]) == 0
    assert re.search(r"Exercises: http://127.0.0.1:\d+/exercise.html#04", capsys.readouterr().out), printed


def test_the_page_links_to_the_exercises():
    assert re.findall(r'href="exercise.html#(\d\d)"', make_page()) == list(LESSONS)


def test_a_race_compares_two_runs_of_the_same_requests():
    runs = [
        {"name": "A: static", "settings": {"scheduler": "static", "arrivals": "at-once"}, "code": ""},
        {"name": "B: <own>", "settings": {"arrivals": "at-once"}, "code": f"{BASE}    pass\n"},
    ]
    answer = json.loads(session_module.call(json.dumps({"race": runs, "number": 1})))
    assert "The first step that differs is step" in answer["page"] and "B: &lt;own&gt;" in answer["page"]
    assert answer["moments"] == sorted(set(answer["moments"])) and answer["first"] is not None
    assert len(re.findall("<rect ", answer["page"])) == 2 * 3 * 64, "each request waits, is prefilled and decodes"
    same = json.loads(session_module.call(json.dumps({"race": [runs[0], runs[0]], "number": 1})))
    assert "Both runs have the same steps." in same["page"] and same["first"] is None
    runs[1]["code"] = f"{BASE}    def schedule(self):\n        return self.nothing\n"
    assert json.loads(session_module.call(json.dumps({"race": runs, "number": 1})))["error"].startswith(
        "B: <own>: AttributeError"
    )


def test_a_race_gives_both_runs_the_same_requests_though_one_has_a_small_cache():
    runs = [
        {"name": name, "settings": {"num_gpu_blocks": n, "num_requests": 24}, "code": ""} for name, n in (("A", 24), ("B", 96))
    ]
    assert "not the same ones" not in tell({"race": runs, "number": 1})["page"]
    runs[1]["settings"]["mean_output_len"] = 30
    assert "not the same ones" in tell({"race": runs, "number": 1})["page"]
    runs[0]["settings"]["num_gpu_blocks"] = -1
    assert tell({"race": runs, "number": 1})["error"].startswith("A: ")


def test_a_look_at_another_race_changes_nothing():
    runs = [{"name": mode, "settings": {"preemption_mode": mode, "num_gpu_blocks": 40, "arrivals": "at-once"}, "code": ""}
            for mode in ("recompute", "swap")]  # fmt: skip
    moments = tell({"race": runs, "number": 1})["moments"]
    first = tell({"race": runs, "number": 2})["first"]
    assert "another race has begun" in tell({"look": len(moments) - 1, "number": 1})["error"]
    shown = tell({"look": first, "number": 2})["runs"]
    assert all(not run["is_new"] and run["report"]["num_running"] for run in shown)


@pytest.mark.parametrize(
    "code", ["raise SystemExit", "class Sad(Exception):\n    def __str__(self):\n        raise self\nraise Sad"]
)
def test_whatever_the_readers_code_raises_is_told(code):
    assert tell({"begin": {}, "code": code})["error"].startswith(("SystemExit", "Sad"))


@pytest.fixture(scope="module")
def raced():
    """Two runs with preemptions and a gap in which the engine has nothing to do."""
    chosen = Settings(num_requests=12, arrival_rate=0.5, arrivals="bursts", num_gpu_blocks=24)
    traces = [
        simulate(chosen.requests(), **chosen.engine_options() | {"preemption_mode": mode}).trace for mode in ("recompute", "swap")
    ]
    for trace in traces:
        assert any(step.preempted for step in trace) and any(step.end < later.start for step, later in pairwise(trace))
    return tuple(traces)


@settings(max_examples=20)
@given(st.data())
def test_a_race_shows_both_runs_as_they_were_at_any_moment_in_any_order(raced, data):
    race = Race(raced)
    pages = [{"tables": {}, "ended": 0} for _ in raced]
    for number in data.draw(st.lists(st.integers(0, len(race.moments) - 1), min_size=1, max_size=8)):
        moment = race.moments[number]
        for trace, page, shown in zip(raced, pages, race.look(number), strict=True):
            step = [step for step in trace if step.start - trace[0].start <= moment][-1]
            assert shown["num_steps"] == trace.steps.index(step) + 1 and shown["num_steps_of_run"] == len(trace)
            assert shown["is_idle"] == (step.end - trace[0].start <= moment)
            if shown["is_new"]:
                page |= {"tables": {}, "ended": 0}
            if (report := shown["report"]) is not None:
                tables = {
                    (s["request_id"], s["index"]): page["tables"].get((s["request_id"], s["index"]), ())[: s["keep"]]
                    + s["blocks"]
                    for s in report["sequences"]
                }
                page |= {"tables": tables, "waiting": report["waiting"]}
                page["ended"] += sum(happening["what"] == "ended" for happening in report["happenings"])
            if not shown["is_idle"] or report is not None:
                assert page["tables"] == step.block_tables | step.swapped_tables
            assert len(page["waiting"]) == step.num_waiting
            assert page["ended"] == sum(len(each.finished) for each in trace[: shown["num_steps"]])
            if shown["is_idle"]:
                page["tables"] = {}  # as the page does


def test_a_race_knows_all_that_have_ended_and_the_moment_of_a_step(raced):
    many = Settings(num_requests=300, arrivals="at-once", mean_prompt_len=4, mean_output_len=2)
    race = Race((simulate(many.requests(), **many.engine_options()).trace,))
    (shown,) = race.look(len(race.moments) - 1)
    assert sum(happening["what"] == "ended" for happening in shown["report"]["happenings"]) == 300 and shown["is_idle"]
    race = Race(raced)
    assert race.moment_of(None) is None and race.moment_of(0) == 0
    longer = max(raced, key=len)
    assert race.moments[race.moment_of(len(longer) - 1)] == pytest.approx(longer[-1].start - longer[0].start)


def test_looking_at_a_race_that_python_has_forgotten_is_told(monkeypatch):
    monkeypatch.setattr(session_module, "_race", None)
    error = tell({"look": 3, "number": 1})["error"]
    assert error == "The runs are gone, because Python was stopped or another race has begun: race again."


def test_the_example_on_the_page_runs():
    block = re.search(r"```text\n(  from minivllm.*?)```", (PACKAGE.parent / "docs/playground.md").read_text(), flags=re.DOTALL)[
        1
    ]
    session = Session(Settings(arrivals="at-once"), textwrap.dedent(block))
    most = 0
    while not (answer := session.advance(8))["done"]:
        most = max(most, answer["report"]["num_running"])
    assert most == 4
