"""The checks of lesson 09 for a static batcher: step by step, in the simulated engine, and in the real one."""

from __future__ import annotations

import random
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

_ERRORS = (RuntimeError, AttributeError, TypeError)
"""What a step may raise because of a mistake in a batcher."""
_MEMBERS = "when a batch is formed (all its members have ended), from which sequences (the first in the queue, up to max_num_seqs), and which may join (its members, also one that was preempted)"


def _check_own(cls: Any) -> None:
    """A batcher is the learner's own, not the package's."""
    if not isinstance(cls, type) or not issubclass(cls, Scheduler) or issubclass(cls, StaticBatchScheduler) or cls is Scheduler:
        look = "MyStaticBatcher: write its two methods yourself"
        fail(f"Expected: a class of your own that derives from Scheduler\nGot: {cls!r}\nLook at {look}.")


def add(engine: LLMEngine, name: str, prompt_len: int, output_len: int) -> None:
    """Add a request of these lengths."""
    engine.add_request(name, [1] * prompt_len, SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True))


class Rivals:
    """Two simulated engines that get the same requests: one with the package's static batcher, one with the learner's."""

    def __init__(self, cls: Any, rng: random.Random, number: int) -> None:
        self.seats = rng.randint(1, 5)
        options: dict[str, Any] = {"max_num_seqs": self.seats, "block_size": 4, "num_gpu_blocks": 200, "max_model_len": 120}
        if number % 3 == 2:  # not all members are in every step then, nor in a tight one
            options |= {"enable_chunked_prefill": True, "max_num_batched_tokens": max(8, self.seats)}
        if number % 5 == 4:
            options |= {"num_gpu_blocks": rng.randint(10, 14), "max_model_len": 40}
        self.engines = [make_simulated_engine(scheduler=maker, **options) for maker in (StaticBatchScheduler, cls)]
        self.others = ""
        if number % 4 == 3:  # whose batch must not matter
            other = make_simulated_engine(scheduler=cls, **options)
            add(other, "other", 5, 30)
            other.step()
            self.others = " Another engine, with a scheduler of its own, is in the middle of a batch."
        self.waiting: list[str] = []
        self.batch: list[str] = []
        self.did: list[str] = []

    def add(self, name: str, prompt_len: int, output_len: int) -> None:
        """A request comes."""
        for engine in self.engines:
            add(engine, name, prompt_len, output_len)
        self.waiting.append(name)
        self.did.append(f"{name} comes")

    def abort(self, name: str) -> None:
        """A member is aborted."""
        for engine in self.engines:
            engine.abort_request(name)
        self.batch.remove(name)
        self.did.append(f"{name} is aborted")

    def step(self) -> None:
        """Take a step in both, and compare which members are in it."""
        situation = f"So far: {', '.join(self.did[-12:])}. Waiting: {', '.join(self.waiting) or 'nobody'}; in the batch: {', '.join(self.batch) or 'nobody'}."
        said, members = f"max_num_seqs={self.seats}. {situation}{self.others}", []
        for engine in self.engines:
            try:
                outputs = engine.step()
            except NotImplementedError:
                raise
            except _ERRORS as error:
                fail(f"{said}\nExpected members of the next step: {', '.join(members[0])}\nGot: {error!r}\nLook at {_MEMBERS}.")
            assert engine.trace is not None
            members.append(sorted(part.request_id for part in engine.trace[-1].scheduled))
        expect(said, "members of the next step", *members, _MEMBERS)
        if not self.batch:
            self.batch, self.waiting = self.waiting[: self.seats], self.waiting[self.seats :]
            self.did.append(f"{'+'.join(self.batch)} begin")
        ended = [output.request_id for output in outputs if output.finished]
        self.batch = [name for name in self.batch if name not in ended]
        self.did.extend(f"{name} ends" for name in ended)


