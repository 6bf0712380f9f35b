"""What the API server answers, request by request, on an engine that says what a test can foresee."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
from scripted_server import (
    MAX_MODEL_LEN,
    MODEL,
    SENTENCE,
    check_shape,
    error_of,
    events,
    running_server,
    scripted_engine,
    wait_until,
)

from minivllm.entrypoints.openai.chat.protocol import ChatCompletionChunk, ChatCompletionResponse
from minivllm.entrypoints.openai.completions.protocol import CompletionChunk, CompletionResponse
from minivllm.entrypoints.openai.errors import ErrorResponse
from minivllm.entrypoints.openai.protocol import ModelList
from minivllm.entrypoints.server.tokenize_api import TokenizeResponse

CHAT = [{"role": "user", "content": "Hi"}]
USAGE = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4, "prompt_tokens_details": {"cached_tokens": 0}}


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


# -- answers -------------------------------------------------------------------------------------------------------


def test_a_completion(server):
    response = server.complete(max_tokens=3)
    assert response.status_code == 200
    body = response.json()
    check_shape(CompletionResponse, body)
    assert body["id"].startswith("cmpl-") and body["model"] == MODEL
    assert body["choices"] == [
        {"index": 0, "text": " The quick brown", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert body["usage"] == USAGE


def test_a_cache_salt_goes_with_the_prompt(server):
    for prompt in ("Hi", [1, 2]):
        assert server.complete(prompt=prompt, cache_salt="tenant 7", max_tokens=1).status_code == 200
    assert server.chat(cache_salt="tenant 7", max_tokens=1).status_code == 200
    for salt in ("", 7, "x" * 1025):
        assert server.complete(cache_salt=salt, max_tokens=1).status_code == 400


@pytest.mark.parametrize("ask", ["complete", "chat", "respond"])
def test_a_character_that_ends_lines_for_some_clients_ends_none_in_a_stream(server, monkeypatch, ask):
    said = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\r\nj"
    token_ids = server.engine.tokenizer.encode(said)
    said = server.engine.tokenizer.decode(token_ids)  # SmolLM2 has no tokens for some control characters
    assert {"\u2028", "\u2029", "\x85", "\r"} <= set(said)
    monkeypatch.setattr(server.engine.scripted, "script", [*token_ids, 2])
    if ask == "respond":
        raw = server.client.post("/v1/responses", json={"input": "Hi", "stream": True}).content.decode()
        texts = [json.loads(line[6:]).get("delta", "") for line in raw.split("\n") if line.startswith("data: ")]
    else:
        raw = getattr(server, ask)(stream=True, max_tokens=99).content.decode()
        choices = [json.loads(line[6:])["choices"][0] for line in raw.split("\n") if line.startswith("data: {")]
        texts = [choice["text"] if ask == "complete" else choice["delta"].get("content", "") for choice in choices]
    assert raw.splitlines() == raw.split("\n")[:-1]
    assert "".join(texts) == said


def test_an_error_in_a_stream_is_on_one_line():
    from minivllm.entrypoints.openai.protocol import sse

    event = sse({"error": "a\u2028b\x85"}, "response.failed").decode()
    assert event.splitlines() == event.split("\n")[:-1] and json.loads(event.split("data: ")[1])["error"] == "a\u2028b\x85"


def test_special_tokens_around_a_prompt_can_be_left_out(server, monkeypatch):
    tokenizer = server.engine.tokenizer.hf_tokenizer
    encode = tokenizer.encode
    monkeypatch.setattr(
        tokenizer, "encode", lambda text, add_special_tokens: [1] * add_special_tokens + encode(text, add_special_tokens=False)
    )
    counts = [
        server.complete(max_tokens=1, **fields).json()["usage"]["prompt_tokens"] for fields in ({}, {"add_special_tokens": False})
    ]
    assert counts == [2, 1]
    assert (
        server.complete(prompt=["Hi", "Ho"], add_special_tokens=False, cache_salt="s", max_tokens=1).json()["usage"][
            "prompt_tokens"
        ]
        == 2
    )


def test_sixteen_tokens_are_the_default_of_completions(server):
    assert server.complete().json()["usage"]["completion_tokens"] == 16


def test_a_chat_goes_on_until_the_context_is_full(server):
    body = server.chat(logit_bias={}, user="me").json()
    check_shape(ChatCompletionResponse, body)
    assert body["usage"]["total_tokens"] == MAX_MODEL_LEN
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["choices"][0]["message"]["content"].startswith(SENTENCE * 2)


def test_max_completion_tokens_is_the_newer_name(server):
    assert server.chat(max_completion_tokens=2, max_tokens=9).json()["usage"]["completion_tokens"] == 2


def test_messages_may_have_parts_of_text(server):
    def tokens(content):
        return server.client.post("/tokenize", json={"messages": [{"role": "user", "content": content}]}).json()["tokens"]

    assert tokens([{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]) == tokens("H\ni")


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


def test_token_ids_are_given_if_wanted(server):
    script = server.engine.scripted.script[:3]
    whole = server.complete(prompt=["a", "b"], max_tokens=3, return_token_ids=True).json()
    check_shape(CompletionResponse, whole)
    prompts = [server.client.post("/tokenize", json={"prompt": prompt}).json()["tokens"] for prompt in ("a", "b")]
    assert [(choice["prompt_token_ids"], choice["token_ids"]) for choice in whole["choices"]] == [(p, script) for p in prompts]
    chunks = list(events(server.complete(prompt="a", max_tokens=3, return_token_ids=True, stream=True)))
    for chunk in chunks:
        check_shape(CompletionChunk, chunk)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token for choice in choices for token in choice["token_ids"]] == script
    assert [choice["prompt_token_ids"] for choice in choices] == [prompts[0]] + [None] * (len(choices) - 1)
    whole = server.chat(max_tokens=3, return_token_ids=True).json()
    check_shape(ChatCompletionResponse, whole)
    assert whole["choices"][0]["token_ids"] == script and len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    chunks = list(events(server.chat(max_tokens=3, return_token_ids=True, stream=True)))
    for chunk in chunks:
        check_shape(ChatCompletionChunk, chunk)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [whole["prompt_token_ids"]] + [None] * (len(chunks) - 1)
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])] == script


def test_tokens_are_named_by_their_ids_if_wanted(server):
    wanted = {"max_tokens": 2, "return_tokens_as_token_ids": True}
    names = [f"token_id:{token}" for token in server.engine.scripted.script[:2]]
    logprobs = server.complete(logprobs=2, echo=True, **wanted).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][-2:] == names and names[0] in logprobs["top_logprobs"][-2]
    assert all(token.startswith("token_id:") for token in logprobs["tokens"])
    content = server.chat(logprobs=True, top_logprobs=1, **wanted).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == names and bytes(content[0]["bytes"]) == b" The"


@pytest.mark.parametrize("script", [" 机器学习是😀 and so on", "😀😀é", "é" * 20])
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_within_a_character(server, monkeypatch, script, stream):
    """Several tokens make a character: each is where the character begins, and has its own bytes."""
    monkeypatch.setattr(server.engine.scripted, "script", server.engine.tokenizer.encode(script))
    num_tokens = len(server.engine.scripted.script)
    assert num_tokens > len(script.split())
    answer = server.complete(max_tokens=num_tokens, logprobs=0, echo=True, stream=stream)
    chunks = list(events(answer)) if stream else [answer.json()]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    logprobs = {
        name: [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"][name]] for name in ("tokens", "text_offset")
    }
    assert text == "Once" + script
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        whole = token.rstrip("\ufffd")
        assert text[offset:].startswith(whole) and offset < len(text)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])

    answer = server.chat(max_tokens=num_tokens, logprobs=True, top_logprobs=2, stream=stream)
    chunks = list(events(answer))[1:] if stream else [answer.json()]
    entries = [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == script.encode()


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
        {"stop": "lazy", "logprobs": 1},
        {"prompt": ["a", "b"]},
        {"echo": True, "max_tokens": 0},
    ):
        whole = server.complete(**wanted).json()
        chunks = list(events(server.complete(**wanted, stream=True)))
        for chunk in chunks:
            check_shape(CompletionChunk, chunk)
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
        check_shape(ChatCompletionChunk, chunk)
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


def test_the_usage_so_far_comes_with_each_chunk_when_asked_for(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    for ask in (server.complete, server.chat):
        chunks = list(events(ask(max_tokens=3, stream=True, stream_options=options)))
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts[0] > 0 and counts[-1] == 3 and sorted(counts) == counts
        assert all(
            chunk["usage"]["total_tokens"] == chunk["usage"]["prompt_tokens"] + count
            for chunk, count in zip(chunks, counts, strict=True)
        )
    options = {"include_usage": False, "continuous_usage_stats": True}
    assert all("usage" not in chunk for chunk in events(server.complete(max_tokens=3, stream=True, stream_options=options)))


def test_each_token_is_a_chunk_even_without_text(server, monkeypatch):
    """A client that measures the time between tokens counts chunks: only tokens that came together share one."""
    monkeypatch.setattr(server.engine.scripted, "seconds_per_step", 0.05)
    monkeypatch.setattr(server.engine.scripted, "script", server.engine.tokenizer.encode("😀😀😀"))
    num_tokens = len(server.engine.scripted.script)
    for ask, is_text in ((server.complete, True), (server.chat, False)):
        chunks = list(events(ask(max_tokens=num_tokens, stream=True)))
        texts = [
            choice["text"] if is_text else choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]
        ]
        assert "".join(texts) == "😀😀😀" and len(chunks) > num_tokens - 3 > 4, (
            "without those that have no text, there would be four"
        )
    held = list(events(server.complete(max_tokens=9, stop="x" * 30, stream=True)))
    assert len(held) > 5, "the possible start of a stop string is held back"


def test_one_prompt_that_is_too_long_among_several_is_refused_before_any_is_served(slow, monkeypatch):
    prompts = ["a", "word " * 300]
    encode = slow.engine.tokenizer.encode
    monkeypatch.setattr(slow.engine.tokenizer, "encode", lambda text, *more: time.sleep(len(text) / 3000) or encode(text, *more))
    for stream in (False, True):
        error = error_of(slow.complete(prompt=prompts, max_tokens=5, stream=stream), 400)
        assert "301 tokens" in error["message"]
    assert slow.engine.stats.num_used_blocks == 0


@pytest.mark.parametrize("stream", [False, True])
def test_the_first_token_of_several_prompts_is_the_earliest(server, monkeypatch, stream):
    """The server runs four at once, so the last two of six prompts wait for the others."""
    monkeypatch.setattr(server.engine.scripted, "seconds_per_step", 0.05)
    answers = []
    monkeypatch.setattr("minivllm.entrypoints.server.request_log.RequestRecord.log", lambda record: answers.append(record.answer))
    begin = time.monotonic()
    server.complete(prompt=["a"] * 6, max_tokens=6, stream=stream)
    elapsed = time.monotonic() - begin

    def logged():  # the answer before may be logged only now
        return [answer for answer in answers if answer and answer.num_sequences == 6]

    wait_until(logged)
    assert 0.04 < logged()[0].time_to_first_token < elapsed / 3, "of twelve steps, it came in the first"


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
    check_shape(ErrorResponse, rest[-1])
    assert "the kernel is gone" in rest[-1]["error"]["message"]
    assert "the kernel is gone" in error_of(slow.complete(), 500)["message"]
    slow.engine.scripted.failure = None
    assert slow.complete(max_tokens=1).status_code == 200


# -- other routes --------------------------------------------------------------------------------------------------


def test_tokenize_and_detokenize_are_inverse(server):
    body = server.client.post("/tokenize", json={"prompt": "Hello world", "return_token_strs": True}).json()
    check_shape(TokenizeResponse, body)
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"]) == 2
    assert body["max_model_len"] == MAX_MODEL_LEN
    assert server.client.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": "Hello world"}


def test_tokenize_shows_what_a_conversation_becomes(server):
    body = server.client.post("/tokenize", json={"messages": CHAT}).json()
    text = server.client.post("/detokenize", json={"tokens": body["tokens"]}).json()["prompt"]
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_model_is_listed(server):
    body = server.client.get("/v1/models").json()
    check_shape(ModelList, body)
    assert body["data"][0]["id"] == MODEL
    assert server.client.get(f"/v1/models/{MODEL}").json() == body["data"][0]


def test_health_version_metrics_and_description(server):
    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.client.get("/version").json()["version"]
    assert "minivllm:num_requests_running" in server.client.get("/metrics").text
    assert "422" not in server.client.get("/openapi.json").text


# -- the model's own defaults ----------------------------------------------------------------------------------------


def test_a_request_gets_the_models_sampling_defaults_where_it_says_nothing(server, monkeypatch):
    defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 3}
    monkeypatch.setattr(
        server.engine, "model_config", dataclasses.replace(server.engine.model_config, sampling_defaults=defaults)
    )
    seen, generate = [], server.engine.generate

    def note(request):
        params = request.core_request.sampling_params
        seen.append((params.temperature, params.top_p, params.top_k, params.max_tokens))
        return generate(request)

    monkeypatch.setattr(server.engine, "generate", note)
    assert server.chat().status_code == 200
    assert server.chat(temperature=0, max_tokens=2).status_code == 200
    assert server.complete(max_tokens=None).status_code == 200
    body = server.client.post("/v1/responses", json={"input": "Hi", "top_p": 0.5}).json()
    assert seen == [(0.6, 0.95, 20, 3), (0, 0.95, 20, 2), (0.6, 0.95, 20, 16), (0.6, 0.5, 20, 3)]
    assert (body["temperature"], body["top_p"]) == (0.6, 0.5)
