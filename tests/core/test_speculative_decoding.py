"""Speculative decoding by prompt lookup: drafts save steps and change no token.

The invariants over random workloads, with speculation too, are in test_invariants.py and test_invariants_on_a_model.py.
"""

from __future__ import annotations

import pickle

import pytest
import shadow
from hypothesis import given
from hypothesis import strategies as st
from shadow import check_blocks, expected_tokens, habit, shadow_engine

from minivllm import LLM, SamplingParams
from minivllm.config import EngineArgs
from minivllm.core import speculation
from minivllm.core.speculation import NgramIndex, PromptLookup, accept_drafts
from minivllm.errors import ConfigError
from minivllm.request import EngineCoreRequest, Request, Sequence

GREEDY = {"temperature": 0.0, "ignore_eos": True}
CIRCLE = [1, 8, 7, 10]
"""What `habit` says again and again."""


# -- guessing ------------------------------------------------------------------------------------------------------------


def look_up(token_ids: list[int], min_n: int, max_n: int, num_tokens: int) -> list[int]:
    """The definition, by search: the longest end that occurred before, where it did so last, and how that went on."""
    for n in range(min(max_n, len(token_ids) - 1), min_n - 1, -1):
        for start in range(len(token_ids) - n - 1, -1, -1):
            if token_ids[start : start + n] == token_ids[-n:]:
                going_on = list(token_ids)
                for i in range(num_tokens):
                    going_on.append(going_on[start + n + i])
                return going_on[len(token_ids) :]
    return []


@pytest.mark.parametrize(
    ("token_ids", "drafts"),
    [
        ([5, 6, 7, 8, 9, 5, 6], [7, 8, 9]),  # what followed "5 6"
        ([5, 6, 1, 5, 6, 2, 5, 6], [2, 5, 6]),  # the last time counts
        ([4, 5, 6, 1, 9, 5, 6, 2, 4, 5, 6], [1, 9, 5]),  # three tokens count more than two
        ([5, 6, 5, 6], [5, 6, 5]),  # goes on in circles
        ([5, 5, 5], [5, 5, 5]),
        ([5, 6, 7, 8], []),
        ([5, 1, 5], []),  # one token is too short
        ([5], []),
    ],
)
def test_drafts_are_what_followed_the_last_time(token_ids, drafts):
    assert NgramIndex(2, 4).propose(token_ids, 3) == look_up(token_ids, 2, 4, 3) == drafts


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=10), min_size=1, max_size=8),
    st.integers(1, 3), st.integers(0, 3), st.integers(1, 6),
)  # fmt: skip
def test_an_index_that_grows_finds_what_a_search_finds(parts, min_n, more, num_tokens):
    index = NgramIndex(min_n, min_n + more)
    token_ids: list[int] = []
    for part in parts:
        token_ids += part
        assert index.propose(token_ids, num_tokens) == look_up(token_ids, min_n, min_n + more, num_tokens)


def test_each_token_is_indexed_once():
    class Tokens(list):
        reads = 0

        def __getitem__(self, key):
            Tokens.reads += 1
            return super().__getitem__(key)

    tokens, index = Tokens(range(10_000)), NgramIndex(2, 4)
    index.propose(tokens, 5)
    Tokens.reads = 0
    for token_id in range(100):
        tokens.append(token_id)
        index.propose(tokens, 5)
    assert Tokens.reads < 100 * 12


def test_siblings_have_indexes_of_their_own_and_ended_sequences_none():
    lookup = PromptLookup(1, 2)
    parent = Sequence(0, Request(EngineCoreRequest("a", [1, 2, 3], SamplingParams(), max_num_tokens=100)))
    assert lookup.propose(parent, 2) == []
    child = parent.fork(1, 1)
    parent.token_ids.append(1)
    child.token_ids.append(2)
    assert (lookup.propose(parent, 2), lookup.propose(child, 2)) == ([2, 3], [3, 2])
    lookup.forget(parent)
    lookup.forget(child)
    assert pickle.dumps(lookup) == pickle.dumps(PromptLookup(1, 2)), "nothing is kept"


