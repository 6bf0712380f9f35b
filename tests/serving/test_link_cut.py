"""The link to a node with replicas is cut under its streams: they go on elsewhere, nothing comes twice, and the node joins again."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from test_two_nodes import running, wait_for
from two_networks import two_nodes, why_not

from minivllm import SamplingParams
from minivllm.distributed.sockets import make_key_file

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

PORT, NUM_STREAMS, LENGTH = 8124, 6, 100
CLIENT = """
import asyncio, json, sys, httpx
requests = json.load(sys.stdin)
pieces = [[] for _ in requests]
async def stream(client, got, request):
    async with client.stream("POST", "/v1/completions", json=request | {"stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                got += [choice["text"] for choice in chunk["choices"]]
                if len(got) == 3 and all(len(other) >= 3 for other in pieces):
                    print("all have begun", flush=True)
async def main():
    async with httpx.AsyncClient(base_url="http://127.0.0.1:PORT", timeout=300) as client:
        await asyncio.gather(*[stream(client, got, request) for got, request in zip(pieces, requests)])
        replicas = (await client.get("/replicas")).json()
    print(json.dumps({"texts": ["".join(got) for got in pieces], "replicas": replicas}))
asyncio.run(main())
""".replace("PORT", str(PORT))


@pytest.mark.parametrize(
    ("replica_timeout", "cut_seconds", "words"),
    [
        pytest.param(5, 30, "nothing was heard from it for 5 seconds", id="longer than the timeout", marks=pytest.mark.nightly),
        pytest.param(60, 16, "messages", id="long enough to lose messages"),
    ],
)
def test_the_link_is_cut_and_healed(llm, tmp_path, replica_timeout, cut_seconds, words):
    prompts = [f"Once upon a time, number {number} of the foxes" for number in range(NUM_STREAMS)]
    params = [
        {"temperature": 0.8 * (number % 2), "seed": number, "max_tokens": LENGTH, "ignore_eos": True}
        for number in range(NUM_STREAMS)
    ]
    expected = [
        output.outputs[0].text for output in llm.generate(prompts, [SamplingParams(**item) for item in params], use_tqdm=False)
    ]
    requests = json.dumps([{"prompt": prompt, **item} for prompt, item in zip(prompts, params, strict=True)])
    key = tmp_path / "replicas.key"
    make_key_file(key)

    def serve(node, *more):
        return node.command(
            sys.executable, "-m", "minivllm.entrypoints.cli.main", "serve", "smollm2-135m", "--data-parallel-size", "2",
            "--data-parallel-size-local", "1", "--data-parallel-address", "10.77.0.1", "--data-parallel-key-file", str(key),
            "--num-gpu-blocks-override", "256", "--replica-timeout", str(replica_timeout), *more,
        )  # fmt: skip

    def start_client(node):
        command = node.command(sys.executable, "-c", CLIENT)
        client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        client.stdin.write(requests)
        client.stdin.close()
        assert client.stdout.readline() == "all have begun\n"
        return client

    def finish(client):
        answer = json.loads(client.stdout.read())
        assert client.wait(10) == 0
        assert answer["texts"] == expected
        assert answer["replicas"]["streams_lost"] == 0
        return answer["replicas"]

    head_log, node_log = tmp_path / "head.log", tmp_path / "node.log"
    with (
        two_nodes(delay=0.01, loss=0.0) as (first, second, link),
        running(serve(first, "--port", str(PORT)), head_log) as head,
        running(serve(second, "--headless", "--data-parallel-start-rank", "1"), node_log) as node,
    ):
        wait_for(head_log, "Replica 1 takes requests.", head)
        wait_for(head_log, "minivllm serves", head)
        before = len(head_log.read_text())
        client = start_client(first)
        link.is_cut, cut_at = True, time.monotonic()
        if replica_timeout < cut_seconds:
            replicas = finish(client)  # while the link is cut
            assert replicas["streams_resumed"] == NUM_STREAMS / 2
        time.sleep(max(0.0, cut_at + cut_seconds - time.monotonic()))
        link.is_cut = False
        if replica_timeout > cut_seconds:
            replicas = finish(client)
            assert replicas["streams_resumed"] > 0
        end = time.monotonic() + 60
        while "Replica 1 takes requests." not in head_log.read_text()[before:]:
            assert time.monotonic() < end and head.poll() is None and node.poll() is None, head_log.read_text()
            time.sleep(0.1)
        causes = [line for line in head_log.read_text()[before:].splitlines() if "Replica 1" in line]
        assert any(words in line for line in causes), "\n".join(causes)
        last = finish(start_client(first))
        assert last["streams_resumed"] == replicas["streams_resumed"]
        assert [item["state"] for item in last["replicas"]] == ["ready", "ready"]
        assert node.poll() is None
