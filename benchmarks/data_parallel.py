"""Two replicas of one thread each against one engine of two threads, and what routing costs.

    python benchmarks/data_parallel.py --json data_parallel.json

Both are loaded at the same time and take turns at the same requests, so that the machine is the same for both; an idle engine sleeps. 32 sequences
run in all: 16 at each replica. Routing is timed with 1,000 replicas: prompts of 1,000 tokens, half of which begin with the same 600.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from minivllm.bench.report import format_table, report
from minivllm.data_parallel.routing import ROUTERS, make_router
from minivllm.engine.core_messages import ReplicaLoad

WAYS: dict[str, dict[str, Any]] = {"float32": {}, "bfloat16": {"dtype": "bfloat16"}, "int8": {"quantization": "int8"}}
NUM_RUNNING, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64, 96
NUM_REPLICAS, NUM_ROUTED = 1000, 5000


def compare(model: str, way: str, rounds: int) -> dict[str, Any]:
    """Output tokens per second of both, medians over rounds."""
    from minivllm import LLM, SamplingParams

    rng = random.Random(0)
    prompts = [[rng.randrange(3, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_RUNNING)]
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    num_blocks = NUM_RUNNING * (PROMPT_TOKENS + OUTPUT_TOKENS) // 16 + 8
    options = {"num_gpu_blocks_override": num_blocks, "max_num_seqs": NUM_RUNNING, "skip_tokenizer_init": True} | WAYS[way]
    engines = {size: LLM(model, data_parallel_size=size, **options) for size in (1, 2)}
    speeds: dict[int, list[float]] = {1: [], 2: []}
    for i in range(rounds + 1):
        for size, llm in engines.items():
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - start
            if i > 0:  # the first one warms up
                speeds[size].append(sum(len(output.outputs[0].token_ids) for output in outputs) / seconds)
    for llm in engines.values():
        llm.llm_engine.shutdown()
    medians = {size: statistics.median(values) for size, values in speeds.items()}
    return {
        "way": way,
        "tokens_per_second": {str(size): round(speed, 1) for size, speed in medians.items()},
        "rounds": {str(size): [round(speed, 1) for speed in values] for size, values in speeds.items()},
        "ratio": round(medians[2] / medians[1], 3),
    }


def time_routing(routing: str) -> dict[str, Any]:
    """Microseconds to route a request among many replicas, and to count its end."""
    rng = random.Random(0)
    shared = [rng.randrange(50_000) for _ in range(600)]
    router = make_router(routing)
    for replica in range(NUM_REPLICAS):
        router.open(replica)
        router.update(replica, ReplicaLoad(0, rng.randrange(8), 0.4))
    routed, route_times, finish_times = [], [], []
    for i in range(NUM_ROUTED):
        prompt = [rng.randrange(50_000) for _ in range(1000)]
        if i % 2:
            prompt[:600] = shared
        start = time.perf_counter()
        routed.append(router.route(prompt))
        route_times.append(time.perf_counter() - start)
        if len(routed) > 4 * NUM_REPLICAS:
            replica = routed.pop(0)
            start = time.perf_counter()
            router.finish(replica)
            finish_times.append(time.perf_counter() - start)
    return {
        "routing": routing,
        "route_us": round(1e6 * statistics.median(route_times), 1),
        "finish_us": round(1e6 * statistics.median(finish_times), 1),
    }


def main() -> None:
    """Measure, print tables, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    routing = [time_routing(name) for name in ROUTERS]
    rows = [(item["routing"], f"{item['route_us']} us", f"{item['finish_us']} us") for item in routing]
    routes = format_table((f"a request of 1,000 tokens, {NUM_REPLICAS} replicas", "route", "finish"), rows)
    runs = [compare(arguments.model, way, arguments.rounds) for way in tqdm(arguments.ways, unit="way")]
    rows = [(run["way"], *run["tokens_per_second"].values(), run["ratio"]) for run in runs]
    table = format_table(("dtype", "one engine, tokens/s", "two replicas, tokens/s", "ratio"), rows)
    report(f"{NUM_RUNNING} sequences in all", f"{table}\n\n{routes}", {"routing": routing, "runs": runs}, file=arguments.json)


if __name__ == "__main__":
    main()
