"""Whatever is sent, the server answers: no status 5xx, no hang, and nothing that its own description does not promise."""

from __future__ import annotations

import collections
import json
import socket
import time

import httpx
import hypothesis
import pytest
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from scripted_server import MAX_NUM_SEQS, running_server, scripted_engine, wait_until

from minivllm.entrypoints.openai.chat.protocol import ChatCompletionRequest
from minivllm.entrypoints.openai.completions.protocol import CompletionRequest
from minivllm.entrypoints.openai.protocol import UNSERVED
from minivllm.entrypoints.openai.responses.protocol import ResponsesRequest
from minivllm.entrypoints.server.state import ServerSettings

MAX_BYTES = 8 * 2**20  # more than the longest body that schemathesis makes: 413 is not among the answers that it expects
GENERATING = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/responses": ResponsesRequest,
}
SMALL = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
}
ROUTES = [*GENERATING, "/tokenize", "/detokenize"]
OPERATIONS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/ping"),
    ("GET", "/load"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/replicas"),
    ("POST", "/replicas/scale"),
    ("POST", "/replicas/{rank}/restart"),
    ("POST", "/replicas/{rank}/kill"),
]
NEEDS_MORE = {"/v1/models/{model}", "/replicas/scale", "/replicas/{rank}/restart", "/replicas/{rank}/kill"}
"""Paths that serve nothing here: they need a name that nobody guesses, or replicas."""
quick = settings(
    max_examples=60,  # with fewer, it may be that none is served
    deadline=None,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.generate],  # shrinking a request of forty fields takes minutes
)


@pytest.fixture(scope="module")
def server(smollm2_path):
    with running_server(
        lambda: scripted_engine(smollm2_path), ServerSettings(max_request_bytes=MAX_BYTES, shutdown_timeout=1)
    ) as server:
        yield server
        wait_until(server.is_idle)
        assert server.client.get("/health").status_code == 200, "after all of it the server lives"


@pytest.fixture(scope="module")
def description(server):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_every_route_is_described_and_tried(description):
    assert {(method.upper(), path) for path in description for method in description[path]} == set(OPERATIONS)


def make_likelier(body: dict) -> None:
    """Take out what nearly always has a body refused that is as described: the names and sizes of this server are not in it."""
    body.pop("model", None)
    if isinstance(body.get("n"), int):
        body["n"] = 1 + body["n"] % MAX_NUM_SEQS
    if isinstance(body.get("prompt"), list):
        body["prompt"] = ["a", "b"]
    if isinstance(body.get("tokens"), list):
        body["tokens"] = [token % 1000 for token in body["tokens"]]
    for name in ("best_of", "stop_token_ids", "logit_bias"):
        body.pop(name, None)
    if isinstance(body.get("prompt"), str):  # /tokenize takes one of both
        body.pop("messages", None)
    for name in ("text", "response_format", "structured_outputs"):  # the scripted model follows no grammar
        body.pop(name, None)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["as described", "not as described"])
@pytest.mark.parametrize("method,path", OPERATIONS, ids=[path for _, path in OPERATIONS])
def test_answers_are_as_described(server, description, method, path, mode):
    operation = description[path][method]
    if mode is GenerationMode.NEGATIVE and not operation.body:
        pytest.skip("there is nothing to get wrong")

    statuses = collections.Counter()

    @settings(quick, max_examples=60 if mode is GenerationMode.POSITIVE else settings().max_examples * 3 // 5)
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case):
        # What fits the description may still be refused: a prompt that is too long, say.
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            make_likelier(case.body)
        response = case.call_and_validate(timeout=20, excluded_checks=[positive_data_acceptance])
        statuses[response.status_code] += 1

    check()
    assert statuses[200] or mode is GenerationMode.NEGATIVE or path in NEEDS_MORE, "nothing was ever served"


# -- bodies that no description foresees ---------------------------------------------------------------------------

JSON = {"Content-Type": "application/json"}
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def is_refused(response):
    assert 400 <= response.status_code < 500, response.text
    assert response.json()["error"]["message"]
    return True


