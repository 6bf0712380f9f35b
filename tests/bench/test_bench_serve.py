"""`minivllm bench serve`: it notes what a server does, whatever that is, and adds it up rightly."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from stub_openai_server import DONE, StubServer, event, piece, steady, stream, usage

import minivllm
from minivllm.bench import openai_client
from minivllm.bench.openai_client import OpenAIClient, read_events
from minivllm.bench.serve import Load, format_serving, generate_load, peak_concurrency, summarize
from minivllm.bench.summary import Distribution, Goals, ServedRequest
from minivllm.bench.workloads import WorkloadRequest
from minivllm.entrypoints.cli import main as cli
from minivllm.errors import ConfigError

SMALL = ["--num-requests", "4", "--mean-prompt-len", "5", "--mean-output-len", "3"]
SLACK = 0.5
"""Seconds by which a busy machine may be late."""


@pytest.fixture
def server():
    with StubServer(steady()).running() as stub:
        yield stub


def send(server: StubServer, output_len: int = 3, **options) -> ServedRequest:
    """What the client notes of one request."""

    async def run() -> ServedRequest:
        async with OpenAIClient(server.base_url, **options) as client:
            return await client.send(WorkloadRequest([5, 6, 7, 8], output_len), "stub")

    return asyncio.run(run())


def streaming(*parts: bytes, end=lambda request: None):
    """A handler that streams these bytes."""

    async def handle(request: web.Request, body: dict) -> web.StreamResponse:
        async def all_parts() -> AsyncIterator[bytes]:
            for part in parts:
                yield part
            end(request)

        return await stream(request, all_parts())

    return handle


# One request.


def test_times_are_those_of_the_server(server):
    server.handler = steady(first=0.3, gap=0.1)
    served = send(server, output_len=4)
    assert served.error is None
    assert 0.3 <= served.ttft < 0.3 + SLACK
    assert len(served.itls) == 3 and 0.3 - 0.05 <= sum(served.itls) < 0.3 + SLACK
    assert 0.6 <= served.latency < 0.6 + SLACK
    assert served.tpot == pytest.approx((served.latency - served.ttft) / 3) and served.tpot >= 0.09
    assert (served.prompt_tokens, served.output_tokens, served.counted_by) == (4, 4, "usage")


def test_it_asks_greedily_for_exactly_so_many_tokens(server):
    send(server)
    assert server.bodies == [
        {
            "model": "stub", "prompt": [5, 6, 7, 8], "max_tokens": 3, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }
    ]  # fmt: skip


def test_a_server_that_does_not_know_ignore_eos_is_not_told_of_it(server):
    send(server, ignore_eos=False)
    assert "ignore_eos" not in server.bodies[0]


def test_a_chat_has_a_word_for_each_token_and_its_role_is_not_the_first_token(server):
    server.handler = steady(first=0.3)
    served = send(server, endpoint="chat")
    [message] = server.bodies[0]["messages"]
    assert message["role"] == "user" and len(message["content"].split()) == 4
    assert served.ttft >= 0.3
    assert (served.prompt_tokens, served.output_tokens) == (7, 3), "as the server counts"


def test_without_a_stream_only_the_end_is_known(server):
    server.handler = steady(first=0.2)
    served = send(server, stream=False)
    assert served.latency >= 0.2 and served.ttft is None and served.tpot is None and served.itls == []
    assert (served.output_tokens, served.counted_by) == (3, "usage")


def test_pieces_are_counted_where_the_server_does_not_count(server):
    server.handler = streaming(piece("a"), piece(""), piece("b"), piece("", reason="stop"), DONE)
    served = send(server)
    assert (served.error, served.output_tokens, served.counted_by) == (None, 3, "pieces")
    assert len(served.itls) == 2


def test_a_piece_with_several_tokens_is_one_gap(server):
    server.handler = streaming(piece("a"), piece(" b c d", reason="length"), usage(4, 4), DONE)
    served = send(server)
    assert len(served.itls) == 1 and served.output_tokens == 4
    assert served.tpot == pytest.approx((served.latency - served.ttft) / 3)


async def _slow(request: web.Request, body: dict) -> web.StreamResponse:
    await asyncio.sleep(5)
    return web.Response()


async def _refuse(request: web.Request, body: dict) -> web.StreamResponse:
    return web.json_response({"error": {"message": "Too many requests wait."}}, status=429, headers={"Retry-After": "1"})


async def _html(request: web.Request, body: dict) -> web.StreamResponse:
    return web.Response(text="<h1>Bad gateway</h1>", status=502)


BROKEN = {
    "status 429": (_refuse, "Too many requests wait."),
    "status 502": (_html, "<h1>Bad gateway</h1>"),
    "timeout": (_slow, ""),
    "error event": (streaming(piece("a"), event({"error": {"message": "The engine has failed."}})), "The engine has failed."),
    "broken answer": (streaming(piece("a")), "the stream stopped before its end"),
    "broken connection": (streaming(piece("a"), end=lambda request: request.transport.abort()), ""),
}


@pytest.mark.parametrize("reason", BROKEN)
def test_a_failure_has_its_reason_and_what_the_server_said(server, reason):
    server.handler, detail = BROKEN[reason]
    served = send(server, timeout=0.5)
    assert served.error == reason
    assert detail in served.detail
    assert served.latency < 2


@pytest.mark.parametrize("content", [b"data: {nonsense\n\n", b'data: {"choices": 3}\n\n', b'data: "\xff"\n\n'])
def test_an_answer_that_makes_no_sense_is_a_failure(server, content):
    server.handler = streaming(content, DONE)
    assert send(server).error == "broken answer"


def test_a_server_that_is_not_there_is_a_failure():
    with StubServer(steady()).running() as stub:
        pass
    assert send(stub).error == "no connection"


@pytest.mark.slow
@given(st.lists(st.text(min_size=1).filter(lambda text: not set(text) & set("\r\n")), min_size=1), st.data())
def test_events_are_read_however_their_bytes_are_cut(texts, data):
    end = data.draw(st.sampled_from(["\n", "\r\n"]))
    content = "".join(f": a comment{end}event: x{end}data: {text}{end}{end}" for text in texts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)))))
    pieces = [content[i:j] for i, j in zip([0, *cuts], [*cuts, len(content)], strict=True)]

    async def read() -> list[str]:
        async def chunks() -> AsyncIterator[bytes]:
            for chunk in pieces:
                yield chunk

        return [event.decode() async for event in read_events(chunks())]

    assert asyncio.run(read()) == texts


# When requests are sent.


def generate(load: Load, requests, seconds: float, interrupt_after: float | None = None) -> list[tuple[float, float, bool]]:
    """Start, end and whether it was given up, for each request of a service that takes this many seconds."""
    calls = []

    async def run() -> None:
        begin = time.perf_counter()
        interrupted = asyncio.Event()

        async def serve(request: WorkloadRequest, lateness: float) -> None:
            start, given_up = time.perf_counter() - begin, False
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                given_up = True
            calls.append((start, time.perf_counter() - begin, given_up))

        if interrupt_after is not None:
            asyncio.get_running_loop().call_later(interrupt_after, interrupted.set)
        await generate_load(serve, requests, load, interrupted)

    asyncio.run(run())
    return calls


def endless():
    while True:
        yield WorkloadRequest([1], 1)


def take(count: int) -> list[WorkloadRequest]:
    return [WorkloadRequest([1], 1)] * count


def test_by_default_all_are_sent_at_once():
    calls = generate(Load(), take(50), 0.2)
    assert len(calls) == 50 and max(start for start, _, _ in calls) < SLACK


def test_a_closed_loop_keeps_its_width():
    calls = generate(Load(concurrency=3), take(9), 0.1)
    served = [ServedRequest(1, 1, start=start, end=end) for start, end, _ in calls]
    assert peak_concurrency(served) == 3
    assert 0.3 <= max(end for _, end, _ in calls) < 0.3 + SLACK


def test_an_open_loop_sends_at_its_rate_however_slow_the_server_is():
    calls = generate(Load(request_rate=200), take(100), 0.6)
    assert 0.3 < max(start for start, _, _ in calls) < 1.0, "100 requests at 200 per second"
    assert not any(given_up for _, _, given_up in calls)


def test_the_same_seed_sends_at_the_same_moments():
    first, second, other = (generate(Load(request_rate=5, seed=seed), take(5), 0.0) for seed in (1, 1, 2))
    for (a, _, _), (b, _, _) in zip(first, second, strict=True):
        assert a == pytest.approx(b, abs=0.15)
    assert max(abs(a - b) for (a, _, _), (b, _, _) in zip(first, other, strict=True)) > 0.15


def test_after_the_duration_none_is_sent_and_what_runs_may_end():
    calls = generate(Load(concurrency=2, duration=0.6, grace=5), endless(), 0.4)
    assert len(calls) == 4 and not any(given_up for _, _, given_up in calls)


def test_after_the_grace_what_runs_is_given_up():
    begin = time.perf_counter()
    calls = generate(Load(concurrency=2, duration=0.1, grace=0.1), endless(), 30)
    assert [given_up for _, _, given_up in calls] == [True, True]
    assert time.perf_counter() - begin < 0.2 + SLACK


def test_an_interruption_gives_up_what_runs():
    calls = generate(Load(request_rate=100), endless(), 30, interrupt_after=0.3)
    assert len(calls) > 5 and all(given_up for _, _, given_up in calls)


def test_a_mistake_in_the_requests_is_not_hidden():
    def broken():
        yield WorkloadRequest([1], 1)
        raise ConfigError("no more")

    with pytest.raises(ConfigError, match="no more"):
        generate(Load(), broken(), 0)


@pytest.mark.parametrize(
    "arguments,sentence",
    [
        ({"request_rate": 0}, "The request rate is 0"),
        ({"request_rate": float("nan")}, "The request rate is nan"),
        ({"concurrency": 0}, "The concurrency is 0"),
        ({"concurrency": 1, "request_rate": 2}, "two kinds of load"),
        ({"duration": -1}, "The duration is -1"),
        ({"grace": -1}, "The grace is -1"),
    ],
)
def test_a_load_that_cannot_be_is_refused(arguments, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Load(**arguments)


# What it adds up to.


def served_request(start: float, ttft: float, itls: list[float], output_tokens: int | None = None) -> ServedRequest:
    count = len(itls) + 1 if output_tokens is None else output_tokens
    return ServedRequest(10, 3, 0.0, start, start + ttft + sum(itls), ttft, itls, count, "usage")


WORKED_EXAMPLE = [
    served_request(0.0, 1.0, [0.5, 0.5]),
    served_request(1.0, 2.0, [1.0]),
    ServedRequest(10, 3, 0.5, 3.0, 4.0, error="status 429", detail="Come back later."),
]


def test_a_worked_example():
    result = summarize(WORKED_EXAMPLE, Load(request_rate=2), Goals(ttft=1500))
    assert (result.num_requests, result.completed, result.failures) == (3, 2, {"status 429": 1})
    assert result.seconds == 4.0
    assert (result.prompt_tokens, result.output_tokens) == (20, 5)
    assert (result.requests_per_second, result.output_tokens_per_second) == (0.5, 1.25)
    assert result.ttft == pytest.approx((1.5, 1, 2, 2))
    assert result.itl == pytest.approx((2 / 3, 0.5, 1, 1))
    assert result.tpot == pytest.approx((0.75, 0.5, 1, 1))
    assert result.latency == pytest.approx((2.5, 2, 3, 3))
    assert result.goodput == 0.25, "one request in four seconds had its first token within 1.5 s"
    assert result.peak_concurrency == 2
    assert (result.asked_rate, result.sent_rate) == (2, pytest.approx(2 / 3))
    assert result.short_answers == 1


def test_the_table_says_what_went_wrong():
    goals = Goals(ttft=1500, e2e=9000)
    table = format_serving(summarize(WORKED_EXAMPLE, Load(request_rate=2), goals), goals, WORKED_EXAMPLE)
    assert "2 of 3, in 4.00 s" in table
    assert "(1 with TTFT up to 1500 ms, end to end up to 9000 ms)" in table
    assert "Failed, status 429: 1, the first with: Come back later." in table
    assert "sent requests up to 0.50 s late" in table
    assert "Answers with fewer tokens than were asked for: 1" in table
    assert "(asked 2.00, sent 0.67)" in table


def test_a_late_answer_without_any_token_misses_the_goal_for_the_first_one():
    empty_after_two_seconds = ServedRequest(10, 3, start=0.0, end=2.0, counted_by="usage")
    assert not Goals(ttft=1500).are_met_by(empty_after_two_seconds)
    assert Goals(ttft=2500, tpot=1).are_met_by(empty_after_two_seconds)


@pytest.mark.parametrize("goal", [0, -5, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["ttft", "tpot", "e2e"])
def test_a_goal_that_cannot_be_is_refused(name, goal):
    with pytest.raises(ConfigError, match=f"The goal for {name} is {goal}, but must be a number of milliseconds above 0"):
        Goals(**{name: goal})


def test_a_run_in_which_all_failed_has_no_distributions():
    result = summarize([WORKED_EXAMPLE[2]], Load(), Goals())
    assert (result.completed, result.goodput, result.output_tokens_per_second) == (0, None, 0.0)
    assert all(map(math.isnan, result.ttft))
    assert "–" in format_serving(result, Goals(), [WORKED_EXAMPLE[2]])


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.001, 10)), min_size=1, max_size=20))
def test_the_peak_is_the_most_at_one_moment(spans):
    requests = [ServedRequest(1, 1, start=start, end=start + length) for start, length in spans]
    at_starts = (sum(r.start <= other.start < r.end for r in requests) for other in requests)
    assert peak_concurrency(requests) == max(at_starts)


# The command.


def run_cli(server: StubServer, *options: str) -> int:
    return cli.main(["bench", "serve", "--base-url", server.base_url, *SMALL, *options])


@pytest.mark.slow
def test_the_command_prints_a_table_and_saves_what_it_takes_to_draw_it_again(server, capsys, tmp_path):
    report, plot = tmp_path / "report.json", tmp_path / "plot.png"
    server.handler = steady(0.02, 0.01)
    options = ["--concurrency", "2", "--warmup", "2", "--e2e-goal", "5000", "--json", str(report), "--plot", str(plot)]
    assert run_cli(server, *options) == 0
    out = capsys.readouterr().out
    assert "4 of 4" in out and "time to first token (TTFT)" in out and "goodput" in out
    content = json.loads(report.read_text())
    assert re.search(r'"itls": \[0\.\d+, 0\.\d+', report.read_text()), "a list of numbers takes one line"
    assert content["model"] == "stub" and content["command"].startswith("minivllm bench serve --base-url")
    assert content["machine"] and content["time"] and content["text"]
    assert content["result"]["output_tokens"] == 12 and content["result"]["peak_concurrency"] == 2
    assert (
        len(content["requests"]) == 4
        and {"start", "ttft", "itls", "end", "output_tokens", "error"} <= content["requests"][0].keys()
    )
    again = [ServedRequest(**request) for request in content["requests"]]
    ttft = Distribution(*(milliseconds / 1e3 for milliseconds in content["result"]["ttft_ms"].values()))
    assert summarize(again, Load(concurrency=2), Goals(e2e=5000)).ttft == pytest.approx(ttft, abs=1e-5)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert len(server.bodies) == 6, "two of them to warm up"
    warm_up, measured = server.bodies[:2], server.bodies[2:]
    assert not [body for body in warm_up if body["prompt"] in [other["prompt"] for other in measured]]


def test_a_workload_file_is_sent_as_it_is_and_again_if_more_is_asked_for(server, tmp_path, capsys):
    file = tmp_path / "two.json"
    file.write_text(json.dumps([{"ids": [1, 2], "out": 2}, {"ids": [3], "out": 1}]))
    assert (
        cli.main(["bench", "serve", "--base-url", server.base_url + "/v1/", "--workload", str(file), "--concurrency", "1"]) == 0
    )
    assert [body["prompt"] for body in server.bodies] == [[1, 2], [3]]
    assert run_cli(server, "--workload", str(file), "--num-requests", "3", "--concurrency", "1") == 0
    assert [body["prompt"] for body in server.bodies[2:]] == [[1, 2], [3], [1, 2]]
    assert "two: 3 requests, 1 at a time" in capsys.readouterr().out


def test_a_duration_alone_sends_as_many_as_it_takes(server, capsys):
    server.handler = steady(0.05)
    options = ["--duration", "1", "--concurrency", "10", "--mean-prompt-len", "5", "--mean-output-len", "1"]
    assert cli.main(["bench", "serve", "--base-url", server.base_url, *options]) == 0
    assert 32 < len(server.bodies) <= 220
    assert len({str(body["prompt"]) for body in server.bodies}) == len(server.bodies), "no prompt is sent twice"


def test_if_nothing_was_completed_the_status_is_1(server, capsys):
    server.handler = _refuse
    assert run_cli(server) == 1
    assert "Failed, status 429: 4, the first with: Too many requests wait." in capsys.readouterr().out


def test_a_key_is_sent_and_never_saved(server, tmp_path, capsys, monkeypatch):
    server.api_key = "secret-key"
    assert run_cli(server) == 2
    assert "refuses the API key (status 401): give it with --api-key" in capsys.readouterr().err
    report = tmp_path / "report.json"
    for options in (["--api-key", "secret-key"], ["--api-key=secret-key"], ["--api", "secret-key"]):
        assert run_cli(server, *options, "--json", str(report)) == 0
        assert "secret-key" not in report.read_text() and "KEY" in json.loads(report.read_text())["command"]
    monkeypatch.setenv("MINIVLLM_API_KEY", "secret-key")
    assert run_cli(server) == 0
    assert server.headers[-1]["Authorization"] == "Bearer secret-key"
    assert "secret-key" not in capsys.readouterr().out


def test_the_model_is_the_one_that_is_named_or_the_first(server, capsys):
    server.models = [{"id": "first"}, {"id": "second"}]
    assert run_cli(server) == 0 and server.bodies[-1]["model"] == "first"
    assert run_cli(server, "--model", "second") == 0 and server.bodies[-1]["model"] == "second"
    assert run_cli(server, "--model", "third") == 2
    assert "has no model 'third', but 'first', 'second'" in capsys.readouterr().err
    server.models = None
    assert run_cli(server, "--model", "third") == 0 and server.bodies[-1]["model"] == "third"
    assert run_cli(server) == 2
    assert "lists no models (status 404): name one with --model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options,sentence",
    [
        (["--base-url", "localhost:8000"], "The base URL is 'localhost:8000', but must be like http://"),
        (["--base-url", "http://me:secret@127.0.0.1"], "must not hold a name or a password"),
        (["--json", "no/such/folder/x.json"], "cannot be written"),
        (["--no-stream", "--ttft-goal", "5"], "Without streaming, TTFT and TPOT are not known"),
        (["--ttft-goal", "-5"], "The goal for ttft is -5.0"),
        (["--timeout", "0"], "The timeout is 0.0"),
        (["--timeout", "inf"], "The timeout is inf"),
        (["--warmup", "-1"], "--warmup is -1"),
        (["--num-requests", "0"], "--num-requests is 0"),
        (["--distribution", "uniform", "longtail"], "takes one workload"),
        (["--workload", "no-such-file"], "There is no workload file"),
        (["--request-rate", "1", "--concurrency", "1"], "two kinds of load"),
    ],
)  # fmt: skip
def test_mistakes_get_one_sentence_before_anything_is_sent(server, capsys, options, sentence):
    assert run_cli(server, *options) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and "Traceback" not in captured.err
    assert server.bodies == []


def test_requests_without_end_need_a_pace(server, capsys):
    assert cli.main(["bench", "serve", "--base-url", server.base_url, "--duration", "1"]) == 2
    assert "An endless workload cannot be sent all at once" in capsys.readouterr().err


def test_without_a_server_it_says_how_to_start_one(capsys):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert cli.main(["bench", "serve", "--base-url", f"http://127.0.0.1:{unused.getsockname()[1]}"]) == 2
    assert "No server can be reached at http://127.0.0.1" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_prints_what_there_is(server):
    async def first_quickly_then_never(request: web.Request, body: dict) -> web.StreamResponse:
        return await (steady() if len(server.bodies) <= 2 else steady(60))(request, body)

    server.handler = first_quickly_then_never
    command = [sys.executable, "-m", "minivllm.entrypoints.cli.main", "bench", "serve", "--base-url", server.base_url, *SMALL]
    environment = {**os.environ, "PYTHONPATH": str(Path(minivllm.__file__).parents[1])}
    process = subprocess.Popen(
        [*command, "--concurrency", "1"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    while len(server.bodies) < 3:
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in out and "2 of 3" in out and "Failed, given up: 1" in out


@pytest.mark.parametrize(
    "chunks",
    [
        [b"data: [DONE]\n\n"],
        [b"x" * 2**21],
        [b'data: {"choices":[{"text":"\xff"}]}\n\n'],
        [b"data: " + b"[" * 200_000 + b"\n\n"],
        [b'data: {"error":' + b"[" * 200_000 + b"\n\n"],
        [b'data: {"choices":[],"usage":{"prompt_tokens":-5,"completion_tokens":3}}\n\n'],
        [b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":99999999999999999999}}\n\n'],
    ],
    ids=range(7),
)
def test_a_stream_that_makes_no_sense_is_a_broken_answer(server, chunks):
    server.handler = streaming(*chunks)
    assert send(server).error == "broken answer"


def test_what_would_change_the_terminal_is_not_shown(server, capsys):
    async def refuse(request: web.Request, body: dict) -> web.Response:
        return web.json_response({"error": {"message": "no\u0007 bell"}}, status=400)

    server.models, server.handler = [{"id": "a\u001b[31m"}, {"id": "b"}], refuse
    assert run_cli(server) == 1
    assert [body["model"] for body in server.bodies] == ["b"] * 4
    out = capsys.readouterr().out
    assert "no  bell" in out and "\u0007" not in out and "\u001b" not in out


@pytest.mark.parametrize("options", [{"base_url": "http://[::1"}, {"base_url": "http://localhost", "api_key": "a\nb"}])
def test_what_cannot_be_sent_is_refused(options):
    with pytest.raises(ConfigError):
        openai_client.OpenAIClient(**options)
