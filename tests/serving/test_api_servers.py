"""Two replicas behind three API servers on one port: what clients get, what metrics add up to, and how all of it ends."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
from child_processes import children
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families
from test_serving import KEY, MODEL, ServeProcess

from minivllm.entrypoints.cli import main as cli
from minivllm.sampling_params import SamplingParams

pytestmark = pytest.mark.slow
OPTIONS = ["--data-parallel-size", "2", "--api-server-count", "3", "--replica-timeout", "3"]
HEADERS = {"Authorization": f"Bearer {KEY}"}
LONG = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The server of all tests but two. The last ones take parts of it away, and end it."""
    served = ServeProcess(*OPTIONS, log=tmp_path_factory.mktemp("serve") / "log")
    yield served
    assert served.end() == 0


def metrics(served):
    families = text_string_to_metric_families(served.http.get("/metrics").text)
    return [sample for family in families for sample in family.samples]


def total(samples, name, **labels):
    return sum(
        sample.value for sample in samples if sample.name == f"minivllm:{name}" and labels.items() <= sample.labels.items()
    )


def post_alone(served, body, timeout=120):
    """A request on a connection of its own: any of the API servers takes it."""
    return httpx.post(f"{served.url}/v1/completions", json={"model": MODEL} | body, headers=HEADERS, timeout=timeout)


def test_metrics_are_there_from_the_beginning(served):
    samples = [sample for sample in metrics(served) if sample.name == "minivllm:num_requests_running"]
    assert sorted((sample.labels["engine"], sample.value) for sample in samples) == [("0", 0), ("1", 0)]


def test_requests_get_the_tokens_of_llm_generate_wherever_they_go(served, llm, pytestconfig):
    num_requests = 200 if pytestconfig.getoption("--long") else 64
    rng = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "went", "away", "to", "find", "food", "near", "house"]
    prompts = [" ".join(rng.choices(words, k=rng.randint(1, 20))) for _ in range(num_requests)]
    options = [
        {"temperature": 0, "max_tokens": rng.randint(1, 10)}
        if i % 2
        else {"temperature": 1.0, "top_p": 0.9, "seed": i, "max_tokens": rng.randint(1, 10), "n": 1 + i % 3}
        for i in range(num_requests)
    ]
    outputs = llm.generate(prompts, [SamplingParams(**item) for item in options], use_tqdm=False)
    expected = [[completion.text for completion in output.outputs] for output in outputs]
    before = metrics(served)

    def ask(prompt, options):
        answer = served.client.completions.create(model=MODEL, prompt=prompt, **options)
        return [choice.text for choice in answer.choices]

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        assert list(pool.map(ask, prompts, options)) == expected

    after = metrics(served)
    assert total(after, "request_success_total") - total(before, "request_success_total") == num_requests
    num_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    assert total(after, "generation_tokens_total") - total(before, "generation_tokens_total") == num_tokens
    shares = [total(after, "time_to_first_token_seconds_count", engine=rank) for rank in "01"]
    assert min(shares) > num_requests / 4, "both replicas have worked"
    assert total(after, "num_requests_running") == total(after, "num_requests_waiting") == 0
    assert len({tuple(sample.labels.items()) for sample in after if sample.name == "minivllm:num_requests_running"}) == 2


def test_all_api_servers_take_connections(served):
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        body = {"prompt": "Hello", "max_tokens": 2}
        assert all(answer.status_code == 200 for answer in pool.map(lambda _: post_alone(served, body), range(96)))
    (folder,) = {child.environ()["PROMETHEUS_MULTIPROC_DIR"] for child in children(served, "api_server_proc")}
    pids = [served.process.pid, *(child.pid for child in children(served, "api_server_proc"))]
    finished = [
        sum(sample.value for metric in MultiProcessCollector.merge([f"{folder}/counter_{pid}.db"]) for sample in metric.samples
            if sample.name == "minivllm:request_success_total")
        for pid in pids
    ]  # fmt: skip
    assert len(finished) == 3 and min(finished) > 0, finished
    assert sum(finished) == total(metrics(served), "request_success_total")


@pytest.mark.long
def test_bench_serve_measures_all_of_it(served, tmp_path, monkeypatch):
    monkeypatch.setenv("MINIVLLM_API_KEY", KEY)
    before = total(metrics(served), "request_success_total")
    report = tmp_path / "bench.json"
    options = [
        "--num-requests",
        "40",
        "--concurrency",
        "16",
        "--mean-output-len",
        "16",
        "--mean-prompt-len",
        "32",
        "--json",
        str(report),
    ]
    command = [
        sys.executable,
        "-m",
        "minivllm.entrypoints.cli.main",
        "bench",
        "serve",
        "--base-url",
        served.url,
        "--model",
        MODEL,
    ]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"completed": 40' in report.read_text()
    assert total(metrics(served), "request_success_total") - before >= 40


