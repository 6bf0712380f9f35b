"""How quickly the widgets redraw: the knobs, simulation included, and the player.

    python benchmarks/knobs.py --json knobs.json

Each knob is turned to each of its values, with 50 requests; the player goes to steps all over a trace of 50 requests and 100 blocks.
Without a browser, which adds a few hundredths of a second.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import time
from pathlib import Path

from minivllm.bench.machine import describe_machine
from minivllm.bench.what_if import what_if
from minivllm.viz.knobs import CHOICES, START, knobs
from minivllm.viz.player import play

ROUNDS = 3
FRAMES = 100


def timed(move) -> float:
    """Milliseconds."""
    start = time.perf_counter()
    move()
    return (time.perf_counter() - start) * 1e3


def measure_knobs() -> list[float]:
    """A time for each move that leads to a picture. Before the next knob, each is turned back."""
    box = knobs(what_if)
    times = []
    for _ in range(ROUNDS):
        for name, choices in CHOICES.items():
            for value in [*choices, START[name]]:
                if box.knobs[name].value == value:
                    continue
                took = timed(lambda name=name, value=value: setattr(box.knobs[name], "value", value))
                if not box.message.value:  # else it was a cache too small, and nothing was drawn
                    times.append(took)
    return times


def measure_player() -> list[float]:
    """A time for each step that has not been shown before."""
    trace = what_if(num_gpu_blocks=100)
    box = play(trace)
    steps = random.Random(0).sample(range(1, len(trace)), FRAMES)
    return [timed(lambda step=step: setattr(box.slider, "value", step)) for step in steps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args()
    results = {"knobs": measure_knobs(), "player": measure_player()}
    text = [f"Redrawing the widgets; {describe_machine()}", "", f"{'widget':<10}{'moves':>7}{'median':>11}{'slowest of 20':>16}"]
    for name, times in results.items():
        slow = sorted(times)[int(0.95 * len(times))]
        text.append(f"{name:<10}{len(times):>7}{statistics.median(times):>8.0f} ms{slow:>13.0f} ms")
    print("\n".join(text))
    if arguments.json:
        command = f"python benchmarks/knobs.py --json {arguments.json}"
        report = {"time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "command": command}
        rounded = {name: [round(took, 1) for took in times] for name, times in results.items()}
        arguments.json.write_text(json.dumps(report | {"text": text, "milliseconds": rounded}) + "\n")


if __name__ == "__main__":
    main()
