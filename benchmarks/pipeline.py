"""Pipeline stages on a simulated device: how busy each is, with balanced batches and with batches that take whatever is there.

python benchmarks/pipeline.py --json pipeline.json
python benchmarks/pipeline.py --plot docs/pipeline.png    # only draws
python benchmarks/pipeline.py --model smollm2-135m --json pipeline_model.json    # workers in processes

On the simulated device the engine schedules as ever, the stages have equal parts of the model, and the host takes no time. With a model, the same requests
run on one worker, on two that share each layer, and on two stages. SmolLM2 has 30 layers.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from minivllm import LLM
from minivllm.bench.report import format_table, report
from minivllm.core.pipeline_scheduler import PipelineScheduler
from minivllm.engine.trace import EngineTrace
from minivllm.executor.simulated import CostModel
from minivllm.sampling_params import SamplingParams
from minivllm.simulation.engine import make_simulated_engine
from minivllm.viz.pipeline import draw_bubbles, stage_utilisation

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
    return draw_bubbles(traces, first=60, num_steps=12)


@dataclass(frozen=True)
class ModelRun:
    """Requests on a model. `busy` is what each rank computes of its steps' time, without communication and waits."""

    workers: str
    tokens_per_second: float
    busy: list[float]


WORKERS = {
    "one": {},
    "two that share each layer": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
    "two stages of 18 and 12 layers": {"pipeline_parallel_size": 2, "pp_layer_partition": "18,12"},
}


def measure_model(model: str, num_requests: int, num_rounds: int = 3) -> list[ModelRun]:
    """The best of some rounds with each kind of workers. Tokens must be the same."""
    rng, runs, expected = random.Random(0), [], None
    prompts = [[rng.randrange(100, 20_000) for _ in range(rng.randint(20, 60))] for _ in range(num_requests)]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    for name, options in WORKERS.items():
        llm = LLM(model, kv_cache_memory_bytes=2**29, skip_tokenizer_init=True, max_model_len=256, **options)
        rates = []
        for _ in range(num_rounds):
            trace, start = llm.llm_engine.start_trace(), time.perf_counter()
            outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
            rates.append(sum(map(len, outputs)) / (time.perf_counter() - start))
            expected = expected or outputs
            if outputs != expected:
                raise SystemExit(f"Workers: {name}. Other tokens than with one.")
        busy = stage_utilisation(trace) if trace[0].ranks else []
        runs.append(ModelRun(name, max(rates), busy))
        llm.llm_engine.engine_core.shutdown()
    return runs


def format_model_runs(runs: list[ModelRun]) -> str:
    """The measurements as a table of text."""
    rows = [(run.workers, f"{run.tokens_per_second:,.0f}", ", ".join(f"{share:.2f}" for share in run.busy)) for run in runs]
    return format_table(("workers", "tokens/s", "each rank busy"), rows, left=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4], help="numbers of stages (default: %(default)s)")
    parser.add_argument("--num-requests", type=int, default=32, help="requests (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the first number of stages")
    parser.add_argument("--model", metavar="MODEL", help="run this model in worker processes, instead of a simulated device")
    arguments = parser.parse_args()
    if arguments.model:
        title = f"{arguments.num_requests} requests on {arguments.model}"
        model_runs = measure_model(arguments.model, arguments.num_requests)
        results = {"results": [vars(each) for each in model_runs]}
        report(title, format_model_runs(model_runs), results, file=arguments.json)
        return
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