def test_every_api_server_tells_of_each_replica(served):
    for _ in range(20):
        with httpx.Client() as client:  # another connection each time
            replicas = client.get(f"{served.url}/health", headers=HEADERS).json()["replicas"]
        assert [(replica["rank"], replica["state"]) for replica in replicas] == [(0, "ready"), (1, "ready")]


@pytest.mark.long
def test_every_api_server_has_the_page_with_its_replicas(served):
    headers = {"Authorization": f"Bearer {KEY}"}
    for replica in (0, 1, 1, 0, 1, 0):
        with httpx.stream("GET", f"{served.url}/live?replica={replica}", headers=headers, timeout=60) as events:
            asked = threading.Thread(target=lambda: [post_alone(served, {"prompt": "Hi", "max_tokens": 8}) for _ in range(4)])
            asked.start()
            seen = []
            for line in events.iter_lines():
                seen.append(line)
                if line.startswith("data:") and "tokens_per_second" in line:
                    replicas = json.loads(line.removeprefix("data: "))["replicas"]
                    if sum(item["tokens_per_second"] for item in replicas) > 0:
                        break
            assert f'"num_engines":2,"replica":{replica}' in "".join(seen)
            asked.join()
    assert (
        httpx.get(f"{served.url}/live?replica=2", headers=headers).json()["error"]["message"]
        == "There is no replica 2: they are 0 to 1."
    )


def num_in_flight(served):
    samples = metrics(served)
    return total(samples, "num_requests_running") + total(samples, "num_requests_waiting")


def becomes(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long
def test_when_a_replica_dies_the_answers_of_all_api_servers_go_on(served):
    body = LONG | {"max_tokens": 60}
    expected = post_alone(served, body).json()["choices"][0]["text"]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(post_alone, served, body) for _ in range(12)]
        becomes(lambda: num_in_flight(served) == 12)
        children(served, "engine_core_proc")[0].kill()
        answers = [one.result() for one in asked]
    assert [answer.status_code for answer in answers] == [200] * 12
    assert {answer.json()["choices"][0]["text"] for answer in answers} == {expected}
    samples = metrics(served)
    assert total(samples, "num_resumed_requests_total") >= 3
    assert total(samples, "engine_deaths_total") == 1
    becomes(lambda: total(metrics(served), "engine_ready") == 2)  # another is started
    for _ in range(12):  # every API server knows of it
        answer = httpx.get(f"{served.url}/replicas", headers=HEADERS).json()
        assert [(replica["state"], replica["deaths"]) for replica in answer["replicas"]] in (
            [("ready", 1), ("ready", 0)],
            [("ready", 0), ("ready", 1)],
        )
        assert answer["streams_lost"] == 0 and answer["streams_resumed"] >= 3


@pytest.mark.long
def test_an_api_server_that_was_stopped_for_a_while_goes_on_with_the_replicas_it_has(served):
    other = children(served, "api_server_proc")[0]
    before = served.log.read_text()
    other.suspend()
    stop = time.monotonic() + 5  # longer than a replica may be silent
    while time.monotonic() < stop:
        with contextlib.suppress(httpx.TimeoutException):
            assert post_alone(served, {"prompt": "Hi", "max_tokens": 20}, timeout=0.5).status_code == 200
    other.resume()
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        body = {"prompt": "Hi", "max_tokens": 20}
        assert {answer.status_code for answer in pool.map(lambda _: post_alone(served, body), range(48))} == {200}
    for _ in range(12):
        with httpx.Client() as client:
            replicas = client.get(f"{served.url}/health", headers=HEADERS).json()["replicas"]
            assert [replica["state"] for replica in replicas] == ["ready", "ready"]
    assert "nothing was heard" not in served.log.read_text().removeprefix(before)


@pytest.mark.long
def test_a_coordinator_that_is_stopped_is_replaced(served):
    (stopped,) = children(served, "data_parallel.coordinator")
    stopped.suspend()
    becomes(lambda: [child for child in children(served, "data_parallel.coordinator") if child.pid != stopped.pid])
    assert "The coordinator of the replicas shows no sign of life: it is killed." in served.log.read_text()
    assert all(post_alone(served, {"prompt": "Hi", "max_tokens": 2}).status_code == 200 for _ in range(12))


