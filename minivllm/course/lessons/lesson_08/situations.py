"""Steps, tokens and texts for the checks of lesson 08: everything random and seeded, nothing that needs a model."""

from __future__ import annotations

import logging
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig
from minivllm.course.observations import fail, seed_of, show
from minivllm.engine.llm_engine import LLMEngine
from minivllm.executor.base import Executor
from minivllm.request import EngineCoreRequest
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler_output import ExecuteModelRequest, SequenceData, SequenceOutput

END = 0
"""The token that ends a text, in these checks."""
_BYTES = {**{i: bytes([96 + i]) for i in range(1, 27)}, 27: b" ", 28: b"\xc3", 29: b"\xa9"}
"""Letters, a space, and a character in two halves."""
VOCAB_SIZE = 30
_MOST_STEPS = 600


def make_sequences(rng: random.Random, block_size: int) -> list[SequenceData]:
    """A ragged step: prompts, chunks of prompts and decodes, with blocks in any order."""
    kinds = rng.choice((("decode",), ("prompt", "chunk", "middle", "decode"), ("prompt",), ("middle",)))
    sequences, blocks = [], rng.sample(range(5000), 4000)
    for number in range(rng.randint(1, 5)):
        kind, length = rng.choice(kinds), rng.randint(1, 30)
        start = {"prompt": 0, "decode": length - 1}.get(kind, rng.randrange(length))
        known = length + (rng.randint(1, 9) if kind == "middle" else 0)
        table = [blocks.pop() for _ in range(-(-known // block_size) + rng.choice((0, 0, 1)))]
        token_ids = [rng.randrange(1000) for _ in range(length - start)]
        params = SamplingParams(temperature=0, max_tokens=50)
        request = EngineCoreRequest(f"r{number}", [1] * known, params, max_num_tokens=known + 50)
        num_samples = 0 if kind == "middle" else 1
        sequences.append(SequenceData(request, number, 0, token_ids, start, table, 0, [], num_samples, 0, kind == "decode"))
    return sequences


def describe(sequences: list[SequenceData], block_size: int) -> str:
    """A step in words."""
    said = f"A step with blocks of {block_size} tokens:"
    for seq in sequences:
        end = seq.num_computed_tokens + seq.num_tokens
        sampled = "a token is sampled" if seq.num_samples else "the prompt continues, so nothing is sampled"
        said += f"\n  {seq.request.request_id}: computes positions {seq.num_computed_tokens} to {end - 1}, block table {seq.block_table}; {sampled}"
    return said


class Letters:
    """A tokenizer of letters, with one character in two halves."""

    skipped_token_ids = frozenset({END})
    eos_token_id = END

    def has(self, token_id: int) -> bool:
        """Whether it is a token's id."""
        return 0 <= token_id < VOCAB_SIZE

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """One token for each letter, and no special ones."""
        return [next((i for i, part in _BYTES.items() if part == c.encode()), 27) for c in text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text; half a character is �."""
        return b"".join(_BYTES.get(token_id, b"") for token_id in token_ids).decode(errors="replace")


@dataclass
class Script(Executor):
    """A stand-in for the model: which token a request gets depends only on its name and on how many it has.

    Attributes:
        seed: Which tokens.
        blocks: How many fit, on the device and in the swap space.
        fails_at: The steps in which it raises the error, counted from 1.
        ends: Whether it may end a text; otherwise each request gets its maximum number of tokens.
    """

    seed: str
    blocks: tuple[int, int]
    fails_at: frozenset[int] = frozenset()
    error: type[BaseException] = RuntimeError
    ends: bool = True
    num_steps: int = 0

    def token(self, request_id: str, position: int) -> int:
        """The token with this number of a request's answer."""
        number = zlib.crc32(f"{self.seed} {request_id} {position}".encode())
        return END if self.ends and number % 23 == 0 else 1 + number // 23 % (VOCAB_SIZE - 1)

    def determine_num_available_blocks(self) -> tuple[int, int]:
        """As it was made with."""
        return self.blocks

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """There is none."""

    def execute_model(self, request: ExecuteModelRequest) -> list[SequenceOutput]:
        """A step, as a worker computes it."""
        self.num_steps += 1
        if self.num_steps in self.fails_at:
            raise self.error("out of memory")
        return [
            SequenceOutput([self.token(seq.request.request_id, seq.num_output_tokens)] if seq.num_samples else [])
            for seq in request.sequences
        ]


MODEL = ModelConfig("letters", Path(), "", {}, 0, 0, 0, 0, VOCAB_SIZE, max_model_len=60, eos_token_ids=(END,))
"""A model that exists only as limits."""


class Crowd:
    """An engine with too few blocks, and requests for it, all drawn from one seed.

    Attributes:
        requests: (id, prompt, sampling parameters).
        joins: How many steps are taken before each is added.
    """

    def __init__(self, seed: str, stop_strings: bool = False) -> None:
        self.seed = seed_of(seed)
        rng = random.Random(self.seed)
        mode, watermark = rng.choice(("swap", "recompute")), rng.choice((0.0, 0.1))
        max_num_seqs, in_chunks = rng.randint(2, 5), rng.random() < 0.5
        budget = rng.randint(6, 16) if in_chunks else 60
        self.cache_config = CacheConfig(block_size=4, watermark=watermark)
        self.scheduler_config = SchedulerConfig(max_num_seqs, budget, enable_chunked_prefill=in_chunks, preemption_mode=mode)
        self.blocks = rng.randint(13, 20), 30 if mode == "swap" else 0
        self.requests = [self._make_request(rng, number, stop_strings) for number in range(8)]
        self.joins = [rng.choice((0, 0, 1, 3)) for _ in self.requests]

    def _make_request(self, rng: random.Random, number: int, stop_strings: bool) -> tuple[str, str, SamplingParams]:
        prompt = "".join(rng.choices("abcdefghij klmnop", k=rng.randint(1, 24)))
        stop = rng.sample(["a", "e", "th", "é", "b"], k=rng.randint(1, 3)) if stop_strings and rng.random() < 0.6 else None
        stop_tokens = rng.sample(range(1, 27), 2) if stop_strings and rng.random() < 0.4 else None
        max_tokens = rng.randint(1, 20)
        if stop_strings and rng.random() < 0.4:  # found in the very step in which the core ends the request
            max_tokens, stop = self._stop_at_the_end(f"r{number}", max_tokens)
        params = SamplingParams(temperature=0, max_tokens=max_tokens, stop=stop, stop_token_ids=stop_tokens, seed=number)
        return f"r{number}", prompt, params

    def _stop_at_the_end(self, request_id: str, max_tokens: int) -> tuple[int, list[str]]:
        """A limit of tokens, and a stop string that the last of them completes: a letter, or half a character, which is given out last."""
        tokens = [self.make_script().token(request_id, i) for i in range(20)]
        if 28 in tokens:
            return tokens.index(28) + 1, ["\ufffd"]
        return max_tokens, [_BYTES.get(tokens[max_tokens - 1], b"a").decode(errors="replace")]

    def make_script(self, **options: Any) -> Script:
        """What stands in for the model; see `Script`."""
        return Script(self.seed, self.blocks, **options)

    def make_engine(self, **options: Any) -> LLMEngine:
        """The package's engine on a script."""
        configs = (MODEL, self.cache_config, self.scheduler_config)
        return LLMEngine.from_executor(*configs, self.make_script(**options), Letters())  # type: ignore[arg-type]

    def run(self, add: Callable[..., None], step: Callable[[], Any], has_unfinished: Callable[[], bool]) -> Iterator[Any]:
        """Add the requests as time goes by, and give what each step returns, until all have finished."""
        for request, wait in zip(self.requests, self.joins, strict=True):
            for _ in range(wait):
                if has_unfinished():
                    yield step()
            add(*request)
        for _ in range(_MOST_STEPS):
            if has_unfinished():
                yield step()

    def describe(self) -> str:
        """The crowd in words."""
        config = self.scheduler_config
        return (
            f"{len(self.requests)} requests, max_num_seqs={config.max_num_seqs}, {self.blocks[0]} blocks of {self.cache_config.block_size} tokens, "
            f"{'with' if config.enable_chunked_prefill else 'without'} chunked prefill, preemption by {config.preemption_mode}."
        )


def expect_list(said: str, kind: type, got: Any) -> None:
    """Raise an AssertionError unless this is a list of these objects."""
    if not isinstance(got, list) or not all(isinstance(item, kind) for item in got):
        fail(f"{said}\nExpected: a list of {kind.__name__}\nGot: {show(got)}")


quiet = patch.object(logging.getLogger("minivllm.engine.engine_core"), "disabled", True)
"""Silences the package's log of failed steps: here they are intended."""
