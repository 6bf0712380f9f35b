"""`minivllm serve` on the real model, as a person starts it, and OpenAI's own client, unchanged."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Annotated, Literal

import httpx
import openai
import psutil
import pydantic
import pytest
import warm_processes

from minivllm.entrypoints.cli import main as cli
from minivllm.sampling_params import SamplingParams

pytestmark = pytest.mark.slow
MODEL = "smollm2-135m"
KEY = "a-key-for-tests"
SMALL = ["--num-gpu-blocks-override", "512", "--max-num-seqs", "16"]
PROMPTS = ["The capital of France is", "Once upon a time", "def fibonacci(n):", "Zwei und zwei sind", "The opposite of hot is"]
CHAT = [{"role": "user", "content": "Name a colour."}]


class ServeProcess:
    """`minivllm serve` in a process of its own, and its log."""

    def __init__(self, *options, log):
        self.log = log
        environment = os.environ | {"MINIVLLM_API_KEY": KEY}
        with log.open("w") as file:
            entry = (
                [warm_processes.__file__, "minivllm"] if warm_processes.are_used() else ["-m", "minivllm.entrypoints.cli.main"]
            )
            command = [sys.executable, *entry, "serve", MODEL, "--port", "0", *SMALL, *options]
            self.process = subprocess.Popen(command, stderr=file, env=environment)
        self.url = self._wait_for_url()
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=120)
        self.http = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=120)

    def _wait_for_url(self):
        deadline = time.monotonic() + 180
        while (found := re.search(r"serves \S+ at (http://\S+) until Ctrl-C", self.log.read_text())) is None:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)
        return found[1]

    def records(self):
        """The lines of the log that are JSON."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def end(self, sig=signal.SIGTERM):
        self.client.close()
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(sig)
        return self.process.wait(timeout=60)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    served = ServeProcess(log=tmp_path_factory.mktemp("serve") / "log")
    yield served
    served.end()


@pytest.fixture
def client(served):
    return served.client


def test_greedy_text_is_that_of_llm_generate(client, llm):
    params = SamplingParams(temperature=0, max_tokens=24)
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    expected = [output.text for output in outputs]
    completion = client.completions.create(model=MODEL, prompt=PROMPTS, temperature=0, max_tokens=24)
    assert [choice.text for choice in completion.choices] == expected
    assert [
        client.completions.create(model=MODEL, prompt=p, temperature=0, max_tokens=24).choices[0].text for p in PROMPTS
    ] == expected
    assert completion.usage.completion_tokens == sum(len(output.token_ids) for output in outputs)


def test_greedy_chat_is_that_of_llm_chat(client, llm):
    expected = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)[0].outputs[0]
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, max_completion_tokens=16)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == expected.finish_reason


def test_streamed_pieces_join_to_the_whole_text(client):
    wanted = {"model": MODEL, "prompt": PROMPTS[:2], "temperature": 0.9, "seed": 7, "n": 2, "max_tokens": 12}
    whole = client.completions.create(**wanted)
    texts = dict.fromkeys(range(4), "")
    reasons = {}
    for chunk in client.completions.create(**wanted, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert list(texts.values()) == [choice.text for choice in whole.choices]
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert len(set(texts.values())) == 4, "with a temperature they differ"


def test_a_streamed_chat_joins_and_ends_with_its_usage(client):
    wanted = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**wanted)
    chunks = list(client.chat.completions.create(**wanted, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage


def test_openais_stream_helper_understands_the_stream(client):
    with client.chat.completions.stream(model=MODEL, messages=CHAT, temperature=0, stop=[" "]) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "content.delta")
        assert stream.get_final_completion().choices[0].message.content == deltas != ""


def test_a_seed_repeats_an_answer_and_another_one_does_not(client):
    def say(seed):
        return client.completions.create(model=MODEL, prompt="My favourite", seed=seed, max_tokens=12).choices[0].text

    assert say(1) == say(1) != say(2)


def test_stop_strings_end_the_text(client):
    whole = client.completions.create(model=MODEL, prompt=PROMPTS[0], temperature=0, max_tokens=24).choices[0].text
    stop = whole[4:8]
    choice = client.completions.create(model=MODEL, prompt=PROMPTS[0], temperature=0, max_tokens=24, stop=[stop]).choices[0]
    assert (choice.text, choice.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_logprobs_of_completions(client):
    choice = client.completions.create(
        model=MODEL, prompt=PROMPTS[0], temperature=0, max_tokens=4, logprobs=3, echo=True
    ).choices[0]  # fmt: skip
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert [
        choice.text[offset:][: len(token)] for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)
    ] == logprobs.tokens
    assert logprobs.token_logprobs[0] is None and all(value <= 0 for value in logprobs.token_logprobs[1:])
    for token, value, top in list(zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True))[-4:]:
        assert top[token] == value == max(top.values()), "greedy takes the most likely"


