"""Tools on chat: calls in a model's text, calls that are required, streamed and whole."""

from __future__ import annotations

import json

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scripted_server import check_shape, error_of, events, running_server, scripted_engine

from minivllm.entrypoints.openai.chat.protocol import ChatCompletionChunk, ChatCompletionRequest, ChatCompletionResponse
from minivllm.entrypoints.openai.chat.tool_calls import HermesCalls, NamedCall, RequiredCalls, make_parser, schema_of_calls

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time"}}
HERMES = 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO = HERMES + '\n<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
MESSAGES = [{"role": "user", "content": "What is the weather?"}]


@pytest.fixture(scope="module")
def server(smollm2_path):
    with running_server(lambda: scripted_engine(smollm2_path)) as server:
        yield server


@pytest.fixture
def says(server, monkeypatch):
    """A chat with the tools, in which the model says a text, and what comes of it: message and finish reason, whole and streamed."""

    def say(text, **fields):
        eos = server.engine.tokenizer.eos_token_id
        monkeypatch.setattr(server.engine.scripted, "script", [*server.engine.tokenizer.encode(text), eos])
        fields = {"tools": [WEATHER, CLOCK], **fields}
        body = server.chat(**fields).json()
        check_shape(ChatCompletionResponse, body)
        whole = body["choices"][0]
        chunks = list(events(server.chat(**fields, stream=True)))
        for chunk in chunks:
            check_shape(ChatCompletionChunk, chunk)
        message, reason = joined([chunk["choices"][0] for chunk in chunks])
        assert (message, reason) == (without_ids(whole["message"]), whole["finish_reason"])
        return message, reason

    return say


def joined(choices):
    """A message from its parts in a stream."""
    content, calls = "", {}
    for choice in choices:
        content += choice["delta"].get("content", "")
        for part in choice["delta"].get("tool_calls", ()):
            if part["index"] not in calls:
                assert part["id"].startswith("call_") and part["type"] == "function"
                calls[part["index"]] = dict(part["function"])
            else:
                calls[part["index"]]["arguments"] += part["function"]["arguments"]
    return (content or (None if calls else ""), [calls[index] for index in sorted(calls)]), choices[-1]["finish_reason"]


def without_ids(message):
    return message["content"], [call["function"] for call in message.get("tool_calls", ())]


def test_a_text_with_calls(says):
    (content, calls), reason = says(HERMES)
    assert (content.strip(), reason) == ("Let me see.", "tool_calls")
    assert calls == [{"name": "get_weather", "arguments": '{"city": "Paris"}'}]
    (_, calls), _ = says(TWO)
    assert [call["name"] for call in calls] == ["get_weather", "get_time"]
    (_, calls), reason = says(TWO, parallel_tool_calls=False)
    assert ([call["name"] for call in calls], reason) == (["get_weather"], "tool_calls")


def test_a_text_without_calls_is_content(says):
    for text in ("Nothing to call.", "a < b <tool", "<tool_call>this is no call</tool_call>", '<tool_call>{"name": "get_time"'):
        assert says(text) == ((text, []), "stop")
    assert says(HERMES, tool_choice="none") == ((HERMES, []), "stop")


@pytest.mark.parametrize(
    "call",
    [
        "[" * 3000,
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "\\ud800"}',
        '{"name": 5}',
        "5",
        '{"name": "f", "arguments": "',
    ],
)
def test_what_is_no_call_is_content(call):
    text = f"<tool_call>{call}</tool_call>"
    assert HermesCalls().update(text, is_last=True) == (text, [])


