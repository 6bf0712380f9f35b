"""A server under misbehaving clients for minutes: does anything leak, hang or break?

    python benchmarks/soak.py --streams 64 --seconds 300 --json soak.json
    python benchmarks/soak.py --streams 64 --seconds 600 --data-parallel-size 4 --api-server-count 2

Starts `minivllm serve`. Clients stream one answer after another, and a third of them disconnect in mid-stream; others send malformed
requests; now and then there is a burst of more requests than may wait. Afterwards blocks, tasks, file descriptors and memory must be as
before. Last, the first API server is killed while it serves, and all processes must end with it. Otherwise the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil
from server_process import HealthProbe, ServerProcess, start_server

from minivllm.bench.openai_client import WORDS, read_events
from minivllm.bench.report import format_table, report
from minivllm.entrypoints.cli.options import check_writable

MODEL = "smollm2-135m"
MAX_NUM_SEQS, NUM_BLOCKS = 16, 96  # few blocks: some requests are preempted, and all blocks are soon touched
ANSWER_SECONDS = 120.0
"""An accepted request that takes longer counts as hung."""
BURST_EVERY, BURST_EXCESS = 10.0, 32
SETTLE_SECONDS = 20.0
"""How long the server has to settle after the last client is gone."""
MOST_WARM_UP_SECONDS, STILL_SECONDS, STILL_GROWTH, WARM_UP_REQUESTS = 120.0, 5, 0.01, 48
"""The warm-up ends when this many requests have completed, which touches every block, and memory has grown by less than this share for some
seconds. A leak outlives it."""
MOST_GROWTH = 0.05
KILL_SECONDS = 10.0
"""Of load at the end, in the middle of which the first API server is killed."""
WARM_UP_SHARE, WINDOW_SHARE = 1 / 3, 1 / 5
"""Memory is compared between a window of the run after its warm-up and one at its end."""

SERVER = """
import asyncio, pathlib, signal, sys
from minivllm.entrypoints.cli.main import main
signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path({file!r}).write_text(str(len(asyncio.all_tasks()))))
sys.exit(main())
"""
"""`minivllm`, which writes its number of asyncio tasks on SIGUSR1."""

JSON_TYPE = {"Content-Type": "application/json"}
BAD_REQUESTS: tuple[tuple[str, str, bytes], ...] = (
    ("POST", "/v1/completions", b"{"),
    ("POST", "/v1/completions", b'{"prompt": "\xff\xfe"}'),
    ("POST", "/v1/completions", b"[" * 5000),
    ("POST", "/v1/completions", b'{"model": "smollm2-135m", "prompt": "' + b"x" * 5 * 2**20 + b'"}'),
    ("POST", "/nowhere", b"{}"),
    ("GET", "/v1/completions", b""),
    *(
        ("POST", f"/v1/{path}", json.dumps({"model": MODEL} | body).encode())
        for path, body in (
            ("completions", {"model": "nobody", "prompt": "hi"}),
            ("completions", {"prompt": ""}),
            ("completions", {"prompt": [10**9]}),
            ("completions", {"prompt": [5] * 100_000}),
            ("completions", {"prompt": "hi", "max_tokens": -1}),
            ("completions", {"prompt": "hi", "temperature": "hot"}),
            ("completions", {"prompt": "hi", "n": 10**6}),
            ("completions", {"prompt": ["hi"] * 5000}),
            ("chat/completions", {"messages": []}),
            ("chat/completions", {"messages": [{"role": "user"}]}),
        )
    ),
)
"""Method, path, body."""


@dataclass
class Tally:
    """What the clients saw."""

    counts: Counter = field(default_factory=Counter)
    surprises: list[str] = field(default_factory=list)
    """In words, the first hundred."""

    def surprise(self, kind: str, words: str) -> None:
        """Something that must not be."""
        self.counts[kind] += 1
        if len(self.surprises) < 100:
            self.surprises.append(f"{kind}: {words}")


class Users:
    """All clients of a server, on one event loop."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, rng: random.Random, tally: Tally) -> None:
        self.session = session
        self.base_url = base_url
        self.rng = rng
        self.tally = tally

    def make_body(self) -> tuple[str, dict[str, Any]]:
        """The path and body of a valid streaming request."""
        rng = self.rng
        text = " ".join(rng.choices(WORDS, k=rng.randint(1, 60)))
        body = {
            "model": MODEL, "max_tokens": rng.randint(2, 60), "temperature": rng.choice((0, 1)), "ignore_eos": True,
            "n": rng.choice((1, 1, 1, 2)), "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if rng.random() < 0.3:
            return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
        return "/v1/completions", body | {"prompt": text}

    async def stream(self) -> None:
        """Stream one answer to its end, or, a third of the time, disconnect in mid-stream."""
        path, body = self.make_body()
        leaves = self.rng.random() < 1 / 3
        num_events = self.rng.randint(1, body["max_tokens"])
        try:
            async with self.session.post(self.base_url + path, json=body) as response:
                if response.status != 200:
                    self.note_refusal(response, "stream")
                    await asyncio.sleep(0.2)
                    return
                self.tally.counts["accepted"] += 1
                last, tokens = b"", 0
                async with aclosing(read_events(response.content.iter_any())) as events:
                    async for event in events:
                        last, num_events = event, num_events - 1
                        if event != b"[DONE]":
                            answer = json.loads(event)
                            if "error" in answer:
                                self.tally.surprise("broken", f"an error event: {answer['error']}")
                                return
                            tokens = (answer.get("usage") or {}).get("completion_tokens", tokens)
                        if leaves and num_events == 0:
                            self.tally.counts["left"] += 1
                            return
                if last != b"[DONE]" or tokens != body["n"] * body["max_tokens"]:
                    self.tally.surprise("broken", f"{tokens} tokens and then {last!r} for {body}")
                else:
                    self.tally.counts["completed"] += 1
        except asyncio.TimeoutError:
            self.tally.surprise("hung", f"{path} with {body}")
        except (aiohttp.ClientError, OSError) as error:
            self.tally.surprise("broken", f"{type(error).__name__}: {error}")

    def note_refusal(self, response: aiohttp.ClientResponse, kind: str) -> None:
        """A valid request may be refused only for overload, with a Retry-After."""
        if response.status in (429, 503) and "Retry-After" in response.headers:
            self.tally.counts["too many"] += 1
        else:
            self.tally.surprise("broken", f"status {response.status} for a good {kind}")

    async def send_bad_request(self) -> None:
        """Send one malformed request."""
        method, path, content = self.rng.choice(BAD_REQUESTS)
        name = f"{method} {path} {content[:60]!r}"
        try:
            async with self.session.request(method, self.base_url + path, data=content, headers=JSON_TYPE) as response:
                await response.read()
                if 400 <= response.status < 500:
                    self.tally.counts["bad refused"] += 1
                else:
                    self.tally.surprise("bad taken", f"status {response.status} for {name}")
        except asyncio.TimeoutError:
            self.tally.surprise("hung", name)
        except (aiohttp.ClientError, OSError):  # the server closed the connection: a refusal too
            self.tally.counts["bad refused"] += 1

    async def burst(self, size: int) -> None:
        """Send `size` short requests at once."""

        async def send() -> None:
            body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 2, "ignore_eos": True}
            try:
                async with self.session.post(f"{self.base_url}/v1/completions", json=body) as response:
                    await response.read()
                    if response.status == 200:
                        self.tally.counts["accepted"] += 1
                        self.tally.counts["completed"] += 1
                    else:
                        self.note_refusal(response, "request of a burst")
            except asyncio.TimeoutError:
                self.tally.surprise("hung", "a request of a burst")
            except (aiohttp.ClientError, OSError) as error:
                self.tally.surprise("broken", f"in a burst, {type(error).__name__}: {error}")

        await asyncio.gather(*(send() for _ in range(size)))