@pytest.mark.slow
@pytest.mark.parametrize("path", list(GENERATING))
def test_any_value_in_any_field_is_answered(server, path):
    names = [*GENERATING[path].model_fields, *UNSERVED]
    statuses = collections.Counter()

    @settings(quick, max_examples=settings().max_examples * 3 // 2)
    @given(fields=st.dictionaries(st.sampled_from(names), json_values, min_size=1, max_size=3))
    def check(fields):
        response = server.client.post(path, content=json.dumps(SMALL[path] | fields), headers=JSON)
        assert response.status_code == 200 or is_refused(response)
        statuses[response.status_code] += 1

    check()
    assert statuses[200], "nothing was ever served"


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b'{"prompt": "\xff\xfe", "tokens": "\xff"}',
        b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}], "tokens": "\\ud800"}',
        b'{"\\ud800": 1}',
        b'{"prompt": "a", "messages": 1, "temperature": NaN}',
        b'{"prompt": "a", "messages": 1, "temperature": 1e400, "tokens": [1e400]}',
        b'{"prompt": "a", "messages": 1, "max_tokens": 1' + b"0" * 400 + b', "tokens": [1' + b"0" * 400 + b"]}",
        b'{"prompt": "a", "messages": 1, "seed": 1' + b"0" * 10_000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt":' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"messages":[' + b"null," * 100_000 + b"null]}",
        b'{"prompt": [' + b"true," * 100_000 + b"1]}",
        b'{"stop": [' + b'"",' * 100_000 + b'""]}',
    ],
    ids=lambda body: body[:24].decode("latin-1") + f" ({len(body)})",
)
def test_a_body_that_makes_no_sense_is_refused_at_once(server, path, body):
    begin = time.monotonic()
    assert is_refused(server.client.post(path, content=body, headers=JSON))
    assert time.monotonic() - begin < 10


@pytest.mark.slow
@pytest.mark.parametrize("path", ROUTES)
def test_ten_megabytes_are_refused(server, path):
    text = "a b " * 2_500_000
    body = {"prompt": text, "messages": [{"role": "user", "content": text}], "tokens": [1] * 2_500_000}
    assert server.client.post(path, json=body).status_code == 413


@pytest.mark.parametrize("path", ROUTES)
def test_a_text_that_is_short_enough_to_send_and_too_long_to_fit_is_refused(server, path):
    text = "word " * 190_000
    messages = {"messages": [{"role": "user", "content": text}]}
    bodies = {"/v1/completions": {"prompt": text}, "/v1/responses": {"input": text}, "/detokenize": {"tokens": [5] * 300_000}}
    body = bodies.get(path, messages)
    response = server.client.post(path, json=body)
    assert is_refused(response)
    unit = "300000 tokens" if path == "/detokenize" else f"{len(text)} characters"
    assert f"the prompt has {unit}: shorten it" in response.json()["error"]["message"], "it is refused before it is tokenized"


def exchange(server, sent: bytes) -> bytes:
    """What comes back for bytes as they are, until the server closes the connection."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(65536), b""))
        except TimeoutError:
            raise
        except OSError:  # it had enough, and hung up
            return b""


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(100_000)) + b"\r\n",
        b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: " + b"y" * 10_000_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET /version HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999999999999999\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n",
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"\x16\x03\x01\x00\xff" * 1000,
        b"GET /%00%ff%2e%2e/x HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
    ],
    ids=[
        "many headers",
        "a long header",
        "a long path",
        "no host",
        "a negative length",
        "a huge length",
        "no chunk",
        "no chunk of a body that nobody reads",
        "TLS",
        "bytes",
    ],
)
def test_what_is_no_request_gets_a_4xx_or_nothing(server, sent, caplog):
    answer = exchange(server, sent)
    assert not answer or answer.startswith(b"HTTP/1.1 4"), answer[:200]
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert [record for record in caplog.records if record.exc_info] == []