@pytest.mark.parametrize("arguments", ['{"a": 1e400}', '{"a": "é"}', '{"a": "\\u00e9"}', '{ "a" : 1.0 }'])
def test_arguments_are_what_the_model_wrote(arguments):
    _, [found] = HermesCalls().update(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>', is_last=True)
    _, [required] = RequiredCalls().update(f'[{{"name": "f", "parameters": {arguments}}}]', is_last=True)
    assert found["function"] == required["function"] == {"name": "f", "arguments": arguments}


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ({"arguments": '{"a": 1}'}, '{"a": 1}'),  # encoded twice
        ({"parameters": {"a": 1}}, '{"a": 1}'),  # Llama's name
        ({"parameters": '{"a": 1}', "id": "call_1", "type": "function"}, '{"a": 1}'),
        ({"arguments": None}, "{}"),
        ({"arguments": ""}, "{}"),
        ({}, "{}"),
        ({"arguments": '"{\\"a\\": 1}"'}, '{"a": 1}'),  # encoded three times
        ({"arguments": ' {"a": 1}\n'}, '{"a": 1}'),
        ({"arguments": "[1]"}, "[1]"),
        ({"arguments": "null"}, "{}"),
        ({"arguments": " "}, "{}"),
        ({"arguments": None, "parameters": {"a": 1}}, '{"a": 1}'),
        ({"arguments": {}, "parameters": {"a": 1}}, '{"a": 1}'),
        ({"arguments": '{"a": 1', "type": "function"}, '"{\\"a\\": 1"'),  # cut off
        ({"arguments": "Paris"}, '"Paris"'),
    ],
)
def test_arguments_in_other_forms_are_read_as_they_are_meant(call, arguments):
    text = f"<tool_call>{json.dumps({'name': 'f', **call})}</tool_call>"
    content, [found] = HermesCalls().update(text, is_last=True)
    assert (content, found["function"]) == ("", {"name": "f", "arguments": arguments})


@pytest.mark.parametrize("fields", ['"args": {"a": 1}', '"input": {"a": 1}', '"arguments": {"a": 1}, "parameters": {"b": 2}'])
def test_a_call_whose_arguments_nobody_reads_is_content(fields):
    text = f'<tool_call>{{"name": "f", {fields}}}</tool_call>'
    assert HermesCalls().update(text, is_last=True) == (text, [])


@given(st.lists(st.text(max_size=6), max_size=6), st.lists(st.integers(0, 300)), st.integers(0, 300))
def test_required_calls_come_when_they_are_complete_wherever_the_text_is_cut(values, cuts, length):
    written = [json.dumps({"name": "f", "parameters": {"a": value}}) for value in values]
    text = "[" + ", ".join(written) + "]"
    text = text[:length]
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    parser, begin, content, found = RequiredCalls(), 0, "", []
    for end in ends:
        more, calls = parser.update(text[begin:end], is_last=end == ends[-1])
        content, found, begin = content + more, found + calls, end
        assert len(found) == sum(call in text[:end] for call in dict.fromkeys(written)) or len(set(written)) < len(written)
    count = len(found)
    assert [json.loads(call["function"]["arguments"])["a"] for call in found] == values[:count]
    assert content == ("" if found else text)
    assert [call["index"] for call in found] == list(range(count))


def test_calls_that_are_complete_survive_a_limit_on_tokens(says, server):
    text = json.dumps([{"name": "get_weather", "parameters": {"city": city}} for city in ("Paris", "Rome", "Oslo")])
    num_tokens = len(server.engine.tokenizer.encode(text)) - 6
    (content, calls), reason = says(text, tool_choice="required", max_tokens=num_tokens)
    assert (content, reason) == (None, "length")
    assert [json.loads(call["arguments"])["city"] for call in calls] == ["Paris", "Rome"]


def test_the_end_of_a_call_may_stand_in_a_string():
    call = '{"name": "f", "arguments": {"a": "x</tool_call>\\"</tool_call>"}}'
    content, [found] = HermesCalls().update(f"<tool_call>{call}</tool_call>", is_last=True)
    assert content == "" and found["function"]["arguments"] == '{"a": "x</tool_call>\\"</tool_call>"}'


def test_a_named_call_is_its_arguments(says):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    (content, calls), reason = says('{"city": "Paris"}', tool_choice=choice)
    assert (content, calls, reason) == (None, [{"name": "get_weather", "arguments": '{"city": "Paris"}'}], "stop")


def test_required_calls(says):
    text = '[{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "get_time", "parameters": {}}]'
    (content, calls), reason = says(text, tool_choice="required")
    assert (content, reason) == (None, "tool_calls")
    assert [call["name"] for call in calls] == ["get_weather", "get_time"]
    (content, calls), reason = says(text, tool_choice="required", max_tokens=5)
    assert (calls, reason) == ([], "length") and text.startswith(content)


