"""The cost of recording a trace: steps of the default model with and without, in turns.

    python benchmarks/trace_overhead.py --json overhead.json

The recorder's own time is measured too, because steps vary by more than it takes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from minivllm import LLM, SamplingParams
from minivllm.bench.report import format_table, report
from minivllm.engine.trace_recorder import TraceRecorder

BATCH_SIZES = (1, 16, 64)
OPTIONS = {"float32": {}, "int8": {"quantization": "int8"}, "float32, prefix cache": {"enable_prefix_caching": True}}
ROUNDS = 6
PROMPT_LEN, NUM_TOKENS = 64, 32


def decode_times(llm: LLM, batch_size: int, round_number: int) -> list[float]:
    """Seconds of each decode step of a batch."""
    engine, params = llm.llm_engine, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for i in range(batch_size):
        engine.add_request(str(i), [1000 + 64 * round_number + i] * PROMPT_LEN, params)
    times = []
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return times[-NUM_TOKENS + 2 :]


def timed(name: str, seconds: list[float]):
    """The recorder's method, its time noted."""
    method = getattr(TraceRecorder, name)

    def watched(self, *arguments):
        start = time.perf_counter()
        try:
            return method(self, *arguments)
        finally:
            seconds.append(time.perf_counter() - start)

    return watched


def measure(options: dict, batch_size: int) -> dict[str, float]:
    llm = LLM("smollm2-135m", max_num_seqs=batch_size, max_model_len=512, **options)
    decode_times(llm, batch_size, 0)
    plain, traced, begin, end = [], [], [], []
    methods = TraceRecorder.begin_step, TraceRecorder.end_step
    for round_number in range(ROUNDS):
        plain += decode_times(llm, batch_size, round_number)
        llm.llm_engine.start_trace()
        traced += decode_times(llm, batch_size, round_number)
        TraceRecorder.begin_step, TraceRecorder.end_step = timed("begin_step", begin), timed("end_step", end)
        decode_times(llm, batch_size, round_number)
        TraceRecorder.begin_step, TraceRecorder.end_step = methods
        llm.llm_engine.stop_trace()
    recorder = statistics.median(begin) + statistics.median(end)
    step = statistics.median(plain)
    return {
        "blocks": llm.llm_engine.block_manager.num_gpu_blocks,
        "plain_ms": step * 1e3,
        "traced_ms": statistics.median(traced) * 1e3,
        "recorder_ms": recorder * 1e3,
        "share": recorder / step,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args()
    headers = ("weights", "batch", "blocks", "without", "with", "recorder alone", "share of a step")
    rows, results = [], []
    for name, options in OPTIONS.items():
        for batch_size in BATCH_SIZES:
            result = measure(options, batch_size)
            results.append({"weights": name, "batch_size": batch_size} | result)
            times = (f"{result['plain_ms']:.2f} ms", f"{result['traced_ms']:.2f} ms", f"{result['recorder_ms']:.3f} ms")
            rows.append((name, batch_size, result["blocks"], *times, f"{result['share']:.2%}"))
    title = f"Decode steps without and with a trace, medians of {ROUNDS} runs in turns"
    report(title, format_table(headers, rows), {"results": results}, file=arguments.json)


if __name__ == "__main__":
    main()
