"""Workers as actors of a Ray cluster: on one node and on several, the tokens are those of one worker, and a worker that is gone is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
from failing_parts import FailingBackend, FailingSampler
from ray_nodes import WHY_NOT, RayNodes, becomes

from minivllm import LLM, SamplingParams, StructuredOutputsParams
from minivllm.distributed import ray_cluster
from minivllm.errors import ConfigError, EngineDeadError, KernelError, WorkerKilledError
from minivllm.executor.ray_workers import RayWorkers
from minivllm.request import EngineCoreRequest
from minivllm.scheduler_output import ExecuteModelRequest, SequenceData

pytest.importorskip("ray", reason=WHY_NOT)
pytestmark = [pytest.mark.slow, pytest.mark.long]
NOTICED_SECONDS = 60.0
"""It takes some seconds, but more on a busy machine; merely waiting for the rank would take 300 s."""
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)


@pytest.fixture(scope="module")
def nodes():
    made = RayNodes(2, num_cpus=2)
    before, os.environ["RAY_ADDRESS"] = os.environ.get("RAY_ADDRESS"), made.address
    yield made
    os.environ.pop("RAY_ADDRESS")
    if before is not None:
        os.environ["RAY_ADDRESS"] = before
    made.close()


@pytest.fixture
def start(tiny_llama, nodes):
    """Makes an engine on the cluster, which ends with the test."""
    made = []

    def make(**options):
        defaults = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 300, "tensor_parallel_size": 2}
        made.append(LLM(tiny_llama, distributed_executor_backend="ray", **defaults | options))
        return made[-1]

    yield make
    for llm in made:
        llm.llm_engine.engine_core.shutdown()


def workers_of(llm) -> RayWorkers:
    return llm.llm_engine.executor._workers


def tokens_of(llm, prompts, params):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def all_gone(process_ids):
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in process_ids)


WAYS = {
    "one node": ({"tensor_parallel_size": 2}, "STRICT_PACK"),
    "two nodes": ({"tensor_parallel_size": 2}, "STRICT_SPREAD"),
    "stages on two nodes": ({"tensor_parallel_size": 1, "pipeline_parallel_size": 2}, "STRICT_SPREAD"),
    "two stages of two ranks": ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "PACK"),
    "one worker": ({"tensor_parallel_size": 1}, "PACK"),
}


BY_NIGHT = {"stages on two nodes", "one worker"}


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.nightly] * (way in BY_NIGHT)) for way in WAYS])
def test_tokens_are_those_of_one_worker(tiny_llama, start, way):
    """Steps in flight, too, and a mask that is sent after its step."""
    options, strategy = WAYS[way]
    prompts = [[5, 6, 7], [8, 9] * 20, [3] * 33, [11, 12, 13]]
    params = [
        GREEDY, SamplingParams(seed=3, max_tokens=20, ignore_eos=True), SamplingParams(seed=4, max_tokens=12, logprobs=1),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, presence_penalty=1.0),
    ]  # fmt: skip
    alone = LLM(tiny_llama, skip_tokenizer_init=True, num_gpu_blocks_override=300)
    there = start(ray_placement_strategy=strategy, async_scheduling=options.get("pipeline_parallel_size", 1) == 1, **options)
    places = workers_of(there).places
    assert len({place.node_id for place in places}) == (1 if strategy == "STRICT_PACK" or len(places) == 1 else 2)
    assert [place.node_id for place in places] == sorted(
        (place.node_id for place in places), key=[p.node_id for p in places].index
    )
    assert tokens_of(there, prompts, params) == tokens_of(alone, prompts, params)


def test_masks_follow_their_step(nodes):
    there = LLM(
        "smollm2-135m", kv_cache_memory_bytes=64 * 2**20, tensor_parallel_size=2, distributed_executor_backend="ray", async_scheduling=True
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["cat", "dog"]))
    try:
        assert there.generate(["My favourite animal is the"], params, use_tqdm=False)[0].outputs[0].text in ("cat", "dog")
    finally:
        there.llm_engine.engine_core.shutdown()


def test_a_step_that_fails_ends_its_requests_alone(start):
    llm = start(sampler_cls=FailingSampler, ray_placement_strategy="STRICT_SPREAD")
    before = tokens_of(llm, [[5, 6, 7]], GREEDY)
    failed, good = llm.generate([[5, 6, 7], [8, 9]], [SamplingParams(seed=13, max_tokens=3), GREEDY], use_tqdm=False)
    words = "The model failed in a step: WorkerError: Rank 0: ZeroDivisionError: the sampler has failed."
    assert failed.error == good.error == words

    request = EngineCoreRequest("bad", [5, 6], GREEDY, 100)
    bad = ExecuteModelRequest([SequenceData(request, 0, 0, [5, 6], 0, [1000], 0, [], 1, 0, False)])
    with pytest.raises(KernelError, match=r"Rank \d: A block table names block 1000, but the cache has 300 blocks"):
        llm.llm_engine.executor.execute_model(bad)

    before_it = signal.signal(signal.SIGINT, signal.default_int_handler)
    is_over = threading.Event()

    def interrupt():
        while not is_over.wait(1.0):
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
    assert tokens_of(llm, [[5, 6, 7]], GREEDY) == before
    assert llm.llm_engine.executor.collective_rpc("check_health") == [None, None]

    processes = workers_of(llm).process_ids  # and now rank 0 kills itself in a step
    with pytest.raises(EngineDeadError, match=r"Rank 0 of 2 \(process \d+ on [\d.]+\) was killed"):
        llm.generate([[5, 6, 7]], SamplingParams(seed=14, max_tokens=3), use_tqdm=False)
    becomes(lambda: all_gone(processes))


def test_a_rank_that_fails_while_others_wait_for_it_is_named(start, tmp_path, monkeypatch):
    file = tmp_path / "failing"
    monkeypatch.setenv("FAILING_PROCESS", str(file))
    monkeypatch.setattr(ray_cluster, "COPIED_VARIABLES", (*ray_cluster.COPIED_VARIABLES, "FAILING_PROCESS"))
    llm = start(attention_backend=FailingBackend)
    file.write_text(str(workers_of(llm).process_ids[1]))
    with pytest.raises(EngineDeadError, match="^Rank 1 of 2 failed: ZeroDivisionError: attention has failed$") as raised:
        llm.generate([[5, 6, 7]] * 2, LONG, use_tqdm=False)
    assert not isinstance(raised.value, WorkerKilledError)


@pytest.mark.parametrize("what", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.nightly)])
def test_a_worker_that_is_gone_is_named(start, what):
    llm = start(max_model_len=4096, ray_placement_strategy="STRICT_SPREAD")
    workers, sent = workers_of(llm), []
    tokens_of(llm, [[5, 6]], GREEDY)
    process_ids = workers.process_ids

    def send():
        sent.append(time.monotonic())
        os.kill(process_ids[1], getattr(signal, what))

    words = "was killed" if what == "SIGKILL" else "shows no sign of life"
    threading.Timer(0.5, send).start()
    with pytest.raises(EngineDeadError, match=rf"Rank 1 of 2 \(process {process_ids[1]} on [\d.]+\) {words}"):
        llm.generate([[5, 6, 7]] * 4, LONG, use_tqdm=False)
    assert time.monotonic() - sent[0] < NOTICED_SECONDS
    with pytest.raises(WorkerKilledError):
        llm.llm_engine.executor.check_health()
    becomes(lambda: all_gone(process_ids))


def test_a_node_that_is_gone_is_named_and_another_takes_its_place(nodes, start):
    llm = start(ray_placement_strategy="STRICT_SPREAD")
    tokens_of(llm, [[5, 6]], GREEDY)
    place = workers_of(llm).places[1]
    threading.Timer(0.5, nodes.kill, (place.node_id,)).start()
    with pytest.raises(EngineDeadError, match=r"Rank 1 of 2 \(process \d+ on [\d.]+\) was (killed|lost with its node)"):
        llm.generate([[5, 6, 7]] * 4, LONG, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    nodes.add()
    assert tokens_of(start(ray_placement_strategy="STRICT_SPREAD"), [[5, 6]], GREEDY)


def test_an_end_gives_all_back(tiny_llama, start):
    import ray

    def is_free():
        return ray.available_resources().get("CPU", 0) == ray.cluster_resources()["CPU"]

    llm = start()
    process_ids = workers_of(llm).process_ids
    llm.llm_engine.engine_core.shutdown()
    llm.llm_engine.engine_core.shutdown()
    becomes(lambda: all_gone(process_ids) and is_free())
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate([[5]], LONG, use_tqdm=False)

    llm = LLM(tiny_llama, skip_tokenizer_init=True, num_gpu_blocks_override=300, distributed_executor_backend="ray")
    process_ids = workers_of(llm).process_ids
    del llm
    becomes(lambda: all_gone(process_ids) and is_free())


def test_workers_end_with_a_driver_that_is_killed(tiny_llama, nodes):
    code = textwrap.dedent(f"""
        from minivllm import LLM, SamplingParams
        llm = LLM(
            {tiny_llama!r}, skip_tokenizer_init=True, num_gpu_blocks_override=300, tensor_parallel_size=2, distributed_executor_backend="ray"
        )
        print(*llm.llm_engine.executor.process_ids, flush=True)
        llm.generate([[5, 6]] * 4, SamplingParams(max_tokens=4000, ignore_eos=True), use_tqdm=False)
    """)
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    process_ids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(process_ids) == 2
    driver.kill()
    driver.wait()
    becomes(lambda: all_gone(process_ids))


# -- starts that fail ------------------------------------------------------------------------------------------------


def test_a_start_that_fails_says_why(start):
    with pytest.raises(ConfigError, match=r"Rank \d: kv_cache_memory_bytes is 100, but one block"):
        start(kv_cache_memory_bytes=100, num_gpu_blocks_override=None)


def test_too_few_places_are_told(start, monkeypatch):
    words = r"cannot place 8 workers \(PACK\), which need 8 CPU: it has 4 CPU on 3 nodes, of which \d CPU are free"
    with pytest.raises(ConfigError, match=words):
        start(tensor_parallel_size=4, pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match=r"cannot place 4 workers \(STRICT_SPREAD\), which need 4 CPU: it has 4 CPU on 3 nodes"):
        start(tensor_parallel_size=4, ray_placement_strategy="STRICT_SPREAD")
    monkeypatch.setattr(ray_cluster, "SECONDS_FOR_PLACES", 1.0)
    first = start(tensor_parallel_size=3)
    with pytest.raises(
        ConfigError, match=r"cannot place 2 workers \(PACK\), which need 2 CPU: it has 4 CPU on 3 nodes, of which 1 CPU are free"
    ):
        start()
    assert tokens_of(first, [[5, 6]], GREEDY)


def test_no_cluster_is_told(tiny_llama, nodes):
    code = textwrap.dedent(f"""
        from minivllm import LLM
        LLM({tiny_llama!r}, distributed_executor_backend="ray", ray_address="127.0.0.1:1", skip_tokenizer_init=True)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "ConfigError: There is no Ray cluster at 127.0.0.1:1" in done.stderr.splitlines()[-1], done.stderr
