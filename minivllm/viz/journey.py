"""Follows one prompt through the engine: which component calls which, how often, and how long each takes itself.

    with follow(llm) as journey:
        llm.generate(...)
    draw_engine_map(seconds=journey.seconds)
    print(journey.describe())

Only while the block runs, the methods through which components call each other are wrapped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from minivllm.errors import ConfigError

if TYPE_CHECKING:
    from minivllm.entrypoints.llm import LLM


@dataclass
class Visit:
    """A call of a component's method.

    Attributes:
        component: A part of the engine's map.
        method: What was called.
        seconds: From call to return, including calls to other components.
        calls: Its calls to other components, in order.
    """

    component: str
    method: str
    seconds: float = 0.0
    calls: list[Visit] = field(default_factory=list)

    @property
    def own_seconds(self) -> float:
        """Seconds without calls to other components."""
        return self.seconds - sum(call.seconds for call in self.calls)


@dataclass
class Journey:
    """All visits, in the order in which they began.

    Attributes:
        visits: The outermost ones, not called by another component.
    """

    visits: list[Visit] = field(default_factory=list)

    def __iter__(self) -> Iterator[Visit]:
        """All visits, including nested ones."""
        waiting = list(reversed(self.visits))
        while waiting:
            visit = waiting.pop()
            yield visit
            waiting += reversed(visit.calls)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that each component took itself."""
        total: dict[str, float] = {}
        for visit in self:
            total[visit.component] = total.get(visit.component, 0.0) + visit.own_seconds
        return total

    def find(self, component: str, method: str) -> list[Visit]:
        """All calls of a component's method."""
        return [visit for visit in self if (visit.component, visit.method) == (component, method)]

    def describe(self, visits: list[Visit] | None = None) -> str:
        """The call tree, indented. Calls of the same kind share a line, with their number and total time.

        Args:
            visits: Where to begin; None for the outermost.
        """
        return "\n".join(_describe(self.visits if visits is None else visits, 0))


def _describe(visits: list[Visit], depth: int) -> Iterator[str]:
    kinds: dict[tuple[str, str], list[Visit]] = {}
    for visit in visits:
        kinds.setdefault((visit.component, visit.method), []).append(visit)
    for (component, method), calls in kinds.items():
        times = f"{len(calls)} × " if len(calls) > 1 else ""
        name = f"{'  ' * depth}{times}{component}.{method}"
        yield f"{name:62}{1000 * sum(visit.seconds for visit in calls):8.2f} ms"
        yield from _describe([call for visit in calls for call in visit.calls], depth + 1)


@contextmanager
def follow(llm: LLM) -> Iterator[Journey]:
    """Record each call from one component of an engine to another.

    Raises:
        ConfigError: The engine's core runs in another process.
    """
    if not hasattr(llm, "llm_engine"):
        raise ConfigError(f"follow needs an LLM, not a {type(llm).__name__}.")
    engine, journey = llm.llm_engine, Journey()
    worker = getattr(engine.executor, "worker", None)
    if worker is None:
        raise ConfigError("There is no worker in this process to follow: make the engine with LLM(...).")
    runner, core = worker.model_runner, engine.core
    components: list[tuple[str, Any, tuple[str, ...]]] = [
        ("LLM", llm, ("generate",)),
        ("LLMEngine", engine, ("add_request", "step")),
        ("InputProcessor", engine.input_processor, ("process_inputs",)),
        ("Tokenizer", engine.tokenizer, ("encode", "decode")),
        ("OutputProcessor", engine.output_processor, ("add_request", "process_outputs")),
        ("InprocClient", engine.engine_core, ("add_request", "get_output", "stop_sequences")),
        ("EngineCore", core, ("add_request", "step", "stop_sequences")),
        ("Scheduler", core.scheduler, ("add_request", "schedule", "update")),
        ("BlockSpaceManager", core.block_manager, ("find_cached_blocks", "can_allocate", "allocate", "can_append_slots", "append_slots", "get_block_table", "cache_full_blocks", "free")),
        ("Executor", engine.executor, ("execute_model",)),
        ("Worker", worker, ("execute_model",)),
        ("CacheEngine", worker.cache_engine, ("swap_out", "swap_in", "copy")),
        ("ModelRunner", runner, ("prepare_inputs", "execute_model")),
        ("Llama", runner.model, ("forward", "compute_logits")),
        ("Sampler", runner.sampler, ("sample",)),
    ]  # fmt: skip
    for module in runner.model.modules():
        backend = getattr(module, "backend", None)
        if backend is not None:
            components.append(("Attention", backend, ("forward",)))
            components.append(
                ("Kernels", backend.ops, ("reshape_and_cache", "paged_decode_attention", "paged_prefill_attention"))
            )
    with ExitStack() as stack:
        open_visits: list[Visit] = []
        for component, owner, methods in components:
            for method in methods if owner is not None else ():
                stack.enter_context(patch.object(owner, method, _recording(journey, open_visits, component, method, owner)))
        yield journey


def _recording(journey: Journey, open_visits: list[Visit], component: str, method: str, owner: Any) -> Callable[..., Any]:
    """The method, recording each call; a component's calls to itself count as part of the current call."""
    original = getattr(owner, method)

    def call(*args: Any, **kwargs: Any) -> Any:
        if open_visits and open_visits[-1].component == component:
            return original(*args, **kwargs)
        visit = Visit(component, method)
        (open_visits[-1].calls if open_visits else journey.visits).append(visit)
        open_visits.append(visit)
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            visit.seconds = time.perf_counter() - start
            open_visits.pop()

    return call
