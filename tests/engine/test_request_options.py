"""vLLM's smaller options of a request."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LogitsProcessorList, NoBadWordsLogitsProcessor

from minivllm import LLM, SamplingParams
from minivllm.config import EngineArgs
from minivllm.engine.llm_engine import LLMEngine
from minivllm.errors import RequestError
from minivllm.sampling_params import StructuredOutputsParams

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


@pytest.mark.parametrize("where", ["plain", "eos", "skip"])
def test_a_stop_string_that_is_a_special_token_stops(llm, where):
    """SmolLM2's <|im_end|> is token 2; the text leaves special tokens out unless told otherwise."""
    params = replace(
        GREEDY, allowed_token_ids=[2], ignore_eos=where != "eos", skip_special_tokens=where != "skip", stop="<|im_end|>"
    )
    for wanted in (False, True):
        completion = generate(llm, replace(params, include_stop_str_in_output=wanted)).outputs[0]
        assert (completion.finish_reason, completion.stop_reason, list(completion.token_ids)) == ("stop", "<|im_end|>", [2])
        assert completion.text == ("<|im_end|>" if wanted else "")


def test_it_stops_after_min_tokens_and_not_before(llm):
    params = replace(GREEDY, min_tokens=3, stop=["<|im_end|>", "no such text"], logit_bias={2: 100})
    completion = generate(llm, params).outputs[0]
    assert (len(completion.token_ids), completion.stop_reason) == (4, "<|im_end|>")
    assert "<|im_end|>" not in completion.text


@pytest.mark.parametrize("stop", ["<|im_end|>\n", "a<|im_start|>", "<|im_end|><|im_end|>"])
def test_a_stop_string_with_a_special_token_inside_is_refused_with_a_way_out(llm, stop):
    with pytest.raises(RequestError, match=r"is a special token, which the text leaves out: .* use stop_token_ids \(\[[12]\]\)"):
        generate(llm, replace(GREEDY, stop=[stop]))
    assert generate(llm, replace(GREEDY, stop=[stop], skip_special_tokens=False)).finished


def test_special_tokens_around_a_prompt_can_be_left_out(llm, monkeypatch):
    tokenizer = llm.get_tokenizer()
    encode = tokenizer.hf_tokenizer.encode
    monkeypatch.setattr(
        tokenizer.hf_tokenizer,
        "encode",
        lambda text, add_special_tokens: [1] * add_special_tokens + encode(text, add_special_tokens=False),
    )  # as a tokenizer that begins each text with a special token
    short = replace(GREEDY, max_tokens=1)
    for prompt in (PROMPT, {"prompt": PROMPT}):
        plain, bare = (
            llm.generate(prompt, short, use_tqdm=False, tokenization_kwargs=kwargs)[0]
            for kwargs in (None, {"add_special_tokens": False})
        )
        assert plain.prompt_token_ids == [1, *bare.prompt_token_ids] and plain.prompt == bare.prompt == PROMPT
    with pytest.raises(RequestError, match="tokenization_kwargs has 'truncation', but may have only add_special_tokens"):
        llm.generate(PROMPT, short, tokenization_kwargs={"truncation": True})
    with pytest.raises(RequestError, match="add_special_tokens must be True or False, not 1"):
        llm.generate({"prompt": PROMPT, "add_special_tokens": 1}, short)


def test_a_chat_takes_what_the_template_does(llm):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, I"}]
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ 'thinks ' if enable_thinking }}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if not loop.last or not continue %};{% endif %} {% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )

    def prompt(**options):
        [output] = llm.chat(messages, replace(GREEDY, max_tokens=1), use_tqdm=False, **options)
        return llm.get_tokenizer().decode(output.prompt_token_ids, False)

    hf = llm.get_tokenizer().hf_tokenizer
    before, hf.chat_template = hf.chat_template, template
    try:
        assert prompt() == "user: Hi; assistant: Hello, I; assistant: "
        assert prompt(add_generation_prompt=False) == "user: Hi; assistant: Hello, I; "
        assert prompt(continue_final_message=True) == "user: Hi; assistant: Hello, I"
        assert prompt(tools=tools, chat_template_kwargs={"enable_thinking": True}).startswith("f thinks user: Hi;")
    finally:
        hf.chat_template = before
    with pytest.raises(RequestError, match="are both True: leave one out"):
        llm.chat(messages, GREEDY, continue_final_message=True, add_generation_prompt=True)
    for name in ("messages", "tools", "add_generation_prompt", "continue_final_message", "conversation", "tokenize"):
        with pytest.raises(RequestError, match=f"chat_template_kwargs has {name}, which is not a variable of the template"):
            llm.chat(messages, GREEDY, chat_template_kwargs={name: True})