def test_logprobs_of_chats(client):
    choice = client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_tokens=4, logprobs=True, top_logprobs=2
    ).choices[0]  # fmt: skip
    content = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == choice.message.content
    assert all(entry.token == entry.top_logprobs[0].token and len(entry.top_logprobs) == 2 for entry in content)


def test_token_ids_are_a_prompt_too(client, tokenizer):
    texts = [
        client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=8).choices[0].text
        for prompt in (PROMPTS[0], tokenizer.encode(PROMPTS[0]), [tokenizer.encode(PROMPTS[0])])
    ]
    assert len(set(texts)) == 1


def test_vllms_extra_fields_come_through_extra_body(client):
    extra = {"top_k": 1, "min_tokens": 3, "ignore_eos": True, "repetition_penalty": 1.0, "priority": 0}
    greedy = client.completions.create(model=MODEL, prompt=PROMPTS[0], temperature=0, max_tokens=8).choices[0].text
    assert client.completions.create(model=MODEL, prompt=PROMPTS[0], max_tokens=8, extra_body=extra).choices[0].text == greedy


class Colour(pydantic.BaseModel):
    """What a client may ask for."""

    name: Literal["red", "green", "blue"]
    brightness: Annotated[int, pydantic.Field(ge=0, le=100)]


def test_openais_parse_gets_what_it_asks_for(client):
    wanted = {"model": MODEL, "messages": CHAT, "response_format": Colour, "temperature": 0.7, "seed": 1, "max_tokens": 80}
    answer = client.chat.completions.parse(**wanted)
    assert isinstance(answer.choices[0].message.parsed, Colour) and answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**wanted) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed


def test_openais_responses(client):
    wanted = {"model": MODEL, "input": CHAT, "text_format": Colour, "temperature": 0.7, "max_output_tokens": 80}
    answer = client.responses.parse(**wanted, extra_body={"seed": 1})
    assert isinstance(answer.output_parsed, Colour) and answer.status == "completed"
    with client.responses.stream(**wanted, extra_body={"seed": 1}) as stream:
        assert stream.get_final_response().output_parsed == answer.output_parsed
    greedy = {"model": MODEL, "temperature": 0}
    said = client.chat.completions.create(**greedy, messages=CHAT, max_tokens=12).choices[0].message.content
    assert client.responses.create(**greedy, input=CHAT, max_output_tokens=12).output_text == said


def test_structured_outputs_in_openais_form_and_vllms(client):
    def complete(**extra):
        answer = client.completions.create(model=MODEL, prompt="The number: ", max_tokens=40, temperature=0, extra_body=extra)
        return answer.choices[0].text

    assert complete(structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    assert re.fullmatch("[0-9]{4}", complete(structured_outputs={"regex": "[0-9]{4}"}))
    assert json.loads(complete(structured_outputs={"json": {"type": "integer", "minimum": 0}})) >= 0
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, 2, 3]}}}
    assert complete(response_format=schema) in ("1", "2", "3")
    assert complete(response_format={"type": "text"}) == complete()


def test_errors_are_those_that_the_client_knows(served, client):
    with pytest.raises(openai.BadRequestError, match="temperature is -1") as caught:
        client.completions.create(model=MODEL, prompt="a", temperature=-1)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError, match="There is no model"):
        client.completions.create(model="gpt-5", prompt="a")
    with pytest.raises(openai.BadRequestError, match="maximum context length is"):
        client.completions.create(model=MODEL, prompt="word " * 9000, stream=True)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="another", max_retries=0).models.list()
    assert [model.id for model in client.models.list()] == [MODEL]


def test_many_streams_at_once_get_what_they_would_get_alone(client):
    def stream(prompt):
        chunks = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=16, stream=True)
        return "".join(choice.text for chunk in chunks for choice in chunk.choices)

    alone = [stream(prompt) for prompt in PROMPTS]
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        assert list(pool.map(stream, PROMPTS * 4)) == alone * 4