@dataclass(frozen=True)
class Footprint:
    """What a server holds on to."""

    tasks: int
    file_descriptors: int
    sequences: int
    cache_use: float

    def is_within(self, other: Footprint) -> bool:
        """Whether it holds no more than another."""
        return all(mine <= others for mine, others in zip(vars(self).values(), vars(other).values(), strict=True))


def measure_footprint(server: ServerProcess, task_file: Path) -> Footprint:
    """The server's footprint, from its metrics, its signal handler and the system."""
    task_file.unlink(missing_ok=True)
    os.kill(server.pid, signal.SIGUSR1)
    deadline = time.monotonic() + 10
    while not (task_file.exists() and task_file.read_text()):
        if time.monotonic() > deadline:
            raise SystemExit("The server does not say how many tasks it has.")
        time.sleep(0.02)
    metrics = server.metrics()
    sequences = metrics["minivllm:num_requests_running"] + metrics["minivllm:num_requests_waiting"]
    return Footprint(
        int(task_file.read_text()), server.num_file_descriptors(), int(sequences), metrics["minivllm:kv_cache_usage_perc"]
    )


async def load(
    server: ServerProcess,
    streams: int,
    seconds: float,
    seed: int,
    tally: Tally,
    is_enough: Callable[[dict[int, list[int]]], bool] = lambda memory: False,
    *,
    excess: int = MAX_NUM_SEQS + BURST_EXCESS,
) -> dict[int, list[int]]:
    """Run all clients for `seconds`, or until `is_enough` of the memory so far; then they receive the answers that have begun.

    Returns the resident bytes of each of the server's processes over time, by process id: a sample a second, and at least sixty.
    """
    end = time.monotonic() + seconds
    memory: dict[int, list[int]] = {}
    rng = random.Random(seed)
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout) as session:
        users = Users(session, server.base_url, rng, tally)

        async def again(action, pause: float = 0.0) -> None:
            while time.monotonic() < end:
                await action()
                await asyncio.sleep(pause)

        async def sample() -> None:
            nonlocal end
            with contextlib.suppress(psutil.NoSuchProcess):  # it was killed
                for process in server.processes():
                    memory.setdefault(process.pid, []).append(process.memory_info().rss)
            if is_enough(memory):
                end = time.monotonic()

        await asyncio.gather(
            *(again(users.stream) for _ in range(streams)),
            again(users.send_bad_request, 0.1),
            again(lambda: users.burst(streams + excess), BURST_EVERY),
            again(sample, min(1.0, seconds / 60)),
        )
    return memory