def test_a_chat_reads_arguments_of_earlier_calls_as_objects(llm):
    hf = llm.get_tokenizer().hf_tokenizer
    before, hf.chat_template = (
        hf.chat_template,
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.items()|list }}{% endfor %}{% endfor %}x",
    )

    def text(arguments):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return llm.get_tokenizer().decode(
            llm.get_tokenizer().apply_chat_template([{"role": "assistant", "content": None, "tool_calls": [call]}])
        )

    try:
        assert text('{"a": 1}') == text({"a": 1}) == text('"{\\"a\\": 1}"') == "[('a', 1)]x"
        assert text("") == text(None) == "[]x"
        with pytest.raises(
            RequestError, match=r"messages\[0\].tool_calls\[0\].function.arguments must be a JSON object or its text, not"
        ):
            text('{"a": ')
    finally:
        hf.chat_template = before


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
    half = llm.llm_engine.input_processor.max_request_tokens // 2
    cut = request("b", [5] * 20_000, replace(GREEDY, truncate_prompt_tokens=-1, max_tokens=20_000))
    assert len(cut.core_request.prompt_token_ids) == half
    with pytest.raises(RequestError, match="truncate_prompt_tokens is 0, but must be at least 1"):
        replace(GREEDY, truncate_prompt_tokens=0)


def no_bad_words(llm, bad_words):
    """transformers' ban, from the same spellings."""
    encode = llm.get_tokenizer().encode
    spellings = {tuple(encode(space + word, add_special_tokens=False)) for word in bad_words for space in ("", " ")}
    return NoBadWordsLogitsProcessor([list(word) for word in spellings], eos_token_id=None)


@pytest.mark.slow
def test_bad_words_are_not_written(llm, hf_smollm2):
    plain = generate(llm, GREEDY).outputs[0].text
    assert " Paris" in plain
    bad_words = ["Paris", "located", "beautiful and", " France", "unbelievably"]
    output = generate(llm, replace(GREEDY, bad_words=bad_words))
    prompt = torch.tensor([output.prompt_token_ids])
    processors = LogitsProcessorList([no_bad_words(llm, bad_words)])
    expected = hf_smollm2.generate(prompt, max_new_tokens=12, do_sample=False, logits_processor=processors, pad_token_id=0)
    assert output.outputs[0].token_ids == expected[0, prompt.shape[1] :].tolist()
    for params in (replace(GREEDY, temperature=1.5, seed=2, n=4, max_tokens=48), replace(GREEDY, repetition_penalty=1.3)):
        for completion in generate(llm, replace(params, bad_words=["the", "a", "is", "unbelievably"])).outputs:
            assert not {"the", "a", "is", "unbelievably"} & set(completion.text.split(" "))


@pytest.mark.slow
def test_a_bad_word_of_several_tokens_loses_its_last_one(llm):
    plain = generate(llm, GREEDY).outputs[0]
    text = llm.get_tokenizer().decode(plain.token_ids[2:5])
    assert llm.get_tokenizer().encode(text, add_special_tokens=False) == plain.token_ids[2:5]
    output = generate(llm, replace(GREEDY, bad_words=[text])).outputs[0]
    assert output.token_ids[:4] == plain.token_ids[:4]
    assert text.strip() not in output.text


@pytest.mark.slow
def test_what_a_grammar_demands_comes_before_bad_words(llm):
    wanted = StructuredOutputsParams(choice=["Paris", "Rome"])
    for bad_words, expected in (([], {"Paris"}), (["Paris"], {"Rome"}), (["Paris", "Rome"], {"Paris", "Rome"})):
        params = replace(GREEDY, structured_outputs=wanted, bad_words=bad_words)
        assert generate(llm, params).outputs[0].text in expected


