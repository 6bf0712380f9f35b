"""The engine on a GPU: tokens per second, as a share of what the card's memory and matrix units allow, and over HTTP.

    python benchmarks/gpu_engine.py --json gpu_engine.json

The model has Qwen3-0.6B's sizes and random weights in bfloat16 (`load_format="dummy"`). Three parts, of which `--parts` chooses some:

- offline: nano-vllm's workload, 256 requests of 100 to 1,024 random tokens in and out, drawn from `random.seed(0)`. No run can be faster than
  this limit: each decode step reads the keys and values of its contexts and, once, the weights, at the copy bandwidth; the products of all
  tokens run at the matrix rate. Both rates are measured here.
- decode: 1, 8 and 64 sequences that decode.
- http: long-tailed requests of 512 tokens in and 256 out on average, 32 and 256 at a time, streamed by a server, as a share of the same
  requests in the engine alone. `--budgets` tries other values of `max_num_batched_tokens` than the server's own.

Medians of several rounds. Results are saved after each engine and each server. `--rehearse` runs everything with a tiny model on a CPU, to see
that it runs; the figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_kernels import measure_copy_bandwidth, measure_matrix_rate
from gpu_model import QWEN3, TINY, count_parameters, write_model
from server_process import start_server

from minivllm import LLM, SamplingParams
from minivllm.bench.openai_client import OpenAIClient
from minivllm.bench.report import find_origin, format_table, to_json
from minivllm.bench.serve import Load, ServingResult, measure_serving, summarize
from minivllm.bench.summary import Goals
from minivllm.bench.workloads import WorkloadRequest, make_workload, warm_up_requests
from minivllm.entrypoints.cli.options import check_writable

PARTS = ("offline", "decode", "http")
TWO_STEPS = {"async_scheduling": True}
WAYS: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("256 requests, greedy", TWO_STEPS, 0.0),
    ("256 requests, temperature 0.6", TWO_STEPS, 0.6),
    ("256 requests, greedy, one step in flight", {}, 0.0),
    ("256 requests, temperature 0.6, one step in flight", {}, 0.6),
    ("256 requests, greedy, chunked prefill", TWO_STEPS | {"enable_chunked_prefill": True}, 0.0),
)
"""A name, the engine's options, and the temperature."""
MOST_TOKENS_PER_STEP = 16384
LIMIT_GOAL = 0.85
"""Share of the limit, greedy and at a temperature."""
DECODE_GOALS = {1: 900, 8: 6500, 64: 30000}
"""Tokens per second by number of sequences."""
DECODE_LEN = 256
HTTP_GOAL, ITL_GOAL = 0.85, 2.0
"""Share of the engine's own rate, and the 95th percentile of inter-token latency relative to its median."""


@dataclass(frozen=True)
class Scale:
    """How much is run.

    Attributes:
        config: Of the model.
        options: Of all engines.
        num_requests, longest: Of the offline workload, and their most tokens in, and out.
        streams: For each number of streams, how many requests.
        mean_prompt_len, mean_output_len: Of the requests over HTTP.
    """

    config: dict[str, Any]
    options: dict[str, Any]
    num_requests: int
    longest: int
    streams: dict[int, int]
    mean_prompt_len: int
    mean_output_len: int


REAL = Scale(QWEN3, {"dtype": "bfloat16", "max_model_len": 4096, "max_num_seqs": 256}, 256, 1024, {32: 96, 256: 384}, 512, 256)
REHEARSAL = Scale(
    TINY, {"device": "cpu", "max_model_len": 256, "max_num_seqs": 64, "num_gpu_blocks_override": 2048}, 6, 104, {4: 6}, 12, 24
)


@dataclass
class Row:
    """A line of the table.

    Attributes:
        name: The workload.
        tokens_per_second: Of each round.
        share: Of the limit, or of the engine's own rate.
        p50, p95: Inter-token latencies over HTTP, in milliseconds; None if all tokens of each answer came together.
        goal, met: In words, and whether it was met; empty and None where there is none.
    """

    name: str
    tokens_per_second: list[float] = field(default_factory=list)
    share: float | None = None
    p50: float | None = None
    p95: float | None = None
    goal: str = ""
    met: bool | None = None

    @property
    def median(self) -> float:
        """Tokens per second."""
        return statistics.median(self.tokens_per_second)

    def cells(self) -> tuple[str, ...]:
        """As they are printed."""
        lowest, highest = min(self.tokens_per_second), max(self.tokens_per_second)
        share = "" if self.share is None else f"{self.share:.2f}"
        latencies = "" if self.p50 is None or self.p95 is None else f"{self.p50:.1f}, {self.p95:.1f}"
        verdict = "" if self.met is None else "met" if self.met else "missed"
        return (self.name, f"{self.median:,.0f}", f"{lowest:,.0f}-{highest:,.0f}", share, latencies, self.goal, verdict)