def warm_up(server: ServerProcess, streams: int, seed: int, excess: int) -> None:
    """Run the load until its processes stop growing: kernels compiled and KV cache blocks touched for the first time are no leak."""
    tally = Tally()

    def is_warm(memory: dict[int, list[int]]) -> bool:
        return tally.counts["completed"] >= WARM_UP_REQUESTS and all(map(is_still, memory.values()))

    asyncio.run(load(server, streams, MOST_WARM_UP_SECONDS, seed + 1, tally, is_warm, excess=excess))


def is_still(samples: list[int]) -> bool:
    """Whether memory, of which there is a sample a second, has hardly grown in the last seconds."""
    return len(samples) > STILL_SECONDS and samples[-1] < (1 + STILL_GROWTH) * samples[-1 - STILL_SECONDS]


def growth(samples: list[int]) -> float:
    """How much larger the memory is at the end of a run than after its warm-up, as a share: medians of two windows."""
    width = max(1, round(WINDOW_SHARE * len(samples)))
    start = round(WARM_UP_SHARE * len(samples))
    return statistics.median(samples[-width:]) / statistics.median(samples[start : start + width]) - 1


class Check(NamedTuple):
    """A check: its value in words, what it must be, and whether it is."""

    name: str
    value: str
    bar: str
    good: bool


def judge(
    tally: Tally,
    health: HealthProbe,
    before: Footprint,
    after: Footprint,
    memory: dict[str, list[int]],
    same_processes: bool,
    survivors: int,
) -> list[Check]:
    """All checks."""
    counts = tally.counts
    processes = "the same" if same_processes else "others"
    checks = [
        Check("accepted requests that hung", str(counts["hung"]), "0", counts["hung"] == 0),
        Check("answers that broke", str(counts["broken"]), "0", counts["broken"] == 0),
        Check("bad requests not refused", str(counts["bad taken"]), "0", counts["bad taken"] == 0),
        Check("refused in bursts", str(counts["too many"]), "some", counts["too many"] > 0),
        Check("left in mid-stream", str(counts["left"]), "some", counts["left"] > 0),
        Check("/health not true", f"{health.failures} of {len(health.seconds)}", "0", health.failures == 0),
        Check("processes afterwards", processes, "the same", same_processes),
        Check("processes after SIGKILL of the first", str(survivors), "0", survivors == 0),
        Check("sequences left", str(after.sequences), "0", after.sequences == 0),
        Check("KV cache left in use", f"{after.cache_use:.1%}", "0", after.cache_use == 0),
    ]
    for name in ("tasks", "file descriptors"):
        is_, was = (getattr(footprint, name.replace(" ", "_")) for footprint in (after, before))
        checks.append(Check(name, f"{is_}, {was} before", "no more", is_ <= was))
    for name, samples in memory.items():
        grown = growth(samples)
        value = f"{samples[-1] / 2**20:.0f} MiB, {grown:+.1%}"
        checks.append(Check(f"memory of the {name}", value, f"below +{MOST_GROWTH:.0%}", grown < MOST_GROWTH))
    return checks