@pytest.mark.slow
def test_logits_processors_change_the_logits(llm):
    def shorten(output_ids, logits):
        calls.append(list(output_ids))
        return logits.index_fill(0, torch.tensor(banned), -torch.inf)

    def count_prompt(prompt_ids, output_ids, logits):
        assert prompt_ids == prompt
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor([1000 + len(output_ids)]), 0.0)

    calls, prompt = [], llm.get_tokenizer().encode(PROMPT)
    banned = generate(llm, GREEDY).outputs[0].token_ids[:1]
    output = generate(llm, replace(GREEDY, logits_processors=[shorten])).outputs[0]
    assert output.token_ids == generate(llm, replace(GREEDY, logit_bias={banned[0]: -100})).outputs[0].token_ids
    assert calls == [output.token_ids[:i] for i in range(12)]
    counted = generate(llm, replace(GREEDY, n=2, temperature=1.0, logits_processors=[count_prompt])).outputs
    assert [completion.token_ids for completion in counted] == [[1000 + i for i in range(12)]] * 2


FAILING = {
    "raises": (lambda output_ids, logits: 1 / 0, "The logits processor fail_late raised ZeroDivisionError: division by zero."),
    "none": (lambda output_ids, logits: None, "must return the logits, [49152], not NoneType."),
    "shape": (lambda output_ids, logits: logits[:5], "must return the logits, [49152], not [5]."),
    "infinity": (lambda output_ids, logits: logits + torch.inf, "returned a logit of inf: use a large number."),
    "not a number": (lambda output_ids, logits: logits * torch.nan, "returned a logit of nan: use a large number."),
    "nothing left": (lambda output_ids, logits: logits - torch.inf, "leaves no token to choose from."),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("raises", "shape") else pytest.mark.long) for kind in FAILING]
)
def test_a_logits_processor_that_fails_ends_its_request_alone(llm, kind):
    process, sentence = FAILING[kind]

    def fail_late(output_ids, logits):
        return process(output_ids, logits) if len(output_ids) == 3 else logits

    alone = generate(llm, GREEDY).outputs[0].token_ids
    for temperature, n in ((0, 1), (1.0, 2)):
        bad = replace(GREEDY, temperature=temperature, n=n, seed=1, logits_processors=[fail_late])
        for _ in range(4):  # one after another, which is no reason to end the engine
            failed, good = llm.generate([PROMPT] * 2, [bad, GREEDY], use_tqdm=False)
            assert sentence in failed.error and good.outputs[0].token_ids == alone
            assert {completion.finish_reason for completion in failed.outputs} == {"error"}
    assert llm.llm_engine.block_manager.get_num_free_gpu_blocks() == llm.llm_engine.block_manager.num_gpu_blocks


@pytest.mark.slow
def test_functions_say_what_they_take(llm):
    seen = []
    generate(llm, replace(GREEDY, logits_processors=[lambda ids, logits, scale=2: (seen.append(len(ids)), logits)[1]]))
    assert seen == list(range(12)), "what has a default is no third parameter"
    for function in (lambda logits: logits, lambda a, b, c, d: a, print):
        with pytest.raises(RequestError, match="but must have functions of two parameters"):
            replace(GREEDY, logits_processors=[function])


@pytest.mark.slow
def test_logits_processors_are_for_models_in_this_process(smollm2_path):
    params = replace(GREEDY, logits_processors=[lambda output_ids, logits: logits])
    engine = LLMEngine.from_engine_args(EngineArgs(str(smollm2_path), num_gpu_blocks_override=16), in_process=False)
    try:
        with pytest.raises(RequestError, match="the model runs in another one: use an LLM without parallelism"):
            engine.add_request("a", PROMPT, params)
    finally:
        engine.shutdown()


@pytest.mark.slow
def test_drafts_and_bad_words_go_together(llm, smollm2_path):
    """A text that repeats itself, so that there would be drafts; the bad word is within what is repeated."""
    drafting = LLM(smollm2_path, num_gpu_blocks_override=64, num_speculative_tokens=4, max_num_seqs=4)
    prompt = "one two three four five one two three four five one two"
    params = replace(GREEDY, max_tokens=40)
    assert generate(drafting, params, prompt).metrics.num_draft_tokens > 0
    plain = generate(llm, params, prompt).outputs[0]
    params = replace(params, bad_words=["four five"])
    with_drafts, without = (generate(engine, params, prompt).outputs[0] for engine in (drafting, llm))
    assert "four five" in plain.text and "four five" not in without.text
    assert with_drafts.token_ids == without.token_ids
