"""What the API server refuses, and what it logs."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import contextlib
import json
import logging

import httpx
import pytest
from scripted_server import (
    MAX_NUM_SEQS,
    MODEL,
    connect,
    error_of,
    events,
    post,
    read_to_the_end,
    running_server,
    scripted_engine,
    wait_until,
)

from minivllm.entrypoints.openai.errors import ApiError
from minivllm.entrypoints.server.json_route import check_num_parts
from minivllm.entrypoints.server.state import ServerSettings
from minivllm.errors import ConfigError


@pytest.fixture(scope="module")
def server(smollm2_path):
    with running_server(lambda: scripted_engine(smollm2_path)) as server:
        yield server


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
        ({"prompt": "word " * 300}, None, "This model's maximum context length is 256 tokens, the first generated one included, but the prompt has 301 tokens"),
        ({"prompt": "a" * 5000}, None, "maximum context length is 256 tokens, but the prompt has 5000 characters"),
        ({"logit_bias": {"x": 1}}, None, "a token id in logit_bias must be a whole number"),
        ({"logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias", "5000 entries"),
        ({"logit_bias": {str(i): "x" for i in range(5000)}}, "logit_bias", "5000 entries"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "lower min_tokens"),
        ({"best_of": 3}, "best_of", "best_of is 3 but n is 1"),
        ({"suffix": "x"}, "suffix", "suffix is \"x\", but this server does not support that"),
        ({"add_special_tokens": 5}, "add_special_tokens", "add_special_tokens is 5, but must be true or false"),
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
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role is \"robot\", but must be 'system'"),
        ({"messages": [{"role": "user"}]}, "content is missing: give text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content is a list, but must be text, or a list of at most 4096 parts of type text (images, audio",
        ),
        ({"functions": [{"name": "f"}]}, "functions is a list, but this server does not support that"),
        ({"response_format": {"type": "json_schema"}}, "response_format must have json_schema if, and only if"),
        ({"response_format": {"type": "structural_tag"}}, "must be 'text', 'json_object' or 'json_schema'"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "leave one out"),
        ({"structured_outputs": {}}, "structured_outputs is empty, but must have exactly one"),
        ({"structured_outputs": {"regex": "(["}}, "structured_outputs cannot be compiled: "),
        ({"structured_outputs": {"json": {"type": "x"}}}, "structured_outputs cannot be compiled: "),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs has regex and choice"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "disable_any_whitespace is true, but this server",
        ),
        ({"structured_outputs": {"structural_tag": "x"}}, 'structural_tag is "x", but this server does not support that'),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json is 5, but must be a JSON schema"),
        ({"tool_choice": 5}, "tool_choice is 5, but must be none, auto, required, or {"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "name has 0 characters, but must have at least 1."),
        ({"allowed_token_ids": [5] * 20_000}, "allowed_token_ids has 20000 entries, but must have at most 16384"),
        ({"chat_template_kwargs": {"sanitize_control_tokens": 5}}, "which is not a variable of the template"),
        ({"bad_words": [" "]}, "but must be a list of at most 1024 words"),
        ({"logits_processors": ["x"]}, "logits_processors is a list, but this server does not"),
        ({"truncation_side": "right"}, "but this server does not support that"),
        ({"use_beam_search": True}, "use_beam_search is true, but this server does not support that"),
        ({"top_logprobs": 2}, "logprobs is not true"),
        ({"messages": [{"role": "user", "content": ""}] * 5000}, "messages has 5000 entries, but must have at most 2048."),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 5000}]},
            "messages.0.content is a list, but must be text, or a list of at most 4096 parts",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_chat_gets_one_sentence(server, fields, sentence):
    assert sentence in error_of(server.chat(**fields), 400)["message"]


def test_a_model_that_leaves_the_grammar_fails_its_request_alone(server):
    """The scripted one does not look at masks, as a sampler of one's own may do."""
    error = error_of(server.chat(structured_outputs={"regex": "[0-9]+"}), 500)
    assert error["message"].startswith("structured_outputs cannot go on: ")
    assert server.chat(max_tokens=1, structured_outputs={"regex": "(.|\n)*"}).status_code == 200


def test_a_conversation_with_a_tool_is_read(server):
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "42", "tool_call_id": "x"},
    ]
    assert server.chat(messages=messages, max_tokens=1).status_code == 200


def test_values_that_change_nothing_are_taken(server):
    harmless = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "user": "x",
        "store": True,
        "add_special_tokens": False,
        "echo": False,
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
        for end in (100_000, 2001):  # the last piece, too, may be the one that is too long
            pieces = (body[i : i + 1000] for i in range(0, end, 1000))
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


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [[1]] * 200_000},
        {"prompt": "a", "no such field": [[]] * 300_000},
        {"prompt": "a", "logit_bias": {str(i): 1 for i in range(70_000)}},
        {"prompt": "a", "no such field": [{}] * 300_000},
        {"tokens": [1] * 250_000},
    ],
    ids=["prompts", "lists", "fields", "objects", "values"],
)
def test_a_body_of_many_parts_is_refused_before_it_is_parsed(server, monkeypatch, body):
    content = json.dumps(body, separators=(",", ":")).encode()
    assert len(content) < 2**20
    monkeypatch.setattr("msgspec.json.decode", lambda body: pytest.fail("it was parsed"))
    response = server.client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    sentence = "more than 209715 values" if "tokens" in body else "more than 20000 lists"
    assert sentence in error_of(response, 400)["message"]