def test_a_reader_that_stops_in_the_middle_frees_its_blocks(served, client):
    with client.completions.create(
        model=MODEL, prompt="One, two,", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    deadline = time.monotonic() + 10
    while "minivllm:kv_cache_usage_perc" + '{engine="0",model_name="smollm2-135m"} 0.0' not in served.http.get("/metrics").text:
        assert time.monotonic() < deadline, "the blocks are still taken"
        time.sleep(0.05)
    while not any(record.get("end") == "client disconnected" for record in served.records()):
        assert time.monotonic() < deadline, "the log does not tell why it ended"
        time.sleep(0.05)


def test_the_log_has_a_line_for_each_request_and_no_prompt(served, client):
    response = client.completions.with_raw_response.create(model=MODEL, prompt="a private matter", max_tokens=3)
    request_id = response.headers["x-request-id"]
    deadline = time.monotonic() + 5
    while not (lines := [record for record in served.records() if record.get("request_id") == request_id]):
        assert time.monotonic() < deadline
    assert (lines[0]["status"], lines[0]["completion_tokens"], lines[0]["level"]) == (200, 3, "info")
    log = served.log.read_text()
    assert "private" not in log and KEY not in log


def test_sigterm_lets_what_runs_finish_and_leaves_with_status_0(tmp_path):
    served = ServeProcess(log=tmp_path / "log")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        stream = served.client.completions.create(
            model=MODEL, prompt="One, two,", max_tokens=40, stream=True, extra_body={"ignore_eos": True}
        )  # fmt: skip
        next(iter(stream))
        rest = pool.submit(lambda: list(stream))
        served.process.send_signal(signal.SIGTERM)
        chunks = rest.result()
    assert chunks[-1].choices[0].finish_reason == "length"
    assert served.end() == 0
    assert "Traceback" not in served.log.read_text()


def engine_process(served):
    """The process id of the server's engine."""
    return served.http.get("/replicas").json()["replicas"][0]["process_id"]


def kill_the_engine_under_streams(served, num_streams):
    """How each client learned of the engine's death, and after how many seconds."""
    num_begun = threading.Semaphore(0)

    def read(_):
        try:
            for _ in served.client.completions.create(
                model=MODEL, prompt="a", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
            ):  # fmt: skip
                num_begun.release()
        except openai.APIError as error:
            return str(error), time.monotonic()
        return "it ended as if nothing had been", time.monotonic()

    with concurrent.futures.ThreadPoolExecutor(num_streams) as pool:
        readers = [pool.submit(read, number) for number in range(num_streams)]
        for _ in range(100):  # 16 of them run, the others wait
            assert num_begun.acquire(timeout=60)
        killed = time.monotonic()
        os.kill(engine_process(served), signal.SIGKILL)
        return [(message, seconds - killed) for message, seconds in (reader.result(timeout=60) for reader in readers)]


def test_a_killed_engine_ends_32_streams_within_2_seconds_and_the_server_with_status_1(tmp_path):
    served = ServeProcess(log=tmp_path / "log")
    ends = kill_the_engine_under_streams(served, 32)
    assert [message for message, _ in ends if "The engine has ended: its process was killed by SIGKILL" not in message] == []
    assert max(seconds for _, seconds in ends) < 2
    assert served.http.get("/health").status_code == 503
    assert served.process.wait(timeout=30) == 1


def wait_until_healthy(served):
    deadline = time.monotonic() + 120
    while served.http.get("/health").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.long
def test_another_engine_is_started_where_that_was_asked_for(tmp_path):
    served = ServeProcess("--restart-engine", log=tmp_path / "log")
    streams_go_on_after(served, lambda: engine_process(served), "Another engine is being started")
    wait_until_healthy(served)
    answer = served.client.completions.create(model=MODEL, prompt=PROMPTS[0], max_tokens=2, temperature=0)
    assert answer.choices[0].text == " Paris."
    assert served.end() == 0


def streams_go_on_after(served, find_victim, said):
    """Kill a process under four streams: /health says this, and the texts are those of an undisturbed run."""
    options = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 60, "temperature": 0.8, "seed": 3}
    expected = served.client.completions.create(**options).choices[0].text
    begun = threading.Semaphore(0)

    def read(_):
        text = ""
        for chunk in served.client.completions.create(**options, stream=True):
            text += chunk.choices[0].text
            begun.release()
        return text

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read, number) for number in range(4)]
        for _ in range(40):
            assert begun.acquire(timeout=60)
        os.kill(find_victim(), signal.SIGKILL)
        deadline = time.monotonic() + 10
        while (health := served.http.get("/health")).status_code == 200:
            assert time.monotonic() < deadline
        assert said in health.json()["error"]["message"]
        assert [reader.result(timeout=120) for reader in readers] == [expected] * 4


