"""The API server, request by request, on an engine that says what a test can foresee."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import json
import logging
import socket
import threading
import time

import httpx
import pytest
from pydantic import TypeAdapter
from scripted_server import MAX_MODEL_LEN, MAX_NUM_SEQS, MODEL, SENTENCE, events, running_server, scripted_engine, wait_until
from starlette.responses import StreamingResponse

from minivllm.entrypoints.openai import responses as shapes
from minivllm.entrypoints.server_state import ServerSettings
from minivllm.errors import ConfigError

CHAT = [{"role": "user", "content": "Hi"}]
USAGE = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4, "prompt_tokens_details": {"cached_tokens": 0}}


def check_shape(shape, value):
    TypeAdapter(shape).validate_python(value, strict=True)
    assert value.keys() <= shape.__annotations__.keys() | {"prompt_logprobs"}


@pytest.fixture(scope="module")
def server(smollm2_path):
    with running_server(lambda: scripted_engine(smollm2_path)) as server:
        yield server


@pytest.fixture
def slow(server):
    """The same server, at ten tokens a second."""
    executor = server.engine.scripted
    executor.seconds_per_step = 0.1
    yield server
    executor.seconds_per_step = 0.0
    wait_until(server.is_idle)


def error_of(response, status):
    assert response.status_code == status, response.text
    check_shape(shapes.ErrorResponse, response.json())
    return response.json()["error"]


# -- answers -------------------------------------------------------------------------------------------------------


def test_a_completion(server):
    response = server.complete(max_tokens=3)
    assert response.status_code == 200
    body = response.json()
    check_shape(shapes.CompletionResponse, body)
    assert body["id"].startswith("cmpl-") and body["model"] == MODEL
    assert body["choices"] == [
        {"index": 0, "text": " The quick brown", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert body["usage"] == USAGE


def test_sixteen_tokens_are_the_default_of_completions(server):
    assert server.complete().json()["usage"]["completion_tokens"] == 16


def test_a_chat_goes_on_until_the_context_is_full(server):
    body = server.chat(logit_bias={}, user="me").json()
    check_shape(shapes.ChatCompletionResponse, body)
    assert body["usage"]["total_tokens"] == MAX_MODEL_LEN
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["choices"][0]["message"]["content"].startswith(SENTENCE * 2)


def test_max_completion_tokens_is_the_newer_name(server):
    assert server.chat(max_completion_tokens=2, max_tokens=9).json()["usage"]["completion_tokens"] == 2


def test_messages_may_have_parts_of_text(server):
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    whole = server.chat(max_tokens=1).json()["usage"]
    assert server.chat(max_tokens=1, messages=[{"role": "user", "content": parts}]).json()["usage"] == whole


def test_what_openai_calls_developer_is_the_models_system(server):
    usages = [
        server.chat(max_tokens=1, messages=[{"role": r, "content": "Hm"}, *CHAT]).json()["usage"] for r in ("system", "developer")
    ]
    assert usages[0] == usages[1]


@pytest.mark.parametrize(
    "prompt,num_prompts",
    [("a", 1), (["a", "b"], 2), ([5, 6, 7], 1), ([[5], [6, 7]], 2)],
    ids=["text", "texts", "token ids", "lists of token ids"],
)
def test_prompts_come_in_four_forms(server, prompt, num_prompts):
    body = server.complete(prompt=prompt, max_tokens=2, n=2).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * num_prompts))
    assert [choice["text"] for choice in body["choices"]] == [" The quick", " quick brown"] * num_prompts
    assert body["usage"]["completion_tokens"] == 4 * num_prompts


def test_a_stop_string_ends_the_text_and_is_named(server):
    choice = server.complete(stop=["fox", "dog"]).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" The quick brown ", "stop", "fox")


def test_echo_puts_the_prompt_first(server):
    assert server.complete(echo=True, max_tokens=1).json()["choices"][0]["text"] == "Once The"
    token_ids = server.client.post("/tokenize", json={"prompt": "Once"}).json()["tokens"]
    assert server.complete(prompt=token_ids, echo=True, max_tokens=1).json()["choices"][0]["text"] == "Once The"


def test_echo_without_tokens_is_the_prompt_alone(server):
    body = server.complete(prompt="Once upon", echo=True, max_tokens=0, logprobs=1).json()
    assert body["choices"][0]["text"] == "Once upon"
    assert body["choices"][0]["logprobs"]["tokens"] == ["Once", " upon"]
    assert body["usage"]["completion_tokens"] == 0


# -- log-probabilities ---------------------------------------------------------------------------------------------


def test_logprobs_of_completions_are_four_lists(server):
    logprobs = server.complete(max_tokens=3, logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [" The", " quick", " brown"]
    assert logprobs["token_logprobs"] == [-0.1, -0.2, -0.3]
    assert logprobs["text_offset"] == [0, 4, 10]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2, 2]
    assert logprobs["top_logprobs"][0][" The"] == -0.1


def test_with_echo_the_prompts_tokens_have_logprobs_too(server):
    choice = server.complete(prompt="Once upon", max_tokens=2, logprobs=1, echo=True).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["Once", " upon", " The", " quick"]
    assert logprobs["token_logprobs"] == [None, -0.1, -0.2, -0.3]
    assert logprobs["top_logprobs"][0] is None
    assert [choice["text"][offset] for offset in logprobs["text_offset"]] == ["O", " ", " ", " "]


def test_logprobs_of_chats_are_entries_with_bytes(server):
    content = server.chat(max_tokens=2, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [" The", " quick"]
    assert bytes(content[0]["bytes"]) == b" The"
    assert [len(entry["top_logprobs"]) for entry in content] == [1, 1]
    assert content[0]["top_logprobs"][0]["logprob"] > content[0]["logprob"], "the chosen one was the second most likely"


def test_prompt_logprobs_are_vllms(server):
    completion = server.complete(prompt="Once upon", max_tokens=1, prompt_logprobs=1).json()["choices"][0]["prompt_logprobs"]
    assert completion[0] is None
    assert {entry["decoded_token"] for entry in completion[1].values()} > {" upon"}
    assert server.chat(max_tokens=1, prompt_logprobs=0).json()["prompt_logprobs"][0] is None


# -- streams -------------------------------------------------------------------------------------------------------


def test_a_streamed_completion_joins_to_the_whole_one(server):
    for wanted in (
        {},
        {"n": 2},
        {"echo": True, "logprobs": 1},
        {"stop": "lazy"},
        {"prompt": ["a", "b"]},
        {"echo": True, "max_tokens": 0},
    ):
        whole = server.complete(**wanted).json()
        chunks = list(events(server.complete(**wanted, stream=True)))
        for chunk in chunks:
            check_shape(shapes.CompletionChunk, chunk)
        for choice in whole["choices"]:
            parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
            assert "".join(part["text"] for part in parts) == choice["text"]
            assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
            assert parts[-1]["stop_reason"] == choice["stop_reason"]
            if choice["logprobs"]:
                for name, values in choice["logprobs"].items():
                    assert [entry for part in parts for entry in part["logprobs"][name]] == values


def test_a_streamed_chat_begins_with_the_role(server):
    whole = server.chat(max_tokens=5, n=2, logprobs=True).json()
    chunks = list(events(server.chat(max_tokens=5, n=2, logprobs=True, stream=True)))
    for chunk in chunks:
        check_shape(shapes.ChatCompletionChunk, chunk)
        assert chunk["object"] == "chat.completion.chunk"
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
        assert parts[-1]["finish_reason"] == "length"
        assert [entry for part in parts[1:] for entry in part["logprobs"]["content"]] == choice["logprobs"]["content"]


def test_the_usage_comes_last_when_asked_for(server):
    chunks = list(events(server.complete(max_tokens=3, stream=True, stream_options={"include_usage": True})))
    assert [chunk["usage"] for chunk in chunks] == [None] * (len(chunks) - 1) + [USAGE]
    assert chunks[-1]["choices"] == []
    assert all("usage" not in chunk for chunk in events(server.complete(max_tokens=3, stream=True)))


def test_tokens_come_when_they_are_there(slow):
    with slow.client.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 6, "stream": True}) as response:
        times = [time.monotonic() for _ in events(response)]
    assert times[-1] - times[0] > 0.3


def test_a_failed_step_ends_the_stream_with_an_error(slow):
    with slow.client.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 50, "stream": True}) as response:
        stream = events(response)
        next(stream)
        slow.engine.scripted.failure = RuntimeError("the kernel is gone")
        rest = list(stream)
    check_shape(shapes.ErrorResponse, rest[-1])
    assert "the kernel is gone" in rest[-1]["error"]["message"]
    assert "the kernel is gone" in error_of(slow.complete(), 500)["message"]
    slow.engine.scripted.failure = None
    assert slow.complete(max_tokens=1).status_code == 200


# -- other routes --------------------------------------------------------------------------------------------------


def test_tokenize_and_detokenize_are_inverse(server):
    body = server.client.post("/tokenize", json={"prompt": "Hello world", "return_token_strs": True}).json()
    check_shape(shapes.TokenizeResponse, body)
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"]) == 2
    assert body["max_model_len"] == MAX_MODEL_LEN
    assert server.client.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": "Hello world"}


def test_tokenize_shows_what_a_conversation_becomes(server):
    body = server.client.post("/tokenize", json={"messages": CHAT}).json()
    text = server.client.post("/detokenize", json={"tokens": body["tokens"]}).json()["prompt"]
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_model_is_listed(server):
    body = server.client.get("/v1/models").json()
    check_shape(shapes.ModelList, body)
    assert body["data"][0]["id"] == MODEL
    assert server.client.get(f"/v1/models/{MODEL}").json() == body["data"][0]


def test_health_version_metrics_and_description(server):
    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.client.get("/version").json()["version"]
    assert "minivllm:num_requests_running" in server.client.get("/metrics").text
    assert "422" not in server.client.get("/openapi.json").text


# -- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields,param,sentence",
    [
        ({"max_tokens": "5"}, "max_tokens", 'max_tokens is "5", but must be a whole number.'),
        ({"max_tokens": True}, "max_tokens", "max_tokens is true, but must be a whole number."),
        ({"max_tokens": -1}, "max_tokens", "max_tokens is -1, but must be at least 0."),
        ({"max_tokens": 0}, "max_tokens", "set echo to true"),
        ({"temperature": -0.5}, "temperature", "temperature is -0.5, but must be at least 0."),
        ({"top_p": 0}, "top_p", "top_p is 0, but must be more than 0."),
        ({"seed": 10**30}, "seed", "at most"),
        ({"n": 0}, "n", "n is 0, but must be at least 1."),
        ({"logprobs": 21}, "logprobs", "at most 20"),
        ({"stop": [""]}, "stop", "stop contains an empty string"),
        ({"stop": 5}, "stop", "stop is 5, but must be a string, or a list of at most 64 strings."),
        ({"prompt": []}, "prompt", "prompt is a list, but must be a string"),
        ({"prompt": ["a", 5]}, "prompt", "a list of strings"),
        ({"prompt": None}, "prompt", "prompt is null"),
        ({"prompt": ""}, None, "The prompt is empty"),
        ({"prompt": [10**6]}, None, "out of range"),
        ({"prompt": "word " * 300}, None, "301 tokens, but the model takes at most 256"),
        ({"prompt": "a" * 5000}, None, "5000 characters, far more than fits the 256 tokens"),
        ({"logit_bias": {"x": 1}}, None, "a token id in logit_bias must be a whole number"),
        ({"logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias", "5000 entries"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "lower min_tokens"),
        ({"best_of": 3}, "best_of", "best_of is 3 but n is 1"),
        ({"suffix": "x"}, "suffix", "suffix is \"x\", but this server cannot do that"),
        ({"stream_options": {}}, "stream_options", "stream is not true"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "does not work with stream"),
        ({"n": 1024}, "n", "at most max_num_seqs = 4"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_wrong_value_gets_one_sentence_and_its_field(server, fields, param, sentence):
    error = error_of(server.complete(**fields), 400)
    assert sentence in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert (
        error_of(server.complete(**{**fields, "stream": fields.get("stream", "stream_options" not in fields)}), 400)["param"]
        == param
    )


@pytest.mark.parametrize(
    "fields,sentence",
    [
        ({"messages": []}, "messages has 0 entries, but must have at least 1."),
        ({"messages": "Hi"}, 'messages is "Hi", but must be a list.'),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role is \"tool\", but must be 'system'"),
        ({"messages": [{"role": "user"}]}, "messages.0.content is missing: give text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content is a list, but must be text, or a list of parts of type text (images, audio",
        ),
        ({"tools": [{"type": "function"}]}, "tools is a list, but this server cannot do that"),
        ({"response_format": {"type": "json_object"}}, "response_format is an object, but this server cannot do that"),
        ({"top_logprobs": 2}, "logprobs is not true"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_chat_gets_one_sentence(server, fields, sentence):
    assert sentence in error_of(server.chat(**fields), 400)["message"]


def test_values_that_change_nothing_are_taken(server):
    harmless = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "user": "x",
        "store": True,
    }
    assert server.chat(max_tokens=1, **harmless).status_code == 200
    nulls = ("temperature", "top_p", "n", "stop", "seed", "stream", "logit_bias", "logprobs", "suffix", "max_tokens", "model")
    assert server.complete(**dict.fromkeys(nulls)).status_code == 200


def test_another_model_is_not_found(server):
    error = error_of(server.complete(model="gpt-5"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error_of(server.client.get("/v1/models/gpt-5"), 404)["code"] == "model_not_found"
    assert server.complete(model=MODEL, max_tokens=1).status_code == 200


def test_routes_and_methods_that_do_not_exist(server):
    assert "GET /nowhere" in error_of(server.client.get("/nowhere"), 404)["message"]
    response = server.client.get("/v1/completions")
    assert "use POST" in error_of(response, 405)["message"]
    assert response.headers["allow"] == "POST"


def test_a_body_must_say_that_it_is_json(server):
    error = error_of(server.client.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"}), 415)
    assert "application/json" in error["message"]


# -- keys ----------------------------------------------------------------------------------------------------------


def test_without_a_key_nothing_but_health_answers(smollm2_path):
    keys = ("first-key", "second-key")
    with running_server(lambda: scripted_engine(smollm2_path), ServerSettings(api_keys=keys)) as server:
        paths = ["/", "/v1/models", "/metrics", "/version", "/openapi.json", "/nowhere", "/health/", "//health"]
        for path in paths:
            response = server.client.get(path)
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert "Bearer" in response.headers["www-authenticate"]
        assert server.client.post("/v1/completions", content=b"{").status_code == 401
        assert server.client.get("/health").status_code == 200

        def status(authorization):
            return server.client.get("/version", headers={"Authorization": authorization}).status_code

        basic = base64.b64encode(b"anybody:first-key").decode()
        assert [status("Bearer first-key"), status("bearer second-key"), status(f"Basic {basic}")] == [200, 200, 200]
        wrong = [
            "Bearer first-ke",
            "Bearer",
            "Bearer x y",
            "first-key",
            "Basic !!!",
            "Basic " + base64.b64encode(b"first-key").decode(),
        ]
        assert [status(authorization) for authorization in wrong] == [401] * len(wrong)
        description = server.client.get("/openapi.json", headers={"Authorization": "Bearer first-key"}).json()
        assert description["security"] == [{"key": []}]


@pytest.mark.parametrize("keys", [("",), ("two words",), ("schlüssel",)])
def test_a_key_that_no_header_can_carry_is_refused(keys):
    with pytest.raises(ConfigError, match="API key"):
        ServerSettings(api_keys=keys)


# -- limits --------------------------------------------------------------------------------------------------------


def test_a_body_that_is_too_long_is_refused_announced_or_not(smollm2_path):
    with running_server(lambda: scripted_engine(smollm2_path), ServerSettings(max_request_bytes=2000)) as server:
        body = json.dumps({"prompt": "a" * 10_000_000}).encode()
        headers = {"Content-Type": "application/json"}
        assert "2000 bytes" in error_of(server.client.post("/v1/completions", content=body, headers=headers), 413)["message"]
        pieces = (body[i : i + 1000] for i in range(0, 100_000, 1000))
        error_of(server.client.post("/v1/completions", content=pieces, headers=headers), 413)
        fits = json.dumps({"prompt": "a", "user": "x" * 1900}).encode()
        assert server.client.post("/v1/completions", content=fits, headers=headers).status_code == 200


def test_more_than_may_wait_gets_429_and_when_to_try_again(smollm2_path):
    with running_server(lambda: scripted_engine(smollm2_path), ServerSettings(max_waiting=2)) as server:
        server.engine.scripted.seconds_per_step = 0.05
        capacity = MAX_NUM_SEQS + 2
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda _: server.complete(max_tokens=10, stream=True), range(12)))
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses == [200] * capacity + [429] * (12 - capacity)
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert error_of(refused, 429)["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        wait_until(server.is_idle)
        assert server.complete(prompt=["a"] * capacity, max_tokens=1).status_code == 200
        assert (
            f"asks for {capacity + 1} continuations" in error_of(server.complete(prompt=["a"] * (capacity + 1)), 400)["message"]
        )


def test_an_answer_that_takes_too_long_is_ended(smollm2_path):
    with running_server(lambda: scripted_engine(smollm2_path), ServerSettings(request_timeout=0.5)) as server:
        server.engine.scripted.seconds_per_step = 0.1
        error = error_of(server.complete(max_tokens=200), 504)
        assert (error["code"], "0.5 seconds" in error["message"]) == ("deadline", True)
        chunks = list(events(server.complete(max_tokens=200, stream=True, n=2)))
        assert chunks[0]["choices"], "what there was has been sent"
        assert chunks[-1]["error"]["code"] == "deadline"
        wait_until(server.is_idle)
        assert server.complete(max_tokens=2).status_code == 200


def test_a_body_that_does_not_come_is_not_waited_for(server, monkeypatch):
    monkeypatch.setattr("minivllm.entrypoints.middleware.BODY_SECONDS", 0.2)
    with socket.create_connection(server.url.removeprefix("http://").split(":"), timeout=10) as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


# -- clients that leave --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{"stream": True}, {}, {"prompt": ["a", "b", "c"]}, {"prompt": ["a", "b"], "n": 2, "stream": True}]
)
def test_a_client_that_leaves_frees_everything(slow, fields):
    num_tasks = slow.tasks()
    body = json.dumps({"prompt": "a", "max_tokens": 200, **fields}).encode()
    with socket.create_connection(slow.url.removeprefix("http://").split(":")) as connection:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        wait_until(lambda: slow.engine.stats.num_running > 0)
    wait_until(slow.is_idle, seconds=2)
    wait_until(lambda: slow.tasks() <= num_tasks, seconds=2)


def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing(server):
    num_tasks = server.tasks()
    with socket.create_connection(server.url.removeprefix("http://").split(":")) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{"
        )
        wait_until(lambda: server.tasks() > num_tasks)
    wait_until(lambda: server.tasks() <= num_tasks)


# -- the end -------------------------------------------------------------------------------------------------------


class StreamReader(threading.Thread):
    """Reads a stream to its end, or the error that came instead."""

    def __init__(self, server, **body):
        super().__init__()
        self.server, self.body, self.chunks = server, {"prompt": "a", "stream": True, **body}, []
        self.start()

    def run(self):
        with (
            httpx.Client(timeout=20) as client,
            client.stream("POST", f"{self.server.url}/v1/completions", json=self.body) as response,
        ):
            self.status = response.status_code
            self.chunks.extend(events(response) if self.status == 200 else [json.loads(response.read())])


def test_the_end_lets_finish_what_runs(smollm2_path):
    with running_server(lambda: scripted_engine(smollm2_path), ServerSettings(shutdown_timeout=10)) as server:
        server.engine.scripted.seconds_per_step = 0.05
        reader = StreamReader(server, max_tokens=20)
        wait_until(lambda: bool(server.engine.stats.num_running))
        server.server.handle_exit(15, None)
        reader.join()
        assert reader.chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert server.server.exit_status == 0


@pytest.mark.parametrize("num_signals,shutdown_timeout", [(1, 0.3), (2, 60)])
def test_what_does_not_end_in_time_or_after_a_second_signal_is_ended_clearly(smollm2_path, num_signals, shutdown_timeout):
    with running_server(lambda: scripted_engine(smollm2_path), ServerSettings(shutdown_timeout=shutdown_timeout)) as server:
        server.engine.scripted.seconds_per_step = 0.1
        reader = StreamReader(server, max_tokens=240)
        wait_until(lambda: bool(server.engine.stats.num_running))
        begin = time.monotonic()
        for _ in range(num_signals):
            server.server.handle_exit(2, None)
            time.sleep(0.3)
        reader.join()
        assert reader.chunks[-1]["error"]["code"] == "shutdown"
        assert time.monotonic() - begin < 5
    assert server.server.exit_status == 0


def test_when_the_engine_dies_every_client_hears_why_and_the_server_ends(smollm2_path):
    with running_server(lambda: scripted_engine(smollm2_path)) as server:
        server.engine.scripted.seconds_per_step = 0.05
        readers = [StreamReader(server, max_tokens=200) for _ in range(8)]
        wait_until(lambda: server.engine.stats.num_running == MAX_NUM_SEQS and server.engine.stats.num_waiting > 0)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.complete, max_tokens=200)
            wait_until(lambda: server.engine.num_unfinished_requests() == 9)
            engine = server.engine
            engine.shutdown()
            assert "was shut down" in error_of(waiting.result(), 503)["message"]
        assert "was shut down" in error_of(server.client.get("/health"), 503)["message"]
        for reader in readers:
            reader.join()
            assert reader.chunks[-1]["error"]["code"] == "engine_dead"
        assert sorted(reader.status for reader in readers) == [200] * MAX_NUM_SEQS + [503] * 4, (
            "who had no token yet gets a status"
        )
        wait_until(lambda: server.server.should_exit)
    assert server.server.exit_status == 1


def test_a_dead_engine_is_replaced_if_told_so(smollm2_path, monkeypatch):
    may_start = threading.Event()
    may_start.set()

    def start_engine():
        assert may_start.wait(timeout=10)
        return scripted_engine(smollm2_path)

    with running_server(start_engine, restart=True) as server:
        may_start.clear()
        server.engine.shutdown()
        wait_until(lambda: "Another engine is being started" in server.client.get("/health").text)
        response = server.complete()
        error_of(response, 503)
        assert int(response.headers["retry-after"]) >= 1
        may_start.set()
        wait_until(lambda: server.client.get("/health").status_code == 200)
        assert server.complete(max_tokens=1).status_code == 200


def test_three_failed_starts_end_the_server(smollm2_path, monkeypatch):
    monkeypatch.setattr("minivllm.entrypoints.engine_keeper.EngineKeeper.PAUSE", 0.05)
    starts = []

    def start_engine():
        starts.append(time.monotonic())
        if len(starts) > 1:
            raise ConfigError("There is no memory.")
        return scripted_engine(smollm2_path)

    with running_server(start_engine, restart=True) as server:
        server.engine.shutdown()
        wait_until(lambda: server.server.should_exit)
    assert (len(starts), server.server.exit_status) == (4, 1)


def test_who_only_watches_is_not_waited_for(smollm2_path):
    async def for_ever():
        while True:
            yield b"data: news\n\n"
            await asyncio.sleep(0.05)

    with running_server(lambda: scripted_engine(smollm2_path), ServerSettings(shutdown_timeout=60)) as server:
        server.server.config.app.add_api_route("/watch", lambda: StreamingResponse(for_ever(), media_type="text/event-stream"))
        with server.client.stream("GET", "/watch") as response:
            lines = response.iter_lines()
            next(lines)
            begin = time.monotonic()
            server.server.handle_exit(15, None)
            assert set(lines) <= {"data: news", ""}, "it ends as a response should"
        assert time.monotonic() - begin < 5


# -- ids and logs --------------------------------------------------------------------------------------------------


def test_the_clients_request_id_is_kept_if_it_can_be(server):
    def sent_back(request_id):
        return server.client.get("/version", headers={"X-Request-Id": request_id}).headers["x-request-id"]

    assert sent_back("abc-1 2") == "abc-1 2"
    assert sent_back("x" * 200) != "x" * 200
    assert len(sent_back(b"\xff\xfe")) == 32
    assert sent_back("") != sent_back("")


def test_a_request_is_one_line_without_its_prompt(server, caplog):
    with caplog.at_level(logging.DEBUG, "minivllm.requests"):
        server.client.post(
            "/v1/completions", json={"prompt": "my secret", "max_tokens": 2, "colour": "blue"}, headers={"X-Request-Id": "mine"}
        )
        wait_until(lambda: len(caplog.records) > 0)
    (record,) = caplog.records
    fields = record.fields
    assert (fields["request_id"], fields["status"], fields["end"]) == ("mine", 200, "finished")
    assert (fields["prompt_tokens"], fields["completion_tokens"], fields["ignored_fields"]) == (2, 2, ["colour"])
    assert fields["seconds"] >= fields["seconds_to_first_token"] >= 0
    assert "secret" not in json.dumps(fields)
