"""`minivllm demo`: generated text, then static against continuous batching, as a table and as a picture; `minivllm demo failover`: a
replica is killed in the middle of its answers, and another continues them, byte for byte."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from minivllm.bench.offline import SCHEDULERS, format_runs, run_offline
from minivllm.bench.report import describe_machine
from minivllm.bench.workloads import DISTRIBUTIONS, make_workload
from minivllm.config import EngineArgs
from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.engine.trace import EngineTrace
from minivllm.entrypoints.llm import LLM
from minivllm.errors import ConfigError
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
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: name a folder for the picture.")
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
    package = Path(__file__).parents[2]
    if (package.parent / "notebooks").is_dir():
        course = {"make lab": "open the course in JupyterLab, at lesson 00"}
    else:
        course = {f"{_short(minivllm)} course play": "step through the scheduler in your browser, and change it"}
    commands = {
        **course,
        f"{_short(minivllm)} chat": "talk to the model",
        f"{_short(minivllm)} bench offline -h": "compare static and continuous batching on your own workload",
        str(_short(package / "core/scheduler.py")): "read the scheduler that makes the difference",
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


# -- failover --------------------------------------------------------------------------------------------------------

PARAMS = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=48, seed=0, ignore_eos=True)
KILL_AFTER = 16
"""Tokens that each answer has when the replica is killed."""
SEAM = " ┃ "


@dataclass
class _Answer:
    """A growing text, its length when the replica was killed, and when its tokens came."""

    text: str = ""
    seam: int = 0
    times: list[float] = field(default_factory=list)


def demo_failover() -> int:
    """Run the demo. Returns the exit status: 0 if all texts are equal."""
    print("1. Two replicas of SmolLM2-135M start, each in a process of its own", flush=True)
    engine = AsyncLLMEngine.from_engine_args(
        EngineArgs("smollm2-135m", data_parallel_size=2, data_parallel_routing="round-robin", kv_cache_memory_bytes=64 * 2**20),
        restart=True,
    )
    try:
        return asyncio.run(_run(engine))
    finally:
        engine.shutdown()


async def _run(engine: AsyncLLMEngine) -> int:
    print(f"   processes {', '.join(str(status.process_id) for status in engine.replicas.statuses())}\n")
    print("2. Four prompts, undisturbed", flush=True)
    undisturbed = [_Answer() for _ in PROMPTS]
    await _answer_all(engine, undisturbed)
    for prompt, answer in zip(PROMPTS, undisturbed, strict=True):
        print(f"   {prompt!r} → {answer.text!r}")

    victim = 0
    victim_id = engine.replicas.statuses()[victim].process_id
    print(f"\n3. The same prompts again, and when each answer has {KILL_AFTER} tokens, replica {victim} is killed", flush=True)
    disturbed, at_victim, killed = await _answer_all_and_kill(engine, victim, victim_id)
    print(
        f"   kill -9 {victim_id}: it had {len(at_victim)} of the four, which the other replica continues after the mark{SEAM.rstrip()}\n"
    )
    for number, (prompt, answer) in enumerate(zip(PROMPTS, disturbed, strict=True)):
        text = answer.text
        shown = text[: answer.seam] + SEAM + text[answer.seam :] if number in at_victim else text
        print(f"   {prompt!r} → {shown!r}")

    equal = sum(mine.text == theirs.text for mine, theirs in zip(disturbed, undisturbed, strict=True))
    waits = [min(moment for moment in disturbed[number].times if moment > killed) - killed for number in at_victim]
    print(f"\n   texts equal to those of the undisturbed run: {equal} of {len(PROMPTS)}")
    num_lost = engine.metrics.count("num_lost_requests")
    print(f"   from the kill to the next token: {' and '.join(f'{wait:.2f} s' for wait in waits)}; streams lost: {num_lost}")
    print("\n4. Another process is started in its place", flush=True)
    start = time.perf_counter()
    while (status := engine.replicas.statuses()[victim]).state != "ready" and time.perf_counter() - start < 60:
        await asyncio.sleep(0.05)
    print(f"   replica {victim} is {status.state}, as process {status.process_id}")
    print(f"\n{describe_machine()}")
    print(
        "To see it in a browser: minivllm serve --data-parallel-size 3 --allow-kill, and press a button. How it works: docs/failover.md"
    )
    return 0 if equal == len(PROMPTS) and num_lost == 0 else 1


async def _answer_all(engine: AsyncLLMEngine, answers: list[_Answer]) -> None:
    """Generate for all prompts at once."""

    async def one(number: int) -> None:
        async for output in engine.generate(PROMPTS[number], PARAMS, f"{number}"):
            answers[number].text = output.outputs[0].text
            answers[number].times.append(time.perf_counter())

    await asyncio.gather(*(one(number) for number in range(len(PROMPTS))))


async def _answer_all_and_kill(engine: AsyncLLMEngine, victim: int, process_id: int) -> tuple[list[_Answer], list[int], float]:
    """As `_answer_all`, but kill a replica on the way. Returns also which answers were there, and when it was killed."""
    answers = [_Answer() for _ in PROMPTS]
    running = asyncio.create_task(_answer_all(engine, answers))
    while min(len(answer.times) for answer in answers) < KILL_AFTER and not running.done():
        await asyncio.sleep(0.001)
    states = engine.output_processor.states
    at_victim = [number for number in range(len(PROMPTS)) if f"{number}" in states and states[f"{number}"].engine_index == victim]
    killed = time.perf_counter()
    os.kill(process_id, signal.SIGKILL)
    for answer in answers:
        answer.seam = len(answer.text)
    await running
    return answers, at_victim, killed
