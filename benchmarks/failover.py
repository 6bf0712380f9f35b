"""Replicas die while they stream: does every client get what it would have got, and how long does it wait?

    python benchmarks/failover.py storm --json storm.json   one of three is killed or stopped every 5 seconds, for two minutes
    python benchmarks/failover.py gap --json gap.json       from SIGKILL to the next token, and what others notice of it
    python benchmarks/failover.py cost --json cost.json     tokens/s with and without what it takes, when nobody dies

In the storm, answers are compared with those of `LLM.generate`, which nobody disturbs. The exit status is 1 if any differs, or anything is left over. `every_token.py` compares them after each token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from server_process import ServerProcess, start_server
from streams import MODEL, Stream, all_ready, ask, fault, percentile, replicas_of
from tqdm import tqdm

from minivllm import LLM, SamplingParams
from minivllm.bench.openai_client import WORDS
from minivllm.bench.report import format_table, report
from minivllm.config import EngineArgs
from minivllm.data_parallel.request_table import InFlightRequest
from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.engine.core_messages import EngineCoreOutput

KILL_EVERY, STREAMS, STORM_SECONDS = 5.0, 200, 120.0
TIMEOUT = 3
"""`--replica-timeout` in the storm: seconds of silence after which a stopped replica is lost."""
STOPPED_SECONDS = (1.0, 30.0)
"""How long a stopped replica stays so."""


def leftovers() -> set[str]:
    """What the package leaves among temporary files and in shared memory, if it leaves anything."""
    folders = (Path(tempfile.gettempdir()), Path("/dev/shm"))
    return {str(path) for folder in folders if folder.is_dir() for path in folder.glob("*minivllm*")}


# -- storm -----------------------------------------------------------------------------------------------------------


def make_storm_requests(rng: random.Random, count: int) -> list[tuple[str, dict[str, Any]]]:
    """Prompts and parameters."""
    requests = []
    for number in range(count):
        text = " ".join(rng.choices(WORDS, k=rng.randint(5, 60)))
        params = {"max_tokens": rng.randint(20, 100), "temperature": rng.choice((0, 0.9)), "seed": number, "ignore_eos": True}
        requests.append((text, params | {"n": 2 if number % 10 == 0 else 1}))
    return requests


async def storm(
    server: ServerProcess, requests: list[tuple[str, dict[str, Any]]], seconds: float, rng: random.Random
) -> dict[str, Any]:
    """Let the streams come over the time, while replicas die and stand still."""
    events: list[str] = []
    url = server.base_url
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        await all_ready(session, url)

        async def later(delay: float, prompt: str, params: dict[str, Any]) -> Stream:
            await asyncio.sleep(delay)
            return await ask(session, url, prompt, params)

        tasks = [asyncio.create_task(later(rng.uniform(0, seconds), *request)) for request in requests]
        resumed: list[asyncio.Task[None]] = []
        for _ in tqdm(range(int(seconds / KILL_EVERY)), desc="every 5 s", dynamic_ncols=True):
            await asyncio.sleep(KILL_EVERY)
            answer = await replicas_of(session, url)
            if ready := [item for item in answer["replicas"] if item["state"] == "ready"]:
                victim, kills = rng.choice(ready), rng.random() < 0.5
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim["process_id"], signal.SIGKILL if kills else signal.SIGSTOP)
                events.append(f"{'kill' if kills else 'stop'} {victim['rank']}, which had {victim['running']}")
                if not kills:
                    resumed.append(asyncio.create_task(wake(victim["process_id"], rng.uniform(*STOPPED_SECONDS))))
        streams = await asyncio.gather(*tasks)
        await asyncio.gather(*resumed)
        last = await all_ready(session, url)
        used = [item["kv_cache_usage"] for item in last["replicas"]]
        processes = [" ".join(process.cmdline()[1:4]) for process in server.processes()]
    return {"streams": streams, "events": events, "last": last, "used": used, "processes": processes}


async def wake(process_id: int, delay: float) -> None:
    """Let a stopped process go on."""
    await asyncio.sleep(delay)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGCONT)


def run_storm(arguments: argparse.Namespace) -> int:
    rng = random.Random(arguments.seed)
    requests = make_storm_requests(rng, arguments.streams)
    llm = LLM(MODEL, kv_cache_memory_bytes=512 * 2**20)
    expected = llm.generate([text for text, _ in requests], [SamplingParams(**params) for _, params in requests])
    del llm
    before, others = leftovers(), {process.pid for process in psutil.process_iter()}
    with start_server(MODEL, "--data-parallel-size", "3", "--replica-timeout", str(TIMEOUT), "--max-num-seqs", "64") as server:
        outcome = asyncio.run(storm(server, requests, arguments.seconds, rng))
    time.sleep(1)
    left = sorted(leftovers() - before)
    alive = [
        process.pid
        for process in psutil.process_iter()
        if process.pid not in others and "minivllm.engine" in " ".join(_command(process))
    ]
    streams = outcome["streams"]
    faults = [f"{number}: {words}" for number, got in enumerate(streams) if (words := fault(got, expected[number]))]
    gaps = [gap for got in streams for gap in got.gaps]
    kills = sum(event.startswith("kill") for event in outcome["events"])
    rows = [
        ("streams", len(streams)),
        ("replicas killed, stopped", f"{kills}, {len(outcome['events']) - kills}"),
        ("streams resumed elsewhere", outcome["last"]["streams_resumed"]),
        ("streams lost", sum(bool(got.error) for got in streams)),
        ("streams with extra, missing or wrong tokens", len(faults) - sum(bool(got.error) for got in streams)),
        ("between two pieces: median", f"{statistics.median(gaps):.3f} s"),
        ("between two pieces: p99", f"{percentile(gaps, 0.99):.3f} s"),
        ("between two pieces: longest", f"{max(gaps):.2f} s"),
        ("cache in use afterwards", f"{max(outcome['used']):.0%}"),
        ("processes, files left when the server has ended", f"{len(alive)}, {len(left)}"),
    ]
    results = {"events": outcome["events"], "faults": faults, "left": left, "processes": outcome["processes"]}
    report("Replicas killed or stopped every 5 seconds under streams", format_table(("", ""), rows), results, file=arguments.json)
    print("\n".join(faults[:10]))
    return 1 if faults or left or alive or max(outcome["used"]) else 0


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


# -- gap -------------------------------------------------------------------------------------------------------------


async def one_gap(server: ServerProcess, count: int, rng: random.Random) -> tuple[list[float], list[float], list[float]]:
    """Kill one of two replicas. Returns the waits of its streams, and the gaps of the others before and after."""
    url = server.base_url
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        answer = await all_ready(session, url)
        streams = [Stream() for _ in range(count)]
        tasks = []
        for number, got in enumerate(streams):  # round robin: every second one at the same replica
            text = " ".join(rng.choices(WORDS, k=40))
            params = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}
            tasks.append(asyncio.create_task(ask(session, url, text, params, got)))
            while not got.times:
                await asyncio.sleep(0.005)
            del number
        running = {item["rank"]: item["running"] for item in (await replicas_of(session, url))["replicas"]}
        assert set(running.values()) == {count // 2}, running
        await asyncio.sleep(2)
        killed = time.perf_counter()
        os.kill(answer["replicas"][0]["process_id"], signal.SIGKILL)
        await asyncio.gather(*tasks)
    waits = [next(moment for moment in got.times if moment > killed) - killed for got in streams]
    halves = streams[::2], streams[1::2]
    lost, others = sorted(
        halves, key=lambda half: -statistics.median(wait for got, wait in zip(streams, waits, strict=True) if got in half)
    )
    before = [gap for got in others for gap, moment in zip(got.gaps, got.times[1:], strict=False) if killed - 2 < moment < killed]
    after = [gap for got in others for gap, moment in zip(got.gaps, got.times[1:], strict=False) if killed < moment < killed + 3]
    return [waits[streams.index(got)] for got in lost], before, after


def run_gap(arguments: argparse.Namespace) -> int:
    rng, rows, raw = random.Random(arguments.seed), [], {}
    with start_server(
        MODEL, "--data-parallel-size", "2", "--data-parallel-routing", "round-robin", "--max-replica-deaths", "1000"
    ) as server:
        for count in arguments.counts:
            waits, before, after = [], [], []
            for _ in tqdm(range(arguments.rounds), desc=f"{count} streams", dynamic_ncols=True):
                for whole, part in zip((waits, before, after), asyncio.run(one_gap(server, count, rng)), strict=True):
                    whole += part
            raw[count] = {"waits": waits, "before": before, "after": after}
            numbers = [
                statistics.median(waits),
                percentile(waits, 0.9),
                statistics.median(before),
                statistics.median(after),
                percentile(after, 0.99),
            ]
            rows.append((count, *(f"{number:.3f} s" for number in numbers)))
    head = ("streams", "to the next token: median", "p90", "others' gaps before: median", "in 3 s after: median", "p99")
    report("From SIGKILL to the next token", format_table(head, rows), {"raw": raw}, file=arguments.json)
    return 0


# -- cost ------------------------------------------------------------------------------------------------------------


def note_ends(in_flight: InFlightRequest, output: EngineCoreOutput) -> None:
    """In place of `InFlightRequest.add`: remember no tokens."""
    for new in output.sequences:
        if new.finish_reason is not None:
            in_flight.finish_sequence(new.index)
    if output.finished:
        in_flight.unfinished.clear()


def run_cost(arguments: argparse.Namespace) -> int:
    engine = AsyncLLMEngine.from_engine_args(EngineArgs(MODEL, data_parallel_size=2, max_num_seqs=16), restart=True)
    add, rng = InFlightRequest.add, random.Random(arguments.seed)
    prompts = [" ".join(rng.choices(WORDS, k=20)) for _ in range(32)]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)

    async def one(prompt: str) -> None:
        async for _ in engine.generate(prompt, params):
            pass

    async def rate() -> float:
        start = time.perf_counter()
        await asyncio.gather(*map(one, prompts))
        return len(prompts) * 64 / (time.perf_counter() - start)

    async def measure() -> dict[str, list[float]]:
        await rate()
        rates: dict[str, list[float]] = {"with": [], "without": []}
        for number in tqdm(range(arguments.rounds), dynamic_ncols=True):
            for name in sorted(rates, reverse=bool(number % 2)):
                InFlightRequest.add = add if name == "with" else note_ends  # type: ignore[method-assign]
                rates[name].append(await rate())
        return rates

    rates = asyncio.run(measure())
    engine.shutdown()
    ratios = [a / b for a, b in zip(rates["with"], rates["without"], strict=True)]
    rows = [(name, f"{statistics.median(values):.0f}") for name, values in rates.items()]
    table = (
        format_table(("failover", "tokens/s (median)"), rows)
        + f"\n\nWith to without, median of {len(ratios)} pairs: {statistics.median(ratios):.3f}"
    )
    report("What failover costs when nobody dies", table, {"rates": rates, "ratios": ratios}, file=arguments.json)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(required=True, metavar="MODE")
    for name, run in {"storm": run_storm, "gap": run_gap, "cost": run_cost}.items():
        mode = modes.add_parser(name)
        mode.set_defaults(run=run)
        mode.add_argument("--seed", type=int, default=0)
        mode.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
        if name == "storm":
            mode.add_argument("--streams", type=int, default=STREAMS)
            mode.add_argument("--seconds", type=float, default=STORM_SECONDS)
        if name in ("gap", "cost"):
            mode.add_argument("--rounds", type=int, default=5 if name == "gap" else 15)
        if name == "gap":
            mode.add_argument("--counts", type=int, nargs="+", default=[4, 16, 32])
    arguments = parser.parse_args()
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