@pytest.mark.long
def test_two_ranks_serve_and_a_killed_one_is_named(tmp_path):
    served = ServeProcess("--tensor-parallel-size", "2", "--restart-engine", log=tmp_path / "log")
    engine = psutil.Process(engine_process(served))
    workers = engine.children()
    assert len(workers) == 2
    said = f"The engine has ended: Rank 1 of 2 (process {workers[1].pid}) was killed by SIGKILL."
    streams_go_on_after(served, lambda: workers[1].pid, said)
    wait_until_healthy(served)
    answer = served.client.completions.create(model=MODEL, prompt=PROMPTS[0], max_tokens=2, temperature=0)
    assert answer.choices[0].text == " Paris."
    workers += psutil.Process(engine_process(served)).children()
    assert served.end() == 0
    assert not any(worker.is_running() for worker in workers)


def test_serve_has_help_with_an_example(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["serve", "--help"])
    assert stopped.value.code == 0
    assert "Example: minivllm serve" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "options,sentence",
    [
        (["--port", "70000"], "port is 70000, but must be from 0 to 65535."),
        (["--host", "256.1.1.1"], "The server cannot listen on 256.1.1.1"),
        (["--max-waiting", "-1"], "max_waiting is -1"),
        (["--request-timeout", "0"], "request_timeout is 0.0 seconds"),
        (["--api-key", ""], "An API key must be"),
        (["no-such-model", "--port", "0"], "There is no model 'no-such-model'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_mistakes_on_the_command_line_get_one_sentence(options, sentence, capsys):
    assert cli.main(["serve", *options]) == 2
    assert sentence in capsys.readouterr().err


def test_a_port_in_use_is_one_sentence(served, capsys):
    assert cli.main(["serve", "--port", served.url.rsplit(":", 1)[1]]) == 2
    assert "choose another --port" in capsys.readouterr().err


# -- other clients ---------------------------------------------------------------------------------------------------


class Person(pydantic.BaseModel):
    """Short, so that the model gets to its end."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: Annotated[str, pydantic.Field(max_length=12)]
    age: Annotated[int, pydantic.Field(ge=0, le=150)]


QUESTION = "Who is it? Alice is 30 years old."


def test_langchain_gets_structures_and_tools(served):
    langchain = pytest.importorskip("langchain_openai", reason="LangChain is not installed")
    chat = langchain.ChatOpenAI(
        model=MODEL, base_url=f"{served.url}/v1", api_key=KEY, temperature=0, max_tokens=80, max_retries=0
    )
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(Person, method=method).invoke(QUESTION), Person)
    answer = chat.bind_tools([Person], tool_choice="required").invoke(QUESTION)
    assert [call["name"] for call in answer.tool_calls] == ["Person"] * len(answer.tool_calls) != []
    assert chat.bind_tools([Person]).invoke(QUESTION).content, "it may call, and does not know how"
    parts = list(chat.bind_tools([Person], tool_choice="Person").stream(QUESTION))
    assert json.loads("".join(part["args"] or "" for chunk in parts for part in chunk.tool_call_chunks)).keys() == {"name", "age"}


def test_instructor_gets_structures(client):
    instructor = pytest.importorskip("instructor", reason="instructor is not installed")
    messages = [{"role": "user", "content": QUESTION}]
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        person = instructor.from_openai(client, mode=mode).chat.completions.create(
            model=MODEL, messages=messages, response_model=Person, temperature=0, max_tokens=80, max_retries=0
        )
        assert isinstance(person, Person)


def test_litellm_gets_structures_and_knows_the_error_of_a_full_context(served):
    litellm = pytest.importorskip("litellm", reason="LiteLLM is not installed")
    where = {"model": f"openai/{MODEL}", "api_base": f"{served.url}/v1", "api_key": KEY, "num_retries": 0}
    messages = [{"role": "user", "content": QUESTION}]
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": Person.model_json_schema()}}
    answer = litellm.completion(**where, messages=messages, temperature=0, max_tokens=80, response_format=schema)
    Person.model_validate_json(answer.choices[0].message.content)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**where, messages=[{"role": "user", "content": "word " * 9000}])