class Results:
    """What has been measured so far, saved whenever something is added.

    Args:
        file: Where; None saves nothing.
        title: Of the table.
        rates: Copy bandwidth in GB/s and matrix rate in TFLOP/s.
        limit: Tokens per second that these allow for the offline workload.
    """

    def __init__(self, file: Path | None, title: str, rates: tuple[float, float], limit: float) -> None:
        self.file, self.title, self.rows, self.limit = file, title, list[Row](), limit
        self.note = (
            f"The limit of the 256 requests: {limit:,.0f} tokens/s, at {rates[0] / 1e3:.2f} TB/s and {rates[1]:.0f} TFLOP/s."
        )
        self.rates = {"copy_gb_s": rates[0], "matrix_tflop_s": rates[1], "limit_tokens_per_second": limit}

    def add(self, rows: Iterable[Row]) -> None:
        """Add lines, print them, and save all."""
        for row in rows:
            self.rows.append(row)
            print("  ".join(filter(None, row.cells())), flush=True)
        if self.file is not None:
            content = {"text": self.text().split("\n"), "rows": [asdict(row) for row in self.rows]}
            self.file.write_text(to_json(find_origin() | content | self.rates), encoding="utf-8")

    def text(self) -> str:
        """The table, with its title and the machine."""
        headers = ("workload", "tokens/s", "range", "share", "ITL p50, p95 ms", "goal", "")
        table = format_table(headers, [row.cells() for row in self.rows])
        return f"{self.title}\n{find_origin()['machine']}\n\n{table}\n\n{self.note} Shares of HTTP are those of the engine alone."


def make_requests(scale: Scale) -> list[WorkloadRequest]:
    """The offline workload, as nano-vllm draws it."""
    random.seed(0)
    ids, shortest = min(10000, scale.config["vocab_size"] - 1), 100
    prompts = [
        [random.randint(0, ids) for _ in range(random.randint(shortest, scale.longest))] for _ in range(scale.num_requests)
    ]
    return [WorkloadRequest(prompt, random.randint(shortest, scale.longest)) for prompt in prompts]


def limit_seconds(requests: list[WorkloadRequest], config: dict[str, Any], bandwidth: float, matrix_rate: float) -> float:
    """The least time for a workload.

    Args:
        requests: All of them run at once.
        config: Of the model.
        bandwidth: Bytes per second.
        matrix_rate: Floating-point operations per second.
    """
    layer, head = count_parameters(config)
    layers, outputs = config["num_hidden_layers"], [request.output_len for request in requests]
    bytes_per_token = 2 * 2 * layers * config["num_key_value_heads"] * config["head_dim"]
    contexts = sum(len(request.prompt_token_ids) + step for request in requests for step in range(1, request.output_len))
    num_bytes = contexts * bytes_per_token + max(outputs) * 2 * (layers * layer + head)
    tokens = sum(len(request.prompt_token_ids) for request in requests) + sum(outputs)
    return num_bytes / bandwidth + (2 * layers * layer * tokens + 2 * head * sum(outputs)) / matrix_rate


def run_offline(llm: LLM, requests: list[WorkloadRequest], temperature: float = 0.0, at_once: int | None = None) -> float:
    """Output tokens per second of the engine alone, with at most `at_once` requests in it."""
    engine, waiting, number = llm.llm_engine, list(reversed(requests)), 0
    start = time.perf_counter()
    while waiting or engine.has_unfinished_requests():
        while waiting and engine.get_num_unfinished_requests() < (at_once or len(requests)):
            request, number = waiting.pop(), number + 1
            params = SamplingParams(temperature=temperature, max_tokens=request.output_len, ignore_eos=True)
            engine.add_request(str(number), {"prompt_token_ids": request.prompt_token_ids}, params)
        engine.step()
    return sum(request.output_len for request in requests) / (time.perf_counter() - start)


def measure_engines(folder: Path, scale: Scale, parts: list[str], rounds: int, quick: bool, results: Results) -> dict[int, float]:
    """The parts "offline" and "decode", and the rates that HTTP is compared with: by number of streams, if "http" is wanted."""
    requests, alone = make_requests(scale), {}
    ways = [way for way in WAYS if "offline" in parts and (not quick or way[1] == TWO_STEPS)]
    for options in [TWO_STEPS, *(o for o in ({}, WAYS[-1][1]) if any(way[1] == o for way in ways))]:
        llm = LLM(
            str(folder), load_format="dummy", skip_tokenizer_init=True, max_num_batched_tokens=MOST_TOKENS_PER_STEP, **scale.options, **options
        )  # fmt: skip
        run_offline(llm, [WorkloadRequest(request.prompt_token_ids, 8) for request in requests[:8]], 0.6)  # warm up
        rows = {name: Row(name) for name, wanted, _ in ways if wanted == options}
        decodes = {
            n: Row(f"decode only, {n} sequence{'s'[: n > 1]}") for n in DECODE_GOALS if "decode" in parts and options == TWO_STEPS
        }
        for _ in range(rounds):
            for name, wanted, temperature in ways:
                if wanted == options:
                    rows[name].tokens_per_second.append(run_offline(llm, requests, temperature))
            for n, row in decodes.items():
                short = [WorkloadRequest(consecutive(64 * i, scale), min(DECODE_LEN, scale.longest)) for i in range(n)]
                row.tokens_per_second.append(run_offline(llm, short))
        for row in rows.values():
            row.share = row.median / results.limit
            if options == TWO_STEPS:
                row.goal, row.met = f"share {LIMIT_GOAL}", row.share >= LIMIT_GOAL
        for n, row in decodes.items():
            row.goal, row.met = f"{DECODE_GOALS[n]:,}", row.median >= DECODE_GOALS[n]
        results.add([*rows.values(), *decodes.values()])
        if "http" in parts and options == TWO_STEPS:
            alone = {n: run_offline(llm, make_http_requests(scale, n), at_once=n) for n in scale.streams}
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        torch.cuda.empty_cache()
    return alone


