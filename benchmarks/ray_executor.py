"""Workers on a Ray cluster against workers of `mp`, on one machine: how long a decode step takes.

    python benchmarks/ray_executor.py --json ray_executor.json

Two ranks, as tensor-parallel workers and as stages. The engines are loaded at the same time and take turns, so that the machine is the same for
both; an idle worker sleeps. On one node, Ray's workers share memory, as those of `mp` do; on two nodes, which are processes of this machine,
their sums go through gloo. Needs `pip install 'minivllm[ray]'`.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from minivllm import LLM, SamplingParams
from minivllm.bench.report import format_table, report

NUM_SEQS, PROMPT_TOKENS, OUTPUT_TOKENS, BLOCK_SIZE = 16, 64, 64, 16
LAYOUTS: dict[str, dict[str, Any]] = {
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
}
BACKENDS: dict[str, dict[str, Any]] = {
    "mp": {"distributed_executor_backend": "mp"},
    "ray, one node": {"distributed_executor_backend": "ray", "ray_placement_strategy": "STRICT_PACK"},
    "ray, two nodes": {"distributed_executor_backend": "ray", "ray_placement_strategy": "STRICT_SPREAD"},
}
GOAL = 1.2
"""Of a step on one node, relative to `mp`."""


def compare(model: str, layout: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of a decode step, medians over rounds; and the median of each round's ratio to `mp`."""
    options = {
        "num_gpu_blocks_override": NUM_SEQS * (PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK_SIZE + 8, "max_num_seqs": NUM_SEQS,
        "block_size": BLOCK_SIZE, "skip_tokenizer_init": True,
    }  # fmt: skip
    starts, engines = {}, {}
    for backend, more in BACKENDS.items():
        begin = time.perf_counter()
        engines[backend] = LLM(model, **options, **LAYOUTS[layout], **more)
        engines[backend].generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)
        starts[backend] = round(time.perf_counter() - begin, 1)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_SEQS)]
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    steps: dict[str, list[float]] = {backend: [] for backend in engines}
    tokens: dict[str, list[list[int]]] = {}
    for i in tqdm(range(rounds + 1), desc=layout):
        for backend, llm in engines.items():
            trace = llm.llm_engine.start_trace()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            llm.llm_engine.stop_trace()
            tokens[backend] = [output.outputs[0].token_ids for output in outputs]
            if i > 0:  # the first one warms up
                full = [record.end - record.start for record in trace if record.phase == "decode"]
                steps[backend].append(1e3 * statistics.median(full))
    for llm in engines.values():
        llm.llm_engine.engine_core.shutdown()
    if any(found != tokens["mp"] for found in tokens.values()):
        raise SystemExit(f"The tokens of {layout} differ.")
    return {
        backend: {
            "step_ms": round(statistics.median(found), 2),
            "ratio": round(statistics.median(own / mp for own, mp in zip(found, steps["mp"], strict=True)), 3),
            "start_seconds": starts[backend],
        }
        for backend, found in steps.items()
    }


def main() -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=7, help="of each engine in turn (default: 7)")
    parser.add_argument("--json", type=Path, help="where to save the results")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
    from ray_nodes import RayNodes

    nodes = RayNodes(2, num_cpus=4)
    os.environ["RAY_ADDRESS"] = nodes.address
    try:
        results = {layout: compare(args.model, layout, args.rounds) for layout in LAYOUTS}
    finally:
        nodes.close()
    rows = [
        (layout, backend, f"{found['step_ms']:.2f}", f"{found['ratio']:.2f}", f"{found['start_seconds']:.1f}")
        for layout, by_backend in results.items()
        for backend, found in by_backend.items()
    ]
    table = format_table(("workers", "backend", "ms per step", "relative to mp", "seconds to start"), rows)
    title = f"Decode steps of {NUM_SEQS} sequences, {args.model}, medians of {args.rounds} rounds in turns"
    report(title, table, {"results": results, "goal": GOAL}, file=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
