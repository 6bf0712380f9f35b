"""Workers in processes with several steps in flight: what requests get, and all that can go wrong while others are behind."""

from __future__ import annotations

import random
import signal
import threading
import time
from dataclasses import replace

import pytest
from failing_parts import FailingSampler
from hypothesis import given, settings
from hypothesis import strategies as st
from steps_in_processes import LAYOUTS, launch, load, make_step
from test_invariants import Job, jobs, run
from test_steps_in_flight import Remainders

from minivllm import SamplingParams, StructuredOutputsParams
from minivllm.errors import KernelError, WorkerError
from minivllm.request import EngineCoreRequest
from minivllm.scheduler_output import ExecuteModelRequest, SequenceData

pytestmark = pytest.mark.slow
NOTICED_SECONDS = 30.0
GREEDY = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
MAX_MODEL_LEN = 56
MADE = [pytest.param(name, marks=() if name in ("two ranks", "two stages") else pytest.mark.long) for name in LAYOUTS]


@pytest.fixture(scope="module", params=MADE)
def layout(request):
    """How the model is divided."""
    return LAYOUTS[request.param]


# -- what requests get -----------------------------------------------------------------------------------------------


OPTIONS = {"max_model_len": MAX_MODEL_LEN, "block_size": 4, "preemption_mode": "swap", "swap_space": 2e-4}


@pytest.fixture(scope="module")
def one(folder):
    """One worker, and one step in flight."""
    return load(folder, {}, **OPTIONS)


@pytest.fixture(scope="module")
def several(folder, layout):
    """Several steps in flight, and few blocks."""
    engine = load(folder, layout, **OPTIONS | {"num_gpu_blocks_override": 20})
    yield engine
    engine.core.shutdown()


@st.composite
def demanding_jobs(draw) -> Job:
    job = draw(jobs(40, 2))
    extras = {
        "presence_penalty": draw(st.sampled_from([0.0, 0.0, 0.0, 0.5])),
        "logprobs": draw(st.sampled_from([None, 0, 2])),
        "prompt_logprobs": draw(st.sampled_from([None, None, 1])),
        "top_p": draw(st.sampled_from([1.0, 0.9])),
    }
    return replace(job, params=replace(job.params, **extras))


@st.composite
def limits_of_steps(draw) -> dict[str, object]:
    limits = {"max_num_seqs": draw(st.integers(2, 6)), "max_num_batched_tokens": MAX_MODEL_LEN}
    if draw(st.booleans()):
        limits = limits | {"enable_chunked_prefill": True, "max_num_batched_tokens": draw(st.integers(6, 20))}
    return limits | {"preemption_mode": draw(st.sampled_from(["recompute", "swap"]))}


def run_with_grammars(engine, limits, workload, constrained):
    engine.core.use_scheduler(type(engine.scheduler), replace(engine.core.scheduler_config, **limits))
    add = engine.scheduler.add_request

    def add_with_grammar(request):
        request.grammar = Remainders() if request.request_id in constrained else None
        add(request)

    engine.scheduler.add_request = add_with_grammar
    try:
        return run(engine, workload)
    except BaseException:  # the engine is there for the next example
        for i in range(len(workload)):
            engine.abort_request(str(i))
        raise


def bare(result):
    return replace(result, logprobs=[])


def numbers(result):
    """The log-probabilities of a result in order."""
    sequences = [sequence or [] for sequence in result.logprobs]
    return [entry[token_id].logprob for sequence in sequences for entry in sequence for token_id in sorted(entry)]


