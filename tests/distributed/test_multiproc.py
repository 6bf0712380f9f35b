"""Workers in processes: the default model's tokens, and every way in which a worker can fail."""

from __future__ import annotations

import asyncio
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from dataclasses import replace

import msgspec
import psutil
import pytest
from failing_parts import FailingBackend, FailingSampler, HalfAsSure
from hypothesis import given
from hypothesis import strategies as st

from minivllm import LLM, AsyncLLMEngine, EngineArgs, ModelRegistry, SamplingParams, StructuredOutputsParams
from minivllm.errors import ConfigError, EngineDeadError, KernelError, WorkerError, WorkerKilledError
from minivllm.executor.worker_messages import RequestLedger, decode_to_worker, encode, to_request
from minivllm.models import registry
from minivllm.request import EngineCoreRequest
from minivllm.scheduler_output import ExecuteModelRequest, SequenceData

pytestmark = pytest.mark.slow
NOTICED_SECONDS = 30.0
"""It takes a fraction of a second, but more on a busy machine; merely waiting for the rank would take 300 s."""


def load(folder, **options):
    defaults = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 300, "tensor_parallel_size": 2}
    return LLM(folder, **defaults | options)


LONG = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)


def processes_of(llm):
    return [psutil.Process(pid) for pid in llm.llm_engine.executor.process_ids]


def all_gone(processes):
    return all(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in processes)


# -- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_tokens_of_the_default_model_are_those_of_one_worker(llm, world_size):
    words = [
        "The",
        "capital",
        "of",
        "France",
        "is",
        "a",
        "large",
        "city",
        "where",
        "people",
        "speak",
        "French",
        "and",
        "eat",
        "bread",
        "with",
        "cheese",
        "every",
        "single",
        "day",
    ]
    rng = random.Random(0)
    prompts = [" ".join(rng.choices(words, k=rng.randint(1, 30))) for _ in range(12)]
    params = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        if i % 2
        else SamplingParams(
            temperature=0.9, top_p=0.95, seed=i, max_tokens=24, logprobs=1, prompt_logprobs=1, presence_penalty=0.5
        )
        for i in range(len(prompts))
    ]
    params[3] = replace(params[3], bad_words=["bread", "the cat"], ignore_eos=False)
    params[5] = replace(params[5], structured_outputs=StructuredOutputsParams(regex="[a-z]{4,9}( [a-z]{4,9})*"), ignore_eos=False)
    params[6] = replace(params[6], structured_outputs=StructuredOutputsParams(choice=["cat", "dog", "bread with cheese"]))
    divided = LLM("smollm2-135m", kv_cache_memory_bytes=256 * 2**20, max_num_seqs=32, tensor_parallel_size=world_size)
    try:
        one, several = (engine.generate(prompts, params, use_tqdm=False) for engine in (llm, divided))
    finally:
        divided.llm_engine.engine_core.shutdown()
    for alone, together in zip(one, several, strict=True):
        first, second = alone.outputs[0], together.outputs[0]
        assert second.token_ids == first.token_ids
        if first.logprobs is not None:
            found = [entry[token].logprob for entry, token in zip(second.logprobs, second.token_ids, strict=True)]
            expected = [entry[token].logprob for entry, token in zip(first.logprobs, first.token_ids, strict=True)]
            assert found == pytest.approx(expected, abs=1e-3)
            assert len(together.prompt_logprobs) == len(alone.prompt_logprobs)


# -- one engine through all that does not end it, then what does -------------------------------------------------------


