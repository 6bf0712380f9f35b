"""Workers in processes that fail, are killed or stopped while several steps are in flight."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace

import psutil
import pytest
from failing_parts import FailingOnceBackend, FailingSampler
from late_parts import LateBackend
from steps_in_processes import LAYOUTS, generate, launch, load, make_step

from minivllm import SamplingParams
from minivllm.errors import EngineDeadError, KernelError, WorkerError, WorkerKilledError
from minivllm.executor.worker_proc import Outbox

pytestmark = pytest.mark.slow
NOTICED_SECONDS = 30.0
LAYOUT = pytest.mark.parametrize("layout", [LAYOUTS["two ranks"], LAYOUTS["two stages"]], ids=["ranks", "stages"])


def processes_of(engine):
    return [psutil.Process(pid) for pid in engine.executor.process_ids]


def all_gone(processes):
    return all(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in processes)


def named(layout, rank, process=None):
    """How a rank of two is named."""
    details = [f"stage {rank}"] if "pipeline_parallel_size" in layout else []
    details += [f"process {process.pid}"] if process else []
    return f"Rank {rank} of 2" + (rf" \({', '.join(details)}\)" if details else "")


@LAYOUT
@pytest.mark.parametrize(("what", "rank"), [pytest.param("SIGKILL", 0, marks=pytest.mark.long), ("SIGKILL", 1), ("SIGSTOP", 1)])
def test_a_worker_that_is_gone_ends_every_pending_step(folder, layout, what, rank):
    engine = load(folder, layout, sampler_cls=FailingSampler)
    executor, processes = engine.executor, processes_of(engine)
    expected = f"{named(layout, rank, processes[rank])} was {'killed by SIGKILL' if what == 'SIGKILL' else 'stopped'}"
    pending = [launch(executor, make_step(i, temperature=1.0, seed=15)) for i in range(1, 5)]  # a slow sampler
    os.kill(processes[rank].pid, getattr(signal, what))
    start, errors = time.monotonic(), []
    for each in pending:
        try:
            each()
        except WorkerKilledError as error:
            errors.append(str(error))
    assert len(errors) >= 3 and all(error.startswith(errors[0]) for error in errors)
    with pytest.raises(WorkerKilledError, match=expected):
        launch(executor, make_step(1))
    assert time.monotonic() - start < NOTICED_SECONDS
    assert all_gone(processes)


def test_a_worker_that_is_stopped_while_a_long_message_is_sent(folder):
    engine = load(folder, LAYOUTS["two ranks"])
    processes, other = processes_of(engine), make_step(1)
    other.sequences[0].request = replace(other.sequences[0].request, prompt_token_ids=[7] * 3_000_000)
    os.kill(processes[0].pid, signal.SIGSTOP)
    with pytest.raises(WorkerKilledError, match=r"Rank 0 of 2 \(process \d+\) was stopped"):
        launch(engine.executor, other)
    assert all_gone(processes)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_alone_in_the_model_is_named(folder, rank, tmp_path, monkeypatch):
    file = tmp_path / "failing"
    monkeypatch.setenv("FAILING_PROCESS", str(file))
    engine = load(folder, LAYOUTS["two ranks"], attention_backend=FailingOnceBackend)
    executor, processes = engine.executor, processes_of(engine)
    pending = [launch(executor, make_step(1))]
    pending[0]()
    file.write_text(str(processes[rank].pid))
    pending = [launch(executor, make_step(i)) for i in range(1, 4)]
    start = time.monotonic()
    for each in pending:
        with pytest.raises(
            EngineDeadError, match=f"^Rank {rank} of 2 failed: ZeroDivisionError: attention has failed$"
        ) as raised:
            each()
        assert not isinstance(raised.value, WorkerKilledError)
    assert time.monotonic() - start < NOTICED_SECONDS
    assert all_gone(processes)


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), *(pytest.param(rank, 3, marks=pytest.mark.long) for rank in (1, 0))])
def test_a_stage_that_fails_alone_costs_one_step(folder, size, rank, tmp_path, monkeypatch):
    """The later stages leave it, too, and all stages go on with the steps behind it."""
    file = tmp_path / "failing"
    monkeypatch.setenv("FAILING_PROCESS", str(file))
    engine = load(folder, {"pipeline_parallel_size": size}, attention_backend=FailingOnceBackend)
    executor, processes = engine.executor, processes_of(engine)
    expected = executor.execute_model(make_step(1))[0].token_ids
    for _ in range(3):
        file.write_text(str(processes[rank].pid))
        pending = [launch(executor, make_step(i)) for i in range(1, 4)]
        with pytest.raises(WorkerError, match=rf"^Rank {rank} \(stage {rank}\): ZeroDivisionError: attention has failed$"):
            pending[0]()
        assert [each()[0].token_ids for each in pending[1:]] == [expected] * 2
    engine.core.shutdown()


def test_a_stage_that_is_late_is_named(folder, tmp_path, monkeypatch):
    file = tmp_path / "late"
    monkeypatch.setenv("LATE_PROCESS", str(file))
    engine = load(folder, LAYOUTS["three stages"], attention_backend=LateBackend)
    executor, processes = engine.executor, processes_of(engine)
    launch(executor, make_step(1))()
    file.write_text(str(processes[1].pid))
    pending = [launch(executor, make_step(i)) for i in range(1, 4)]
    late = rf"Stage 1 of 3 \(rank 1\), process {processes[1].pid}, did not come within 1 s."
    for each in pending:
        with pytest.raises(EngineDeadError, match=rf"^Rank 2 of 3 \(stage 2\) failed: {late}$"):
            each()
    assert all_gone(processes)


def test_a_rank_that_fails_alone_in_its_stage_is_named(folder, tmp_path, monkeypatch):
    file = tmp_path / "failing"
    monkeypatch.setenv("FAILING_PROCESS", str(file))
    engine = load(folder, LAYOUTS["two stages of two ranks"], attention_backend=FailingOnceBackend)
    executor, processes = engine.executor, processes_of(engine)
    launch(executor, make_step(1))()
    file.write_text(str(processes[1].pid))
    pending = [launch(executor, make_step(i)) for i in range(1, 4)]
    for each in pending:
        with pytest.raises(EngineDeadError, match=r"^Rank 1 of 4 \(stage 0\) failed: ZeroDivisionError: attention has failed$"):
            each()
    assert all_gone(processes)


def test_a_stage_may_be_busy_with_earlier_steps_when_one_before_it_fails(folder, tmp_path, monkeypatch):
    """For longer than ranks of one stage would wait for each other."""
    file = tmp_path / "failing"
    monkeypatch.setenv("FAILING_PROCESS", str(file))
    layout = LAYOUTS["two stages of two ranks"]
    engine = load(folder, layout, attention_backend=FailingOnceBackend, sampler_cls=FailingSampler)
    executor, bad = engine.executor, make_step(2, block=1000)
    expected = executor.execute_model(make_step(1))[0].token_ids
    slow = [launch(executor, make_step(i, temperature=1.0, seed=15)) for i in range(3, 10)]
    failing, behind = launch(executor, bad), launch(executor, make_step(1))
    for each in slow:
        assert len(each()[0].token_ids) == 1
    with pytest.raises(KernelError, match="A block table names block 1000"):
        failing()
    assert behind()[0].token_ids == expected
    engine.core.shutdown()


@LAYOUT
def test_a_step_that_fails_ends_its_requests_alone(folder, layout):
    engine = load(folder, layout, sampler_cls=FailingSampler, max_num_seqs=4)
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]]
    expected = [
        output.outputs[0].token_ids
        for output in generate(engine, prompts, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    ]
    engine.add_request("later", [5, 6], SamplingParams(temperature=1, seed=13, max_tokens=3))
    assert "the sampler has failed" in next(output for _ in range(9) for output in engine.step() if output.finished).error
    assert [
        output.outputs[0].token_ids
        for output in generate(engine, prompts, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    ] == expected
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
    outbox = Outbox(queue.write)
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
