"""The checks of lesson 10 on the real model: a chat that is not recomputed, and a long prompt that does not stall everyone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minivllm.core.scheduler import Scheduler
from minivllm.course.observations import expect, require
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


def run_chat(llm: LLM, enabled: bool = True) -> list[tuple[int, int, list[int]]]:
    """A chat in token ids, so that each prompt begins exactly with everything said before; with an empty cache, or with none.

    Returns:
        For each turn: the prompt's tokens, how many were found in the cache, and the answer.
    """
    tokenizer = llm.get_tokenizer()
    said, turns = tokenizer.encode(SYSTEM), []
    manager: Any = llm.llm_engine.block_manager
    manager.reset_prefix_cache()
    manager.enable_prefix_caching = enabled
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
    plain, cached, lines, before = run_chat(llm, enabled=False), run_chat(llm), [], 0
    for number, ((prompt_len, _, expected), (_, found, answer)) in enumerate(zip(plain, cached, strict=True)):
        said = f"Turn {number}, a prompt of {prompt_len} tokens."
        look = "which blocks are matched, and whether they were computed when they were offered"
        expect(said, "answer (token ids)", expected, answer, look)
        known = max(0, before - 1) // manager.block_size * manager.block_size  # the last token of an answer is not computed
        look = "blocks that were filled by the answers: they are offered too"
        expect(said, "tokens found in the cache", known, found, look)
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
    runs, lines = {}, []
    for name, cls, limits in (("one piece", Scheduler, whole), ("chunks", mine, config)):
        core.use_scheduler(cls, limits)
        llm.llm_engine.block_manager.reset_prefix_cache()
        runs[name], largest = _interrupt(llm)
        lines.append(f"the long prompt in {name}: the largest step computed {largest} tokens")
    for request_id, answer in runs["one piece"].items():
        look = "num_computed_tokens after a chunk, and check_decisions"
        expect(f"Request {request_id}.", "answer (token ids)", answer, runs["chunks"][request_id], look)
    limit = config.max_num_batched_tokens
    require(True, largest <= limit, f"The largest step.\nExpected: at most {limit} tokens\nGot: {largest}\nLook at the budget.")
    return lines


def _interrupt(llm: LLM) -> tuple[dict[str, list[int]], int]:
    """Six requests write; a long prompt comes. Their answers, and how many tokens the largest step computed."""
    engine, answers = llm.llm_engine, {}
    trace = engine.start_trace()

    def add(name: str, prompt: range, max_tokens: int) -> None:
        engine.add_request(name, list(prompt), SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))

    for number in range(6):
        add(f"{number}", range(100 + 10 * number, 108 + 10 * number), 24)
    while engine.has_unfinished_requests():
        if len(trace) == 6:
            add("long", range(1000, 1384), 4)
        answers |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step() if output.finished}
    engine.stop_trace()
    return answers, max(sum(part.num_tokens for part in step.scheduled) for step in trace)
