"""The simulator behind the knobs of `viz/knobs.py`: what would the engine do if?"""

from __future__ import annotations

from minivllm.bench.workloads import generate_requests
from minivllm.engine.trace import EngineTrace
from minivllm.simulation.engine import simulate


def what_if(
    *,
    max_num_seqs: int = 8,
    block_size: int = 16,
    num_gpu_blocks: int = 64,
    arrival_rate: float = 4.0,
    distribution: str = "longtail",
    scheduler: str = "continuous",
    num_requests: int = 50,
    seed: int = 0,
) -> EngineTrace:
    """Simulate requests that arrive at random on an engine of this shape, in a fraction of a second.

    Its arguments are the knobs of `viz.knobs.knobs`, so a notebook needs one line: `knobs(what_if)`.

    Args:
        max_num_seqs: The most sequences that run at once.
        block_size: Tokens in a block of the KV cache.
        num_gpu_blocks: Blocks in the cache.
        arrival_rate: Requests per second, on average (Poisson).
        distribution: Of prompt and output lengths, which are 48 tokens on average: "uniform" or "longtail".
        scheduler: "continuous" or "static".
        num_requests, seed: Of the workload. The same seed gives requests of the same lengths, whatever the other knobs.

    Raises:
        ConfigError: An argument is out of range, or a request does not fit into the cache.
    """
    requests = list(generate_requests(num_requests, arrival_rate=arrival_rate, distribution=distribution, seed=seed))
    trace = simulate(
        requests, max_num_seqs=max_num_seqs, block_size=block_size, num_gpu_blocks=num_gpu_blocks, scheduler=scheduler
    ).trace
    assert trace is not None
    return trace
