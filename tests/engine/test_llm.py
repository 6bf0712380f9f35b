"""The engine as users meet it, on the real model; transformers in float32 says what is right."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from prompts import mixed_prompts

from minivllm import LLM, EngineArgs, LLMEngine, SamplingParams, StaticBatchScheduler
from minivllm.engine.llm_engine import LLMEngine as Engine
from minivllm.errors import RequestError

FOUR_PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [*mixed_prompts(tokenizer, 12, max_len=150, seed=3), *map(tokenizer.encode, FOUR_PROMPTS)]


@pytest.fixture(scope="module")
def judge(hf_smollm2):
    """Checks that each token is the one that transformers finds most likely, or ties with it."""
    judged = set()

    @torch.inference_mode()
    def check(prompt: list[int], tokens: list[int]) -> None:
        key = (*prompt, *tokens)
        if key not in judged:
            logits = hf_smollm2(torch.tensor([prompt + tokens]), logits_to_keep=len(tokens) + 1).logits[0, :-1]
            gap = logits.max(-1).values - logits.gather(-1, torch.tensor(tokens)[:, None]).squeeze(1)
            assert gap.max() < 1e-4
            judged.add(key)

    return check


WAYS = {
    "alone": {"max_num_seqs": 1},
    "batched": {"max_num_seqs": 16},
    "static": {"max_num_seqs": 4, "scheduler_cls": StaticBatchScheduler},
    "few blocks, recompute": {"num_gpu_blocks_override": 30},
    "few blocks, swap": {"num_gpu_blocks_override": 30, "preemption_mode": "swap", "swap_space": 0.1},
    "chunked": {"enable_chunked_prefill": True, "max_num_batched_tokens": 33, "max_num_seqs": 8},
    "prefix cache": {"enable_prefix_caching": True, "max_num_seqs": 8},
    "odd block size": {"block_size": 7, "max_num_seqs": 8},
    "all at once": {
        "enable_chunked_prefill": True, "max_num_batched_tokens": 33, "max_num_seqs": 8, "enable_prefix_caching": True,
        "preemption_mode": "swap", "swap_space": 0.02, "num_gpu_blocks_override": 30,
    },
}  # fmt: skip


WHEN = dict.fromkeys(("alone", "all at once"), ()) | dict.fromkeys(
    ("static", "few blocks, recompute", "odd block size"), pytest.mark.long
)
"""Ways that are run by day. What the others set is set in "all at once", too."""


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param(way, marks=WHEN.get(way, pytest.mark.nightly)) for way in WAYS])
def test_greedy_tokens_equal_transformers(way, prompts, judge):
    """benchmarks/agreement.py is the large version: 200 prompts of up to 900 tokens."""
    args = {"kv_cache_memory_bytes": 256 * 2**20, "max_model_len": 256} | WAYS[way]
    llm = LLM("smollm2-135m", **args)
    for _ in range(2 if args.get("enable_prefix_caching") else 1):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.prompt_token_ids == prompt
            assert len(output.outputs[0].token_ids) == NUM_TOKENS
            judge(prompt, output.outputs[0].token_ids)
    if "few blocks" in way:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    if args.get("enable_prefix_caching") and "num_gpu_blocks_override" not in args:
        assert sum(output.num_cached_tokens for output in outputs) > 300, "the second round finds the first one's blocks"
    manager = llm.llm_engine.block_manager
    assert manager.get_num_free_gpu_blocks() == manager.num_gpu_blocks


def test_a_seeded_request_is_the_same_alone_and_in_any_batch(llm):
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=12, n=2)
    alone = llm.generate(FOUR_PROMPTS[2], params, use_tqdm=False)[0]
    others = [SamplingParams(temperature=1.0, max_tokens=5 + i, seed=i) for i in range(3)]
    batch = llm.generate(
        [FOUR_PROMPTS[0], FOUR_PROMPTS[1], FOUR_PROMPTS[2], FOUR_PROMPTS[3]], [others[0], others[1], params, others[2]],
        use_tqdm=False,
    )  # fmt: skip
    assert [c.token_ids for c in batch[2].outputs] == [c.token_ids for c in alone.outputs]
    assert alone.outputs[0].token_ids != alone.outputs[1].token_ids, "siblings have streams of their own"


@pytest.mark.slow
def test_an_engine_seed_makes_unseeded_requests_repeatable(smollm2_path):
    texts = [
        LLM(str(smollm2_path), num_gpu_blocks_override=40, seed=seed).generate(
            "Once", SamplingParams(max_tokens=8), use_tqdm=False
        )
        for seed in (1, 1, 2)
    ]
    first, again, other = (output[0].outputs[0].token_ids for output in texts)
    assert first == again
    assert first != other


@pytest.mark.slow
def test_prompts_may_be_text_token_ids_or_dicts(llm, tokenizer):
    text = FOUR_PROMPTS[0]
    token_ids = tokenizer.encode(text)
    forms = [text, token_ids, {"prompt": text}, {"prompt_token_ids": token_ids}, [text], [token_ids]]
    outputs = [llm.generate(form, GREEDY, use_tqdm=False) for form in forms]
    assert all(len(output) == 1 for output in outputs)
    assert len({tuple(output[0].outputs[0].token_ids) for output in outputs}) == 1
    assert (outputs[0][0].prompt, outputs[1][0].prompt) == (text, None)


def test_outputs_come_in_the_order_of_the_prompts(llm):
    params = [SamplingParams(temperature=0, max_tokens=length) for length in (9, 1, 5, 2)]
    outputs = llm.generate(FOUR_PROMPTS, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == FOUR_PROMPTS
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5, 2]
    assert all(output.finished and output.error is None for output in outputs)


def test_chat_applies_the_template(llm, hf_smollm2, tokenizer):
    messages = [{"role": "user", "content": "Name a fruit."}]
    output = llm.chat(messages, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)[0]
    assert tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False).endswith(
        "<|im_start|>user\nName a fruit.<|im_end|>\n<|im_start|>assistant\n"
    )
    expected = hf_smollm2.generate(torch.tensor([output.prompt_token_ids]), do_sample=False, max_new_tokens=20)
    assert output.outputs[0].token_ids == expected[0, len(output.prompt_token_ids) :].tolist()
    both = llm.chat([messages, messages], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    assert [o.outputs[0].text for o in both] == [output.outputs[0].text] * 2


@pytest.mark.slow
def test_a_text_ends_at_a_stop_string_a_stop_token_or_the_end_of_sequence(llm):
    prompt = FOUR_PROMPTS[2]
    full = llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0]
    assert (full.finish_reason, full.stop_reason) == ("length", None)
    stop = full.text[5:9]
    cut = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, stop=stop), use_tqdm=False)[0].outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (full.text[: full.text.index(stop)], "stop", stop)
    token = full.token_ids[4]
    cut = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, stop_token_ids=[token]), use_tqdm=False)[
        0
    ].outputs[0]
    assert (cut.token_ids[-1], cut.finish_reason, cut.stop_reason) == (token, "stop", token)
    assert cut.token_ids == full.token_ids[: full.token_ids.index(token) + 1]
    ended = llm.chat([{"role": "user", "content": "Say hi."}], SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)[0]
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", None)
    assert "<|im_end|>" not in ended.outputs[0].text


@torch.inference_mode()
def test_logprobs_equal_transformers(llm, hf_smollm2):
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    output = llm.generate(FOUR_PROMPTS[1], params, use_tqdm=False)[0]
    prompt, completion = output.prompt_token_ids, output.outputs[0]
    logprobs = hf_smollm2(torch.tensor([prompt + completion.token_ids])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for position, entry in enumerate([*output.prompt_logprobs[1:], *completion.logprobs]):
        chosen = (prompt + completion.token_ids)[position + 1]
        assert chosen in entry
        for token_id, logprob in entry.items():
            assert abs(logprob.logprob - float(logprobs[position, token_id])) < 1e-3
            assert logprob.decoded_token == llm.get_tokenizer().decode([token_id], skip_special_tokens=False)
    expected = sum(float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(completion.token_ids))
    assert abs(completion.cumulative_logprob - expected) < 1e-2


def test_prompt_logprobs_are_the_same_in_chunks(smollm2_path, llm):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    text = " ".join(FOUR_PROMPTS)
    chunked = LLM(
        str(smollm2_path), enable_chunked_prefill=True, max_num_batched_tokens=5, max_num_seqs=2, num_gpu_blocks_override=40
    )
    whole, parts = (engine.generate(text, params, use_tqdm=False)[0].prompt_logprobs for engine in (llm, chunked))
    assert len(whole) == len(parts) > 20
    for one, other in zip(whole[1:], parts[1:], strict=True):
        assert one.keys() == other.keys()
        assert all(abs(one[token].logprob - other[token].logprob) < 1e-3 for token in one)


def test_step_streams_text_that_only_grows_and_joins_to_the_final_one(llm):
    engine = llm.llm_engine
    assert isinstance(engine, Engine) and LLMEngine is Engine
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=15, n=2)
    for i, prompt in enumerate(FOUR_PROMPTS):
        engine.add_request(f"s{i}", prompt, params)
    assert engine.get_num_unfinished_requests() == 4
    last: dict[tuple[str, int], str] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            for completion in output.outputs:
                key = (output.request_id, completion.index)
                assert completion.text.startswith(last.get(key, ""))
                last[key] = completion.text
    again = llm.generate(FOUR_PROMPTS, params, use_tqdm=False)
    assert last == {(f"s{i}", c.index): c.text for i, output in enumerate(again) for c in output.outputs}


def test_an_interrupted_call_leaves_an_engine_that_works(llm, monkeypatch):
    engine = llm.llm_engine
    step, calls = engine.step, []

    def interrupted_step():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(FOUR_PROMPTS, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert not engine.has_unfinished_requests()
    assert engine.block_manager.get_num_free_gpu_blocks() == engine.block_manager.num_gpu_blocks
    assert llm.generate(FOUR_PROMPTS[0], GREEDY, use_tqdm=False)[0].finished


def test_engine_args_make_an_engine(smollm2_path):
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(smollm2_path), num_gpu_blocks_override=10, trace=True))
    engine.add_request("a", "Hello", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    assert [record.phase for record in engine.trace] == ["prefill", "decode", "decode"]
    assert all(record.end > record.start for record in engine.trace)


@pytest.mark.slow
def test_the_profiling_run_leaves_room_for_a_cache(smollm2_path):
    engine = LLM(str(smollm2_path), max_num_seqs=2, max_model_len=64).llm_engine
    assert engine.block_manager.num_gpu_blocks == 2 * 64 // 16, "no more than two sequences of 64 tokens can use"
    engine = LLM(str(smollm2_path), kv_cache_memory_bytes=10 * 2**20, max_model_len=64).llm_engine
    block_bytes = 2 * 30 * 3 * 64 * 16 * 4
    assert engine.block_manager.num_gpu_blocks == 10 * 2**20 // block_bytes


@pytest.mark.slow
def test_half_precision_runs(smollm2_path):
    llm = LLM(str(smollm2_path), dtype="bfloat16", num_gpu_blocks_override=10)
    text = llm.generate(FOUR_PROMPTS[2], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)[0].outputs[0].text
    assert text.startswith(" Paris")


@pytest.mark.slow
def test_the_token_that_ended_a_text_is_not_in_it(llm):
    prompt = FOUR_PROMPTS[2]
    full = llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0]
    token = full.token_ids[4]
    before = full.token_ids[: full.token_ids.index(token)]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, stop_token_ids=[token])
    assert llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text == llm.get_tokenizer().decode(before)
    params = SamplingParams(temperature=0, max_tokens=200, skip_special_tokens=False)
    ended = llm.chat([{"role": "user", "content": "Say hi."}], params, use_tqdm=False)[0].outputs[0]
    assert ended.finish_reason == "stop"
    assert not ended.text.endswith("<|im_end|>")


def test_a_bad_conversation_fails_alone(llm):
    good = [{"role": "user", "content": "Say hi."}]
    params = SamplingParams(temperature=0, max_tokens=3)
    outputs = llm.chat([good, [{"role": "user"}], good], params, use_tqdm=False)
    assert "both text" in outputs[1].error
    assert outputs[0].outputs[0].text == outputs[2].outputs[0].text
    parts = [{"role": "user", "content": [{"type": "text", "text": "Say"}, {"type": "text", "text": "hi."}]}]
    whole = [{"role": "user", "content": "Say\nhi."}]
    assert (
        llm.chat(parts, params, use_tqdm=False)[0].outputs[0].text == llm.chat(whole, params, use_tqdm=False)[0].outputs[0].text
    )


def test_generate_leaves_requests_of_others_alone(llm):
    engine = llm.llm_engine
    engine.add_request("mine", FOUR_PROMPTS[0], SamplingParams(max_tokens=2))
    with pytest.raises(RequestError, match="1 unfinished requests that you added"):
        llm.generate(FOUR_PROMPTS[1], GREEDY, use_tqdm=False)
    assert engine.get_num_unfinished_requests() == 1
    engine.abort_request("mine")


def test_after_ctrl_c_the_next_step_tells_which_requests_ended(llm, monkeypatch):
    engine = llm.llm_engine
    engine.add_request("a", FOUR_PROMPTS[0], GREEDY)
    engine.step()

    def interrupt(output):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.executor, "execute_model", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    assert engine.has_unfinished_requests()
    (output,) = engine.step()
    assert (output.request_id, output.finished, output.outputs[0].finish_reason) == ("a", True, "error")
    assert not engine.has_unfinished_requests()
    assert engine.block_manager.get_num_free_gpu_blocks() == engine.block_manager.num_gpu_blocks


@pytest.mark.slow
def test_numbers_of_numpy_and_tensors_are_token_ids_too(llm):
    token_ids = llm.get_tokenizer().encode(FOUR_PROMPTS[0])
    expected = llm.generate(token_ids, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    for prompt in (np.array(token_ids), list(np.array(token_ids)), torch.tensor(token_ids), [torch.tensor(token_ids)]):
        assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected


def test_the_memory_of_an_engine_is_free_when_nobody_uses_it_any_more(llm):
    """At once, not when the garbage collector looks for cycles: another engine may be made in the next line."""
    other = LLM("smollm2-135m", num_gpu_blocks_override=16, max_model_len=128)  # the first one is kept by what it has imported
    worker = other.llm_engine.executor.worker
    parts = [weakref.ref(part) for part in (worker.compiled_model, worker.model_runner.model, worker.cache_engine)]
    gc.disable()
    try:
        del other, worker
        assert [part() for part in parts] == [None, None, None]
    finally:
        gc.enable()
