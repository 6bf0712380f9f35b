"""Serving without batching: a process for each request behind the usual frontend."""

from __future__ import annotations

import asyncio
import json
import urllib.request

import pytest
from process_per_request import start_engine
from server_process import start_server
from serving_modes import MODES

from minivllm import EngineArgs, SamplingParams
from minivllm.errors import EngineDeadError, RequestError

ARGS = EngineArgs(max_model_len=256)
PROMPT = "The capital of France is"


async def collect(engine, prompt, params):
    return [output async for output in engine.generate(prompt, params)]


async def becomes(condition):
    while not condition():
        await asyncio.sleep(0.01)


@pytest.mark.long
@pytest.mark.slow
def test_it_answers_the_same_one_request_at_a_time(llm):
    params = SamplingParams(temperature=0, max_tokens=8)
    expected = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text
    engine = start_engine(ARGS, max_processes=1)

    async def run():
        tasks = [asyncio.create_task(collect(engine, PROMPT, params)) for _ in range(3)]
        await becomes(lambda: engine.num_unfinished_requests() == 3)
        tasks[2].cancel()
        outputs = await asyncio.gather(*tasks[:2])
        assert [output[-1].outputs[0].text for output in outputs] == [expected, expected]
        first, second = sorted(
            outputs, key=lambda output: output[-1].metrics.finished_time
        )  # on a busy machine either may start first
        assert first[-1].metrics.finished_time < second[0].metrics.first_token_time
        assert engine.num_unfinished_requests() == 0
        with pytest.raises(RequestError, match="empty"):
            await collect(engine, "", params)
        engine.shutdown()
        with pytest.raises(EngineDeadError):
            await collect(engine, PROMPT, params)

    asyncio.run(run())


def test_a_process_that_cannot_start_fails_its_request_only():
    engine = start_engine(EngineArgs(max_model_len=256, quantization="int8", dtype="float16"))

    async def run():
        for _ in range(2):
            outputs = await collect(engine, PROMPT, SamplingParams(max_tokens=2))
            assert "which needs dtype 'float32' or 'bfloat16', not 'float16'" in outputs[-1].error
        engine.check_health()
        engine.shutdown()

    asyncio.run(run())


@pytest.mark.long
@pytest.mark.slow
def test_it_is_served_over_http_like_any_engine():
    program, options = MODES["processes"]
    with start_server("smollm2-135m", "--max-model-len", "256", *options, program=program) as server:
        body = {"model": "smollm2-135m", "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
        request = urllib.request.Request(
            f"{server.base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            assert json.load(response)["choices"][0]["text"] == " Paris"
