"""The checks of lesson 10 on the real model: a chat that is not recomputed, and a long prompt that does not stall everyone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minivllm.core.scheduler import Scheduler
from minivllm.course.observations import expect
from minivllm.engine.trace import EngineTrace
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm.entrypoints.llm import LLM

SYSTEM = (
    "You are a patient teacher who answers in one short sentence. You never use a word that a child of ten would not know, you never guess, and you say so when you do not "
    "know something. The people who ask you live by the sea, and they like examples from there.\n"
)
QUESTIONS = (
    "What is a tide?", "Why is the sea salty?", "How do ships float?", "What do whales eat?", "Where do waves come from?", "Why is the sky blue?",
    "How deep is the sea?", "What is a lighthouse for?",
)  # fmt: skip
_ANSWER = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def run_chat(llm: LLM) -> list[tuple[int, int, list[int]]]:
    """A chat in token ids, so that each prompt begins exactly with everything said before.

    Returns:
        For each turn: the prompt's tokens, how many were found in the cache, and the answer.
    """
    tokenizer = llm.get_tokenizer()
    said, turns = tokenizer.encode(SYSTEM), []
    for question in QUESTIONS:
        prompt = said + tokenizer.encode(f"\nQuestion: {question}\nAnswer:")
        (output,) = llm.generate({"prompt_token_ids": prompt}, _ANSWER, use_tqdm=False)
        answer = list(output.outputs[0].token_ids)
        turns.append((len(prompt), output.num_cached_tokens, answer))
        said = prompt + answer
    return turns


def check_chat(llm: LLM) -> list[str]:
    """With the cache, a chat's texts are the same, and all full blocks of earlier turns are found.

    Args:
        llm: An `LLM` with the learner's manager and prefix caching.

    Returns:
        Lines that say what was computed.
    """
    manager: Any = llm.llm_engine.block_manager
    manager.reset_prefix_cache()
    manager.enable_prefix_caching = False
    try:
        plain = run_chat(llm)
    finally:
        manager.enable_prefix_caching = True
    cached = run_chat(llm)
    lines, before = [], 0
    for number, ((prompt_len, _, expected), (_, found, answer)) in enumerate(zip(plain, cached, strict=True)):
        said = f"Turn {number}, a prompt of {prompt_len} tokens."
        expect(
            said,
            "answer (token ids)",
            expected,
            answer,
            "which blocks are matched, and whether they were computed when they were offered",
        )
        size = manager.block_size
        known = max(0, before - 1) // size  # the last token of an answer is not computed
        expect(
            said,
            "tokens found in the cache",
            min(known, (prompt_len - 1) // size) * size,
            found,
            "blocks that were filled by the answers: they are offered too",
        )
        before = prompt_len + len(answer)
        lines.append(f"turn {number}: {prompt_len} tokens in the prompt, {prompt_len - found} of them computed")
    return lines


def check_spike(llm: LLM) -> list[str]:
    """With the learner's scheduler no step exceeds its budget, and texts are the same as without chunks.

    Args:
        llm: An `LLM` with the learner's scheduler and chunked prefill.

    Returns:
        Lines that say how large the largest step was.
    """
    core: Any = llm.llm_engine.core
    config, mine = core.scheduler_config, type(core.scheduler)
    whole = replace(config, enable_chunked_prefill=False, max_num_batched_tokens=llm.llm_engine.model_config.max_model_len)
    runs = {}
    for name, cls, limits in (("one piece", Scheduler, whole), ("chunks", mine, config)):
        core.use_scheduler(cls, limits)
        llm.llm_engine.block_manager.reset_prefix_cache()
        runs[name] = _interrupt(llm)
    texts, trace = runs["chunks"]
    for request_id, expected in runs["one piece"][0].items():
        expect(
            f"Request {request_id}.",
            "answer (token ids)",
            expected,
            texts[request_id],
            "num_computed_tokens after a chunk, and check_decisions",
        )
    for number, step in enumerate(trace):
        said = f"Step {number}."
        tokens = sum(part.num_tokens for part in step.scheduled)
        assert tokens <= config.max_num_batched_tokens, (
            f"{said}\nExpected: at most {config.max_num_batched_tokens} tokens\nGot: {tokens}\nLook at the budget."
        )
    lines = []
    for name, (_, steps) in runs.items():
        largest = max(sum(part.num_tokens for part in step.scheduled) for step in steps)
        lines.append(f"the long prompt in {name}: the largest step computed {largest} tokens")
    return lines


def _interrupt(llm: LLM) -> tuple[dict[str, list[int]], EngineTrace]:
    """Six requests write; a long prompt comes."""
    engine = llm.llm_engine
    trace = engine.start_trace()
    answers: dict[str, list[int]] = {}
    for number in range(6):
        engine.add_request(
            f"{number}",
            list(range(100 + 10 * number, 108 + 10 * number)),
            SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        )
    steps = 0
    while engine.has_unfinished_requests():
        if steps == 6:
            engine.add_request("long", list(range(1000, 1384)), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
    engine.stop_trace()
    return answers, trace