def consecutive(first: int, scale: Scale) -> list[int]:
    """A prompt of 64 tokens."""
    return [(first + i) % scale.config["vocab_size"] for i in range(64)]


def make_http_requests(scale: Scale, num_streams: int) -> list[WorkloadRequest]:
    """Requests for the server, and for the engine alone."""
    return make_workload(
        "longtail", scale.streams[num_streams], mean_prompt_len=scale.mean_prompt_len, mean_output_len=scale.mean_output_len,
        vocab_size=scale.config["vocab_size"], max_len=scale.options["max_model_len"],
    )  # fmt: skip


def measure_http(folder: Path, scale: Scale, alone: dict[int, float], budget: int | None, rounds: int) -> list[Row]:
    """A server that gets `budget` tokens a step, or chooses them itself."""
    options = scale.options | {"load-format": "dummy"} | ({} if budget is None else {"max-num-batched-tokens": budget})
    texts = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    rows = []
    with start_server(str(folder), *texts, "--async-scheduling") as server:
        for num_streams, rate in alone.items():
            requests = make_http_requests(scale, num_streams)
            measured = [asyncio.run(load_server(server.base_url, requests, num_streams)) for _ in range(rounds)]
            row = Row(f"HTTP, {num_streams} streams{'' if budget is None else f', {budget} tokens a step'}")
            row.tokens_per_second = [result.output_tokens_per_second for result in measured]
            row.share = row.median / rate
            row.p50, row.p95 = (median_ms([getattr(result.itl, name) for result in measured]) for name in ("p50", "p95"))
            row.goal = f"share {HTTP_GOAL}, p95 at most {ITL_GOAL:g} x p50"
            if row.p50 is not None and row.p95 is not None:
                row.met = row.share >= HTTP_GOAL and row.p95 <= ITL_GOAL * row.p50
            rows.append(row)
    return rows


def median_ms(seconds: list[float]) -> float | None:
    """In milliseconds; None if it was measured in no round, because all tokens of each answer came together."""
    measured = [time for time in seconds if not math.isnan(time)]
    return 1e3 * statistics.median(measured) if measured else None


async def load_server(base_url: str, requests: list[WorkloadRequest], num_streams: int) -> ServingResult:
    """Keep so many streams open until all requests are answered."""
    load = Load(concurrency=num_streams)
    async with OpenAIClient(base_url, timeout=600.0) as client:
        model = (await client.find_model()).id
        warm_up = warm_up_requests(requests, min(16, num_streams))
        served, interrupted = await measure_serving(client, model, requests, load, warm_up=warm_up, use_tqdm=False)
    if interrupted:
        raise KeyboardInterrupt
    failed = next((request for request in served if request.error is not None), None)
    if failed is not None:
        raise SystemExit(f"A request failed ({failed.error}): {failed.detail}")
    return summarize(served, load, Goals())


def main() -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=f"some of {', '.join(PARTS)}"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each workload (default: 3)")
    parser.add_argument("--quick", action="store_true", help="offline, only what has a goal")
    parser.add_argument(
        "--budgets", nargs="+", type=int, default=[], metavar="TOKENS", help="for the server, as well as its own choice"
    )
    parser.add_argument("--rehearse", action="store_true", help="with a tiny model on a CPU, to see that it runs")
    parser.add_argument("--json", type=Path, help="where to save the results")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1.")
    check_writable(args.json)
    if not args.rehearse and not torch.cuda.is_available():
        print("There is no CUDA device that torch can use here; --rehearse shows whether this script runs.")
        return 1
    scale = REHEARSAL if args.rehearse else REAL
    rates = (1.0, 1.0) if args.rehearse else (measure_copy_bandwidth(), measure_matrix_rate())
    requests = make_requests(scale)
    seconds = limit_seconds(requests, scale.config, 1e9 * rates[0], 1e12 * rates[1])
    title = f"Qwen3-0.6B's sizes, random weights, bfloat16, medians of {args.rounds}"
    title = "A rehearsal with a tiny model on a CPU: these figures mean nothing" if args.rehearse else title
    results = Results(args.json, title, rates, sum(request.output_len for request in requests) / seconds)
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), scale.config)
        alone = measure_engines(Path(name), scale, args.parts, args.rounds, args.quick, results)
        for budget in (None, *args.budgets) if "http" in args.parts else ():
            results.add(measure_http(Path(name), scale, alone, budget, args.rounds))
    print(f"\n{results.text()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