def test_a_step_that_fails_ends_its_requests_alone(tiny_llama):
    llm = load(tiny_llama, sampler_cls=FailingSampler)
    ok = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    before = llm.generate([[5, 6, 7]], ok, use_tqdm=False)[0].outputs[0].token_ids

    # rank 0 alone fails, where nobody waits for it
    failed, good = llm.generate([[5, 6, 7], [8, 9]], [SamplingParams(seed=13, max_tokens=3), ok], use_tqdm=False)
    assert (
        failed.error
        == good.error
        == "The model failed in a step: WorkerError: Rank 0: ZeroDivisionError: the sampler has failed."
    )

    # all fail alike
    request = EngineCoreRequest("bad", [5, 6], ok, 100)
    bad = ExecuteModelRequest([SequenceData(request, 0, 0, [5, 6], 0, [1000], 0, [], 1, 0, False)])
    with pytest.raises(KernelError, match=r"Rank \d: A block table names block 1000, but the cache has 300 blocks"):
        llm.llm_engine.executor.execute_model(bad)
    strange = ExecuteModelRequest([SequenceData(request, 0, 0, [5, 6], 0, [1.5], 0, [], 1, 0, False)])
    with pytest.raises(WorkerError, match=r"Rank \d: ValidationError: Expected `int`, got `float`"):
        llm.llm_engine.executor.execute_model(strange)
    with pytest.raises(Exception, match=r"Rank \d: AttributeError: .*no_such_method"):
        llm.llm_engine.executor.collective_rpc("no_such_method")

    # Ctrl-C in the midst of a step
    before_it = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
    is_over = threading.Event()

    def interrupt():
        while not is_over.wait(1.0):  # again if a callback of hypothesis has swallowed it
            signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        try:
            llm.generate([[5, 6, 7]], SamplingParams(seed=15, max_tokens=1000, ignore_eos=True), use_tqdm=False)
        finally:
            is_over.set()
    thread.join()
    signal.signal(signal.SIGINT, before_it)

    assert llm.generate([[5, 6, 7]], ok, use_tqdm=False)[0].outputs[0].token_ids == before
    assert llm.llm_engine.executor.collective_rpc("check_health") == [None, None]
    llm.llm_engine.executor.check_health()

    # and now rank 0 kills itself in a step
    processes = processes_of(llm)
    with pytest.raises(EngineDeadError, match=r"Rank 0 of 2 \(process \d+\) was killed by SIGKILL"):
        llm.generate([[5, 6, 7]], SamplingParams(seed=14, max_tokens=3), use_tqdm=False)
    assert all_gone(processes)
    with pytest.raises(EngineDeadError, match="Rank 0 of 2"):
        llm.generate([[5, 6, 7]], ok, use_tqdm=False)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_while_others_wait_for_it_is_named(tiny_llama, rank, tmp_path, monkeypatch):
    file = tmp_path / "failing"
    monkeypatch.setenv("FAILING_PROCESS", str(file))
    llm = load(tiny_llama, attention_backend=FailingBackend)
    processes = processes_of(llm)
    file.write_text(str(processes[rank].pid))
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match=f"^Rank {rank} of 2 failed: ZeroDivisionError: attention has failed$") as raised:
        llm.generate([[5, 6, 7]] * 2, LONG, use_tqdm=False)
    assert not isinstance(raised.value, WorkerKilledError), "the others were killed because of it"
    assert time.monotonic() - start < NOTICED_SECONDS
    assert all_gone(processes)


def test_an_async_engine_in_this_process_ends_its_workers(tiny_llama):
    async def run():
        args = EngineArgs(tiny_llama, skip_tokenizer_init=True, num_gpu_blocks_override=300, tensor_parallel_size=2)
        before = set(psutil.Process().children())
        engine = await asyncio.to_thread(AsyncLLMEngine.from_engine_args, args, in_process=True)
        workers = set(psutil.Process().children()) - before
        outputs = [output async for output in engine.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=5))]
        await asyncio.to_thread(engine.shutdown)
        return outputs, workers

    outputs, workers = asyncio.run(run())
    assert outputs[-1].finished and len(workers) == 2
    assert all_gone(workers)


@pytest.mark.parametrize(
    ("what", "when"), [("SIGKILL", "in a step"), ("SIGSTOP", "in a step"), ("SIGTERM", "in a step"), ("SIGKILL", "idle")]
)
def test_a_worker_that_is_gone_is_noticed(tiny_llama, what, when):
    llm = load(tiny_llama, tensor_parallel_size=3 if what == "SIGKILL" else 2, max_model_len=4096)
    executor, processes = llm.llm_engine.executor, processes_of(llm)
    rank, sent = len(processes) - 1, []

    def send():
        sent.append(time.monotonic())
        os.kill(processes[rank].pid, getattr(signal, what))

    words = "was stopped" if what == "SIGSTOP" else f"was killed by {what}"
    expected = rf"Rank {rank} of {len(processes)} \(process {processes[rank].pid}\) {words}"
    if when == "idle":
        noticed = threading.Event()
        executor.register_failure_callback(noticed.set)
        send()
        assert noticed.wait(NOTICED_SECONDS)
        with pytest.raises(EngineDeadError, match=expected):
            executor.check_health()
    else:
        threading.Timer(0.5, send).start()
        with pytest.raises(EngineDeadError, match=expected):
            llm.generate([[5, 6, 7]] * 4, LONG, use_tqdm=False)
        assert time.monotonic() - sent[0] < NOTICED_SECONDS
        with pytest.raises(WorkerKilledError):  # perhaps from outside: no request is blamed for it
            executor.check_health()
    assert all_gone(processes)


