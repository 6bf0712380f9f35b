"""Draws the pictures of the README that come from the simulator. They are the same each time.

python tools/make_pictures.py
"""

from pathlib import Path

from minivllm.bench.what_if import what_if
from minivllm.viz.step import draw_step
from minivllm.viz.timeline import draw_requests

DOCS = Path(__file__).resolve().parent.parent / "docs"


def main() -> None:
    """Writes docs/requests.png and docs/step.png."""
    trace = what_if(num_gpu_blocks=32, max_num_seqs=6, arrival_rate=5.0, num_requests=24, seed=5)
    draw_requests(trace).savefig(DOCS / "requests.png", dpi=120)
    crowded = next(number for number, step in enumerate(trace) if step.preempted)
    draw_step(trace, crowded).savefig(DOCS / "step.png", dpi=120)


if __name__ == "__main__":
    main()
