"""The whole engine of a learner, on the real model: it must write what the package writes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from minivllm.config import CacheConfig, EngineArgs, SchedulerConfig
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.course.lessons.assembly import Device
from minivllm.course.lessons.lesson_08.inputs import EchoModel
from minivllm.course.lessons.lesson_08.situations import MODEL, Letters
from minivllm.course.lessons.lesson_08.start_up import MadeUpDevice, make_device
from minivllm.course.observations import expect, rounds, see, seeded
from minivllm.course.parts import SOURCES, EngineParts
from minivllm.course.results import passed_checks
from minivllm.engine.detokenizer import IncrementalDetokenizer
from minivllm.engine.engine_config import EngineConfig
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler_output import SchedulerOutput
from minivllm.worker.sampler import Sampler

OPTIONS: dict[str, Any] = {
    "max_num_seqs": 4, "max_model_len": 96, "max_num_batched_tokens": 96, "dtype": "float32", "preemption_mode": "swap", "swap_space": 0.05,
    "enforce_eager": True,
}  # fmt: skip
NUM_BLOCKS = 7
"""So few that sequences must be swapped out in the middle of a sentence."""
_BYTES_PER_TOKEN, _BYTES_PER_SEQ = 100_000, 1_000_000
REQUESTS = (
    ("The capital of France is", SamplingParams(temperature=0, max_tokens=24)),
    ("Once upon a time, in a house by the sea,", SamplingParams(temperature=0, max_tokens=24)),
    ("My favourite colour is", SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=24)),
    ("1, 2, 3, 4,", SamplingParams(temperature=0, stop=["12"], max_tokens=24)),
    ("Ships float because", SamplingParams(temperature=0.9, top_k=40, seed=2, max_tokens=24)),
)


class CountedDevice(Device):
    """The real device, except that a step's memory is a formula: exactly `num_blocks` blocks fit, on every machine."""

    def __init__(self, config: EngineConfig, parts: EngineParts, num_blocks: int) -> None:
        super().__init__(config, parts, 0)
        self._config, self._num_blocks = config, num_blocks

    def load_model(self) -> None:
        """Load the model; from then on the amount of memory is known."""
        super().load_model()
        limits, cache = self._config.scheduler_config, self._config.cache_config
        step = self._measure(limits.max_num_batched_tokens, limits.max_num_seqs)
        self.total_bytes = int(
            (self.used_bytes + step + (self._num_blocks + 0.5) * self.block_bytes) / cache.gpu_memory_utilization
        )

    def _measure(self, num_tokens: int, num_seqs: int) -> int:
        return num_tokens * _BYTES_PER_TOKEN + num_seqs * _BYTES_PER_SEQ


_CHECKS_OF_COMPONENTS = {
    "LLM": ("answers come in the order of the prompts, and nothing is left behind",),
    "LLMEngine": ("a refused request leaves no trace", "tokens become text, and both sides notice the end"),
    "EngineCore": (
        "every new token is reported, and finished requests are gone",
        "a failed step ends its own requests and no others",
    ),
    "Worker": ("load, measure, and give the cache the rest", "blocks move before the model runs"),
    "ModelRunner": ("prompts, chunks and decodes lie in the same tensors", "one token for each sequence that needs one"),
}


def built_components() -> list[str]:
    """The components on the engine's map that a learner has built in this exercise: all their checks have passed in this kernel."""
    passed = passed_checks()
    return [component for component, names in _CHECKS_OF_COMPONENTS.items() if passed.issuperset(names)]


Assemble = Callable[[EngineParts, Device, EngineConfig], Any]
"""Makes the engine from its parts."""
Requests = Sequence[tuple[str, SamplingParams]]
"""Prompts, and how to continue each."""


def write(
    assemble: Assemble, parts: EngineParts, requests: Requests = REQUESTS, num_blocks: int = NUM_BLOCKS, **options: Any
) -> list[str]:
    """The texts that a learner's engine writes, with `num_blocks` blocks and, perhaps, other `EngineArgs` than `OPTIONS`."""
    config = EngineConfig.from_engine_args(EngineArgs(**OPTIONS | options))
    return _texts(assemble(parts, CountedDevice(config, parts, num_blocks), config), requests)


def write_with_package(requests: Requests = REQUESTS, num_blocks: int = NUM_BLOCKS, **options: Any) -> list[str]:
    """The texts that the package's engine writes."""
    from minivllm import LLM

    return _texts(LLM(**OPTIONS | options, num_gpu_blocks_override=num_blocks), requests, use_tqdm=False)


def _texts(llm: Any, requests: Requests, **options: Any) -> list[str]:
    outputs = llm.generate(*map(list, zip(*requests, strict=True)), **options)
    error = next((output.error for output in outputs if output.error), None)
    assert error is None, f"The engine runs, and a step failed: {error}"
    return [output.outputs[0].text for output in outputs]


class BenchScheduler(Scheduler):
    """Raises a RuntimeError when polled endlessly by an engine that never learns that all requests have finished."""

    num_steps = 0

    def schedule(self) -> SchedulerOutput:
        """As `Scheduler.schedule`."""
        self.num_steps += 1
        if self.num_steps > 2000:
            raise RuntimeError("The engine takes step after step and never ends.")
        return super().schedule()


def _rename(cls: type) -> type:
    """A class of the package by another name: that shows where it is used."""
    return type(f"Bench{cls.__name__}", (cls,), {})


BENCH_PARTS = EngineParts(
    _rename(Sampler), _rename(IncrementalDetokenizer), EchoModel, _rename(BlockSpaceManager), object, BenchScheduler
)


