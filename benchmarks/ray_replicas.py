"""Replicas on the nodes of a Ray cluster: nodes die under streams, and replicas come and go. Does every client get what it would have got?

    python benchmarks/ray_replicas.py kill --json kill.json     one of three nodes dies under 24 streams, ten times, and another comes
    python benchmarks/ray_replicas.py scale --json scale.json   from 2 replicas to 4 to 1 while clients ask, with Ray and without

The nodes are processes of this machine. Answers are compared with those of `LLM.generate`, which nobody disturbs. The exit status is 1 if any differs, or the replicas are not back in time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from server_process import start_server
from streams import MODEL, Stream, all_ready, ask, fault, replicas_of
from tqdm import tqdm

from minivllm import LLM, SamplingParams
from minivllm.bench.openai_client import WORDS
from minivllm.bench.report import format_table, report
from minivllm.outputs import RequestOutput

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from ray_nodes import RayNodes

NUM_NODES, STREAMS, ROUNDS, MAX_SECONDS = 3, 24, 10, 30.0
CLIENTS, LOAD_SECONDS = 8, 10.0
Request = tuple[str, dict[str, Any]]


def make_requests(rng: random.Random, count: int) -> tuple[list[Request], list[RequestOutput]]:
    """Prompts and parameters, and the answers."""
    requests = []
    for number in range(count):
        text = " ".join(rng.choices(WORDS, k=rng.randint(5, 40)))
        params = {"max_tokens": rng.randint(60, 120), "temperature": rng.choice((0, 0.9)), "seed": number, "ignore_eos": True}
        requests.append((text, params))
    llm = LLM(MODEL, kv_cache_memory_bytes=512 * 2**20)
    return requests, llm.generate([text for text, _ in requests], [SamplingParams(**params) for _, params in requests])


@contextlib.contextmanager
def ray_nodes(count: int) -> Iterator[RayNodes]:
    """A cluster while the context is open."""
    nodes = RayNodes(count)
    try:
        yield nodes
    finally:
        nodes.close()


def options_of(size: int, nodes: RayNodes | None) -> list[str]:
    """Of `minivllm serve`; without nodes, the replicas are on this machine."""
    options = [MODEL, "--data-parallel-size", str(size), "--max-num-seqs", "32", "--kv-cache-memory-bytes", str(256 * 2**20)]
    options += ["--max-replica-deaths", "100"]
    return options if nodes is None else [*options, "--data-parallel-backend", "ray", "--ray-address", nodes.address]


# -- kill ------------------------------------------------------------------------------------------------------------


async def one_kill(url: str, nodes: RayNodes, requests: list[Request], rng: random.Random) -> tuple[list[Stream], float, float]:
    """Kill a node under streams, and add one. Returns the streams, and after how many seconds the replicas are back, from the node's end and from when
    the next node is there."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        await all_ready(session, url)
        streams = [Stream() for _ in requests]
        tasks = [asyncio.create_task(ask(session, url, *request, got)) for request, got in zip(requests, streams, strict=True)]
        while not all(got.times for got in streams):
            await asyncio.sleep(0.01)
        killed = time.perf_counter()
        await asyncio.to_thread(nodes.kill, rng.choice(nodes.ids))
        await asyncio.to_thread(nodes.add)
        added = time.perf_counter()
        is_back = asyncio.create_task(wait_until_back(session, url, NUM_NODES))
        await asyncio.gather(*tasks)
        back = await is_back
    return streams, back - killed, max(0.0, back - added)


async def wait_until_back(session: aiohttp.ClientSession, url: str, size: int) -> float:
    """Wait until so many replicas take requests, and no other is there. Returns when that was."""
    while True:
        answer = await replicas_of(session, url)
        if answer["size"] == size and [item["state"] for item in answer["replicas"]] == ["ready"] * size:
            return time.perf_counter()
        await asyncio.sleep(0.05)


