"""A node with the API server, the coordinator and two replicas, and one with two more, over a slow network that loses packets."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from two_networks import two_nodes, why_not

from minivllm import SamplingParams
from minivllm.distributed.sockets import make_key_file

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

PORT, NUM_REQUESTS = 8123, 48
CLIENT = """
import asyncio, json, sys, httpx
requests = json.load(sys.stdin)
async def main():
    async with httpx.AsyncClient(base_url="http://127.0.0.1:PORT", timeout=300) as client:
        answers = await asyncio.gather(*[client.post("/v1/completions", json=request) for request in requests])
        assert all(answer.status_code == 200 for answer in answers), [answer.text for answer in answers]
        metrics = (await client.get("/metrics")).text
    print(json.dumps({"texts": [[choice["text"] for choice in answer.json()["choices"]] for answer in answers], "metrics": metrics}))
asyncio.run(main())
""".replace("PORT", str(PORT))


def workload():
    rng = random.Random(0)
    prompts = [[rng.randrange(100, 40_000) for _ in range(rng.randint(1, 40))] for _ in range(NUM_REQUESTS)]
    params = [
        {"temperature": 0, "max_tokens": rng.randint(1, 24)}
        if i % 2
        else {"temperature": 1.0, "seed": i, "max_tokens": 12, "n": 1 + i % 3}
        for i in range(NUM_REQUESTS)
    ]
    return prompts, params


@contextlib.contextmanager
def running(command, log):
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(log, words, process, seconds=120):
    end = time.monotonic() + seconds
    while words not in log.read_text():
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.1)


@pytest.mark.long
def test_replicas_on_two_nodes_answer_like_one_engine(llm, tmp_path):
    prompts, params = workload()
    expected = [
        [completion.text for completion in output.outputs]
        for output in llm.generate(prompts, [SamplingParams(**item) for item in params], use_tqdm=False)
    ]
    key, other_key = tmp_path / "replicas.key", tmp_path / "other.key"
    make_key_file(key), make_key_file(other_key)

    def serve(node, *more, key=key, num_seqs=8):
        return node.command(
            sys.executable, "-m", "minivllm.entrypoints.cli.main", "serve", "smollm2-135m", "--data-parallel-size", "4",
            "--data-parallel-size-local", "2", "--data-parallel-address", "10.77.0.1", "--data-parallel-key-file", str(key),
            "--num-gpu-blocks-override", "256", "--max-num-seqs", str(num_seqs), *more,
        )  # fmt: skip

    head_log, node_log = tmp_path / "head.log", tmp_path / "node.log"
    with two_nodes(delay=0.02, loss=0.01) as (first, second, link):
        headless = ("--headless", "--data-parallel-start-rank", "2")
        # the node is there first, and waits; and one with a wrong key waits forever
        with (
            running(serve(second, *headless), node_log) as node,
            running(serve(second, *headless, key=other_key), tmp_path / "wrong.log") as wrong,
            running(serve(first, "--port", str(PORT)), head_log) as head,
        ):
            wait_for(node_log, "replicas 2, 3 start", node)
            wait_for(head_log, "minivllm serves", head)
            other = subprocess.run(serve(second, *headless, num_seqs=9), capture_output=True, text=True, timeout=60)
            assert other.returncode == 2
            assert "Its model or its options differ from those of the API server" in other.stderr
            garbage = f"import os, socket; socket.create_connection(('10.77.0.1', 29550)).sendall({os.urandom(2000)!r})"
            subprocess.run(second.command(sys.executable, "-c", garbage), check=True, timeout=60)
            wait_for(head_log, "Replica 3 takes requests.", head)
            wait_for(head_log, "Replica 2 takes requests.", head)

            requests = [{"prompt": prompt, **item} for prompt, item in zip(prompts, params, strict=True)]
            client = subprocess.run(
                first.command(sys.executable, "-c", textwrap.dedent(CLIENT)),
                input=json.dumps(requests), capture_output=True, text=True, timeout=300, check=True,
            )  # fmt: skip
            answer = json.loads(client.stdout)
            assert answer["texts"] == expected
            counts = {
                rank: sum(
                    float(line.split()[-1])
                    for line in answer["metrics"].splitlines()
                    if line.startswith(f'minivllm:request_success_total{{engine="{rank}"')
                )
                for rank in range(4)
            }
            assert sum(counts.values()) == NUM_REQUESTS
            assert min(counts.values()) >= NUM_REQUESTS / 8, counts
            assert wrong.poll() is None and "waiting for the API server" in (tmp_path / "wrong.log").read_text()
            assert "Refused a connection" in head_log.read_text()
            assert "Refused replicas [2, 3]: Its model or its options differ" in head_log.read_text()
            # in order: what is there finishes, and the others go on
            node.send_signal(signal.SIGTERM)
            assert node.wait(30) == 0
            wait_for(head_log, "Replica 3 has left.", head)
            again = subprocess.run(
                first.command(sys.executable, "-c", textwrap.dedent(CLIENT)),
                input=json.dumps(requests[:6]), capture_output=True, text=True, timeout=300, check=True,
            )  # fmt: skip
            assert json.loads(again.stdout)["texts"] == expected[:6]
        assert link.num_lost > 0
        assert link.num_carried > 500