def test_who_must_call_is_held_to_it(server):
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        error = error_of(server.chat(tools=[WEATHER], tool_choice=choice), 500)
        assert error["message"].startswith("structured_outputs cannot go on"), "the scripted model says something else"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tool_choice": "required"}, "tool_choice is required, but there are no tools."),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            'tool_choice is "x", but there is no such tool.',
        ),
        (
            {"tools": [CLOCK], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice must be auto or none",
        ),
        ({"tools": [{"type": "function"}]}, "tools.0.function is missing"),
        (
            {"chat_template_kwargs": {"tokenize": True}},
            "chat_template_kwargs has tokenize, which is not a variable of the template.",
        ),
        ({"continue_final_message": True, "add_generation_prompt": True}, "are both true"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}],
                "tool_choice": "required",
            },
            "structured_outputs cannot be compiled",
        ),
    ],
)
def test_what_does_not_fit_is_refused(server, fields, sentence):
    assert sentence in error_of(server.chat(**fields), 400)["message"]


def test_the_template_gets_what_it_may_use(server, monkeypatch):
    seen = []

    def apply(conversation, add_generation_prompt=True, **options):
        seen.append((conversation, add_generation_prompt, options))
        return [5]

    monkeypatch.setattr(server.engine.tokenizer, "apply_chat_template", apply)
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "It is"},
    ]
    wanted = {"tools": [CLOCK], "chat_template_kwargs": {"enable_thinking": False}, "continue_final_message": True}
    answer = server.chat(messages=messages, max_tokens=1, echo=True, **wanted).json()
    assert answer["choices"][0]["message"]["content"] == "It is The"
    [(conversation, add_generation_prompt, options)] = seen
    assert conversation[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    assert conversation[2] == {"role": "tool", "content": "sunny", "tool_call_id": "call_1"}
    assert not add_generation_prompt
    assert options == {"tools": [CLOCK], "enable_thinking": False, "continue_final_message": True}


@pytest.fixture
def templated(server, monkeypatch):
    """Has a chat's request answered, and returns what the template got: messages and options."""

    def ask(path="/v1/chat/completions", **fields):
        seen = []
        monkeypatch.setattr(
            server.engine.tokenizer, "apply_chat_template", lambda messages, **options: seen.append((messages, options)) or [5]
        )
        limit = {"max_tokens": 1} if "chat" in path else {}
        response = server.client.post(path, json={"messages": MESSAGES, **limit, **fields})
        assert response.status_code == 200, response.text
        [found] = seen
        return found

    return ask


@pytest.mark.parametrize(
    "sent", ["", " ", None, {"city": "Paris"}, '{"city": "Paris"}', '"{\\"city\\": \\"Paris\\"}"', "{}", "null", '"null"']
)
def test_arguments_that_clients_send_back_reach_the_template_as_an_object(templated, sent):
    call = {"type": "function", "function": {"name": "f", "arguments": sent}}
    messages, _ = templated(messages=[*MESSAGES, {"role": "assistant", "tool_calls": [call]}])
    [found] = messages[1]["tool_calls"]
    assert found["function"]["arguments"] in ({}, {"city": "Paris"})
    assert bool(found["function"]["arguments"]) == ("Paris" in str(sent))


def test_arguments_may_be_missing(templated):
    messages, _ = templated(messages=[*MESSAGES, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}])
    assert messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


@pytest.mark.parametrize("sent", ['{"city": "Par', "[1, 2]", [1, 2], 5, '"Paris"', "Paris", "[" * 100_000])
def test_arguments_that_are_no_object_are_refused_by_name(server, sent):
    call = {"type": "function", "function": {"name": "f", "arguments": sent}}
    error = error_of(server.chat(messages=[*MESSAGES, {"role": "assistant", "tool_calls": [call]}]), 400)
    assert error["param"] == "messages.1.tool_calls.0.function.arguments"
    assert error["message"].endswith("but must be a JSON object, or its text.")


