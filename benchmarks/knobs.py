"""How quickly the widgets redraw: the knobs, with their simulation, and the player.

    python benchmarks/knobs.py --json knobs.json

Each knob is turned to each of its values, with 50 requests; the player jumps to random steps of a trace of 50 requests and 100 blocks.
A browser would add a few hundredths of a second.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from minivllm.bench.report import format_table, report
from minivllm.bench.summary import percentile
from minivllm.simulation.what_if import what_if
from minivllm.viz.knobs import CHOICES, START, knobs
from minivllm.viz.player import play

ROUNDS = 3
FRAMES = 100


def timed(move: Callable[[], None]) -> float:
    """Milliseconds of a move."""
    start = time.perf_counter()
    move()
    return (time.perf_counter() - start) * 1e3


def measure_knobs() -> list[float]:
    """The time of each move that draws a picture. Each knob is turned back before the next one."""
    box = knobs(what_if)
    times = []
    for _ in range(ROUNDS):
        for name, choices in CHOICES.items():
            for value in [*choices, START[name]]:
                if box.knobs[name].value == value:
                    continue
                took = timed(lambda name=name, value=value: setattr(box.knobs[name], "value", value))
                if not box.message.value:  # a cache too small draws nothing
                    times.append(took)
    return times


def measure_player() -> list[float]:
    """The time of each step that has not been shown before."""
    trace = what_if(num_gpu_blocks=100)
    box = play(trace)
    steps = random.Random(0).sample(range(1, len(trace)), FRAMES)
    return [timed(lambda step=step: setattr(box.slider, "value", step)) for step in steps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args()
    results = {"knobs": measure_knobs(), "player": measure_player()}
    rows = [
        (name, len(times), f"{statistics.median(times):.0f} ms", f"{percentile(times, 95):.0f} ms")
        for name, times in results.items()
    ]
    rounded = {name: [round(took, 1) for took in times] for name, times in results.items()}
    table = format_table(("widget", "moves", "median", "p95"), rows)
    report("Redrawing the widgets", table, {"milliseconds": rounded}, file=arguments.json)


if __name__ == "__main__":
    main()
