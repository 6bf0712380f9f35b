"""Pipeline stages on a simulated device: how busy each is, with balanced batches and with batches that take whatever is there.

python benchmarks/pipeline.py --json pipeline.json
python benchmarks/pipeline.py --plot docs/pipeline.png    # only draws

The engine schedules as ever. The device's stages have equal parts of the model, and the host takes no time.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from minivllm.bench.report import format_table, report
from minivllm.core.pipeline_scheduler import PipelineScheduler
from minivllm.engine.trace import EngineTrace
from minivllm.executor.simulated import CostModel
from minivllm.sampling_params import SamplingParams
from minivllm.simulation.engine import make_simulated_engine
from minivllm.viz.pipeline import draw_stages, stage_utilisation

COSTS = CostModel(fixed=2e-3, per_prefill_token=2e-5, per_decode_seq=6e-5, per_context_token=2e-7)
"""A small model on a GPU: decoding 32 sequences of 250 tokens takes 5.5 ms."""


class FirstTakesAll(PipelineScheduler):
    """The batch that is scheduled first takes all sequences that are there."""

    def _share(self, num_seqs: int) -> int:
        return max(1, num_seqs)


SCHEDULERS = {"balanced": PipelineScheduler, "first takes all": FirstTakesAll}


@dataclass(frozen=True)
class Run:
    """All requests from the first to the last.

    Attributes:
        arrival: "together" or "in turn".
        utilisation: Of each stage.
        speedup: Over one stage.
    """

    num_stages: int
    batches: str
    arrival: str
    enable_chunked_prefill: bool
    tokens_per_second: float
    utilisation: list[float]
    speedup: float


def run(num_stages: int, scheduler: type, num_requests: int, together: bool, chunked: bool) -> tuple[EngineTrace, float]:
    """The trace, and output tokens per second, of requests that arrive all at once or one after each tenth step."""
    engine = make_simulated_engine(
        cost_model=COSTS, scheduler=scheduler, num_gpu_blocks=8192, max_num_seqs=2 * num_requests, max_num_batched_tokens=8192,
        enable_chunked_prefill=chunked, pipeline_parallel_size=num_stages,
    )  # fmt: skip
    assert engine.trace is not None
    rng = random.Random(0)
    requests = [(rng.randint(20, 400), rng.randint(150, 250)) for _ in range(num_requests)]
    num_steps = 0
    while requests or engine.has_unfinished_requests():
        while requests and (together or num_steps % 10 == 0):
            length, max_tokens = requests.pop()
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            engine.add_request(str(len(requests)), [1] * length, params)
            if not together:
                break
        engine.step()
        num_steps += 1
    num_tokens = sum(len(tokens) for record in engine.trace.requests.values() for tokens in record.output_token_ids)
    return engine.trace, num_tokens / engine.clock()


def measure(stages: list[int], num_requests: int) -> list[Run]:
    """Every number of stages, with both schedulers, arrivals and kinds of prefill."""
    runs = []
    for chunked in (False, True):
        for together in (True, False):
            _, alone = run(1, PipelineScheduler, num_requests, together, chunked)
            for num_stages in stages:
                for name, scheduler in SCHEDULERS.items():
                    trace, rate = run(num_stages, scheduler, num_requests, together, chunked)
                    arrival, shares = "together" if together else "in turn", stage_utilisation(trace)
                    runs.append(Run(num_stages, name, arrival, chunked, rate, shares, rate / alone))
    return runs


def format_runs(runs: list[Run]) -> str:
    """The measurements as a table of text."""
    headers = ("prefill", "requests come", "stages", "batches", "tokens/s", "over one stage", "each stage busy")
    rows = [
        (
            "in chunks" if each.enable_chunked_prefill else "whole",
            each.arrival,
            each.num_stages,
            each.batches,
            f"{each.tokens_per_second:,.0f}",
            f"{each.speedup:.2f}",
            ", ".join(f"{share:.2f}" for share in each.utilisation),
        )
        for each in runs
    ]
    return format_table(headers, rows, left=2)


def draw(num_stages: int, num_requests: int) -> Figure:
    """Some steps in the middle, with balanced batches and without."""
    traces = {name: run(num_stages, scheduler, num_requests, True, False)[0] for name, scheduler in SCHEDULERS.items()}
    return draw_stages(traces, first=60, num_steps=12)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4], help="numbers of stages (default: %(default)s)")
    parser.add_argument("--num-requests", type=int, default=32, help="requests (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the first number of stages")
    arguments = parser.parse_args()
    if arguments.plot:
        draw(arguments.stages[0], arguments.num_requests).savefig(arguments.plot, dpi=100)
        return
    runs = measure(arguments.stages, arguments.num_requests)
    report(
        f"{arguments.num_requests} requests through simulated pipeline stages",
        format_runs(runs),
        {"results": [vars(each) for each in runs]},
        file=arguments.json,
    )


if __name__ == "__main__":
    main()
