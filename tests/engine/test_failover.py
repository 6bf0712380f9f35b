"""Requests that go on at another engine core, interrupted after every token: the tokens, texts and log-probabilities of an undisturbed run."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from nightly import NIGHTLY

from minivllm import LLM, SamplingParams, StructuredOutputsParams
from minivllm.data_parallel.request_table import InFlightRequest
from minivllm.engine.output_processor import OutputProcessor
from minivllm.sampling_params import RequestOutputKind

PROMPT = "Here is a short story about a fox who wanted to learn how to read.\n\n"
LENGTH = 24
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, seed=5)
FOX = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 5, "maxLength": 30}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
KINDS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "unseeded": replace(SEEDED, seed=None),
    "three continuations": replace(SEEDED, n=3, top_p=0.95, logprobs=0),
    "penalties": replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
    "min_tokens": replace(GREEDY, min_tokens=12, stop_token_ids=list(range(0, 2000))),
    "a stop string": replace(GREEDY, stop=["<to be replaced>"]),
    "three continuations with stops": replace(SEEDED, n=3, stop=[".", "\n"], seed=11),
    "logprobs": replace(SEEDED, logprobs=3, top_k=20, logit_bias={198: 1.0}),
    "bad words": replace(GREEDY, bad_words=["the", "fox jumps", "and"]),
    "structured": replace(SEEDED, n=2, ignore_eos=False, structured_outputs=StructuredOutputsParams(json=FOX)),
    "prompt_logprobs": replace(GREEDY, prompt_logprobs=2, logprobs=1),
}
ENGINES = {
    "default": {},
    "chunked prefill, prefix cache": {
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 48,
    },
    "speculative": {"num_speculative_tokens": 3},
    "few blocks": {"num_gpu_blocks_override": 14, "max_num_seqs": 8},
    "steps in flight": {"async_scheduling": True},
    "stages": {"pipeline_parallel_size": 2},
}


@pytest.fixture(scope="module")
def params_of(llm):
    """The kinds, with a stop string that several tokens make, in the middle of the text."""
    tokens = list(llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
    decode = llm.get_tokenizer().decode
    stop = decode(tokens[:16])[len(decode(tokens[:12])) + 1 : -1]
    return KINDS | {"a stop string": replace(GREEDY, stop=[stop])}


def start(engine, number, params):
    """A request as a frontend sees it, with the engine core's side of it."""
    processed = engine.input_processor.process_inputs(f"{number}", PROMPT, params)
    processor = OutputProcessor(engine.tokenizer)
    return processor, processor.add_request(processed)


def run_alone(engine, params):
    """Run a request. Returns its outputs; and before each token, its frontend's state and the client's."""
    processor, state = start(engine, "alone", params)
    in_flight = InFlightRequest(state.request)
    engine.core.add_request(state.request)
    outputs, states = [], []
    while True:
        shared = {id(part): part for part in (engine.tokenizer, *vars(engine.tokenizer).values())}
        states.append((copy.deepcopy((state, in_flight), shared), len(outputs)))
        step = engine.core.step()
        for output in step.outputs:
            in_flight.add(output)
        processed = processor.process_outputs(step)
        engine.core.stop_sequences(processed.stopped)
        for stopped in processed.stopped:
            in_flight.finish_sequence(stopped.index)
        if processed.updated:
            outputs.append(state.make_output())
        if state.finished:
            assert not in_flight.unfinished
            return outputs, states


def go_on(engine, states):
    """Let interrupted requests go on, all in one batch. Returns the outputs of each."""
    processor = OutputProcessor(engine.tokenizer)
    outputs = {}
    for number, (state, in_flight) in enumerate(states):
        in_flight.request = replace(in_flight.request, request_id=str(number))
        state.request = replace(state.request, request_id=str(number), number=number)
        processor.states[str(number)] = state
        outputs[str(number)] = []
        engine.core.add_request(in_flight.to_send(number))
    while processor.states:
        processed = processor.process_outputs(engine.core.step())
        engine.core.stop_sequences(processed.stopped)
        for state in processed.updated:
            outputs[state.request.request_id].append(state.make_output())
    engine.core.finish_surplus_steps()
    assert not engine.core.has_unfinished_requests()
    assert engine.block_manager.get_num_free_gpu_blocks() == engine.core.num_gpu_blocks
    return list(outputs.values())


def joined(outputs, n):
    """What a client makes of the pieces: by index, text, tokens, logprobs and how it ended."""
    whole = [["", [], [], None, None] for _ in range(n)]
    for output in outputs:
        for piece in output.outputs:
            mine = whole[piece.index]
            assert mine[3] is None, "nothing comes after the end"
            mine[0] += piece.text
            mine[1] += piece.token_ids
            mine[2] += piece.logprobs or []
            mine[3:] = piece.finish_reason, piece.stop_reason
    return whole


def assert_same(got, expected):
    """Equal, and log-probabilities within the rounding of another order of sums."""
    for mine, theirs in zip(got, expected, strict=True):
        assert mine[:2] == theirs[:2] and mine[3:] == theirs[3:]
        for chosen, a, b in zip(mine[1], mine[2], theirs[2], strict=True) if mine[2] else ():
            assert chosen in a and chosen in b and len(a.keys() & b.keys()) >= len(a) - 1
            for token in a.keys() & b.keys():
                assert a[token].logprob == pytest.approx(b[token].logprob, abs=2e-3)
                assert a[token].decoded_token == b[token].decoded_token


@pytest.mark.long
@pytest.mark.parametrize("name", ENGINES)
def test_after_every_token_a_request_goes_on_as_if_nothing_had_happened(llm, params_of, name):
    """The second engine has other options than the first: where a request goes on, it has other neighbours and other chunks.

    With the same options after each fifth token, and with others after fewer; at night after every token, and after every seventh.
    """
    other = (
        llm if name == "default" else LLM("smollm2-135m", **{"max_num_seqs": 32, "kv_cache_memory_bytes": 2**28} | ENGINES[name])
    )
    interrupted, expected = [], []
    for params in params_of.values():
        params = replace(params, output_kind=RequestOutputKind.DELTA)
        outputs, states = run_alone(llm.llm_engine, params)
        assert len(states) > 1 and outputs[-1].finished
        whole = joined(outputs, params.n)
        for interrupted_state, num_given in states:
            if interrupted_state[0].texts or num_given == 0:
                interrupted.append(interrupted_state)
                expected.append((outputs, num_given, whole))
    assert len(interrupted) > 180
    step = (1 if name == "default" else 7) if NIGHTLY else (10 if name == "default" else 37)
    interrupted, expected = interrupted[::step], expected[::step]
    for outputs, (before, num_given, whole) in zip(go_on(other.llm_engine, interrupted), expected, strict=True):
        assert_same(joined(before[:num_given] + outputs, len(whole)), whole)
        last, undisturbed = outputs[-1], before[-1]
        assert last.finished and last.error is None
        assert last.metrics.num_cached_tokens == undisturbed.metrics.num_cached_tokens or num_given == 0
        if num_given:
            assert last.metrics.first_token_time == before[0].metrics.first_token_time
            assert all(output.prompt_logprobs is None for output in outputs)
        elif undisturbed.prompt_token_ids and before[0].prompt_logprobs:
            assert all(outputs[0].prompt_logprobs[1:]) and len(outputs[0].prompt_logprobs) == len(before[0].prompt_logprobs)
