"""vLLM's smaller options of a request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minivllm import SamplingParams
from minivllm.errors import RequestError

PROMPT = "The capital of France is"
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def generate(llm, params, prompt=PROMPT):
    return llm.generate([prompt], params, use_tqdm=False)[0]


@pytest.mark.slow
def test_only_allowed_tokens_come(llm):
    allowed = llm.get_tokenizer().encode(" red green blue")
    for params in (GREEDY, replace(GREEDY, temperature=1.0, seed=1, n=3, top_p=0.9), replace(GREEDY, repetition_penalty=1.2)):
        output = generate(llm, replace(params, allowed_token_ids=allowed))
        assert {token for completion in output.outputs for token in completion.token_ids} <= set(allowed)
    with pytest.raises(RequestError, match="allowed_token_ids has token id 49152"):
        generate(llm, replace(GREEDY, allowed_token_ids=[49152]))
    with pytest.raises(RequestError, match="allowed_token_ids is empty"):
        replace(GREEDY, allowed_token_ids=[])


@pytest.mark.slow
def test_a_stop_string_is_part_of_the_text_if_wanted(llm):
    whole = generate(llm, GREEDY).outputs[0].text
    stop = whole[3:7]
    for wanted in (False, True):
        completion = generate(llm, replace(GREEDY, stop=[stop, "no such text"], include_stop_str_in_output=wanted)).outputs[0]
        assert (completion.text, completion.stop_reason) == (whole[: whole.index(stop) + 4 * wanted], stop)


@pytest.mark.slow
def test_the_text_of_a_stop_token_too(llm):
    tokens = generate(llm, GREEDY).outputs[0].token_ids
    for wanted in (False, True):
        params = replace(GREEDY, stop_token_ids=[tokens[2]], include_stop_str_in_output=wanted)
        completion = generate(llm, params).outputs[0]
        count = tokens.index(tokens[2]) + wanted
        assert (
            completion.text == llm.get_tokenizer().decode([*llm.get_tokenizer().encode(PROMPT), *tokens[:count]])[len(PROMPT) :]
        )


@pytest.mark.slow
def test_prompts_are_cut_at_their_beginning(llm):
    tokens = list(range(100, 140))
    output = generate(llm, replace(GREEDY, truncate_prompt_tokens=7), tokens)
    assert output.prompt_token_ids == tokens[-7:]
    assert output.outputs[0].token_ids == generate(llm, GREEDY, tokens[-7:]).outputs[0].token_ids
    assert generate(llm, replace(GREEDY, truncate_prompt_tokens=100), tokens).prompt_token_ids == tokens
    request = llm.llm_engine.input_processor.process_inputs
    room = llm.llm_engine.input_processor.max_request_tokens - 12
    cut = request("a", [5] * 20_000, replace(GREEDY, truncate_prompt_tokens=-1))
    assert len(cut.core_request.prompt_token_ids) == room
    with pytest.raises(RequestError, match="truncate_prompt_tokens is 0, but must be at least 1"):
        replace(GREEDY, truncate_prompt_tokens=0)
