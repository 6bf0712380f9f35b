"""`minivllm replicas` and its routes: restarts under load, replicas and coordinators that are killed or stopped, and one that is given up."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
from child_processes import children
from test_serving import KEY, MODEL, ServeProcess

from minivllm import SamplingParams
from minivllm.entrypoints.cli import main as cli

pytestmark = pytest.mark.slow
OPTIONS = ["--data-parallel-size", "2", "--allow-kill", "--replica-timeout", "2", "--max-replica-deaths", "2"]
NUM_STREAMS = 6
PARAMS = {"max_tokens": 60, "ignore_eos": True}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    served = ServeProcess(*OPTIONS, log=tmp_path_factory.mktemp("replicas") / "log")
    yield served
    assert served.end() == 0


@pytest.fixture(scope="module")
def expected(llm):
    """The text of each stream, undisturbed."""
    params = [SamplingParams(**PARAMS, seed=number, temperature=number % 2) for number in range(NUM_STREAMS)]
    return [output.outputs[0].text for output in llm.generate(["Once upon a time"] * NUM_STREAMS, params, use_tqdm=False)]


def replicas(served):
    return served.http.get("/replicas").json()["replicas"]


def becomes(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def coordinators(served):
    return children(served, "data_parallel.coordinator")


def wait_until_ready(served):
    becomes(lambda: all(item["state"] == "ready" and not item["running"] for item in replicas(served)))


@contextlib.contextmanager
def streams(served, expected):
    """Streams that have begun; at the end, they are compared with what they should be."""

    def read(number):
        answer = served.client.completions.create(
            model=MODEL, prompt="Once upon a time", stream=True, seed=number, temperature=number % 2, max_tokens=PARAMS["max_tokens"],
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        pieces = []
        for chunk in answer:
            pieces += [choice.text for choice in chunk.choices]
            begun.add(number)
        return "".join(pieces)

    begun = set()
    with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as pool:
        answers = [pool.submit(read, number) for number in range(NUM_STREAMS)]
        becomes(lambda: len(begun) == NUM_STREAMS)
        yield
        assert [answer.result(timeout=90) for answer in answers] == expected
    assert served.http.get("/replicas").json()["streams_lost"] == 0


def run(served, *arguments):
    return cli.main(["replicas", *arguments, "--base-url", served.url, "--api-key", KEY])


def test_a_list_of_the_replicas(served, capsys):
    assert run(served) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["rank", "state", "running", "waiting", "cache", "deaths", "process"]
    assert [line.split()[:2] for line in lines[1:3]] == [["0", "ready"], ["1", "ready"]]
    assert [line.split()[-1] for line in lines[1:3]] == [str(item["process_id"]) for item in replicas(served)]
    assert lines[3] == "streams resumed elsewhere: 0, lost: 0"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["restart"], "Say which replicas to restart"),
        (["restart", "0", "--rolling"], "Say which replicas to restart"),
        (["restart", "7"], "There is no replica 7: they are 0 to 1."),
        (["restart", "-1"], "There is no replica -1"),
    ],
)
def test_a_restart_that_cannot_be(served, capsys, arguments, words):
    with contextlib.suppress(SystemExit):
        assert run(served, *arguments) != 0
    assert words in capsys.readouterr().err


def test_a_server_that_is_not_there(capsys):
    assert cli.main(["replicas", "--base-url", "http://127.0.0.1:9"]) != 0
    assert "There is no answer from http://127.0.0.1:9" in capsys.readouterr().err


def test_requests_that_another_site_could_send_are_refused(served):
    for action in ("restart", "kill"):
        assert served.http.post(f"/replicas/0/{action}", content="{}").status_code == 415
        assert served.http.post(f"/replicas/2/{action}", headers=JSON).status_code == 404
        assert httpx.post(f"{served.url}/replicas/0/{action}", headers=JSON).status_code == 401
    assert all(item["state"] == "ready" and item["deaths"] == 0 for item in replicas(served))


def test_buttons_that_kill_are_for_this_machine_alone(capsys):
    assert cli.main(["serve", MODEL, "--data-parallel-size", "2", "--allow-kill", "--host", "0.0.0.0"]) != 0
    assert "--allow-kill" in capsys.readouterr().err


@pytest.mark.parametrize("size", [0, -1, 2.5, "3", None, 10**6])
def test_a_number_of_replicas_that_cannot_be(served, size):
    answer = served.http.post("/replicas/scale", json={"size": size})
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("size ")
    assert served.http.post("/replicas/scale", content='{"size": 2}').status_code == 415
    assert httpx.post(f"{served.url}/replicas/scale", json={"size": 2}).status_code == 401
    assert served.http.get("/replicas").json()["size"] == 2


@pytest.mark.long
def test_more_and_fewer_under_load(served, expected, capsys):
    wait_until_ready(served)
    with streams(served, expected):
        assert run(served, "scale", "3") == 0
    with streams(served, expected):
        assert run(served, "scale", "1") == 0
    assert [item["state"] for item in replicas(served)] == ["ready"]
    assert run(served, "scale", "2") == 0
    assert "Replica 1 is ready." in capsys.readouterr().err


@pytest.mark.long
def test_restarted_one_after_another_under_load(served, expected, capsys):
    """Running requests finish where they are, and new ones are answered meanwhile."""
    before = {item["process_id"] for item in replicas(served)}
    answers, is_over = [], threading.Event()

    def keep_asking():
        while not is_over.is_set():
            body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
            answers.append(served.http.post("/v1/completions", json=body).json()["choices"][0]["text"])

    asking = threading.Thread(target=keep_asking)
    asking.start()
    with streams(served, expected):
        assert run(served, "restart", "--rolling") == 0
    is_over.set()
    asking.join()
    assert len(answers) > 10 and len(set(answers)) == 1
    assert capsys.readouterr().err.count("and is back after") == 2
    after = {item["process_id"] for item in replicas(served)}
    assert len(after) == 2 and not before & after
    answer = served.http.get("/replicas").json()
    assert answer["streams_resumed"] == 0 and all(item["deaths"] == 0 for item in answer["replicas"])


@pytest.mark.long
def test_a_coordinator_that_is_killed_is_started_again(served, expected):
    (old,) = coordinators(served)
    with streams(served, expected):
        old.kill()
    becomes(lambda: [child for child in coordinators(served) if child.pid != old.pid])
    with streams(served, expected):
        pass
    # A replica that is killed now is started again, and takes its share.
    victim = replicas(served)[0]
    with streams(served, expected):
        os.kill(victim["process_id"], signal.SIGKILL)
    wait_until_ready(served)
    assert replicas(served)[0]["process_id"] != victim["process_id"]


@pytest.mark.long
def test_replicas_and_the_coordinator_are_replaced_though_a_cleaner_has_removed_their_sockets(served, expected):
    wait_until_ready(served)
    (coordinator,) = coordinators(served)
    folder = next(
        Path(item.laddr).parent
        for item in psutil.Process(served.process.pid).net_connections("unix")
        if "/requests-" in item.laddr
    )
    old = [item["process_id"] for item in replicas(served)]
    with streams(served, expected):
        shutil.rmtree(folder)
        coordinator.kill()
    assert run(served, "restart", "--rolling") == 0
    assert "were removed, perhaps by a cleaner, and made again." in served.log.read_text()
    assert not set(old) & {item["process_id"] for item in replicas(served)}
    assert {path.name for path in folder.iterdir()} >= {"requests-0", "outputs-0", "reports-0", "handshake", "loads"}


@pytest.mark.long
def test_a_stopped_replica_loses_its_streams_and_comes_back(served, expected):
    wait_until_ready(served)
    process_id = replicas(served)[1]["process_id"]
    with streams(served, expected):
        os.kill(process_id, signal.SIGSTOP)
        becomes(lambda: replicas(served)[1]["state"] == "unreachable", 10)
        os.kill(process_id, signal.SIGCONT)
        becomes(lambda: replicas(served)[1]["state"] == "ready", 10)
    wait_until_ready(served)
    with streams(served, expected):
        pass
    assert replicas(served)[1]["process_id"] == process_id


@pytest.mark.long
def test_one_that_stays_stopped_is_replaced(served, expected):
    process_id = replicas(served)[1]["process_id"]
    with streams(served, expected):
        os.kill(process_id, signal.SIGSTOP)
    becomes(lambda: replicas(served)[1]["state"] == "ready" and replicas(served)[1]["process_id"] != process_id)
    assert not psutil.pid_exists(process_id)


@pytest.mark.long
def test_one_that_is_stopped_while_it_loads_is_replaced(served, expected):
    def loading():
        return [child for child in children(served, "engine_core_proc") if child.pid not in known]

    wait_until_ready(served)
    known = {item["process_id"] for item in replicas(served)}
    assert served.http.post("/replicas/1/restart", headers=JSON).status_code == 202
    becomes(loading)
    (stopped,) = loading()
    stopped.suspend()
    with streams(served, expected):
        pass
    becomes(lambda: replicas(served)[1]["state"] == "ready", 120)
    assert not psutil.pid_exists(stopped.pid)
    assert "Replica 1 shows no sign of life: its process is killed." in served.log.read_text()


@pytest.mark.long
def test_one_that_dies_again_and_again_is_given_up(served, expected):
    becomes(lambda: all(item["state"] == "ready" for item in replicas(served)))
    with streams(served, expected):
        assert served.http.post("/replicas/1/kill", headers=JSON).status_code == 202
    end = time.monotonic() + 90
    while (state := replicas(served)[1]["state"]) != "given up":
        if state == "ready":
            served.http.post("/replicas/1/kill", headers=JSON)
        assert time.monotonic() < end
        time.sleep(0.05)
    answer = served.http.post("/replicas/1/restart", headers=JSON)
    assert answer.status_code == 409 and "given up" in answer.text
    health = served.http.get("/health")
    assert health.status_code == 200 and "given up" in health.text
    assert 'minivllm:engine_ready{engine="1",model_name="smollm2-135m"} 0.0' in served.http.get("/metrics").text
    assert "it is given up" in served.log.read_text()
    with streams(served, expected):
        pass