# -- verifying -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafts", "chosen", "accepted"),
    [
        ((7, 8), [7, 8, 9], [7, 8, 9]),
        ((7, 8), [7, 5, 9], [7, 5]),
        ((7, 8), [5, 8, 9], [5]),
        ((), [5], [5]),
    ],
)
def test_drafts_are_accepted_up_to_the_first_that_the_model_would_not_say(drafts, chosen, accepted):
    assert accept_drafts(drafts, chosen) == accepted


@given(st.data())
def test_accepted_tokens_are_those_of_decoding_one_by_one(data):
    """The model is any function of the text; it is asked for all positions at once, as a step does."""
    table = data.draw(st.lists(st.integers(0, 2), min_size=7, max_size=7))

    def model(text: list[int]) -> int:
        return table[hash(tuple(text)) % 7]

    text = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
    drafts = data.draw(st.lists(st.integers(0, 2), max_size=5))
    chosen = [model(text + drafts[:i]) for i in range(len(drafts) + 1)]
    accepted = accept_drafts(tuple(drafts), chosen)
    one_by_one = list(text)
    for _ in accepted:
        one_by_one.append(model(one_by_one))
    assert one_by_one == text + accepted
    assert len(accepted) == len(drafts) + 1 or accepted[-1] != drafts[len(accepted) - 1]


def run_shadow_workload(**args) -> int:
    """Requests that repeat themselves, with preemption, forks and the prefix cache. Returns how many drafts were right."""
    engine, executor = shadow_engine(
        40, 20, max_num_seqs=6, max_num_batched_tokens=200, max_model_len=150, enable_prefix_caching=True,
        num_speculative_tokens=4, **args,
    )  # fmt: skip
    params = [SamplingParams(n=1 + i % 2, temperature=i % 3, seed=i, max_tokens=20 + i, min_tokens=10) for i in range(12)]
    prompts = [CIRCLE * 3 + [11 + i % 4] + CIRCLE for i in range(12)]
    for i in range(12):
        engine.add_request(str(i), prompts[i], params[i])
    num_accepted = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                i = int(output.request_id)
                expected = [
                    expected_tokens(prompts[i], params[i], i, index, len(prompts[i]) + 20 + i) for index in range(params[i].n)
                ]
                assert [completion.token_ids for completion in output.outputs] == expected
                num_accepted += output.metrics.num_accepted_tokens
        check_blocks(engine.scheduler)
    assert executor.num_copied and executor.num_preempted
    assert not engine.scheduler.speculation.proposer._indexes
    return num_accepted


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_drafts_change_no_token(chunked, mode):
    assert run_shadow_workload(enable_chunked_prefill=chunked, preemption_mode=mode) > 100


WRONG_RULES = {
    "accept all": lambda drafts, chosen: [*drafts, chosen[-1]],
    "take what follows a wrong draft": lambda drafts, chosen: chosen,
    "accept the first wrong one": lambda drafts, chosen: [*drafts[: len(accept_drafts(drafts, chosen))], chosen[-1]],
}


@pytest.mark.parametrize("rule", WRONG_RULES)
def test_a_wrong_rule_would_be_noticed(rule, monkeypatch):
    monkeypatch.setattr(speculation, "accept_drafts", WRONG_RULES[rule])
    with pytest.raises((AssertionError, shadow.Violation)):
        run_shadow_workload()


# -- scheduling, in worked examples --------------------------------------------------------------------------------------


@pytest.fixture
def only_habit(monkeypatch):
    """A shadow model that always does as it likes to, so that drafts are right once a circle has begun again."""
    monkeypatch.setattr(shadow, "next_token", lambda context, last, *_: habit(last))


def run_steps(engine, executor) -> list[tuple[dict[str, int], int]]:
    """{request: tokens} and the number of preemptions of each step."""
    steps = []
    executor.observe = lambda output: steps.append(
        ({item.seq.request.request_id: item.num_tokens for item in output.scheduled}, len(output.preempted))
    )
    while engine.has_unfinished_requests():
        engine.step()
    return steps


def test_a_step_verifies_drafts_and_ends_with_a_token_of_the_model(only_habit):
    engine, executor = shadow_engine(100, num_speculative_tokens=3, max_num_seqs=4)
    engine.add_request("a", CIRCLE * 2, SamplingParams(max_tokens=10, **GREEDY))
    assert run_steps(engine, executor) == [({"a": 8}, 0), ({"a": 4}, 0), ({"a": 4}, 0), ({"a": 1}, 0)]


