"""The last checks of lesson 06: a learner's attention backend by itself, and in every layer of the engine."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch

from minivllm.course.lessons.lesson_05.launches import explained, refuse_problems
from minivllm.course.lessons.lesson_06.situations import PagedCase, compare, interpreted, make_case
from minivllm.layers.attention import AttentionBackend, AttentionMetadata

if TYPE_CHECKING:
    from minivllm.entrypoints.llm import LLM

_ROUNDS = 20
_BLOCK_SIZE = 16  # `tl.dot` on a GPU adds up at least 16 numbers
_BEGINNING = "Here is a question that a great many people have asked before you, and here is"  # 17 tokens: a block and one more
_PROMPTS = (
    f"{_BEGINNING} what is the capital",
    "Once upon a time, there was a king who had three daughters, and",
    f"{_BEGINNING} why the sea is salty: the",
)
_NUM_TOKENS = 4
_FEW_LAYERS = 4
WAYS: dict[str, dict[str, Any]] = {
    "all in one batch": {},
    "prompts in chunks of 17 tokens, prefixes from the cache, and so few blocks that a request is preempted": {
        "enable_chunked_prefill": True, "max_num_batched_tokens": 17, "max_num_seqs": 3, "enable_prefix_caching": True, "num_gpu_blocks_override": 4,
    },
}  # fmt: skip
"""By description, the options of an engine in which a backend must write the same text as in any other."""


def make_metadata(case: PagedCase, decode: bool) -> AttentionMetadata:
    """What the engine passes to a backend for this step: the slots of the new tokens, -1 for padding, and the tables."""
    block_size = case.key_cache.shape[1]
    slots = []
    for table, context_len, count in zip(case.block_tables.tolist(), case.context_lens.tolist(), case.num_new, strict=True):
        positions = range(context_len - count, context_len)
        slots += [
            table[position // block_size] * block_size + position % block_size if context_len else -1 for position in positions
        ]
    slots += [-1] * (len(case.query) - len(slots))
    return AttentionMetadata(decode, torch.tensor(slots), case.block_tables, case.context_lens, case.query_start_loc)


def split_new(case: PagedCase, metadata: AttentionMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the keys and values of the new tokens out of the cache, which has NaN there afterwards."""
    new = []
    for cache in (case.key_cache, case.value_cache):
        flat, real = cache.flatten(0, 1), metadata.slot_mapping >= 0
        taken = torch.zeros(len(case.query), *cache.shape[2:], dtype=cache.dtype)
        taken[real] = flat[metadata.slot_mapping[real]].clone()
        flat[metadata.slot_mapping[real]] = torch.nan
        new.append(taken)
    return new[0], new[1]


def make_backend(cls: type[AttentionBackend], case: PagedCase) -> AttentionBackend:
    """The backend for a case's heads."""
    return cls(case.query.shape[1], case.key_cache.shape[2], case.query.shape[2], case.scale)


def make_forward_case(rng: random.Random) -> tuple[PagedCase, bool]:
    """A step, and whether it is a pure decode."""
    decode, dtype = rng.random() < 0.5, torch.float16 if rng.random() < 0.3 else torch.float32
    sizes = (128,) if rng.random() < 0.2 else (1, 2, 4, 8)
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    long = rng.random() < 0.25  # several parts
    lengths = ((rng.randint(65, 150), 1), (rng.randint(1, 9), 1)) if long and decode else ()
    return make_case(rng, generator, dtype, decode, (8,) if lengths else sizes, lengths), decode


