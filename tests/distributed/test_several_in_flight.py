"""Workers in processes with several steps in flight: what requests get, and all that can go wrong while others are behind."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import replace

import psutil
import pytest
import torch
from failing_parts import FailingOnceBackend, FailingSampler
from hypothesis import given, settings
from hypothesis import strategies as st
from test_invariants import Job, jobs, run
from test_steps_in_flight import Remainders
from transformers import LlamaConfig, LlamaForCausalLM

from minivllm import SamplingParams, StructuredOutputsParams
from minivllm.config import EngineArgs, SchedulerConfig
from minivllm.core.async_scheduler import AsyncScheduler
from minivllm.engine.llm_engine import LLMEngine
from minivllm.errors import EngineDeadError, KernelError, WorkerError, WorkerKilledError
from minivllm.executor.worker_proc import Outbox
from minivllm.request import EngineCoreRequest
from minivllm.scheduler_output import ExecuteModelRequest, SequenceData

pytestmark = pytest.mark.slow
NOTICED_SECONDS = 30.0
GREEDY = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
MAX_MODEL_LEN = 56


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model whose logits are far enough apart that rounding decides nothing."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, eos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.4)
    path = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(path)
    return str(path)


def load(folder, **options) -> LLMEngine:
    defaults = {
        "skip_tokenizer_init": True, "num_gpu_blocks_override": 60, "block_size": 8, "tensor_parallel_size": 2, "async_scheduling": True,
    }  # fmt: skip
    return LLMEngine.from_engine_args(EngineArgs(folder, **defaults | options))


def generate(engine, prompts, params):
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id] = output
    return [outputs[str(i)] for i in range(len(prompts))]


def processes_of(engine):
    return [psutil.Process(pid) for pid in engine.executor.process_ids]


def all_gone(processes):
    return all(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in processes)


# -- what requests get -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engines(folder):
    """One worker and one step in flight; two workers and two steps in flight, with few blocks."""
    options = {"max_model_len": MAX_MODEL_LEN, "block_size": 4, "preemption_mode": "swap", "swap_space": 2e-4}
    one = load(folder, **options, num_gpu_blocks_override=60, tensor_parallel_size=1, async_scheduling=False)
    two = load(folder, **options, num_gpu_blocks_override=20)
    yield one, two
    two.core.shutdown()


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
def scheduler_configs(draw) -> SchedulerConfig:
    limits = {"max_num_seqs": draw(st.integers(2, 6)), "max_num_batched_tokens": MAX_MODEL_LEN}
    if draw(st.booleans()):
        limits = limits | {"enable_chunked_prefill": True, "max_num_batched_tokens": draw(st.integers(6, 20))}
    return SchedulerConfig(**limits, preemption_mode=draw(st.sampled_from(["recompute", "swap"])), async_scheduling=True)


def run_with_grammars(engine, scheduler_config, scheduler_cls, workload, constrained):
    engine.core.use_scheduler(scheduler_cls, scheduler_config)
    add = engine.scheduler.add_request

    def add_with_grammar(request):
        request.grammar = Remainders() if request.request_id in constrained else None
        add(request)

    engine.scheduler.add_request = add_with_grammar
    return run(engine, workload)


def bare(result):
    return replace(result, logprobs=[])


def numbers(result):
    """The log-probabilities of a result in order."""
    sequences = [sequence or [] for sequence in result.logprobs]
    return [entry[token_id].logprob for sequence in sequences for entry in sequence for token_id in sorted(entry)]


@settings(max_examples=settings().max_examples // 2)
@given(scheduler_configs(), st.lists(demanding_jobs(), min_size=1, max_size=8), st.sets(st.integers(0, 7), max_size=2))
def test_all_that_a_request_gets_is_the_same(engines, scheduler_config, workload, with_grammar):
    """With chunks, preemption by both ways, n > 1, grammars, penalties, log-probabilities and aborts."""
    one, two = engines
    constrained = {str(i) for i in with_grammar}
    # the parameters say that masks follow, though here the grammar is none of theirs
    grammar = StructuredOutputsParams(regex="[a-z]*")
    marked = [
        replace(job, params=replace(job.params, structured_outputs=grammar)) if str(i) in constrained else job
        for i, job in enumerate(workload)
    ]
    found = run_with_grammars(two, scheduler_config, AsyncScheduler, marked, constrained)
    config = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=MAX_MODEL_LEN)
    patient = [replace(job, abort_after=None) for job in workload]
    expected = run_with_grammars(one, config, type(one.scheduler), patient, constrained)
    for name, result in found.items():
        assert result.finished or result.error is not None
        if result.error is None:
            assert bare(result) == bare(expected[name])
            assert numbers(result) == pytest.approx(numbers(expected[name]), abs=1e-3)
    assert two.block_manager.get_num_free_gpu_blocks() == two.block_manager.num_gpu_blocks


# -- steps made by hand ----------------------------------------------------------------------------------------------


def step(number, prompt=(5, 6, 7), block=None, **params) -> ExecuteModelRequest:
    """A whole prompt in one block."""
    params = SamplingParams(**{"temperature": 0, "max_tokens": 5} | params)
    request = EngineCoreRequest(f"r{number}", list(prompt), params, 100, seed=params.seed or 0)
    table = [number if block is None else block]
    samples = 0 if block == 0 else 1
    return ExecuteModelRequest([SequenceData(request, number, 0, list(prompt), 0, table, 0, [], samples, 0, False)])


@pytest.fixture(scope="module")
def executor(folder):
    engine = load(folder, sampler_cls=FailingSampler)
    yield engine.executor
    engine.core.shutdown()


def launch(executor, request, masks=None):
    executor.launch_model(request)
    return executor.sample_tokens(masks or {})


def test_answers_wait_until_they_are_asked_for(executor):
    prompts = [(5, 6, 7), (8, 9), (10, 11, 12)]
    expected = [executor.execute_model(step(1, prompt))[0].token_ids for prompt in prompts]
    pending = [launch(executor, step(i, prompt)) for i, prompt in enumerate(prompts, 1)]
    assert [each()[0].token_ids for each in reversed(pending)] == expected[::-1]


BAD = {
    "on all ranks": (step(2, block=1000), KernelError, "A block table names block 1000"),
    "on the rank that samples": (step(2, temperature=1.0, seed=13), WorkerError, "Rank 0: ZeroDivisionError: the sampler has"),
    "no step at all": (step(2, block=1.5), WorkerError, "ValidationError: Expected `int`, got `float`"),
}


@pytest.mark.parametrize("kind", BAD)
def test_steps_behind_one_that_fails_are_computed(executor, kind, caplog):
    bad, error, words = BAD[kind]
    expected = executor.execute_model(step(1))[0].token_ids
    for _ in range(3):
        caplog.clear()
        pending = [launch(executor, request) for request in (step(1), bad, step(3), bad, step(4))]
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
    expected = executor.execute_model(step(1))[0].token_ids
    for bad, _, _ in BAD.values():
        launch(executor, bad)
        assert launch(executor, step(3))()[0].token_ids == expected


def test_masks_follow_a_step(executor):
    grammar = StructuredOutputsParams(regex="[a-z]*")
    constrained = step(1, structured_outputs=grammar)
    only = [(1 << token_id).to_bytes(7, "little") for token_id in (17, 33)]
    for token_id, mask in zip((17, 33), only, strict=True):
        pending = (
            launch(executor, constrained, {0: [mask]}),
            launch(executor, step(2)),
            launch(executor, constrained, {0: [mask]}),
        )
        assert [each()[0].token_ids[0] for each in pending][::2] == [token_id] * 2


def test_a_step_whose_masks_do_not_come_is_left(executor):
    expected = executor.execute_model(step(2))[0].token_ids
    executor.launch_model(step(1, structured_outputs=StructuredOutputsParams(regex="[a-z]*")))
    time.sleep(0.1)
    assert launch(executor, step(2))()[0].token_ids == expected
    executor.launch_model(step(1, structured_outputs=StructuredOutputsParams(regex="[a-z]*")))
    assert executor.collective_rpc("check_health") == [None, None]


def test_long_messages_in_both_directions_at_once(executor):
    """A worker sends more than fits into its queue while the executor sends more than fits into the other."""
    prompt = [i % 50 for i in range(4000)]
    table = [i % 60 for i in range(500)]
    asked = EngineCoreRequest("long", prompt, SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=20), 4096)
    long = ExecuteModelRequest([SequenceData(asked, 9, 0, prompt, 0, table, 0, [], 1, 0, False)])
    other = step(1)
    other.sequences[0].request = replace(other.sequences[0].request, prompt_token_ids=[7] * 3_000_000)
    pending = [launch(executor, request) for request in (long, other, long, step(2))]
    results = [each()[0] for each in pending]
    assert len(results[0].prompt_logprobs) == len(results[2].prompt_logprobs) == 3999
    assert results[1].token_ids == results[3].token_ids


def test_each_step_has_its_own_timing(executor):
    executor.record_timing(True)
    try:
        pending = [launch(executor, step(i, [5] * (2 + i))) for i in range(1, 4)]
        timings = []
        for each in pending:
            each()
            timings.append(executor.take_timing())
    finally:
        executor.record_timing(False)
    assert [len(timing) for timing in timings] == [2, 2, 2]
    for rank in range(2):
        assert timings[0][rank].end <= timings[1][rank].start and timings[1][rank].end <= timings[2][rank].start
        assert timings[0][rank].num_bytes < timings[1][rank].num_bytes < timings[2][rank].num_bytes
    launch(executor, step(1))()
    assert executor.take_timing() == []


@pytest.mark.parametrize("seed", range(3))
def test_ctrl_c_at_any_time_loses_nothing_else(executor, seed):
    """While a step is sent or waited for, with others in flight: those give their tokens, and so do later ones."""
    expected = [executor.execute_model(step(i, [5] * (i + 1)))[0].token_ids for i in range(1, 5)]
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
                    pending[i] = launch(executor, step(i + 1, [5] * (i + 2)))
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
    expected = executor.execute_model(step(1))[0].token_ids
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
        messages_left[0] = number
        pending = [launch(executor, request) for request in (step(1), step(2), bad, step(3))]
        time.sleep(0.05)
        assert insist(pending[0])[0].token_ids == insist(pending[1])[0].token_ids == expected
        with pytest.raises(WorkerError):
            insist(pending[2])
        assert insist(pending[3])[0].token_ids == expected
        messages_left[0] = 0


# -- what ends the engine --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["SIGKILL", "SIGSTOP"])
def test_a_worker_that_is_gone_ends_every_pending_step(folder, what):
    engine = load(folder, sampler_cls=FailingSampler)
    executor, processes = engine.executor, processes_of(engine)
    expected = rf"Rank 1 of 2 \(process {processes[1].pid}\) was {'killed by SIGKILL' if what == 'SIGKILL' else 'stopped'}"
    pending = [launch(executor, step(i, temperature=1.0, seed=15)) for i in range(1, 5)]  # a slow sampler
    os.kill(processes[1].pid, getattr(signal, what))
    start, errors = time.monotonic(), []
    for each in pending:
        try:
            each()
        except WorkerKilledError as error:
            errors.append(str(error))
    assert len(errors) >= 3 and all(error.startswith(errors[0]) for error in errors)
    with pytest.raises(WorkerKilledError, match=expected):
        launch(executor, step(1))
    assert time.monotonic() - start < NOTICED_SECONDS
    assert all_gone(processes)


def test_a_worker_that_is_stopped_while_a_long_message_is_sent(folder):
    engine = load(folder)
    processes, other = processes_of(engine), step(1)
    other.sequences[0].request = replace(other.sequences[0].request, prompt_token_ids=[7] * 3_000_000)
    os.kill(processes[0].pid, signal.SIGSTOP)
    with pytest.raises(WorkerKilledError, match=r"Rank 0 of 2 \(process \d+\) was stopped"):
        launch(engine.executor, other)
    assert all_gone(processes)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_alone_in_the_model_is_named(folder, rank, tmp_path, monkeypatch):
    file = tmp_path / "failing"
    monkeypatch.setenv("FAILING_PROCESS", str(file))
    engine = load(folder, attention_backend=FailingOnceBackend)
    executor, processes = engine.executor, processes_of(engine)
    pending = [launch(executor, step(1))]
    pending[0]()
    file.write_text(str(processes[rank].pid))
    pending = [launch(executor, step(i)) for i in range(1, 4)]
    start = time.monotonic()
    for each in pending:
        with pytest.raises(
            EngineDeadError, match=f"^Rank {rank} of 2 failed: ZeroDivisionError: attention has failed$"
        ) as raised:
            each()
        assert not isinstance(raised.value, WorkerKilledError)
    assert time.monotonic() - start < NOTICED_SECONDS
    assert all_gone(processes)


# -- an engine -------------------------------------------------------------------------------------------------------


def test_a_step_that_fails_ends_its_requests_alone(folder):
    engine = load(folder, sampler_cls=FailingSampler, max_num_seqs=4)
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]]
    expected = [output.outputs[0].token_ids for output in generate(engine, prompts, replace(GREEDY, max_tokens=30))]
    engine.add_request("later", [5, 6], SamplingParams(temperature=1, seed=13, max_tokens=3))
    assert "the sampler has failed" in next(output for _ in range(9) for output in engine.step() if output.finished).error
    assert [output.outputs[0].token_ids for output in generate(engine, prompts, replace(GREEDY, max_tokens=30))] == expected
    assert engine.block_manager.get_num_free_gpu_blocks() == 60
    engine.core.shutdown()


# -- answers in the background ---------------------------------------------------------------------------------------


class Written:
    def __init__(self):
        self.messages = []

    def write(self, message):
        self.messages.append(message)


def test_answers_in_the_background_keep_their_order_and_hold_nobody_up():
    queue, ready = Written(), threading.Event()
    outbox = Outbox(queue)
    outbox.answer(lambda: b"0")
    assert queue.messages == [b"0"]
    outbox.answer_in_background()
    outbox.answer(lambda: b"1" if ready.wait(30) else b"too late")
    outbox.answer(lambda: b"2")
    outbox.write(b"log")
    assert queue.messages == [b"0", b"log"]
    ready.set()
    deadline = time.monotonic() + 30
    while len(queue.messages) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert queue.messages == [b"0", b"log", b"1", b"2"]
