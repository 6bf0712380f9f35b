"""What scheduling beside the device gains: the engine over a simulated device, and a host that really takes its time.

python benchmarks/async_scheduling.py --json async_scheduling.json
python benchmarks/async_scheduling.py --plot docs/async_scheduling.png    # only draws

Every step takes the device the same time, whatever its batch. The engine without a tokenizer does the rest: scheduling, block tables, results,
outputs. There is no model input to prepare, which a worker on a GPU does as well.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from minivllm.bench.report import format_table, report
from minivllm.engine.llm_engine import LLMEngine
from minivllm.executor.simulated import VirtualClock
from minivllm.sampling_params import RequestOutputKind, SamplingParams
from minivllm.simulation.engine import make_simulated_engine
from minivllm.viz.overlap import draw_overlap

PROMPT_TOKENS = 32


class RealClock(VirtualClock):
    """The time of day: the device really takes as long as it says. On a busy machine, that is not all that the host waits for."""

    def __call__(self) -> float:
        return time.perf_counter()

    def advance(self, seconds: float) -> None:
        self.advance_to(self() + seconds)

    def advance_to(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self()))


class ProcessorClock(VirtualClock):
    """The host's processor time, and its waits for the device added up: what the time of day would be on an idle machine."""

    def __call__(self) -> float:
        return time.process_time() + self.now

    def advance_to(self, moment: float) -> None:
        self.now += max(0.0, moment - self())


CLOCKS = {"real": RealClock, "processor": ProcessorClock}


@dataclass(frozen=True)
class Rate:
    """Decoding with a full batch.

    Attributes:
        clock: "real" or "processor".
        device_ms: What the device takes for a step.
        step_ms: Time per step, on average.
        share: Of the rate of a device that never waits.
        host_ms: Processor time of the host per step.
    """

    clock: str
    num_seqs: int
    device_ms: float
    async_scheduling: bool
    step_ms: float
    share: float
    host_ms: float


def start_engine(name: str, num_seqs: int, device_ms: float, async_scheduling: bool, num_steps: int) -> LLMEngine:
    """An engine with the clock of this name, whose `num_seqs` sequences decode for `num_steps` more steps at the least."""
    engine = make_simulated_engine(
        clock=CLOCKS[name](),
        cost_model=lambda work: device_ms / 1000 if work.decode_seqs else 0.0,
        num_gpu_blocks=num_seqs * (PROMPT_TOKENS + num_steps + 64) // 16 + num_seqs,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs * PROMPT_TOKENS + 8192,
        trace=False,
        async_scheduling=async_scheduling,
    )
    params = SamplingParams(max_tokens=num_steps + 60, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    for i in range(num_seqs):
        engine.add_request(str(i), [1] * PROMPT_TOKENS, params)
    for _ in range(20):
        engine.step()
    gc.collect()
    gc.freeze()  # as servers do, or the collector would walk through everything now and then
    return engine


def measure(name: str, num_seqs: int, device_ms: float, async_scheduling: bool, num_steps: int) -> Rate:
    """Time `num_steps` decode steps of `num_seqs` sequences by the clock with this name."""
    engine = start_engine(name, num_seqs, device_ms, async_scheduling, num_steps)
    clock = engine.core.clock
    start, busy = clock(), time.process_time()
    for _ in range(num_steps):
        engine.step()
    step_ms, host_ms = (seconds / num_steps * 1000 for seconds in (clock() - start, time.process_time() - busy))
    return Rate(name, num_seqs, device_ms, async_scheduling, step_ms, device_ms / step_ms, host_ms)


def format_rates(rates: list[Rate]) -> str:
    """The measurements as a table of text."""
    headers = ("clock", "sequences", "device", "scheduling", "step", "share of the device's rate", "host's processor time")
    rows = [
        (
            rate.clock,
            rate.num_seqs,
            f"{rate.device_ms:.1f} ms",
            "beside the device" if rate.async_scheduling else "between steps",
            f"{rate.step_ms:.2f} ms",
            f"{rate.share:.3f}",
            f"{rate.host_ms:.2f} ms",
        )
        for rate in rates
    ]
    return format_table(headers, rows, left=0)


def draw(num_seqs: int, device_ms: float) -> Figure:
    """Eight steps with one step in flight and with two, by the processor's clock."""
    traces = {}
    for name, async_scheduling in (("one step in flight", False), ("two steps in flight", True)):
        engine = start_engine("processor", num_seqs, device_ms, async_scheduling, 20)
        traces[name] = engine.start_trace()
        for _ in range(14):
            engine.step()
    return draw_overlap(traces, first=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--num-seqs", type=int, nargs="+", default=[16, 256], help="sequences in the batch (default: %(default)s)"
    )
    parser.add_argument("--device-ms", type=float, default=6.0, help="what the device takes for a step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=500, help="steps to time (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw when device and host are busy, with the largest batch")
    arguments = parser.parse_args()
    if arguments.plot:
        draw(max(arguments.num_seqs), arguments.device_ms).savefig(arguments.plot, dpi=100)
        return
    rates = [
        measure(clock, num_seqs, arguments.device_ms, async_scheduling, arguments.steps)
        for clock in CLOCKS
        for num_seqs in arguments.num_seqs
        for async_scheduling in (False, True)
    ]
    report(
        "Decoding over a simulated device", format_rates(rates), {"results": [vars(rate) for rate in rates]}, file=arguments.json
    )


if __name__ == "__main__":
    main()