@pytest.mark.long
def test_an_api_server_that_dies_takes_only_its_own_connections_with_it(served):
    body = LONG | {"max_tokens": 80, "stream": True}
    ends = {}

    def listen():
        client_port = None
        try:
            url, json = f"{served.url}/v1/completions", {"model": MODEL} | body
            with httpx.stream("POST", url, json=json, headers=HEADERS, timeout=120) as answer:
                _, client_port = answer.extensions["network_stream"].get_extra_info("client_addr")
                ends[client_port] = None
                ends[client_port] = "whole" if "[DONE]" in "".join(answer.iter_text()) else "broken"
        except httpx.HTTPError:
            ends[client_port] = "broken"

    listeners = [threading.Thread(target=listen) for _ in range(18)]
    for listener in listeners:
        listener.start()
    becomes(lambda: len(ends) == 18)
    servers = children(served, "api_server_proc")
    clients = [{item.raddr.port for item in server.net_connections("tcp") if item.raddr} & ends.keys() for server in servers]
    victim = max(range(2), key=lambda number: len(clients[number]))
    servers[victim].kill()
    for listener in listeners:
        listener.join()
    assert {port for port, end in ends.items() if end == "broken"} == clients[victim] != set()
    assert sum(end == "whole" for end in ends.values()) == 18 - len(clients[victim])
    assert "was killed by SIGKILL: its clients' connections have ended, and the others go on." in served.log.read_text()

    def is_idle():
        samples = metrics(served)
        return not total(samples, "num_requests_running") + total(samples, "kv_cache_usage_perc")

    becomes(is_idle, 10)  # the replicas have dropped its requests
    assert all(post_alone(served, {"prompt": "Hi", "max_tokens": 2}).status_code == 200 for _ in range(12))


@pytest.mark.long
def test_running_requests_of_all_api_servers_finish_after_sigterm(served):
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(post_alone, served, LONG | {"max_tokens": 60}) for _ in range(12)]
        becomes(lambda: total(metrics(served), "num_requests_running") == 12)
        everybody = psutil.Process(served.process.pid).children(recursive=True)
        assert served.end() == 0
        answers = [one.result() for one in asked]
    assert [answer.status_code for answer in answers] == [200] * 12
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {60}
    assert psutil.wait_procs(everybody, 5)[1] == []


@pytest.mark.long
def test_api_servers_that_are_stopped_keep_neither_clients_nor_the_end_waiting(tmp_path):
    served = ServeProcess(*OPTIONS, log=tmp_path / "log")
    first, second = children(served, "api_server_proc")
    first.suspend()
    becomes(lambda: first not in children(served, "api_server_proc"))
    assert "shows no sign of life: it is killed." in served.log.read_text()
    assert all(post_alone(served, {"prompt": "Hi", "max_tokens": 2}, 20).status_code == 200 for _ in range(12))
    second.suspend()
    start = time.monotonic()
    assert served.end() == 0
    assert time.monotonic() - start < 30, "the others have ended, and nothing is waited for but its next sign of life"


@pytest.mark.long
def test_one_replica_with_two_api_servers(tmp_path):
    served = ServeProcess("--api-server-count", "2", log=tmp_path / "log")
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            body = {"prompt": "Hello", "max_tokens": 4, "temperature": 0}
            texts = [answer.json()["choices"][0]["text"] for answer in pool.map(lambda _: post_alone(served, body), range(16))]
        assert len(set(texts)) == 1
        unseeded = [post_alone(served, {"prompt": "Hello", "max_tokens": 8}).json()["choices"][0]["text"] for _ in range(8)]
        assert len(set(unseeded)) > 6, "the API servers draw other seeds"
        assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    finally:
        assert served.end() == 0


@pytest.mark.long
def test_all_end_when_the_first_api_server_is_killed(tmp_path):
    own = ServeProcess(*OPTIONS, log=tmp_path / "log")
    everybody = psutil.Process(own.process.pid).children(recursive=True)
    other = children(own, "api_server_proc")[1]
    folder = Path(other.environ()["PROMETHEUS_MULTIPROC_DIR"])
    socket_folder = next(Path(item.laddr).parent for item in other.net_connections("unix") if "requests-" in item.laddr)
    assert list(folder.iterdir()) and socket_folder.is_dir()
    own.process.kill()
    assert own.process.wait(10) == -signal.SIGKILL
    assert psutil.wait_procs(everybody, 15)[1] == []
    assert not folder.exists() and not socket_folder.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--api-server-count", "0"], "api_server_count"),
        (["--api-server-count", "2", "--headless"], "With --headless there is no API server here"),
    ],
)
def test_counts_that_cannot_work_are_refused(capsys, options, message):
    assert cli.main(["serve", *options]) == 2
    assert message in capsys.readouterr().err
