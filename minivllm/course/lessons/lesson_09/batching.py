"""The checks of lesson 09 for a static batcher: step by step, in the simulated engine, and in the real one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from minivllm.core.scheduler import Scheduler
from minivllm.core.static_batching import StaticBatchScheduler
from minivllm.course.lessons.lesson_07.engine import compare_steps, describe_steps, run_forty
from minivllm.course.observations import expect, fail, rounds, seeded
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.trace import EngineTrace
from minivllm.sampling_params import SamplingParams
from minivllm.simulation.engine import make_simulated_engine

if TYPE_CHECKING:
    from minivllm.entrypoints.llm import LLM


def _check_own(cls: Any) -> None:
    """A batcher is the learner's own, not the package's."""
    if not isinstance(cls, type) or not issubclass(cls, Scheduler) or issubclass(cls, StaticBatchScheduler):
        fail(
            f"Expected: a class of your own that derives from Scheduler\nGot: {cls!r}\nLook at MyStaticBatcher: write its two methods yourself."
        )


def check_static_batcher(cls: Any) -> None:
    """A batch fills the places from the front of the queue; nothing joins it; the next is formed when all have ended."""
    _check_own(cls)
    for number, rng in enumerate(rounds("static", 60)):
        seats = rng.randint(1, 5)
        chunked, tight = number % 3 == 2, number % 5 == 4  # not all members are in every step then
        options: dict[str, Any] = {"max_num_seqs": seats, "block_size": 4, "num_gpu_blocks": 200, "max_model_len": 120}
        if chunked:
            options |= {"enable_chunked_prefill": True, "max_num_batched_tokens": max(8, seats)}
        if tight:
            options |= {"num_gpu_blocks": rng.randint(10, 14), "max_model_len": 40}
        engine = make_simulated_engine(scheduler=cls, **options)
        others = ""
        if number % 4 == 3:  # whose batch must not matter
            other = make_simulated_engine(scheduler=cls, **options)
            add(other, "other", 5, 30)
            other.step()
            others = " Another engine, with a scheduler of its own, is in the middle of a batch."
        waiting: list[str] = []
        batch: set[str] = set()
        did: list[str] = []
        coming = [(f"{chr(97 + i)}", rng.randint(1, 20), rng.randint(1, 9)) for i in range(rng.randint(1, 12))]
        for _ in range(300):
            while coming and (rng.random() < 0.35 or not (batch or waiting)):
                name, prompt_len, output_len = coming.pop(0)
                add(engine, name, prompt_len, output_len)
                waiting.append(name)
                did.append(f"{name} comes")
            if batch and rng.random() < 0.05:
                name = rng.choice(sorted(batch))
                engine.abort_request(name)
                batch.discard(name)
                did.append(f"{name} is aborted")
            if not (batch or waiting or coming):
                break
            if not (batch or waiting):
                continue
            expected = batch if batch else set(waiting[:seats])
            said = f"max_num_seqs={seats}. So far: {', '.join(did) or 'nothing'}. Waiting: {', '.join(waiting) or 'nobody'}; in the batch: {', '.join(sorted(batch)) or 'nobody'}.{others}"
            look = "when a batch is formed (all its members have ended), from which sequences (the first in the queue, up to max_num_seqs), and which may join (its members)"
            try:
                outputs = engine.step()
            except NotImplementedError:
                raise
            except (RuntimeError, AttributeError, TypeError) as error:
                fail(f"{said}\nExpected members of the next step: {sorted(expected)}\nGot: {error!r}\nLook at {look}.")
            trace = engine.trace
            assert trace is not None
            got = {part.request_id for part in trace[-1].scheduled}
            expect(said, "members of the next step", sorted(expected & got if chunked or tight else expected), sorted(got), look)
            if not batch:
                waiting = waiting[len(expected) :]
                did.append(f"{'+'.join(sorted(expected))} begin")
            batch = expected - {output.request_id for output in outputs if output.finished}
            did.extend(f"{name} ends" for name in sorted(expected - batch))
            did = did[-12:]
        look = "`may_join`: a member that was preempted waits again, and must be let in again"
        expect(f"max_num_seqs={seats}, 300 steps.{others}", "unfinished requests", [], sorted(engine.scheduler.requests), look)


def add(engine: LLMEngine, name: str, prompt_len: int, output_len: int) -> None:
    """Add a request of these lengths."""
    engine.add_request(name, [1] * prompt_len, SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True))


RUNS: tuple[dict[str, Any], ...] = (
    {},
    {"num_gpu_blocks": 32, "max_num_seqs": 12},
    {"num_gpu_blocks": 36, "max_num_seqs": 10, "preemption_mode": "swap", "num_cpu_blocks": 40},
    {"num_gpu_blocks": 34, "max_num_seqs": 10, "enable_chunked_prefill": True, "max_num_batched_tokens": 24},
)
"""Engines with too few blocks."""


def run_static(cls: Any, seed: str, options: dict[str, Any]) -> EngineTrace:
    """Run a random workload in a simulated engine."""
    rng, defaults = seeded(seed), {"num_gpu_blocks": 60, "block_size": 4, "max_num_batched_tokens": 160}
    engine = make_simulated_engine(scheduler=cls, max_model_len=120, **defaults | options)
    look = "`may_join`: a member that was preempted waits again, and must be let in again; and at when a batch is over"
    said = f"Forty requests with {options or 'the usual limits'}."
    errors = (RuntimeError, AttributeError, TypeError)
    return run_forty(
        engine, lambda number: add(engine, f"{number}", rng.randint(1, 60), rng.randint(1, 50)), rng, said, look, errors
    )


def check_decisions(cls: Any) -> None:
    """The same steps as the package's `StaticBatchScheduler`."""
    _check_own(cls)
    for number, options in enumerate(RUNS):
        expected, got = (run_static(maker, f"static run {number}", options) for maker in (StaticBatchScheduler, cls))
        said = f"Forty requests with {', '.join(f'{name}={value!r}' for name, value in options.items()) or 'the usual limits'}."
        look = "which sequences are members (also while preempted or swapped out), and when the next batch is formed"
        compare_steps(said, describe_steps(expected), describe_steps(got), look, "when a batch ends")