def make_bench(rng: random.Random) -> tuple[MadeUpDevice, Any]:
    """A device, and the configuration of an engine for it: few blocks, and some to swap to."""
    limits = SchedulerConfig(rng.randint(2, 5), 60, preemption_mode="swap")
    cache = CacheConfig(block_size=MadeUpDevice.block_size, swap_space_bytes=10**6)
    device = make_device(rng, cache, limits, rng.randint(16, 20))
    config = SimpleNamespace(model_config=MODEL, cache_config=cache, scheduler_config=limits, load_tokenizer=Letters)
    return device, config


def check_parts(assemble: Assemble) -> None:
    """An engine on a device that only counts: the right parts with the right numbers, and what it writes."""
    device, config = make_bench(seeded("parts"))
    num_blocks = device.fitting_blocks(config.cache_config, config.scheduler_config)
    said = f"assemble with a device on which {num_blocks[0]} blocks of {device.block_size} tokens fit, and {num_blocks[1]} in the swap space."
    llm = assemble(BENCH_PARTS, device, config)
    for what, expected, got, look in _list_parts(llm.engine, device, config):
        expect(said, what, expected, got, look)
    device.model.fails = True
    try:
        error = "an error" if llm.generate(["abc"], [SamplingParams(temperature=0, max_tokens=3)])[0].error else "no error"
    except RuntimeError:
        error = "the RuntimeError came out of generate"
    look = "which core you built: MyEngineCore, which continues when a step fails"
    expect(f"{said} Then the model raises a RuntimeError in a step.", "in the output", "an error", error, look)
    for rng in rounds("bench", 4):
        device, config = make_bench(rng)
        prompts = ["".join(rng.choices("abcdef gh", k=rng.randint(1, 20))) for _ in range(6)]
        params = [SamplingParams(temperature=rng.choice((0.0, 1.0)), max_tokens=rng.randint(1, 20), seed=i) for i in range(6)]
        for output in assemble(BENCH_PARTS, device, config).generate(prompts, params):
            see([output.prompt_token_ids, output.outputs[0].text, output.outputs[0].token_ids])
        see([device.cache.did, device.model.num_rows])


def _list_parts(engine: Any, device: MadeUpDevice, config: Any) -> Iterable[tuple[str, Any, Any, str]]:
    """What is looked at in an engine: its name, the right value, the learner's, and where to look."""
    num_gpu_blocks, num_cpu_blocks = device.fitting_blocks(config.cache_config, config.scheduler_config)
    core, block_size = engine.core, device.block_size
    manager, start_up = core.scheduler.block_manager, ["load_model", f"allocate_cache({num_gpu_blocks}, {num_cpu_blocks})"]
    return (
        ("device's calls", start_up, [call for call in device.did if call.startswith(("load", "allocate"))], "start_up, once"),
        ("sampler", "BenchSampler", type(core.worker.runner.sampler).__name__, "parts.sampler_cls, which goes to the runner"),
        ("scheduler", "BenchScheduler", type(core.scheduler).__name__, "parts.scheduler_cls"),
        ("block manager", "BenchBlockSpaceManager", type(manager).__name__, "parts.block_space_manager_cls"),
        ("detokenizer_cls", "BenchIncrementalDetokenizer", engine.detokenizer_cls.__name__, "parts.detokenizer_cls, which goes to the frontend"),
        ("scheduler's config", config.scheduler_config, core.scheduler.config, "the first argument of the scheduler"),
        ("block manager's block_size", block_size, manager.block_size, "the first argument of the block manager"),
        ("block manager's num_gpu_blocks", num_gpu_blocks, manager.num_gpu_blocks, "what start_up returns"),
        ("block manager's num_cpu_blocks", num_cpu_blocks, manager.num_cpu_blocks, "what start_up returns; without them nothing can be swapped out"),
        ("cache_tokens", num_gpu_blocks * block_size, engine.input_processor.cache_tokens, "the last argument of the InputProcessor: blocks times tokens of a block"),
    )  # fmt: skip


def check_text(assemble: Assemble, parts: EngineParts) -> list[str]:
    """An engine of these parts writes what the package's writes, with so few blocks that sequences are swapped out.

    Returns:
        The prompts, continued.
    """
    expected = write_with_package()
    try:
        got = write(assemble, parts)
    except Exception as error:
        blamed = _find_culprit(assemble, parts, expected)
        if blamed is None:
            raise
        raise AssertionError(f"The engine raised {type(error).__name__}: {error}\n{blamed}") from error
    for (prompt, _), wanted, text in zip(REQUESTS, expected, got, strict=True):
        assert text == wanted, (
            f"{prompt!r} on the real model, {NUM_BLOCKS} blocks, preemption by swap.\nExpected text: {wanted!r}\nGot text: {text!r}\n"
            f"{_find_culprit(assemble, parts, expected) or 'With the package’s parts in place of yours it is no better: look at what you assemble.'}"
        )
    return [prompt + text for (prompt, _), text in zip(REQUESTS, got, strict=True)]


def _find_culprit(assemble: Assemble, parts: EngineParts, expected: list[str]) -> str | None:
    """Which of the learner's parts is at fault: the one whose replacement makes the text right."""

    def is_right_without(names: Sequence[str]) -> bool:
        try:
            return write(assemble, parts.with_packages(names)) == expected
        except Exception:
            return False

    for name in parts.mine:
        if is_right_without([name]):
            source = SOURCES[name]
            return f"With the package's {source.load().__name__} in place of yours it is right: look at {source.name}, lesson {source.lesson}."
    if len(parts.mine) > 1 and is_right_without(parts.mine):
        names = ", ".join(SOURCES[name].name for name in parts.mine)
        return f"With the package's parts in place of all of yours it is right, so more than one of them is wrong: {names}."
    return None
