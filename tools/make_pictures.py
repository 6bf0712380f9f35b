"""Draws the documentation's pictures that need no new measurement, in a few seconds and the same each time.

    python tools/make_pictures.py

docs/live_page.png comes from tools/photograph_live_page.py, docs/sweep.png from the command in docs/benchmarks.md, and
docs/static_vs_continuous.png from `minivllm demo`.
"""

import json
from pathlib import Path

from minivllm.bench.served_request import ServedRequest
from minivllm.bench.workloads import generate_requests
from minivllm.engine.trace import EngineTrace
from minivllm.simulation.engine import simulate
from minivllm.simulation.what_if import what_if
from minivllm.viz.engine_map import draw_engine_map
from minivllm.viz.serving import draw_serving
from minivllm.viz.step import draw_step
from minivllm.viz.timeline import draw_requests

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SERVING_MODES = ROOT / "benchmarks" / "results" / "serving_modes_2026-11-21.json"


def simulate_crowd() -> EngineTrace:
    """More requests than the cache holds. They share the beginning of their prompts, and are preempted to the host."""
    requests = generate_requests(
        20, arrival_rate=12.0, distribution="uniform", mean_prompt_len=40, mean_output_len=64, num_shared_prompt_tokens=32, seed=3
    )
    trace = simulate(
        list(requests),
        max_num_seqs=10,
        num_gpu_blocks=48,
        num_cpu_blocks=24,
        enable_prefix_caching=True,
        preemption_mode="swap",
    ).trace
    assert trace is not None
    return trace


def main() -> None:
    """Write docs/engine_map.png, requests.png, step.png and serving_modes.png."""
    draw_engine_map().savefig(DOCS / "engine_map.png", dpi=120)
    few_blocks = what_if(num_gpu_blocks=32, max_num_seqs=6, arrival_rate=5.0, num_requests=24, seed=5)
    draw_requests(few_blocks).savefig(DOCS / "requests.png", dpi=120)
    trace = simulate_crowd()
    crowded = max(range(len(trace)), key=lambda number: (len(trace[number].preempted), trace[number].num_waiting))
    draw_step(trace, crowded).savefig(DOCS / "step.png", dpi=120)
    modes = json.loads(SERVING_MODES.read_text(encoding="utf-8"))["modes"]
    served = {mode: [ServedRequest(**request) for request in measured["requests"]] for mode, measured in modes.items()}
    draw_serving(served, "64 long-tailed requests, 4 per second, to three servers").savefig(DOCS / "serving_modes.png", dpi=150)


if __name__ == "__main__":
    main()