def test_drafts_end_where_the_request_must(only_habit):
    for max_tokens in range(1, 12):
        engine, executor = shadow_engine(100, num_speculative_tokens=3, max_num_seqs=4)
        engine.add_request("a", CIRCLE * 2, SamplingParams(max_tokens=max_tokens, **GREEDY))
        steps = run_steps(engine, executor)
        assert sum(step["a"] for step, _ in steps) == 8 + max_tokens - 1, "the last token is not computed"


@pytest.mark.parametrize("chunked", [False, True])
def test_drafts_take_the_budget_that_is_left(only_habit, chunked):
    engine, executor = shadow_engine(
        100, num_speculative_tokens=8, max_num_seqs=3, max_num_batched_tokens=12, max_model_len=12, enable_chunked_prefill=chunked
    )
    for name in "ab":
        engine.add_request(name, [*CIRCLE, 1], SamplingParams(max_tokens=7, **GREEDY))
    steps = run_steps(engine, executor)
    # "a" needs five drafts to its end, and leaves five for "b".
    assert steps == [({"a": 5, "b": 5}, 0), ({"a": 6, "b": 6}, 0)]


def test_with_chunked_prefill_prompts_come_before_drafts(only_habit):
    engine, executor = shadow_engine(
        100, num_speculative_tokens=8, max_num_seqs=3, max_num_batched_tokens=10, enable_chunked_prefill=True
    )
    engine.add_request("a", [*CIRCLE, 1], SamplingParams(max_tokens=20, **GREEDY))
    engine.step()
    engine.add_request("b", [20] * 16, SamplingParams(max_tokens=1, **GREEDY))
    assert [step for step, _ in run_steps(engine, executor)][:2] == [{"a": 1, "b": 9}, {"a": 3, "b": 7}]


def test_nobody_is_preempted_for_a_draft(only_habit):
    """Six blocks of four: in the second step each has begun its third, and "a" may guess no further than that."""
    engine, executor = shadow_engine(6, num_speculative_tokens=8, max_num_seqs=2, watermark=0)
    engine.add_request("a", CIRCLE * 2, SamplingParams(max_tokens=13, **GREEDY))
    engine.add_request("b", CIRCLE * 2, SamplingParams(max_tokens=5, **GREEDY))
    assert run_steps(engine, executor) == [({"a": 8, "b": 8}, 0), ({"a": 4, "b": 4}, 0), ({"a": 8}, 0)]


def test_wrong_drafts_give_their_blocks_back(monkeypatch):
    monkeypatch.setattr(shadow, "next_token", lambda context, last, *_: int(context, 16) % 20 + 20)
    engine, _ = shadow_engine(100, block_size=2, num_speculative_tokens=8, prompt_lookup_min=1, max_num_seqs=1)
    monkeypatch.setattr(NgramIndex, "propose", lambda self, token_ids, num_tokens: [1] * num_tokens)
    engine.add_request("a", CIRCLE, SamplingParams(max_tokens=20, **GREEDY))
    free = []
    while engine.has_unfinished_requests():
        (output,) = engine.step()
        if not output.finished:
            free.append(engine.block_manager.get_num_free_gpu_blocks())
    assert output.metrics.num_draft_tokens > 100 and output.metrics.num_accepted_tokens == 0
    assert free == [100 - engine.block_manager.num_blocks_for(num_computed) for num_computed in range(4, 23)]


def test_requests_with_penalties_get_no_drafts(only_habit):
    engine, executor = shadow_engine(100, num_speculative_tokens=3, max_num_seqs=4)
    engine.add_request("a", CIRCLE * 2, SamplingParams(max_tokens=4, repetition_penalty=1.1, **GREEDY))
    assert [step for step, _ in run_steps(engine, executor)] == [{"a": 8}, {"a": 1}, {"a": 1}, {"a": 1}]