def test_shutdown_leaves_nothing(tiny_llama):
    llm = load(tiny_llama)
    processes = processes_of(llm)
    llm.llm_engine.engine_core.shutdown()
    llm.llm_engine.engine_core.shutdown()
    assert all_gone(processes)
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate([[5]], LONG, use_tqdm=False)


def test_an_engine_that_is_no_longer_referenced_ends_its_workers(tiny_llama):
    llm = load(tiny_llama)
    processes = processes_of(llm)
    del llm
    deadline = time.monotonic() + 10
    while not all_gone(processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all_gone(processes)


@pytest.mark.parametrize("when", [pytest.param("in a step", marks=pytest.mark.long), "a worker is stopped"])
def test_workers_end_with_a_parent_that_is_killed(tiny_llama, when):
    code = textwrap.dedent(f"""
        from minivllm import LLM, SamplingParams
        llm = LLM({tiny_llama!r}, skip_tokenizer_init=True, num_gpu_blocks_override=300, tensor_parallel_size=2)
        print(*llm.llm_engine.executor.process_ids, flush=True)
        llm.generate([[5, 6]] * 4, SamplingParams(max_tokens=4000, ignore_eos=True), use_tqdm=False)
    """)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    time.sleep(0.5)
    if when == "a worker is stopped":
        os.kill(workers[1].pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    start = time.monotonic()
    while not all_gone(workers) and time.monotonic() < start + NOTICED_SECONDS:
        time.sleep(0.02)
    assert all_gone(workers)


# -- starts that fail ------------------------------------------------------------------------------------------------


def test_a_start_that_fails_says_which_rank_and_why(tiny_llama):
    before = set(psutil.Process().children())
    with pytest.raises(ConfigError, match=r"Rank \d: kv_cache_memory_bytes is 100, but one block"):
        load(tiny_llama, kv_cache_memory_bytes=100, num_gpu_blocks_override=None)
    assert set(psutil.Process().children()) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"tensor_parallel_size": 5},
            "tensor_parallel_size is 5, but .* has 4 query heads, and each rank needs one: use at most 4",
        ),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0, but must be a whole number of at least 1"),
        (
            {"distributed_executor_backend": "uni"},
            "distributed_executor_backend is 'uni', one worker .* tensor_parallel_size is 2",
        ),
        ({"distributed_executor_backend": "rai"}, "must be one of 'uni', 'mp', 'ray'"),
    ],
)
def test_bad_options_are_told(tiny_llama, options, words):
    with pytest.raises(ConfigError, match=words):
        load(tiny_llama, **options)


def test_a_class_that_workers_cannot_import_is_told(tiny_llama):
    class Mine(FailingSampler):
        pass

    with pytest.raises(ConfigError, match="sampler_cls is .*Mine, which another process cannot import"):
        load(tiny_llama, sampler_cls=Mine)


def test_a_model_class_that_says_nothing_of_ranks_is_refused(tiny_llama, monkeypatch):
    monkeypatch.setattr(registry, "MODELS", dict(registry.MODELS))
    ModelRegistry.register_model("LlamaForCausalLM", HalfAsSure)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, but HalfAsSure does not say that it can be sharded"):
        load(tiny_llama)


def test_one_worker_may_have_a_process_of_its_own(tiny_llama):
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    here = load(tiny_llama, tensor_parallel_size=1).generate([[5, 6, 7]], params, use_tqdm=False)
    there = load(tiny_llama, tensor_parallel_size=1, distributed_executor_backend="mp")
    assert len(there.llm_engine.executor.process_ids) == 1
    assert there.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs == here[0].outputs


