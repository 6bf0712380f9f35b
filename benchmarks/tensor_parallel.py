"""Two workers of one thread each against one worker of two: speed, time spent on communication, memory, and the start.

    python benchmarks/tensor_parallel.py --json tensor_parallel.json

Both engines are loaded at the same time and take turns, so that the machine is the same for both; an idle worker sleeps. The model has 3 KV
heads, of which the ranks get 2 and 1; a second model, with random weights and the same sizes but 4 KV heads, shows what that costs.
All-reduce alone is timed between two processes that do nothing else, in shared memory and over gloo. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from memory import kilobytes
from tqdm.auto import tqdm

from minivllm.bench.report import format_table, report
from minivllm.engine.trace import EngineTrace

WAYS: dict[str, dict[str, Any]] = {"float32": {}, "bfloat16": {"dtype": "bfloat16"}, "int8": {"quantization": "int8"}}
NUM_SEQS, PROMPT_TOKENS, OUTPUT_TOKENS, BLOCK_SIZE = 16, 64, 96, 16
NUM_BLOCKS = NUM_SEQS * (PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK_SIZE + 8
HIDDEN_SIZE = 576
ROWS = (1, 16, 64)


# -- two engines in turns --------------------------------------------------------------------------------------------


def compare(model: str, way: str, rounds: int) -> dict[str, Any]:
    """Tokens per second of both engines, and how the ranks spend a decode step; medians over rounds."""
    from minivllm import LLM, SamplingParams

    options = {
        "num_gpu_blocks_override": NUM_BLOCKS,
        "max_num_seqs": NUM_SEQS,
        "block_size": BLOCK_SIZE,
        "skip_tokenizer_init": True,
    }
    engines = {size: LLM(model, tensor_parallel_size=size, **options, **WAYS[way]) for size in (1, 2)}
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_SEQS)]
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    speeds: dict[int, list[float]] = {1: [], 2: []}
    traces: dict[int, list[EngineTrace]] = {1: [], 2: []}
    for i in range(rounds + 1):
        for size, llm in engines.items():
            traces[size].append(llm.llm_engine.start_trace())
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - start
            llm.llm_engine.stop_trace()
            if i > 0:  # the first one warms up
                speeds[size].append(NUM_SEQS * OUTPUT_TOKENS / seconds)
    decodes = {
        size: [step for trace in traces[size][1:] for step in trace if step.phase == "decode" and len(step.scheduled) == NUM_SEQS]
        for size in engines
    }
    step = {size: statistics.median(record.end - record.start for record in decodes[size]) for size in engines}
    ranks = [record.ranks for record in decodes[2]]
    waits = [statistics.median(timing[rank].communication_seconds for timing in ranks) for rank in range(2)]
    # Who comes last to an operation does not wait in it: the shorter time of the two is what the operation itself takes.
    alone = statistics.median(
        sum(min(end - start for start, end in spans) for spans in zip(*(timing.communication for timing in both), strict=True))
        for both in ranks
    )
    num_bytes = statistics.median(sum(timing.num_bytes for timing in both) for both in ranks)
    for llm in engines.values():
        llm.llm_engine.engine_core.shutdown()
    return {
        "tokens_per_second": {str(size): round(statistics.median(values), 1) for size, values in speeds.items()},
        "ratio": round(statistics.median(two / one for one, two in zip(speeds[1], speeds[2], strict=True)), 3),
        "step_ms": {str(size): round(1e3 * seconds, 2) for size, seconds in step.items()},
        "in_all_reduce_ms": round(1e3 * alone, 2),
        "in_all_reduce_share": round(alone / step[2], 3),
        "in_communication_ms_by_rank": [round(1e3 * seconds, 2) for seconds in waits],
        "bytes_per_token": round(num_bytes / NUM_SEQS),
    }


def make_even_model(folder: str) -> str:
    """A model with random weights, as large as the default one, whose heads divide evenly."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152, hidden_size=HIDDEN_SIZE, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=8, num_key_value_heads=4,
        head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def measure_memory(way: str) -> dict[str, Any]:
    """The peak of one worker in a process of its own, and of a process before it loads anything."""
    from minivllm import LLM, SamplingParams

    options = {
        "num_gpu_blocks_override": NUM_BLOCKS,
        "max_num_seqs": NUM_SEQS,
        "block_size": BLOCK_SIZE,
        "skip_tokenizer_init": True,
    }
    prompts = [[5 + i] * PROMPT_TOKENS for i in range(NUM_SEQS)]
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    peaks = {}
    for size in (1, 2):
        llm = LLM("smollm2-135m", tensor_parallel_size=size, distributed_executor_backend="mp", **options, **WAYS[way])
        llm.generate(prompts, params, use_tqdm=False)
        executor = llm.llm_engine.executor
        peaks[size] = max(kilobytes("VmHWM", process) for process in executor.process_ids)
        executor.shutdown()
    code = "import minivllm.executor.worker_proc, minivllm.kernels.cpu, memory; print(memory.kilobytes('VmRSS'))"
    before = int(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent).stdout
    )
    return {
        "kilobytes_before": before,
        "kilobytes": {str(size): peak for size, peak in peaks.items()},
        "share": round((peaks[2] - before) / (peaks[1] - before), 3),
    }


