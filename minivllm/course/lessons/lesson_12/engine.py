"""The summit of lesson 12: an engine of a learner's layers, executor and sums, on real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minivllm.config import EngineArgs
from minivllm.course.lessons.rank_processes import ProcessRing, RankProcesses, WorkerLink
from minivllm.course.observations import expect
from minivllm.distributed.parallel_state import GroupCoordinator
from minivllm.engine.engine_config import EngineConfig
from minivllm.engine.llm_engine import LLMEngine
from minivllm.sampling_params import SamplingParams
from minivllm.worker.worker import Worker

OPTIONS: dict[str, Any] = {
    "max_num_seqs": 4, "max_model_len": 128, "max_num_batched_tokens": 128, "dtype": "float32", "enforce_eager": True,
    "attention_backend": "torch", "kv_cache_memory_bytes": 2**24,
}  # fmt: skip
REQUESTS = (
    ("The capital of France is", SamplingParams(temperature=0, max_tokens=16)),
    ("Once upon a time, in a house by the sea,", SamplingParams(temperature=0, max_tokens=16)),
    ("My favourite colour is", SamplingParams(temperature=0.8, seed=1, max_tokens=16)),
    ("Ships float because", SamplingParams(temperature=0.9, top_k=40, seed=2, max_tokens=16)),
)
"""Greedy, drawn by each rank from its part, and drawn by rank 0 from all logits, because of the filter."""


STACKS = {
    "q_proj": ("qkv_proj", 3), "k_proj": ("qkv_proj", 3), "v_proj": ("qkv_proj", 3), "gate_proj": ("gate_up_proj", 2), "up_proj": ("gate_up_proj", 2),
}  # fmt: skip
"""Weights of a checkpoint to the stack that they belong to, in this order, and how many these are."""


def stacked(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Layers' names and their weights, whole, in float32; those that read the same input as one stack."""
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        parent, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind not in STACKS:
            yield name.removesuffix(".weight"), tensor.float()
            continue
        stack, size = STACKS[kind]
        found = waiting.setdefault(f"{parent}.{stack}", {})
        found[kind] = tensor.float()
        if len(found) == size:
            yield f"{parent}.{stack}", torch.cat([found[kind] for kind in STACKS if kind in found])
            del waiting[f"{parent}.{stack}"]


@dataclass(frozen=True)
class Parts:
    """What a learner has built.

    Attributes:
        model_cls: A model of layers that know their rank.
        executor_cls, serve: The two sides of the links.
        all_reduce, all_gather: In a ring.
    """

    model_cls: type
    executor_cls: type
    serve: Callable[[Any, Any], None]
    all_reduce: Callable[[Tensor, Any], Tensor]
    all_gather: Callable[[list[Tensor], int, Any], None]


class RingGroup(GroupCoordinator):
    """The group operations that layers call, made of a learner's functions over a ring of channels."""

    def __init__(self, ring: Any, parts: Parts) -> None:
        super().__init__(ring.rank, ring.world_size)
        self.ring, self._parts = ring, parts

    def _all_reduce(self, x: Tensor) -> None:
        whole = x if x.is_contiguous() else x.contiguous()
        self._parts.all_reduce(whole, self.ring)
        if whole is not x:
            x.copy_(whole)

    def _gather(self, x: Tensor, sizes: Sequence[int], dst: int | None) -> list[Tensor]:
        chunks = [x.reshape(-1).clone() if rank == self.rank else x.new_empty(size) for rank, size in enumerate(sizes)]
        self._parts.all_gather(chunks, self.rank, self.ring)
        return chunks

    def _broadcast(self, x: Tensor, src: int) -> None:
        raise NotImplementedError("No layer of this lesson broadcasts.")


class RankWorker:
    """The package's worker with a learner's model and group. It is made when `start` is called, so that what goes wrong is an answer."""

    def __init__(self, ring: ProcessRing, config: EngineConfig, parts: Parts) -> None:
        self._ring, self._config, self._parts = ring, config, parts

    def start(self) -> None:
        """Load this rank's part of the model."""
        config = self._config
        model_config = replace(config.model_config, model_cls=self._parts.model_cls)
        configs = (model_config, config.cache_config, config.scheduler_config, config.worker_config)
        self._worker = Worker(*configs, RingGroup(self._ring, self._parts))
        self._worker.load_model()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._worker, name)


def write(parts: Parts, world_size: int, options: dict[str, Any] | None = None) -> list[list[int]]:
    """The tokens that a learner's engine writes on so many processes."""
    config = EngineConfig.from_engine_args(EngineArgs(**OPTIONS | (options or {})))

    def run(ring: ProcessRing, link: WorkerLink, memory: int) -> None:
        parts.serve(RankWorker(ring, config, parts), link)

    with RankProcesses(world_size, run) as processes:
        executor = parts.executor_cls(processes)
        executor.call("start")
        configs = (config.model_config, config.cache_config, config.scheduler_config)
        engine = LLMEngine.from_executor(*configs, executor, config.load_tokenizer())
        return _generate(engine)


def write_with_package(options: dict[str, Any] | None = None) -> list[list[int]]:
    """The tokens that the package's engine writes, with one worker in this process."""
    return _generate(LLMEngine.from_engine_args(EngineArgs(**OPTIONS | (options or {}))))


def _generate(engine: LLMEngine) -> list[list[int]]:
    for number, (prompt, params) in enumerate(REQUESTS):
        engine.add_request(str(number), prompt, params)
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            expect(
                f"Request {output.request_id}: {REQUESTS[int(output.request_id)][0]!r}.",
                "error",
                None,
                output.error,
                "the part that the error names, and its check above",
            )
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    return [tokens[str(number)] for number in range(len(REQUESTS))]


def check_real(parts: Parts, sizes: Sequence[int] = (2, 3), options: dict[str, Any] | None = None) -> list[str]:
    """The engine on real processes: the tokens of one worker.

    Returns:
        A line for each number of processes.
    """
    lines, expected = [], write_with_package(options)
    for world_size in sizes:
        got = write(parts, world_size, options)
        for (prompt, _), right, mine in zip(REQUESTS, expected, got, strict=True):
            said = f"The prompt {prompt!r} on {world_size} processes."
            expect(said, "tokens", right, mine, "the checks above, each of which looks at one part")
        lines.append(f"{world_size} processes: {sum(map(len, got))} tokens, those of one")
    return lines