def run_kill(arguments: argparse.Namespace) -> int:
    rng = random.Random(arguments.seed)
    requests, expected = make_requests(rng, STREAMS)
    rounds, faults, lost = [], [], 0
    with ray_nodes(NUM_NODES) as nodes, start_server(*options_of(NUM_NODES, nodes)) as server:
        for number in tqdm(range(arguments.rounds), dynamic_ncols=True):
            streams, back, since_added = asyncio.run(one_kill(server.base_url, nodes, requests, rng))
            words = [(i, fault(got, answer)) for i, (got, answer) in enumerate(zip(streams, expected, strict=True))]
            faults += [f"round {number}, stream {i}: {what}" for i, what in words if what]
            lost += sum(bool(got.error) for got in streams)
            rounds.append({"back": back, "since_added": since_added, "longest": max(gap for got in streams for gap in got.gaps)})
        resumed = asyncio.run(count_resumed(server.base_url))
    back, since_added = [item["back"] for item in rounds], [item["since_added"] for item in rounds]
    rows = [
        ("nodes killed", len(rounds)),
        ("streams", STREAMS * len(rounds)),
        ("streams resumed elsewhere", resumed),
        ("streams lost", lost),
        ("streams with extra, missing or wrong tokens", len(faults) - lost),
        ("replicas are back after the node's end: median", f"{sorted(back)[len(back) // 2]:.1f} s"),
        ("the longest", f"{max(back):.1f} s"),
        ("after the next node is there: the longest", f"{max(since_added):.1f} s"),
        ("between two pieces of a stream: longest", f"{max(item['longest'] for item in rounds):.1f} s"),
    ]
    title = f"One of {NUM_NODES} nodes dies under {STREAMS} streams, and another comes"
    report(title, format_table(("", ""), rows), {"rounds": rounds, "faults": faults}, file=arguments.json)
    print("\n".join(faults[:10]))
    return 1 if faults or max(back) > MAX_SECONDS else 0


async def count_resumed(url: str) -> int:
    """Streams that went on at another replica."""
    async with aiohttp.ClientSession() as session:
        return int((await replicas_of(session, url))["streams_resumed"])


# -- scale -----------------------------------------------------------------------------------------------------------


async def scale_under_load(url: str, requests: list[Request], sizes: list[int]) -> tuple[list[tuple[int, Stream]], list[float]]:
    """Have these numbers of replicas, one after another, while clients ask. Returns their answers, and how long each change took."""
    answers: list[tuple[int, Stream]] = []
    is_over = False

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def keep_asking(start: int) -> None:
            number = start
            while not is_over:
                place = number % len(requests)
                answers.append((place, await ask(session, url, *requests[place])))
                number += CLIENTS

        clients = [asyncio.create_task(keep_asking(start)) for start in range(CLIENTS)]
        seconds = []
        for size in sizes:
            await asyncio.sleep(LOAD_SECONDS)
            start = time.perf_counter()
            async with session.post(f"{url}/replicas/scale", json={"size": size}) as response:
                assert response.status == 202, await response.text()
            seconds.append(await wait_until_back(session, url, size) - start)
        await asyncio.sleep(LOAD_SECONDS)
        is_over = True
        await asyncio.gather(*clients)
    return answers, seconds


def run_scale(arguments: argparse.Namespace) -> int:
    requests, expected = make_requests(random.Random(arguments.seed), STREAMS)
    sizes, rows, raw, faults = [4, 1], [], {}, []
    for backend in ("mp", "ray"):
        with contextlib.ExitStack() as stack:
            nodes = stack.enter_context(ray_nodes(max(sizes))) if backend == "ray" else None
            server = stack.enter_context(start_server(*options_of(2, nodes)))
            answers, seconds = asyncio.run(scale_under_load(server.base_url, requests, sizes))
        found = [f"{backend}: {words}" for place, got in answers if (words := fault(got, expected[place]))]
        faults += found
        raw[backend] = {"answers": len(answers), "seconds": seconds, "faults": found}
        rows.append((backend, len(answers), len(found), *(f"{value:.1f} s" for value in seconds)))
    head = ("backend", "requests", "failed or wrong", "from 2 to 4", "from 4 to 1")
    report(f"From 2 replicas to 4 to 1 while {CLIENTS} clients ask", format_table(head, rows), raw, file=arguments.json)
    print("\n".join(faults[:10]))
    return 1 if faults else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(required=True, metavar="MODE")
    for name, run in {"kill": run_kill, "scale": run_scale}.items():
        mode = modes.add_parser(name)
        mode.set_defaults(run=run)
        mode.add_argument("--seed", type=int, default=0)
        mode.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
        if name == "kill":
            mode.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
