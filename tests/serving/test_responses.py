"""/v1/responses, on an engine that says what a test can foresee. With a model it is in test_serving.py."""

from __future__ import annotations

import json

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from scripted_server import MAX_MODEL_LEN, MODEL, SENTENCE, check_shape, error_of, running_server, scripted_engine, wait_until

from minivllm.core.structured_output import _load_tokenizer
from minivllm.entrypoints.openai.responses.protocol import ResponsesResponse

EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


@pytest.fixture(scope="module")
def server(smollm2_path):
    with running_server(lambda: scripted_engine(smollm2_path)) as server:
        yield server


def respond(server, **body):
    return server.client.post("/v1/responses", json={"input": "Hi", **body})


def events(response):
    """The events of a stream, each as the official client reads it."""
    assert response.headers["content-type"].startswith("text/event-stream")
    told = []
    for part in response.text.split("\n\n")[:-1]:
        name, data = part.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
        TypeAdapter(ResponseStreamEvent).validate_python(told[-1])
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    return told


def test_a_response(server):
    body = respond(server, max_output_tokens=3, metadata={"a": "b"}, temperature=0.5).json()
    check_shape(ResponsesResponse, body)
    Response.model_validate(body)
    assert body["id"].startswith("resp_") and body["model"] == MODEL and body["metadata"] == {"a": "b"}
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    [message] = body["output"]
    assert message["content"][0]["text"] == " The quick brown"
    chat = server.chat(max_tokens=3).json()
    usage = body["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (chat["usage"]["prompt_tokens"], 3)
    assert body["temperature"] == 0.5


def test_a_stream_says_the_same_in_events(server):
    wanted = {"stop": ["lazy"], "include_stop_str_in_output": True}
    whole = respond(server, **wanted).json()
    told = events(respond(server, stream=True, **wanted))
    assert list(dict.fromkeys(event["type"] for event in told)) == EVENTS
    text = "".join(event["delta"] for event in told if event["type"] == "response.output_text.delta")
    assert text == SENTENCE.removesuffix(" dog.") == whole["output"][0]["content"][0]["text"]
    last = told[-1]["response"]
    assert last["status"] == whole["status"] == "completed"
    assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert last["output"][0]["content"] == whole["output"][0]["content"]
    items = {event["item_id"] for event in told if "item_id" in event} | {last["output"][0]["id"]}
    assert len(items) == 1 and {event["response"]["id"] for event in told if "response" in event} == {last["id"]}
    assert events(respond(server, stream=True, max_output_tokens=2))[-1]["type"] == "response.incomplete"


def test_a_conversation_is_that_of_a_chat(server):
    said = [
        {"role": "user", "content": "Hi"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello", "annotations": []}], "id": "msg_1"},
        {"role": "user", "content": [{"type": "input_text", "text": "How"}, {"type": "input_text", "text": "are you?"}]},
    ]  # fmt: skip
    usage = respond(server, input=said, instructions="Be kind.", max_output_tokens=1).json()["usage"]
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "How\nare you?"},
    ]
    assert usage["input_tokens"] == server.client.post("/tokenize", json={"messages": messages}).json()["count"]


@pytest.mark.parametrize(
    ("body", "sentence", "param"),
    [
        ({"input": []}, "input is a list, but must be a text, or a list of 1 to 2048 messages", "input"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "2"}]}, "input is a list, but must be", "input"),
        ({"input": None}, "input is null, but must be a text", "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id is ", "previous_response_id"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools is a list, but this server does not support that", "tools"),
        ({"truncation": "auto"}, 'truncation is "auto", but this server does not support that', "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0, but must be at least 1", "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format must have a schema if, and only if", "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "structured_outputs cannot be compiled", None),
        ({"response_format": {"type": "json_object"}}, "response_format is an object, but this server does not support", None),
        ({"max_tokens": 5}, "max_tokens is 5, but this server does not support that", "max_tokens"),
        ({"n": 2}, "n is 2, but this server does not support that", "n"),
        (
            {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
            "text.format and structured_outputs",
            None,
        ),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs has tools, which is not a variable", None),
        ({"metadata": {"a": 1}}, "metadata.a is 1, but must be a string", "metadata.a"),
        ({"model": "x"}, 'There is no model "x"', "model"),
        ({"input": "x " * 10_000}, "maximum context length", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_mistakes_are_told_in_a_sentence(server, body, sentence, param, stream):
    error = error_of(respond(server, stream=stream, **body), 404 if "model" in body else 400)
    assert sentence in error["message"]
    assert param is None or error["param"] == param


def test_what_changes_nothing_is_taken(server):
    fields = {"store": True, "reasoning": {"effort": "low"}, "truncation": "disabled", "tools": [], "tool_choice": "none"}
    body = respond(
        server, max_output_tokens=1, text={"format": {"type": "text"}}, n=1, parallel_tool_calls=False, **fields
    ).json()
    assert (body["store"], body["tool_choice"], body["parallel_tool_calls"], body["text"]) == (
        False,
        "none",
        False,
        {"format": {"type": "text"}},
    )
    message = {"type": None, "role": "user", "content": "Hi"}
    assert respond(server, input=[message], bad_words=["x"], min_tokens=1, max_output_tokens=1).status_code == 200


def test_as_many_messages_as_a_chat_and_the_instructions(server):
    messages = [{"role": "user", "content": ""}] * 2048
    error = error_of(respond(server, input=messages, instructions="Be kind."), 400)
    assert (error["code"], error["message"].count("2049 messages")) == ("context_length_exceeded", 1)
    cut = server.chat(messages=messages, truncate_prompt_tokens=9, max_tokens=1).json()
    assert cut["usage"]["prompt_tokens"] == 9


def test_the_first_grammar_finds_the_tokenizer_read(server):
    """Reading it takes a quarter of a second, in which Python does nothing else."""
    before = _load_tokenizer.cache_info().misses
    respond(server, structured_outputs={"regex": f"{before}"})
    assert _load_tokenizer.cache_info().misses == before > 0


def test_a_format_of_plain_text_is_no_other_form(server):
    body = {"text": {"format": {"type": "text"}}, "structured_outputs": {"regex": "a"}}
    assert "leave one out" not in respond(server, **body).text


def test_a_model_that_fails_is_told_as_an_event_or_as_an_error(server):
    executor = server.engine.scripted
    executor.failure = RuntimeError("out of luck")
    try:
        assert "out of luck" in error_of(respond(server), 500)["message"]
        executor.failure, executor.seconds_per_step = None, 0.05
        with server.client.stream("POST", "/v1/responses", json={"input": "Hi", "stream": True}) as response:
            parts = response.iter_text()
            text = next(parts)
            executor.failure = RuntimeError("out of luck")
            text += "".join(parts)
    finally:
        executor.failure, executor.seconds_per_step = None, 0.0
    last = json.loads(text.split("\n\n")[-2].split("\ndata: ")[1])
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert "out of luck" in last["response"]["error"]["message"] and last["response"]["output"][0]["status"] == "incomplete"
    assert SENTENCE.startswith(last["response"]["output"][0]["content"][0]["text"])
    TypeAdapter(ResponseStreamEvent).validate_python(last)
    wait_until(server.is_idle)


def test_without_a_limit_it_goes_on_until_the_context_is_full(server):
    body = respond(server, ignore_eos=True).json()
    assert body["usage"]["total_tokens"] == MAX_MODEL_LEN and body["status"] == "incomplete"
