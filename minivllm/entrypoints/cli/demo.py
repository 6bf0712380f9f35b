"""`minivllm demo`: generated text, then static against continuous batching, as a table and as a picture."""

from __future__ import annotations

import sys
from pathlib import Path

from minivllm.bench.offline import SCHEDULERS, format_runs, run_offline
from minivllm.bench.report import describe_machine
from minivllm.bench.workloads import DISTRIBUTIONS, make_workload
from minivllm.engine.trace import EngineTrace
from minivllm.entrypoints.llm import LLM
from minivllm.sampling_params import SamplingParams

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
MAX_NUM_SEQS = 16
NUM_REQUESTS = 48
MEAN_PROMPT_LEN = 24
MEAN_OUTPUT_LEN = 40


def demo(folder: Path) -> None:
    """Run the demo and save its picture in `folder`; without matplotlib, say so and draw none."""
    print("1. Four prompts, completed in one batch by SmolLM2-135M on this machine\n")
    llm = LLM("smollm2-135m", max_num_seqs=MAX_NUM_SEQS, max_model_len=1024, kv_cache_memory_bytes=64 * 2**20)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95, max_tokens=32, seed=0))
    for output in outputs:
        print(f"\n  {output.prompt!r} →\n    {output.outputs[0].text!r}")

    print(
        f"\n2. One engine, two ways to batch: {NUM_REQUESTS} requests, {NUM_REQUESTS * MEAN_OUTPUT_LEN} tokens to generate, "
        f"at most {MAX_NUM_SEQS} at a time\n"
        f"   static:     a batch is filled, and no request joins it until its longest one has finished\n"
        f"   continuous: the batch is recomposed after every token\n"
        f"   uniform:    every request generates {MEAN_OUTPUT_LEN} tokens\n"
        f"   longtail:   most requests are short and a few very long, as in production; the same total number of tokens\n"
    )
    results = []
    for distribution in DISTRIBUTIONS:
        workload = make_workload(distribution, NUM_REQUESTS, mean_prompt_len=MEAN_PROMPT_LEN, mean_output_len=MEAN_OUTPUT_LEN)
        results += [run_offline(llm.llm_engine, name, distribution, workload) for name in SCHEDULERS]
    print(f"\n{format_runs(results)}")
    print(
        "\nlatency and TTFT (time to first token) are means over requests, which all arrive at once; running is the number\n"
        "of sequences in the batch, and cache use the share of the KV cache in use, both averaged over time.\n"
        f"{describe_machine()}"
    )

    print("\n3. The two timelines of the long-tailed workload, as a picture")
    print(f"   {_draw({result.scheduler: result.trace for result in results if result.workload == DISTRIBUTIONS[-1]}, folder)}")
    minivllm = Path(sys.executable).with_name("minivllm")
    commands = {
        "make lab": "open the course in JupyterLab, at lesson 00",
        f"{_short(minivllm)} chat": "talk to the model",
        f"{_short(minivllm)} bench offline -h": "compare static and continuous batching on your own workload",
        "minivllm/core/scheduler.py": "read the scheduler that makes the difference",
    }
    print("\n4. What to do next")
    for command, what in commands.items():
        print(f"   {command:38} {what}")


def _draw(traces: dict[str, EngineTrace], folder: Path) -> str:
    """Draw the timelines. Returns where they are, or what is missing to draw them."""
    try:
        from minivllm.viz.timeline import draw_timelines
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        return "Not drawn, because matplotlib is not installed: `pip install matplotlib`, then run the demo again."
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / "static_vs_continuous.png"
    title = "The same requests, with long-tailed output lengths: each bar is a request, white is an idle slot"
    draw_timelines(traces, title).savefig(picture, dpi=150)
    return str(picture.resolve())


def _short(path: Path) -> Path:
    """A path relative to the working directory, if it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