def check_static_batcher(cls: Any) -> None:
    """A batch fills the places from the front of the queue; nothing joins it; the next is formed when all have ended."""
    _check_own(cls)
    for number, rng in enumerate(rounds("static", 60)):
        rivals = Rivals(cls, rng, number)
        coming = [(chr(97 + i), rng.randint(1, 20), rng.randint(1, 9)) for i in range(rng.randint(1, 12))]
        while coming or rivals.waiting or rivals.batch:
            while coming and (rng.random() < 0.35 or not (rivals.waiting or rivals.batch)):
                rivals.add(*coming.pop(0))
            if rivals.batch and rng.random() < 0.05:
                rivals.abort(rng.choice(rivals.batch))
            if rivals.waiting or rivals.batch:
                rivals.step()


RUNS: tuple[dict[str, Any], ...] = (
    {},
    {"num_gpu_blocks": 32, "max_num_seqs": 12},
    {"num_gpu_blocks": 36, "max_num_seqs": 10, "preemption_mode": "swap", "num_cpu_blocks": 40},
    {"num_gpu_blocks": 34, "max_num_seqs": 10, "enable_chunked_prefill": True, "max_num_batched_tokens": 24},
)
"""Engines with too few blocks."""


def run_static(cls: Any, seed: str, options: dict[str, Any], said: str) -> EngineTrace:
    """Run a random workload in a simulated engine."""
    rng, defaults = seeded(seed), {"num_gpu_blocks": 60, "block_size": 4, "max_num_batched_tokens": 160}
    engine = make_simulated_engine(scheduler=cls, max_model_len=120, **defaults | options)
    look = "`may_join`: a member that was preempted waits again, and must be let in again; and at when a batch is over"
    return run_forty(
        engine, lambda number: add(engine, f"{number}", rng.randint(1, 60), rng.randint(1, 50)), rng, said, look, _ERRORS
    )


def check_decisions(cls: Any) -> None:
    """The same steps as the package's `StaticBatchScheduler`."""
    _check_own(cls)
    look = "which sequences are members (also while preempted or swapped out), and when the next batch is formed"
    for number, options in enumerate(RUNS):
        said = f"Forty requests with {', '.join(f'{name}={value!r}' for name, value in options.items()) or 'the usual limits'}."
        expected, got = (run_static(maker, f"static run {number}", options, said) for maker in (StaticBatchScheduler, cls))
        compare_steps(said, describe_steps(expected), describe_steps(got), look, "when a batch ends")


PROMPTS = (
    "The capital of France is", "Once upon a time", "Water boils when", "1, 2, 3, 4,", "def fibonacci(n):", "Ships float because", "In the beginning",
    "A cat and a dog", "Roses are red,", "To be or not to be,", "The sun rises in the", "Dear Sir or Madam,",
)  # fmt: skip


def check_text(llm: LLM) -> list[str]:
    """An engine with the learner's batcher writes what one with continuous batching writes, and really forms batches. Returns the texts."""
    engine, cls = llm.llm_engine, type(llm.llm_engine.scheduler)
    _check_own(cls)
    params = [SamplingParams(temperature=0, max_tokens=2 + 5 * (number % 3), ignore_eos=True) for number in range(len(PROMPTS))]
    runs = []
    try:
        for scheduler in (Scheduler, cls):
            engine.core.use_scheduler(scheduler)
            trace = engine.start_trace()
            runs.append([output.outputs[0].text for output in llm.generate(list(PROMPTS), params, use_tqdm=False)])
    finally:
        engine.stop_trace()
        engine.core.use_scheduler(cls)
    num_batches, num_formed = (
        -(-len(PROMPTS) // engine.scheduler_config.max_num_seqs),
        sum(step.phase == "prefill" for step in trace),
    )
    expect("Twelve prompts, all present at the start.", "batches", num_batches, num_formed, "when a batch is formed")
    for prompt, expected, got in zip(PROMPTS, *runs, strict=True):
        expect(f"Prompt {prompt!r}.", "text", expected, got, "check_decisions first; a batcher must not change the text")
    return runs[1]