def measure_start(rounds: int) -> dict[str, Any]:
    """Seconds of `LLM(tensor_parallel_size=2)`: in a Python that has imported all that it needs, and with these imports."""
    code = """
import sys, time
start = time.perf_counter()
import torch, transformers
from transformers import PreTrainedTokenizerFast
from minivllm import LLM
import minivllm.engine.llm_engine, minivllm.engine.tokenizer, minivllm.models.registry, minivllm.executor.multiproc
imported = time.perf_counter()
llm = LLM("smollm2-135m", tensor_parallel_size=2, max_num_seqs=16, kv_cache_memory_bytes=2**26)
ready = time.perf_counter()
print(ready - imported, ready - start)
"""
    found = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(rounds)]
    alone, whole = zip(*(map(float, result.stdout.split()) for result in found), strict=True)
    return {"seconds": round(statistics.median(alone), 2), "seconds_with_imports": round(statistics.median(whole), 2)}


# -- all-reduce alone ------------------------------------------------------------------------------------------------


def time_all_reduce(kind: str) -> dict[str, float]:
    """Median microseconds between two processes, by rows of the hidden size."""
    from minivllm.distributed.shared_memory import create_group_memory

    with tempfile.TemporaryDirectory() as folder:
        memory = create_group_memory(2)
        where = str(memory) if kind == "shared" else f"file://{folder}/meet"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "rank", kind, str(rank), where],
                pass_fds=(memory,),
                stdout=subprocess.PIPE,
                env=environment,
            )
            for rank in range(2)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
        os.close(memory)
    times: dict[str, float] = json.loads(outputs[0])
    return times


def run_rank(kind: str, rank: int, where: str) -> None:
    """One of the two processes."""
    import torch

    from minivllm.distributed.parallel_state import GroupCoordinator

    group: GroupCoordinator
    if kind == "shared":
        from minivllm.distributed.shared_memory_group import SharedMemoryGroup

        group = SharedMemoryGroup(int(where), rank, 2)
    else:
        from minivllm.distributed.torch_group import TorchGroup, dist

        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
        group = TorchGroup(rank, 2)
    medians = {}
    for rows in ROWS:
        x, times = torch.zeros(rows, HIDDEN_SIZE), []
        for _ in range(1000):
            start = time.perf_counter()
            group.all_reduce(x)
            times.append(time.perf_counter() - start)
        medians[str(rows)] = round(1e6 * statistics.median(times), 1)
    print(json.dumps(medians), flush=True)
    os._exit(0)


def format_results(results: dict[str, Any]) -> str:
    """Tables of text."""
    speeds = [
        (
            name, *(f"{speed:.0f}" for speed in found["tokens_per_second"].values()), f"{found['ratio']:.2f}",
            *(f"{step:.1f} ms" for step in found["step_ms"].values()), f"{found['in_all_reduce_share']:.1%}",
            " and ".join(f"{ms:.1f}" for ms in found["in_communication_ms_by_rank"]) + " ms", f"{found['bytes_per_token']:,}",
        )
        for name, found in results["speed"].items()
    ]  # fmt: skip
    headers = (
        "tokens/s", "1 worker", "2 ranks", "ratio by round", "step, 1 worker", "2 ranks", "all-reduce", "with waiting, by rank", "bytes/token"
    )  # fmt: skip
    alone = [(kind, *(f"{time:.0f} µs" for time in times.values())) for kind, times in results["all_reduce_us"].items()]
    memory = [
        (
            way,
            *(f"{size / 1024:.0f} MiB" for size in (*found["kilobytes"].values(), found["kilobytes_before"])),
            f"{found['share']:.2f}",
        )
        for way, found in results["memory"].items()
    ]
    start = results["start"]
    lines = [
        format_table(headers, speeds),
        "",
        "One worker has two threads, a rank has one. Ratio by round: the median of 2 ranks / 1 worker in each round. All-reduce: the share of a",
        "step that the operations take, measured at the rank that comes last to each of them.",
        "",
        format_table(("all-reduce alone", *(f"{rows} × {HIDDEN_SIZE}" for rows in ROWS)), alone),
        "",
        format_table(("peak of memory", "1 worker", "larger of 2 ranks", "before loading", "share above that"), memory),
        "",
        f"LLM(tensor_parallel_size=2) is ready after {start['seconds']:.1f} s; with the imports of a new Python, {start['seconds_with_imports']:.1f} s.",
    ]
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        run_rank(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of each comparison (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args()
    all_reduce = {kind: time_all_reduce(kind) for kind in ("shared", "gloo")}
    with tempfile.TemporaryDirectory() as folder:
        runs = [("smollm2-135m", "smollm2-135m", way) for way in WAYS]
        runs += [("4 KV heads", make_even_model(folder), way) for way in ("float32", "bfloat16")]
        speed = {f"{name}, {way}": compare(model, way, arguments.rounds) for name, model, way in tqdm(runs, dynamic_ncols=True)}
    memory = {way: measure_memory(way) for way in WAYS}
    start = measure_start(arguments.rounds)
    title = f"{NUM_SEQS} sequences of {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens, medians of {arguments.rounds} rounds in turns"
    results = {"all_reduce_us": all_reduce, "speed": speed, "memory": memory, "start": start}
    report(title, format_results(results), results, file=arguments.json)


if __name__ == "__main__":
    main()