@pytest.mark.parametrize(
    "fields",
    [{"reasoning": "2 and 2"}, {"reasoning_content": "2 and 2"}, {"reasoning": "", "reasoning_content": "2 and 2"}],
    ids=str,
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_what_the_assistant_thought_reaches_the_template_under_both_names(server, monkeypatch, path, fields):
    template = "{% for m in messages %}{{ m.reasoning }}|{{ m.reasoning_content }}|{{ m.content }};{% endfor %}"
    monkeypatch.setattr(server.engine.tokenizer.hf_tokenizer, "chat_template", template)
    texts, encode = [], server.engine.tokenizer.encode
    monkeypatch.setattr(server.engine.tokenizer, "encode", lambda text, *more: texts.append(text) or encode(text, *more))
    messages = [*MESSAGES, {"role": "assistant", "content": "4", **fields}]
    name = "messages" if "chat" in path else "input"
    assert server.client.post(path, json={name: messages}).status_code == 200
    assert texts == ["||What is the weather?;2 and 2|2 and 2|4;"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_tools_that_must_not_be_called_are_not_mentioned(templated, path):
    assert "tools" not in templated(path, tools=[CLOCK], tool_choice="none")[1]
    assert templated(path, tools=[CLOCK])[1]["tools"] == [CLOCK]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [WEATHER]},
        {"tools": [WEATHER], "tool_choice": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"add_generation_prompt": False},
        {"continue_final_message": True, "messages": [*MESSAGES, {"role": "assistant", "content": "It"}]},
        {"add_special_tokens": True},
    ],
)
def test_tokenize_counts_what_a_chat_counts(server, templated, fields):
    assert templated("/tokenize", **fields) == templated(**fields)


def test_tokenize_counts_as_many_tokens(server):
    fields = {"messages": MESSAGES, "tools": [WEATHER], "add_generation_prompt": False}
    usage = server.chat(**fields, max_tokens=1).json()["usage"]
    assert server.client.post("/tokenize", json=fields).json()["count"] == usage["prompt_tokens"]


def test_the_last_message_is_continued(server):
    def prompt_tokens(**fields):
        messages = [*MESSAGES, {"role": "assistant", "content": "It is"}]
        return server.chat(messages=messages, max_tokens=1, **fields).json()["usage"]["prompt_tokens"]

    assert prompt_tokens(continue_final_message=True) < prompt_tokens(add_generation_prompt=False) < prompt_tokens()


@example(parts=["<tool_call>", "<tool_call>", '{"name": "f", "arguments": {"a": 1}}', "</tool_call>"], cuts=[3, 30])
@given(
    parts=st.lists(
        st.sampled_from(
            ["Hi ", "<", "<tool", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": 1}}', '{"name": 5}', "\n"]
        ),
        max_size=12,
    ),
    cuts=st.lists(st.integers(0, 200)),
)
def test_a_text_is_the_same_in_any_pieces(parts, cuts):
    text = "".join(parts)
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    parser, begin, content, calls = HermesCalls(), 0, "", []
    for end in ends:
        more = parser.update(text[begin:end], is_last=end == ends[-1])
        content, calls, begin = content + more[0], calls + more[1], end
    whole = HermesCalls()
    expected_content, expected_calls = whole.update(text, is_last=True)
    assert [call["function"] for call in calls] == [call["function"] for call in expected_calls]
    assert content == expected_content
    calls_in_text = text.count('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')
    assert len(calls) >= calls_in_text and parser.num_calls == len(calls)


def test_references_to_definitions_are_kept():
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    other = {"type": "function", "function": {"name": "g", "parameters": {"$defs": {"A": {"const": "x"}}, "$ref": "#/$defs/A"}}}
    body = ChatCompletionRequest(messages=MESSAGES, tools=[tool, other], tool_choice="required")
    schema = schema_of_calls(body)
    assert isinstance(make_parser(body), RequiredCalls)
    right = [{"name": "f", "parameters": {"a": 5}}, {"name": "g", "parameters": "x"}]
    jsonschema.validate(right, schema)
    for wrong in (
        [{"name": "f", "parameters": {"a": "x"}}],
        [{"name": "g", "parameters": 5}],
        [],
        [{"name": "h", "parameters": {}}],
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    body = ChatCompletionRequest(messages=MESSAGES, tools=[tool], tool_choice={"type": "function", "function": {"name": "f"}})
    assert schema_of_calls(body) == parameters | {"additionalProperties": False} and isinstance(make_parser(body), NamedCall)