@contextmanager
def scheduled_by(engine: LLMEngine, cls: Any) -> Iterator[None]:
    """Have an idle engine use another scheduler for a while."""
    before = type(engine.scheduler)
    engine.core.use_scheduler(cls)
    try:
        yield
    finally:
        engine.core.use_scheduler(before)


PROMPTS = (
    "The capital of France is", "Once upon a time", "Water boils when", "1, 2, 3, 4,", "def fibonacci(n):", "Ships float because", "In the beginning",
    "A cat and a dog", "Roses are red,", "To be or not to be,", "The sun rises in the", "Dear Sir or Madam,",
)  # fmt: skip


def check_text(llm: LLM) -> list[str]:
    """The learner's batcher in the real engine writes what continuous batching writes, and really forms batches.

    Args:
        llm: An `LLM` with the learner's batcher.

    Returns:
        The texts.
    """
    engine = llm.llm_engine
    seats = engine.scheduler_config.max_num_seqs
    params = [SamplingParams(temperature=0, max_tokens=2 + 5 * (number % 3), ignore_eos=True) for number in range(len(PROMPTS))]
    if (
        isinstance(engine.scheduler, StaticBatchScheduler)
        or not isinstance(engine.scheduler, Scheduler)
        or type(engine.scheduler) is Scheduler
    ):
        raise ValueError("Create the LLM with your own batcher: scheduler_cls=MyStaticBatcher.")
    texts = []
    for cls in (None, Scheduler):
        with scheduled_by(engine, cls or type(engine.scheduler)):
            trace = engine.start_trace()
            try:
                texts.append([output.outputs[0].text for output in llm.generate(list(PROMPTS), params, use_tqdm=False)])
            finally:
                engine.stop_trace()
        if cls is None:
            firsts = [step for step in trace if step.phase == "prefill"]
            expect(
                "Twelve prompts, all present at the start.",
                "batches",
                -(-len(PROMPTS) // seats),
                len(firsts),
                "when a batch is formed",
            )
    mine, theirs = texts
    for prompt, expected, got in zip(PROMPTS, theirs, mine, strict=True):
        expect(f"Prompt {prompt!r}.", "text", expected, got, "check_decisions first; a batcher must not change the text")
    return mine