def test_brackets_and_commas_in_a_text_are_no_parts():
    check_num_parts(json.dumps({"prompt": '[{"a\\":,' * 30_000}).encode(), 1000)
    check_num_parts(json.dumps({"prompt": ["[,,," * 8] * 4096}).encode(), 5000)
    with pytest.raises(ApiError, match="more than 20000 lists"):
        check_num_parts(json.dumps({"prompt": [["\\", '"', '\\"']] * 20_001}).encode(), 100_000)
    with pytest.raises(ApiError, match="more than 1000 values"):
        check_num_parts(json.dumps({"prompt": ["\\", '"', '\\"'] * 400}).encode(), 1000)


def test_a_body_that_does_not_come_is_not_waited_for(server, monkeypatch):
    monkeypatch.setattr("minivllm.entrypoints.server.json_route.BODY_SECONDS", 0.2)
    with connect(server) as connection:
        connection.sendall(post("/tokenize", prompt="a")[:-5])
        assert read_to_the_end(connection).startswith(b"HTTP/1.1 408")


def test_a_client_that_sends_while_it_listens_hears_that_its_body_is_too_long(smollm2_path):
    async def send(url, content):
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            return await client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})

    async def pieces():
        for _ in range(200):
            yield b"x" * 2**16

    with running_server(lambda: scripted_engine(smollm2_path), ServerSettings(max_request_bytes=2000)) as server:
        for content in (b"x" * 20_000_000, pieces()):
            assert "2000 bytes" in error_of(asyncio.run(send(server.url, content)), 413)["message"]


def test_an_upload_without_end_is_hung_up_on(smollm2_path, monkeypatch):
    monkeypatch.setattr("minivllm.entrypoints.server.json_route.DROP_SECONDS", 0.3)
    with (
        running_server(lambda: scripted_engine(smollm2_path), ServerSettings(max_request_bytes=2000)) as server,
        connect(server) as connection,
    ):
        connection.sendall(
            b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        with contextlib.suppress(ConnectionError):
            for _ in range(10):
                connection.sendall(b"400\r\n" + b"x" * 1024 + b"\r\n")
        answer = read_to_the_end(connection)
        assert answer.startswith(b"HTTP/1.1 413") and b"connection: close" in answer


# -- ids and logs --------------------------------------------------------------------------------------------------


def test_the_clients_request_id_is_kept_if_it_can_be(server):
    def sent_back(request_id):
        return server.client.get("/version", headers={"X-Request-Id": request_id}).headers["x-request-id"]

    assert sent_back("abc-1 2") == "abc-1 2"
    assert sent_back("x" * 200) != "x" * 200
    assert len(sent_back(b"\xff\xfe")) == 32
    assert sent_back("") != sent_back("")


def test_a_key_that_was_tried_leaves_a_trace(smollm2_path, caplog):
    with (
        running_server(lambda: scripted_engine(smollm2_path), ServerSettings(api_keys=("key",))) as server,
        caplog.at_level(logging.INFO, "minivllm.requests"),
    ):
        server.client.get("/health")
        server.client.get("/v1/models")
        wait_until(lambda: len(caplog.records) > 0)
    assert [(record.fields["path"], record.fields["status"]) for record in caplog.records] == [("/v1/models", 401)]


def test_pages_of_other_sites_may_use_the_server_if_it_says_so(smollm2_path):
    asks = {
        "Origin": "https://example.org",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    settings = ServerSettings(api_keys=("key",), allowed_origins=("https://example.org",))
    with running_server(lambda: scripted_engine(smollm2_path), settings) as server:
        preflight = server.client.options("/v1/completions", headers=asks)
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, "https://example.org")
        assert (
            "access-control-allow-origin"
            not in server.client.options("/health", headers=asks | {"Origin": "https://evil.org"}).headers
        )
        answer = server.client.get("/v1/models", headers={"Origin": "https://example.org"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, "https://example.org")
    with running_server(lambda: scripted_engine(smollm2_path)) as server:
        assert server.client.options("/v1/completions", headers=asks).status_code == 405


def test_what_a_load_balancer_asks(server):
    for ask in (server.client.head, server.client.get):
        assert ask("/health").status_code == 200
    assert server.client.head("/health").content == b""
    assert server.client.get("/ping").status_code == server.client.post("/ping").status_code == 200
    assert server.client.get("/load").json() == {"server_load": 0}


def test_a_request_is_one_line_without_its_prompt(server, caplog):
    with caplog.at_level(logging.DEBUG, "minivllm.requests"):
        server.client.post(
            "/v1/completions", json={"prompt": "my secret", "max_tokens": 2, "colour": "blue"}, headers={"X-Request-Id": "mine"}
        )
        wait_until(lambda: any(record.fields["request_id"] == "mine" for record in caplog.records))
    (fields,) = [record.fields for record in caplog.records if record.fields["request_id"] == "mine"]
    assert (fields["request_id"], fields["status"], fields["end"]) == ("mine", 200, "finished")
    assert (fields["prompt_tokens"], fields["completion_tokens"], fields["ignored_fields"]) == (2, 2, ["colour"])
    assert fields["seconds"] >= fields["seconds_to_first_token"] >= 0
    assert "secret" not in json.dumps(fields)