def run_script(code, *, shell="", **options):
    """What a script prints into the file that it is given, run by a shell that does something else before."""
    with tempfile.NamedTemporaryFile("r") as printed:
        script = textwrap.dedent(code).replace("OUT", repr(printed.name))
        command = f"{shell} exec {shlex.quote(sys.executable)} -c {shlex.quote(script)}"
        subprocess.run(["bash", "-c", command.strip()], capture_output=True, text=True, timeout=120, **options)
        return printed.read().split("\n")


START = """
import os, sys
from minivllm import LLM, SamplingParams
out = open(OUT, "w")
def load(size=2):
    return LLM(sys.argv[1] if sys.argv[1:] else FOLDER, skip_tokenizer_init=True, num_gpu_blocks_override=300, tensor_parallel_size=size)
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
def generate(llm):
    return llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids
"""


@pytest.mark.parametrize("shell", [pytest.param("exec <&-;", marks=pytest.mark.long), "exec <&- >&- 2>&-;"])
def test_closed_standard_streams_do_not_matter(tiny_llama, shell):
    code = START.replace("FOLDER", repr(tiny_llama)) + "print(len(generate(load())), file=out, flush=True)"
    assert run_script(code, shell=shell)[0] == "4"


def test_a_forked_process_is_refused_and_does_no_harm(tiny_llama):
    code = START.replace("FOLDER", repr(tiny_llama)) + textwrap.dedent("""
        llm = load()
        before = generate(llm)
        if os.fork() == 0:
            try:
                generate(llm)
            except Exception as error:
                print(type(error).__name__, error, file=out, flush=True)
            del llm
            os._exit(0)
        os.wait()
        print(generate(llm) == before, file=out, flush=True)
    """)
    refused, unharmed, *_ = run_script(code)
    assert refused.startswith("EngineDeadError The workers belong to process ") and refused.endswith("make an engine here.")
    assert unharmed == "True"


def test_too_many_open_files_are_told_and_nothing_stays_open(tiny_llama):
    code = START.replace("FOLDER", repr(tiny_llama)) + textwrap.dedent("""
        import gc, resource
        def num_open():
            gc.collect()  # a map of memory has a descriptor of its own
            return len(os.listdir("/proc/self/fd"))
        load(1)  # opens what stays open
        before = num_open()
        for more in range(2, 20, 3):
            resource.setrlimit(resource.RLIMIT_NOFILE, (before + more, 4096))
            try:
                load(3)
            except Exception as error:
                print(type(error).__name__, error, file=out)
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
        print(num_open() - before, file=out, flush=True)
    """)
    *errors, left, _ = run_script(code)
    assert left == "0"
    assert len(errors) >= 3
    assert all(
        error.startswith("EngineDeadError The workers could not be started: [Errno 24] Too many open files") for error in errors
    )


def test_workers_share_the_memory_of_the_machine(tiny_llama):
    free = psutil.virtual_memory().available
    with pytest.raises(ConfigError, match=r"but the machine, for each of 2 workers, has only"):
        load(tiny_llama, num_gpu_blocks_override=None, kv_cache_memory_bytes=int(0.8 * free))


# -- messages --------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=5, unique=True), max_size=30), st.integers(1, 6))
def test_workers_know_the_requests_of_a_step(steps, capacity):
    requests = [
        EngineCoreRequest(f"r{i}", list(range(1, 400)), SamplingParams(stop=["x"], seed=i), 1000, (2,)) for i in range(12)
    ]
    ledger, known, sizes = RequestLedger(capacity), {}, []
    for number, chosen in enumerate(steps):
        sequences = [SequenceData(requests[i], i, 0, [7], 5, [1, 2], 3, [4], 1, 0, True) for i in chosen]
        step = ExecuteModelRequest(sequences, [(1, 2)], [], [(3, 4)])
        data = encode(ledger.to_step(number, step))
        sizes.append(len(data))
        assert to_request(decode_to_worker(data), known) == step
        assert len(known) <= max(capacity, max(map(len, steps)))
        if number and steps[number - 1] == chosen:
            assert sizes[-1] < 100 + 60 * len(chosen), "prompts are not sent again"


def test_what_is_no_message_is_refused():
    with pytest.raises(msgspec.ValidationError):
        decode_to_worker(msgspec.msgpack.encode({"type": "Step", "number": 1}))