def test_metrics_and_trace_count_drafts(only_habit):
    engine, _ = shadow_engine(100, num_speculative_tokens=3, max_num_seqs=4)
    engine.start_trace()
    engine.add_request("a", [*CIRCLE, 1, 30, 8], SamplingParams(max_tokens=12, **GREEDY))
    while engine.has_unfinished_requests():
        (output,) = engine.step()
    parts = [part for step in engine.trace for part in step.scheduled]
    assert {part.request_id for part in parts} == {"a"}
    assert sum(part.num_drafts for part in parts) == output.metrics.num_draft_tokens
    assert sum(part.num_accepted for part in parts) == output.metrics.num_accepted_tokens > 0
    assert sum(part.num_new_tokens for part in parts) == 12
    assert len(engine.trace) + output.metrics.num_accepted_tokens == 12


def test_the_prefix_cache_knows_blocks_that_right_drafts_filled(only_habit):
    engine, executor = shadow_engine(100, num_speculative_tokens=8, max_num_seqs=1, enable_prefix_caching=True)
    engine.add_request("a", CIRCLE * 2, SamplingParams(max_tokens=9, **GREEDY))
    assert run_steps(engine, executor) == [({"a": 8}, 0), ({"a": 8}, 0)]
    engine.add_request("b", [*CIRCLE * 4, 5], SamplingParams(max_tokens=1, **GREEDY))
    (output,) = engine.step()
    assert output.num_cached_tokens == 16


def test_a_stop_token_among_the_drafts_ends_the_sequence(only_habit):
    engine, executor = shadow_engine(100, num_speculative_tokens=8, max_num_seqs=4)
    engine.add_request("a", CIRCLE * 2, SamplingParams(max_tokens=20, temperature=0, stop_token_ids=[10], min_tokens=5))
    while engine.has_unfinished_requests():
        (output,) = engine.step()
    (completion,) = output.outputs
    assert completion.token_ids == CIRCLE * 2, "the first 10 comes before min_tokens"
    assert (completion.finish_reason, completion.stop_reason) == ("stop", 10)
    assert executor.num_steps == 2


def test_an_abort_while_drafts_are_verified_frees_everything(only_habit):
    engine, executor = shadow_engine(100, num_speculative_tokens=8, max_num_seqs=4)
    execute, drafted = executor.execute_model, []

    def execute_and_abort(request):
        results = execute(request)
        drafted.extend(range(request.sequences[0].num_drafts))
        if drafted:
            engine.abort_request("a")
        return results

    executor.execute_model = execute_and_abort
    engine.add_request("a", CIRCLE * 2, SamplingParams(max_tokens=20, **GREEDY))
    while engine.has_unfinished_requests():
        engine.step()
    assert drafted and executor.num_steps == 2
    assert engine.block_manager.get_num_free_gpu_blocks() == 100


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1, but must be a whole number of at least 0"),
        ({"num_speculative_tokens": True}, "must be a whole number"),
        ({"prompt_lookup_max": 0}, "prompt_lookup_max is 0"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min is 0"),
        ({"prompt_lookup_min": 5}, "prompt_lookup_min is 5, more than prompt_lookup_max .4."),
    ],
)
def test_bad_arguments_are_told_in_one_sentence(args, words):
    with pytest.raises(ConfigError, match=words):
        EngineArgs(**args).scheduler_config(100)


# -- on the real model ---------------------------------------------------------------------------------------------------

PROMPTS = [
    "Repeat this list: red, green, blue, red, green, blue, red, green,",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    "The capital of France is",
]


@pytest.fixture(scope="module")
def speculative(smollm2_path):
    return LLM(str(smollm2_path), num_gpu_blocks_override=100, max_num_seqs=8, num_speculative_tokens=4)


