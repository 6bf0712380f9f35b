"""The server as a Ray Serve application: what its arguments may be, and over HTTP what `minivllm serve` answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import psutil
import pytest
from ray_nodes import WHY_NOT, RayNodes, becomes

from minivllm import SamplingParams
from minivllm.course.lessons.nodes import free_port
from minivllm.entrypoints.ray_serve import app, read_arguments
from minivllm.errors import ConfigError


def test_arguments_are_those_of_serve_as_text_or_as_values():
    engine, server = read_arguments(
        {"model": "m", "max_num_seqs": "64", "gpu_memory_utilization": "0.5", "enable_prefix_caching": "true", "api_keys": ["a", "b"], "salt_by_key": "true", "request_timeout": "2"}
    )  # fmt: skip
    assert (engine.model, engine.max_num_seqs, engine.gpu_memory_utilization, engine.enable_prefix_caching) == (
        "m",
        64,
        0.5,
        True,
    )
    assert engine.enable_chunked_prefill, "as for `minivllm serve`"
    assert (server.api_keys, server.salt_by_key, server.request_timeout) == (("a", "b"), True, 2.0)
    assert read_arguments({"api_keys": "a,b", "request_timeout": "None"})[1].request_timeout is None
    assert read_arguments({"max_num_seqs": 8, "enable_chunked_prefill": False})[0].enable_chunked_prefill is False


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"port": "8001"}, "There is no argument 'port'"),
        ({"max-num-seqs": "8"}, "There is no argument 'max-num-seqs'"),
        ({"max_num_seqs": "many"}, "max_num_seqs is 'many', which is not what it takes"),
        ({"salt_by_key": "yes"}, "salt_by_key is 'yes'"),
        ({"request_timeout": "0"}, "request_timeout is 0.0 seconds"),
    ],
)
def test_a_wrong_argument_is_refused_by_its_name(args, words):
    with pytest.raises(ConfigError, match=words):
        read_arguments({"model": "m"} | args)


def test_replicas_are_ray_serves_affair():
    pytest.importorskip("ray.serve", reason=WHY_NOT)
    with pytest.raises(ConfigError, match="set num_replicas of the deployment, and leave out data_parallel_size"):
        app({"model": "m", "data_parallel_size": "2"})


@pytest.fixture(scope="module")
def url(smollm2_path):
    """Of Ray Serve on a cluster of one node, with two replicas."""
    pytest.importorskip("ray.serve", reason=WHY_NOT)
    import ray
    from ray import serve

    nodes = RayNodes(1, num_cpus=4)
    try:
        ray.init(nodes.address, log_to_driver=False)
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        args = {
            "model": "smollm2-135m",
            "max_num_seqs": "8",
            "kv_cache_memory_bytes": str(64 * 2**20),
            "deployment": {"num_replicas": 2},
        }
        serve.run(app(args))
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        nodes.close()


@pytest.mark.slow
@pytest.mark.long
def test_clients_get_what_the_engine_writes(url, llm):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    prompts = [f"{number} and {number} are" for number in range(8)]
    expected = [
        output.outputs[0].text for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    ]

    def ask(prompt):
        chunks = client.completions.create(model="smollm2-135m", prompt=prompt, max_tokens=12, temperature=0, stream=True)
        return [chunk.choices[0].text for chunk in chunks]

    with ThreadPoolExecutor(len(prompts)) as threads:
        pieces = list(threads.map(ask, prompts))
    assert ["".join(each) for each in pieces] == expected
    assert all(sum(map(bool, each)) > 3 for each in pieces), "token by token"
    answer = client.chat.completions.create(
        model="smollm2-135m", messages=[{"role": "user", "content": "Say hello."}], max_tokens=5
    )
    assert answer.usage.completion_tokens == 5
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="a")
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.post(f"{url}/replicas/scale", json={"size": 2}).status_code == 400, "they are Ray Serve's"


@pytest.mark.slow
@pytest.mark.long
def test_a_replica_whose_engine_dies_is_replaced(url):
    engines = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "minivllm.engine.engine_core_proc" in (process.info["cmdline"] or ())
    ]
    assert len(engines) == 2
    engines[0].kill()
    body = {"model": "smollm2-135m", "prompt": "a", "max_tokens": 2}
    answers = []

    def is_back():
        answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code)
        return answers[-10:] == [200] * 10 and engines[0].pid not in psutil.pids()

    becomes(is_back, 120)
    assert set(answers) <= {200, 500, 503}
