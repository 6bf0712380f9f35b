"""The last checks of lesson 06: a learner's attention backend by itself, and in every layer of the engine."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch

from minivllm.course.lessons.lesson_05.launches import explained, refuse_problems
from minivllm.course.lessons.lesson_06.situations import PagedCase, check_unchanged, compare, interpreted, make_case
from minivllm.course.lessons.tensors import see_tensor
from minivllm.course.observations import expect, fail, is_recording, require, rounds
from minivllm.layers.attention import AttentionBackend, AttentionMetadata

if TYPE_CHECKING:
    from minivllm.entrypoints.llm import LLM

_BLOCK_SIZE = 16  # `tl.dot` on a GPU adds up at least 16 numbers
_BEGINNING = "Here is a question that a great many people have asked before you, and here is"  # 17 tokens: a block and one more
_PROMPTS = (
    f"{_BEGINNING} what is the capital",
    "Once upon a time, there was a king who had three daughters, and",
    f"{_BEGINNING} why the sea is salty: the",
)
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
    block_size, begins = case.key_cache.shape[1], case.query_start_loc.tolist()
    slots = torch.full((len(case.query),), -1)
    for seq, (context_len, count) in enumerate(zip(case.context_lens.tolist(), case.num_new, strict=True)):
        for i in range(count if context_len else 0):
            block, offset = divmod(context_len - count + i, block_size)
            slots[begins[seq] + i] = case.block_tables[seq, block] * block_size + offset
    return AttentionMetadata(decode, slots, case.block_tables, case.context_lens, case.query_start_loc)


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


def make_forward_case(rng: random.Random) -> tuple[PagedCase, bool]:
    """A step, and whether it is a pure decode."""
    decode, dtype = rng.random() < 0.5, torch.float16 if rng.random() < 0.3 else torch.float32
    if decode and rng.random() < 0.25:  # several parts
        return make_case(rng, dtype, decode, (8,), ((rng.randint(65, 150), 1), (rng.randint(1, 9), 1))), decode
    return make_case(rng, dtype, decode, (128,) if rng.random() < 0.2 else (1, 2, 4, 8)), decode


def check_forward(cls: Any) -> None:
    """A layer's call: the new keys and values are written first, then every token attends."""
    if not (isinstance(cls, type) and issubclass(cls, AttentionBackend)):
        fail(f"Expected a subclass of AttentionBackend\nGot: {cls!r}")
    look = "the order (write, then attend), which kernel a step needs (metadata.is_decode), and self.scale"
    rule = "it must hold the new keys and values in their slots, and everything else unchanged"
    for rng in rounds("forward", 10 if is_recording() else 20):
        case, decode = make_forward_case(rng)
        expected, metadata = case.attend(), make_metadata(case, decode)
        caches = {"key_cache": case.key_cache.clone(), "value_cache": case.value_cache.clone()}
        key, value = split_new(case, metadata)
        call, query = f"forward with is_decode={decode}. {case.describe(decode)}", {"the query": case.query.clone()}
        backend = cls(case.query.shape[1], case.key_cache.shape[2], case.query.shape[2], case.scale)
        with explained(call, cls.forward), interpreted() as launches:
            output = backend.forward(case.query, key, value, (case.key_cache, case.value_cache), metadata)
        for launch in launches:
            refuse_problems(call, launch.kernel, launch)
        check_unchanged(call, "forward", query, {"the query": case.query})
        for (name, wanted), got in zip(caches.items(), (case.key_cache, case.value_cache), strict=True):
            see_tensor(wanted, got, 1e-6)
            same = torch.equal(got.nan_to_num(7e7), wanted.nan_to_num(7e7))
            require(True, same, f"{call}\nAfter forward, {name} is wrong: {rule}.")
        dtype = output.dtype if isinstance(output, torch.Tensor) else f"none, {output!r} is no tensor"
        expect(call, "dtype", str(case.query.dtype), str(dtype), "what is returned: a tensor of the query's dtype")
        compare(call, "output", output, expected, ("token", "head", "channel"), look)


def _load(backend: type | None = None, num_layers: int | None = None, **options: Any) -> LLM:
    """An engine with a learner's backend or the package's, with all of the model's layers or the first few."""
    from minivllm import LLM

    chosen = {} if backend is None else {"attention_backend": backend}
    limits = {"max_model_len": 64, "block_size": _BLOCK_SIZE, "num_gpu_blocks_override": 16, "enforce_eager": True}
    llm = LLM("smollm2-135m", dtype="float32", **{**limits, **chosen, **options})
    if num_layers is not None:
        worker = llm.llm_engine.executor.worker
        del worker.model_runner.model.model.layers[num_layers:], worker.cache_engine.gpu_cache[num_layers:]
    return llm


def _write(llm: LLM, prompts: list[str], **options: Any) -> list[Any]:
    """The greedy completions of prompts."""
    from minivllm import SamplingParams

    outputs = llm.generate(prompts, SamplingParams(temperature=0, **options), use_tqdm=False)
    for error in (output.error for output in outputs if output.error):
        fail(f"The engine runs on your backend, and a step failed: {error}")
    return [output.outputs[0] for output in outputs]


def check_engine(cls: Any, kernel: Any) -> None:
    """The engine writes the same with a learner's backend: batched, in chunks, from cached prefixes, and preempted.

    Args:
        cls: The backend.
        kernel: One of its kernels. If it is interpreted, the model has only its first layers, so that it takes seconds, not minutes.
    """
    check_forward(cls)  # which reports a kernel's error better
    num_layers = _FEW_LAYERS if type(kernel).__name__ == "InterpretedFunction" else None
    expected = _write_tokens(_load(None, num_layers))
    for way, options in WAYS.items():
        got = _write_tokens(_load(cls, num_layers, **options))
        for prompt, theirs, mine in zip(_PROMPTS, expected, got, strict=True):
            said = f"SmolLM2 on your backend, {way}: {prompt!r}, greedy."
            require(theirs, mine, f"{said}\nExpected tokens: {theirs}\nGot tokens: {mine}")


def _write_tokens(llm: LLM) -> list[list[int]]:
    return [list(text.token_ids) for text in _write(llm, list(_PROMPTS), max_tokens=4, ignore_eos=True)]


def write_with(cls: Any, prompt: str, max_tokens: int) -> str:
    """The text that the model writes on a learner's backend."""
    check_forward(cls)  # a kernel with an out-of-bounds read would end the notebook
    return _write(_load(cls), [prompt], max_tokens=max_tokens)[0].text