PARAMS = {
    "greedy": SamplingParams(max_tokens=40, **GREEDY),
    "sampled": SamplingParams(temperature=0.5, top_p=0.9, seed=3, n=2, max_tokens=32, logprobs=2, prompt_logprobs=0),
    "biased and banned": SamplingParams(temperature=0, max_tokens=32, min_tokens=20, stop_token_ids=[2], logit_bias={28: -1.0}),
    "penalties": SamplingParams(temperature=0, max_tokens=12, frequency_penalty=0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMS)
def test_tokens_and_logprobs_are_those_without_speculation(llm, speculative, name):
    params = PARAMS[name]
    expected = llm.generate(PROMPTS, params, use_tqdm=False)
    outputs = speculative.generate(PROMPTS, params, use_tqdm=False)
    for output, other in zip(outputs, expected, strict=True):
        for completion, reference in zip(output.outputs, other.outputs, strict=True):
            assert (completion.token_ids, completion.text) == (reference.token_ids, reference.text)
            assert completion.finish_reason == reference.finish_reason
            if params.logprobs is not None:
                assert len(completion.logprobs) == len(completion.token_ids)
                for token_id, entry, right in zip(completion.token_ids, completion.logprobs, reference.logprobs, strict=True):
                    assert entry.keys() == right.keys() and entry[token_id].rank == right[token_id].rank
                    assert abs(entry[token_id].logprob - right[token_id].logprob) < 1e-3
                assert completion.cumulative_logprob == pytest.approx(reference.cumulative_logprob, abs=1e-2)
    num_accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    assert num_accepted == 0 if params.has_penalties else num_accepted > 10


@pytest.mark.slow
def test_tokens_are_the_same_with_chunks_cache_and_swapping(llm, smollm2_path):
    crowded = LLM(
        str(smollm2_path), num_gpu_blocks_override=7, max_num_seqs=4, max_num_batched_tokens=20, max_model_len=128,
        enable_chunked_prefill=True, enable_prefix_caching=True, preemption_mode="swap", swap_space=0.01, num_speculative_tokens=6,
    )  # fmt: skip
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS["greedy"], use_tqdm=False)]
    for _ in range(2):
        outputs = crowded.generate(PROMPTS, PARAMS["greedy"], use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert sum(output.metrics.num_accepted_tokens for output in outputs) > 20
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert crowded.llm_engine.block_manager.get_num_free_gpu_blocks() == 7


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["stop string", "stop token", "max_tokens"])
def test_nothing_comes_after_an_end_in_the_middle_of_accepted_drafts(llm, speculative, ending):
    prompt = PROMPTS[0]
    full = llm.generate(prompt, SamplingParams(max_tokens=30, **GREEDY), use_tqdm=False)[0].outputs[0]
    num_dropped, wishes = 0, []
    for length in range(8, 18, 2):
        if ending == "stop string":
            stop = llm.get_tokenizer().decode(full.token_ids[length - 5 : length])
            wishes.append(SamplingParams(max_tokens=30, stop=stop, min_tokens=length - 1, **GREEDY))
        elif ending == "stop token":
            wishes.append(SamplingParams(max_tokens=30, stop_token_ids=[full.token_ids[length - 8]], **GREEDY))
        else:
            wishes.append(SamplingParams(max_tokens=length, **GREEDY))
    all_expected = llm.generate([prompt] * len(wishes), wishes, use_tqdm=False)
    for params, expected in zip(wishes, all_expected, strict=True):
        speculative.llm_engine.start_trace()
        request = speculative.generate(prompt, params, use_tqdm=False)[0]
        output = request.outputs[0]
        assert output == expected.outputs[0]
        num_won = len(speculative.llm_engine.trace) + request.metrics.num_accepted_tokens  # with those that nobody wanted
        num_dropped += num_won - len(output.token_ids)
    assert num_dropped == 0 if ending == "max_tokens" else num_dropped > 0


@pytest.mark.slow
def test_streamed_text_grows_by_several_tokens_and_an_abort_leaves_the_others_alone(llm, speculative):
    engine = speculative.llm_engine
    params = SamplingParams(max_tokens=30, **GREEDY)
    engine.add_request("a", PROMPTS[0], params)
    engine.add_request("b", PROMPTS[0], params)
    text, gains, token_ids = "", [], []
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id == "a":
                (completion,) = output.outputs
                assert completion.text.startswith(text)
                gains.append(len(completion.token_ids) - len(token_ids))
                text, token_ids = completion.text, completion.token_ids
        if len(gains) == 3:
            engine.abort_request("b")
    assert token_ids == llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0].token_ids
    assert max(gains) == 5 and sum(gains) == 30
    assert engine.block_manager.get_num_free_gpu_blocks() == engine.block_manager.num_gpu_blocks
