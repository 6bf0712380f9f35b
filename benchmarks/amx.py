"""What AMX is worth: the CPU kernels and the engine with it, and with it refused, in turns, on two cores.

    python benchmarks/amx.py --json amx.json

Products of SmolLM2-135M's layers in bfloat16 and int8, attention of prompts with a cache in bfloat16, and the engine on a model of these sizes with
random weights: no model is needed. Each measurement is a process of its own, because the kernels are compiled for what the processor may use:
`MINIVLLM_CPU_FEATURES=-amx-tile` leaves AVX-512. Medians of several rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpu_model import SMOLLM2, write_model

from minivllm.bench.report import format_table, report
from minivllm.entrypoints.cli.options import check_writable

SIDES = {"AMX": "", "AVX-512": "-amx-tile"}
"""What MINIVLLM_CPU_FEATURES says for each."""
NUM_CORES = 2
GOAL = 1.3
"""How many times as fast AMX must be in the engine's rows to be worth its code."""
ROWS = (1, 4, 16, 64, 128)
PROMPT_LENS = (104, 508, 2000)
ENGINES = {"bfloat16": {"dtype": "bfloat16"}, "int8": {"dtype": "bfloat16", "quantization": "int8"}}


def measure() -> dict[str, float]:
    """Milliseconds by name, of this process's side."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    import torch

    torch.set_num_threads(NUM_CORES)
    import linear_layers
    import prefill_attention

    from minivllm import LLM, SamplingParams

    found = {}
    for way, milliseconds in linear_layers.measure_linear(3, ("minivllm bfloat16", "minivllm int8")).items():
        found |= {f"products, {way.removeprefix('minivllm ')}, {rows} rows": milliseconds[rows] for rows in ROWS}
    for length in PROMPT_LENS:
        found[f"attention of {length} tokens, bfloat16"] = prefill_attention.measure(length)["bfloat16"]
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), SMOLLM2)
        for dtype, options in ENGINES.items():
            llm = LLM(
                name, load_format="dummy", skip_tokenizer_init=True, max_model_len=1024, num_gpu_blocks_override=600, **options
            )
            for what, num_prompts, prompt_len, output_len in (
                ("prompt of 508 tokens", 1, 508, 1),
                ("16 sequences, 32 tokens", 16, 16, 32),
            ):
                prompts = [{"prompt_token_ids": [(7 * i + j) % 1000 for j in range(prompt_len)]} for i in range(num_prompts)]
                params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
                times = []
                for _ in range(3):
                    start = time.perf_counter()
                    llm.generate(prompts, params, use_tqdm=False)
                    times.append(1e3 * (time.perf_counter() - start))
                found[f"engine, {dtype}, {what}"] = min(times)
    return found


def run_side(features: str) -> dict[str, float]:
    """`measure` in a process that may use these features."""
    environment = os.environ | ({"MINIVLLM_CPU_FEATURES": features} if features else {})
    command = [sys.executable, __file__, "--measure"]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)  # why it failed is shown
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """0, or 2 where there is no AMX."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of each side (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure()))
        return 0
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1.")
    check_writable(arguments.json)
    from minivllm.kernels.cpu.native import features

    if not features.HAS_BFLOAT16_AMX:
        print("This processor has no AMX, or Linux refuses it: both sides would be the same.")
        return 2
    rounds: dict[str, list[dict[str, float]]] = {}
    for _ in range(arguments.rounds):
        for side, without in SIDES.items():
            rounds.setdefault(side, []).append(run_side(without))
    medians = {side: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for side, runs in rounds.items()}
    ratios = {name: medians["AVX-512"][name] / ms for name, ms in medians["AMX"].items()}
    rows = [(name, *(f"{medians[side][name]:.2f}" for side in SIDES), f"{ratio:.2f}") for name, ratio in ratios.items()]
    worth = statistics.median(ratio for name, ratio in ratios.items() if name.startswith("engine"))
    verdict = f"The engine with AMX is {worth:.2f} times as fast (median; {GOAL} make it worth its code)."
    table = format_table(("milliseconds", *SIDES, "times as fast"), rows)
    report(
        f"With AMX and without, {NUM_CORES} cores, medians of {arguments.rounds}",
        f"{table}\n\n{verdict}",
        {"rounds": rounds},
        file=arguments.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
