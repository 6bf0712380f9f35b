"""The cost of scheduling: `schedule()` and `update()` without a model.

python benchmarks/scheduler_cost.py --waiting 100 100000 --json scheduler.json
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from minivllm.bench.report import format_table, report
from minivllm.bench.summary import percentile
from minivllm.config import SchedulerConfig
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.request import EngineCoreRequest, Request
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler_output import SequenceOutput


@dataclass(frozen=True)
class SchedulerCost:
    """Milliseconds per step with a full batch.

    `decode_median` and `decode_p99` are over the steps that only decode, `mean` over all steps, those that admit and finish requests
    included.
    """

    num_running: int
    num_waiting: int
    num_steps: int
    decode_median: float
    decode_p99: float
    mean: float


def measure_scheduler(num_running: int, num_waiting: int, num_steps: int = 1000, seed: int = 0) -> SchedulerCost:
    """Time the steps of a scheduler with a full batch and a queue of constant length.

    Prompts have 16 to 256 tokens, outputs 64 to 512; whenever a request finishes, another one arrives.
    """
    rng = random.Random(seed)
    block_size = 16
    config = SchedulerConfig(max_num_seqs=num_running, max_num_batched_tokens=max(8192, num_running))
    scheduler = Scheduler(config, BlockSpaceManager(block_size, num_running * 768 // block_size + 100))
    prompts = [[1] * rng.randint(16, 256) for _ in range(100)]
    num_added = 0

    def add_request() -> None:
        nonlocal num_added
        prompt = rng.choice(prompts)
        max_tokens = rng.randint(64, 512)
        params = SamplingParams(max_tokens=max_tokens)
        scheduler.add_request(
            Request(
                EngineCoreRequest(str(num_added), prompt, params, max_num_tokens=len(prompt) + max_tokens, eos_token_ids=(0,))
            )
        )
        num_added += 1

    for _ in range(num_running + num_waiting):
        add_request()
    while len(scheduler.running) < num_running:
        output = scheduler.schedule()
        scheduler.update(output, [SequenceOutput([1]) for _ in output.scheduled])
    all_steps: list[float] = []
    decode_steps: list[float] = []
    for _ in range(num_steps):
        start = time.perf_counter()
        output = scheduler.schedule()
        scheduled = time.perf_counter()
        results = [SequenceOutput([1]) for _ in output.scheduled]  # the model's part
        computed = time.perf_counter()
        scheduler.update(output, results)
        elapsed = (scheduled - start + time.perf_counter() - computed) * 1e3
        all_steps.append(elapsed)
        if output.phase == "decode":
            decode_steps.append(elapsed)
        while len(scheduler.requests) < num_running + num_waiting:
            add_request()
    return SchedulerCost(
        num_running=num_running,
        num_waiting=num_waiting,
        num_steps=num_steps,
        decode_median=statistics.median(decode_steps),
        decode_p99=percentile(decode_steps, 99),
        mean=statistics.mean(all_steps),
    )


def format_costs(costs: list[SchedulerCost]) -> str:
    """The measurements as a table of text."""
    headers = ("running", "waiting", "decode step, median", "p99", "all steps, mean")
    rows = [
        (cost.num_running, cost.num_waiting, *(f"{ms:.3f} ms" for ms in (cost.decode_median, cost.decode_p99, cost.mean)))
        for cost in costs
    ]
    return format_table(headers, rows, left=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256, help="sequences in the batch (default: %(default)s)")
    parser.add_argument(
        "--waiting", type=int, nargs="+", default=[100, 1_000, 10_000, 100_000], help="queue lengths (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args()
    costs = [measure_scheduler(arguments.running, num_waiting) for num_waiting in arguments.waiting]
    results = {"results": [vars(cost) for cost in costs]}
    report("schedule() + update() per step", format_costs(costs), results, file=arguments.json)


if __name__ == "__main__":
    main()
