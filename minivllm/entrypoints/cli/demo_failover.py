"""`minivllm demo failover`: a replica is killed in the middle of its answers, and another continues them, byte for byte."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass, field

from minivllm.bench.report import describe_machine
from minivllm.config import EngineArgs
from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.entrypoints.cli.demo import PROMPTS
from minivllm.sampling_params import SamplingParams

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
    undisturbed = await _answer_all(engine)
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


async def _answer_all(engine: AsyncLLMEngine, answers: list[_Answer] | None = None) -> list[_Answer]:
    """Generate for all prompts at once."""
    answers = [_Answer() for _ in PROMPTS] if answers is None else answers

    async def one(number: int) -> None:
        async for output in engine.generate(PROMPTS[number], PARAMS, f"{number}"):
            answers[number].text = output.outputs[0].text
            answers[number].times.append(time.perf_counter())

    await asyncio.gather(*(one(number) for number in range(len(PROMPTS))))
    return answers


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