def check_forward(cls: Any) -> None:
    """A layer's call: the new keys and values are written first, then every token attends."""
    assert isinstance(cls, type) and issubclass(cls, AttentionBackend), f"Expected a subclass of AttentionBackend\nGot: {cls!r}"
    for seed in range(_ROUNDS):
        case, decode = make_forward_case(random.Random(f"forward {seed}"))
        expected, caches = case.attend(), (case.key_cache.clone(), case.value_cache.clone())
        metadata = make_metadata(case, decode)
        key, value = split_new(case, metadata)
        call = f"forward with is_decode={decode}. {case.describe(decode)}"
        query = case.query.clone()
        with explained(call, cls.forward), interpreted() as launches:
            output = make_backend(cls, case).forward(case.query, key, value, (case.key_cache, case.value_cache), metadata)
        for launch in launches:
            refuse_problems(call, launch.kernel, launch)
        assert torch.equal(query, case.query), f"{call}\nforward changed the query, which it must only read."
        for name, got, wanted in zip(("key_cache", "value_cache"), (case.key_cache, case.value_cache), caches, strict=True):
            assert torch.equal(got.nan_to_num(7e7), wanted.nan_to_num(7e7)), (
                f"{call}\nAfter forward, {name} is wrong: it must hold the new keys and values in their slots, and everything else unchanged."
            )
        assert isinstance(output, torch.Tensor), f"{call}\nExpected a tensor\nGot: {output!r}"
        assert output.dtype == case.query.dtype, f"{call}\nExpected dtype: {case.query.dtype}\nGot dtype: {output.dtype}"
        look = "the order (write, then attend), which kernel a step needs (metadata.is_decode), and self.scale"
        compare(call, "output", output, expected, ("token", "head", "channel"), look)


def _load(backend: type | None = None, num_layers: int | None = None, **options: Any) -> LLM:
    from minivllm import LLM

    chosen = {} if backend is None else {"attention_backend": backend}
    limits = {
        "max_model_len": 64,
        "block_size": _BLOCK_SIZE,
        "num_gpu_blocks_override": 16,
        "enforce_eager": True,
        "dtype": "float32",
    }
    llm = LLM("smollm2-135m", **{**limits, **chosen, **options})
    if num_layers is not None:
        worker = llm.llm_engine.executor.worker
        del worker.model_runner.model.model.layers[num_layers:], worker.cache_engine.gpu_cache[num_layers:]
    return llm


def write_tokens(backend: type | None = None, num_layers: int | None = None, **options: Any) -> list[list[int]]:
    """The tokens that an engine writes, with a learner's backend or the package's, with all of the model's layers or the first few."""
    from minivllm import SamplingParams

    llm = _load(backend, num_layers, **options)
    params = SamplingParams(temperature=0, max_tokens=_NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate(list(_PROMPTS), params, use_tqdm=False)
    error = next((output.error for output in outputs if output.error), None)
    assert error is None, f"The engine runs on your backend, and a step failed: {error}"
    return [list(output.outputs[0].token_ids) for output in outputs]


def check_engine(cls: Any, kernel: Any) -> None:
    """The engine writes the same with a learner's backend: batched, in chunks, from cached prefixes, and preempted.

    Args:
        cls: The backend.
        kernel: One of its kernels. If it is interpreted, the model has only its first layers, so that it takes seconds, not minutes.
    """
    check_forward(cls)  # which reports a kernel's error better
    num_layers = _FEW_LAYERS if type(kernel).__name__ == "InterpretedFunction" else None
    expected = write_tokens(None, num_layers)
    for way, options in WAYS.items():
        got = write_tokens(cls, num_layers, **options)
        for prompt, theirs, mine in zip(_PROMPTS, expected, got, strict=True):
            assert theirs == mine, (
                f"SmolLM2 on your backend, {way}: {prompt!r}, greedy.\nExpected tokens: {theirs}\nGot tokens: {mine}"
            )


def write_with(cls: Any, prompt: str, max_tokens: int) -> str:
    """The text that the model writes on a learner's backend."""
    from minivllm import SamplingParams

    check_forward(cls)  # a kernel with an out-of-bounds read would end the notebook

    [output] = _load(cls).generate([prompt], SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)
    assert output.error is None, f"The engine runs on your backend, and a step failed: {output.error}"
    return output.outputs[0].text