def format_checks(checks: list[Check], tally: Tally) -> str:
    """A line for each check; below, what the clients did, and what they did not expect."""
    rows = [(name, value, bar, "" if good else "MISSED") for name, value, bar, good in checks]
    counts = tally.counts
    lines = [
        format_table(("", "is", "must be", ""), rows),
        "",
        f"{counts['accepted']} requests accepted: {counts['completed']} completed, {counts['left']} left in mid-stream; "
        f"{counts['too many']} refused as too many, {counts['bad refused']} as bad",
    ]
    return "\n".join([*lines, "", *tally.surprises] if tally.surprises else lines)


MODULES = {"api_server_proc": "API server", "coordinator": "coordinator", "engine_core_proc": "engine"}
"""What the processes of the server run, and what they are called here."""


def name_processes(processes: list[psutil.Process]) -> list[str]:
    """A name for each process of a server, numbered if there are several of a kind."""
    commands = [" ".join(process.cmdline()) for process in processes]
    kinds = [next((name for module, name in MODULES.items() if module in command), "API server") for command in commands]
    numbers: Counter[str] = Counter()
    names = []
    for kind in kinds:
        names.append(kind if kinds.count(kind) == 1 else f"{kind} {numbers[kind]}")
        numbers[kind] += 1
    return names


async def kill_while_serving(server: ServerProcess, streams: int, seed: int) -> int:
    """Kill the first API server under load. Returns how many of the server's processes are there after some seconds."""
    processes = server.processes()
    clients = asyncio.create_task(load(server, streams, KILL_SECONDS, seed, Tally()))
    await asyncio.sleep(KILL_SECONDS / 2)
    processes[0].kill()
    _, survivors = await asyncio.to_thread(psutil.wait_procs, processes[1:], SETTLE_SECONDS)
    for survivor in survivors:
        survivor.kill()
    await clients
    return len(survivors)


def soak(
    streams: int, seconds: float, seed: int, num_replicas: int, num_api_servers: int
) -> tuple[list[Check], Tally, dict[str, list[int]]]:
    """Run the server and its clients. Returns the checks, what the clients saw, and the memory of each process over time."""
    with tempfile.TemporaryDirectory() as folder:
        task_file = Path(folder) / "tasks"
        options = [
            MODEL, "--max-num-seqs", str(MAX_NUM_SEQS), "--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-model-len", "512",
            "--max-waiting", str(streams), "--data-parallel-size", str(num_replicas), "--api-server-count", str(num_api_servers),
        ]  # fmt: skip
        excess = MAX_NUM_SEQS * num_replicas + BURST_EXCESS
        tally = Tally()
        with start_server(*options, program=("-c", SERVER.format(file=str(task_file)))) as server:
            warm_up(server, streams, seed, excess)
            time.sleep(2)
            before = measure_footprint(server, task_file)
            pids, names = [process.pid for process in server.processes()], name_processes(server.processes())
            with HealthProbe(server.port, 0.25) as health:
                memory = asyncio.run(load(server, streams, seconds, seed, tally, excess=excess))
            deadline = time.monotonic() + SETTLE_SECONDS
            while not (after := measure_footprint(server, task_file)).is_within(before) and time.monotonic() < deadline:
                time.sleep(0.5)
            same_processes = pids == [process.pid for process in server.processes()]
            survivors = asyncio.run(kill_while_serving(server, streams, seed))
        by_name = {name: memory[pid] for name, pid in zip(names, pids, strict=True)}
        return judge(tally, health, before, after, by_name, same_processes, survivors), tally, by_name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, help="at one time (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=300.0, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what the users do (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--data-parallel-size", type=int, default=1, help="replicas (default: %(default)s)")
    parser.add_argument("--api-server-count", type=int, default=1, help="(default: %(default)s)")
    arguments = parser.parse_args()
    check_writable(arguments.json)
    counts = arguments.data_parallel_size, arguments.api_server_count
    checks, tally, memory = soak(arguments.streams, arguments.seconds, arguments.seed, *counts)
    what = f"{MODEL} behind `minivllm serve`, {arguments.streams} streams for {arguments.seconds:g} s"
    if counts != (1, 1):
        what += f", replicas: {counts[0]}, API servers: {counts[1]}"
    content = {
        "model": MODEL,
        "checks": [check._asdict() for check in checks],
        "counts": tally.counts,
        "surprises": tally.surprises,
        "memory": memory,
    }
    report(what, format_checks(checks, tally), content, file=arguments.json)
    return 0 if all(good for *_, good in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