@settings(max_examples=settings().max_examples // 4)
@given(limits_of_steps(), st.lists(demanding_jobs(), min_size=1, max_size=8), st.sets(st.integers(0, 7), max_size=2))
def test_all_that_a_request_gets_is_the_same(one, several, limits, workload, with_grammar):
    """With chunks, preemption by both ways, n > 1, grammars, penalties, log-probabilities and aborts."""
    constrained = {str(i) for i in with_grammar}
    grammar = StructuredOutputsParams(regex="[a-z]*")  # says that masks follow; the grammar in its place is `Remainders`
    marked = [
        replace(job, params=replace(job.params, structured_outputs=grammar)) if str(i) in constrained else job
        for i, job in enumerate(workload)
    ]
    found = run_with_grammars(several, limits, marked, constrained)
    patient = [replace(job, abort_after=None) for job in marked]
    expected = run_with_grammars(one, {"max_num_seqs": 6, "max_num_batched_tokens": MAX_MODEL_LEN}, patient, constrained)
    for name, result in found.items():
        assert result.finished or result.error is not None
        if result.error is None:
            assert bare(result) == bare(expected[name])
            assert numbers(result) == pytest.approx(numbers(expected[name]), abs=1e-3)
    assert several.block_manager.get_num_free_gpu_blocks() == several.block_manager.num_gpu_blocks


def test_as_many_steps_are_in_flight_as_the_layout_allows(several, layout):
    engine, most = several, 0
    limits = {
        "max_num_seqs": 6,
        "max_num_batched_tokens": MAX_MODEL_LEN,
        "enable_chunked_prefill": False,
    }  # not those of an earlier test
    engine.core.use_scheduler(type(engine.scheduler), replace(engine.core.scheduler_config, **limits))
    for i in range(6):
        engine.add_request(str(i), [5 + i, 6], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
        most = max(most, 1 + len(engine.core._in_flight))
    assert most == engine.core.max_concurrent_batches == layout.get("pipeline_parallel_size", 2)


# -- steps made by hand ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=MADE)
def executor(folder, request):
    engine = load(folder, LAYOUTS[request.param], sampler_cls=FailingSampler)
    yield engine.executor
    engine.core.shutdown()


def test_answers_wait_until_they_are_asked_for(executor):
    prompts = [(5, 6, 7), (8, 9), (10, 11, 12)]
    expected = [executor.execute_model(make_step(1, prompt))[0].token_ids for prompt in prompts]
    pending = [launch(executor, make_step(i, prompt)) for i, prompt in enumerate(prompts, 1)]
    assert [each()[0].token_ids for each in reversed(pending)] == expected[::-1]


BAD = {
    "on all ranks": (make_step(2, block=1000), KernelError, "A block table names block 1000"),
    "on the rank that samples": (
        make_step(2, temperature=1.0, seed=13),
        WorkerError,
        r"Rank \d( \(stage \d\))?: ZeroDivisionError: the sampler has",
    ),
    "no step at all": (make_step(2, block=1.5), WorkerError, "ValidationError: Expected `int`, got `float`"),
}


@pytest.mark.parametrize("kind", BAD)
def test_steps_behind_one_that_fails_are_computed(executor, kind, caplog):
    bad, error, words = BAD[kind]
    expected = executor.execute_model(make_step(1))[0].token_ids
    for _ in range(3):
        caplog.clear()
        pending = [launch(executor, request) for request in (make_step(1), bad, make_step(3), bad, make_step(4))]
        for i, each in enumerate(pending):
            if i in (1, 3):
                with pytest.raises(error, match=words):
                    each()
            else:
                assert each()[0].token_ids == expected
        if error is WorkerError:
            assert caplog.text.count("Traceback") == 2, "once for each step, however many ranks"


def test_a_step_that_failed_may_be_left_alone(executor):
    """Nobody waits for its answers, as after Ctrl-C; the workers go on with the next all the same."""
    expected = executor.execute_model(make_step(1))[0].token_ids
    for bad, _, _ in BAD.values():
        launch(executor, bad)
        assert launch(executor, make_step(3))()[0].token_ids == expected


def test_masks_follow_a_step(executor):
    grammar = StructuredOutputsParams(regex="[a-z]*")
    constrained = make_step(1, structured_outputs=grammar)
    only = [(1 << token_id).to_bytes(7, "little") for token_id in (17, 33)]
    for token_id, mask in zip((17, 33), only, strict=True):
        pending = (
            launch(executor, constrained, {0: [mask]}),
            launch(executor, make_step(2)),
            launch(executor, constrained, {0: [mask]}),
        )
        assert [each()[0].token_ids[0] for each in pending][::2] == [token_id] * 2


def test_a_step_whose_masks_do_not_come_is_left(executor):
    expected = executor.execute_model(make_step(2))[0].token_ids
    executor.launch_model(make_step(1, structured_outputs=StructuredOutputsParams(regex="[a-z]*")))
    time.sleep(0.1)
    assert launch(executor, make_step(2))()[0].token_ids == expected
    executor.launch_model(make_step(1, structured_outputs=StructuredOutputsParams(regex="[a-z]*")))
    assert executor.collective_rpc("check_health") == [None] * executor.world_size


def test_long_messages_in_both_directions_at_once(executor):
    """A worker sends more than fits into its queue while the executor sends more than fits into the other."""
    prompt = [i % 50 for i in range(4000)]
    table = [i % 60 for i in range(500)]
    asked = EngineCoreRequest("long", prompt, SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=20), 4096)
    long = ExecuteModelRequest([SequenceData(asked, 9, 0, prompt, 0, table, 0, [], 1, 0, False)])
    other = make_step(1)
    other.sequences[0].request = replace(other.sequences[0].request, prompt_token_ids=[7] * 3_000_000)
    pending = [launch(executor, request) for request in (long, other, long, make_step(2))]
    results = [each()[0] for each in pending]
    assert len(results[0].prompt_logprobs) == len(results[2].prompt_logprobs) == 3999
    assert results[1].token_ids == results[3].token_ids


def test_each_step_has_its_own_timing(executor):
    executor.record_timing(True)
    try:
        pending = [launch(executor, make_step(i, [5] * (2 + i))) for i in range(1, 4)]
        timings = []
        for each in pending:
            each()
            timings.append(executor.take_timing())
    finally:
        executor.record_timing(False)
    assert [len(timing) for timing in timings] == [executor.world_size] * 3
    for rank in range(executor.world_size):
        assert timings[0][rank].end <= timings[1][rank].start and timings[1][rank].end <= timings[2][rank].start
        assert timings[0][rank].num_bytes < timings[1][rank].num_bytes < timings[2][rank].num_bytes
    launch(executor, make_step(1))()
    assert executor.take_timing() == []


@pytest.mark.parametrize("seed", range(2))
def test_ctrl_c_at_any_time_loses_nothing_else(executor, seed):
    """While a step is sent or waited for, with others in flight: those give their tokens, and so do later ones."""
    expected = [executor.execute_model(make_step(i, [5] * (i + 1)))[0].token_ids for i in range(1, 5)]
    rng, num_interrupted = random.Random(seed), 0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for _ in range(60):
            pending = [None] * 4
            signal.setitimer(signal.ITIMER_REAL, 0)
            timer = threading.Timer(rng.uniform(0, 0.01), signal.raise_signal, [signal.SIGINT])
            try:
                timer.start()
                for i in range(4):
                    pending[i] = launch(executor, make_step(i + 1, [5] * (i + 2)))
                for i in range(4):
                    assert pending[i]()[0].token_ids == expected[i]
                    pending[i] = None
                timer.join()
                time.sleep(0.001)
            except KeyboardInterrupt:
                num_interrupted += 1
            timer.join()
            for each, tokens in zip(pending, expected, strict=True):
                assert each is None or each()[0].token_ids == tokens
    finally:
        signal.signal(signal.SIGINT, before)
    assert num_interrupted > 30


@pytest.mark.parametrize("is_after", [False, True])
def test_ctrl_c_while_an_answer_is_read(executor, monkeypatch, is_after):
    """It is read again, so that nobody waits for it for ever; also if it says that a step has failed."""
    bad = BAD["on the rank that samples"][0]
    expected = executor.execute_model(make_step(1))[0].token_ids
    answers = executor._answers
    take, messages_left = answers._take, [0]

    def take_and_interrupt(rank, message):
        messages_left[0] -= 1
        if is_after or messages_left[0] != 0:
            take(rank, message)
        if messages_left[0] == 0:
            raise KeyboardInterrupt

    def insist(pending):
        """Its result, though it may be interrupted once."""
        try:
            return pending()
        except KeyboardInterrupt:
            return pending()

    monkeypatch.setattr(answers, "_take", take_and_interrupt)
    for number in range(1, 8):
        pending = [launch(executor, request) for request in (make_step(1), make_step(2), bad, make_step(3))]
        time.sleep(0.05)
        messages_left[0] = number  # not before: if a queue is full, answers are read while a step is launched
        assert insist(pending[0])[0].token_ids == insist(pending[1])[0].token_ids == expected
        with pytest.raises(WorkerError):
            insist(pending[2])
        assert insist(pending[3])[0].token_ids == expected
        messages_left[0] = 0
