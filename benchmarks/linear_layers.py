"""All linear layers of one step of the default model, by rows in the batch: `F.linear` against `(W @ x.T).T`.

    python benchmarks/linear_layers.py

The two are equal products. Which is faster depends on the processor: on some the second wins much at small batches, on
others it loses a little. `minivllm/layers/linear.py` takes it for a range of batch sizes; this says what that does here.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.nn.functional as F

from minivllm.bench.machine import describe_machine

SHAPES = [*[(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30, (49152, 576)]
"""[out_features, in_features] of SmolLM2-135M: qkv, o, gate and up, down of 30 layers, and the head."""
ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256)
REPEATS = 7


def milliseconds(product, weights, inputs) -> float:
    """Time of one pass over all layers."""
    start = time.perf_counter()
    for weight in weights:
        product(inputs[weight.shape[1]], weight)
    return (time.perf_counter() - start) * 1e3


@torch.inference_mode()
def main() -> None:
    products = {"F.linear": F.linear, "(W @ x.T).T": lambda x, weight: (weight @ x.t()).t().contiguous()}
    weights = [torch.randn(shape) for shape in SHAPES]
    print(f"Median milliseconds of {REPEATS} passes, in turns; {describe_machine()}\n")
    print(f"{'rows':>6}" + "".join(f"{name:>16}" for name in products))
    for rows in ROWS:
        inputs = {width: torch.randn(rows, width) for width in (576, 1536)}
        times: dict[str, list[float]] = {name: [] for name in products}
        for repeat in range(REPEATS + 1):
            for name, product in products.items():
                elapsed = milliseconds(product, weights, inputs)
                if repeat > 0:  # the first pass warms up
                    times[name].append(elapsed)
        print(f"{rows:>6}" + "".join(f"{statistics.median(values):>16.1f}" for values in times.values()), flush=True)


if __name__ == "__main__":
    main()
