"""`minivllm serve` before it serves: where it listens, whom it warns, and what it says when it cannot."""

from __future__ import annotations

import contextlib
import socket
import sys
from types import ModuleType

import pytest
from scripted_server import running_server, scripted_engine

from minivllm.config import EngineArgs
from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.engine.engine_config import EngineConfig
from minivllm.entrypoints.cli import main as cli
from minivllm.entrypoints.server.launcher import bind, run_server, warn_of_chat_template
from minivllm.entrypoints.server.state import ServerSettings
from minivllm.errors import ConfigError, ModelLoadError


def no_engine(others):
    raise ModelLoadError("There is no model.")


@pytest.fixture
def told_where(capsys):
    """What the server says before it loads a model that does not exist."""

    def tell(host, *keys):
        with pytest.raises(ModelLoadError):
            run_server(no_engine, ServerSettings(host=host, api_keys=keys))
        return capsys.readouterr().err

    return tell


def test_only_this_machine_is_let_in_by_default(capsys):
    assert cli.main(["serve", "no-such-model", "--port", "0"]) != 0
    printed = capsys.readouterr().err
    assert "will listen on http://127.0.0.1:" in printed
    assert "warning" not in printed


def test_who_lets_everybody_in_is_warned(told_where):
    assert "warning: anyone who can reach 0.0.0.0 can use this server" in told_where("0.0.0.0")
    assert "warning" not in told_where("0.0.0.0", "a-key")
    assert "warning" not in told_where("::1")


def test_replicas_on_a_ray_cluster_need_ray_and_no_headless_nodes(monkeypatch, capsys):
    on_ray = ["serve", "no-such-model", "--port", "0", "--data-parallel-backend", "ray"]
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(on_ray) == 2
    printed = capsys.readouterr().err
    assert "Ray is not installed here" in printed and "pip install 'minivllm[ray]'" in printed
    assert "will listen on" not in printed, "nothing was started"
    assert cli.main([*on_ray, "--headless"]) == 2
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    assert cli.main([*on_ray, "--headless"]) == 2
    assert "leave out --headless, or --data-parallel-backend." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "has_gpu", "is_chunked", "budget"),
    [
        (["--max-num-seqs", "16"], False, True, 256),
        (["--max-num-seqs", "300"], False, True, 428),
        (["--max-num-batched-tokens", "64", "--max-num-seqs", "8"], False, True, 64),
        (["--no-enable-chunked-prefill"], False, False, None),
        (["--mode", "static"], False, False, None),
        ([], True, True, 1024),
        (["--max-num-seqs", "600"], True, True, 1112),
        (["--device", "cpu", "--max-num-seqs", "16"], True, True, 256),
    ],
)
def test_long_prompts_are_computed_in_chunks_unless_told_otherwise(monkeypatch, options, has_gpu, is_chunked, budget):
    started = []
    monkeypatch.setattr(AsyncLLMEngine, "from_engine_args", lambda args, restart, others: started.append(args))
    monkeypatch.setattr(
        "minivllm.entrypoints.server.launcher.run_server", lambda start_engine, settings, **where: start_engine(None)
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    cli.main(["serve", *options])
    (args,) = started
    assert (args.enable_chunked_prefill, args.max_num_batched_tokens) == (is_chunked, budget)
    assert not EngineArgs().enable_chunked_prefill, "LLM computes whole prompts unless told otherwise"


def test_two_servers_with_several_api_servers_do_not_share_a_port():
    loading = bind("127.0.0.1", 0, 3)
    port = loading[0].getsockname()[1]
    try:
        for count in (1, 2):
            with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1, port {port}"):
                bind("127.0.0.1", port, count)
        for listener in loading:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ApiServer does
            listener.listen()
        for count in (1, 2):
            with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1, port {port}"):
                bind("127.0.0.1", port, count)
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(12)]
        for listener in loading:
            listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    listener.accept()[0].close()  # first, so that its end of the connection has to linger
        for client in clients:
            client.close()
    finally:
        for listener in loading:
            listener.close()
    for count in (1, 3):  # a restart need not wait
        for listener in bind("127.0.0.1", port, count):
            listener.close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["smollm2-135m", "--model", "another"], "Two models are given, smollm2-135m and --model another: leave one out."),
        (["--chat-template", "no-such-file"], "no-such-file cannot be read as text"),
        (["--served-model-name", " "], "served_model_name"),
    ],
)
def test_options_that_do_not_fit_are_refused(capsys, options, sentence):
    assert cli.main(["serve", *options, "--port", "0"]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("template", "warning", "status"),
    [
        ("{% for message in messages %}{{ message.content }}{% endfor %}", None, 200),
        ("{% for message in messages %}{{ message.content }}", "The model's chat template is broken (line 1: ", 500),
        ("{{ raise_exception('Only poems.') }}", "rejects this conversation (Only poems.)", 400),
    ],
    ids=["works", "broken", "rejects"],
)
def test_a_chat_template_of_ones_own_is_tried_at_the_start(smollm2_path, capsys, template, warning, status):
    engine = scripted_engine(smollm2_path)
    with running_server(lambda: engine, ServerSettings(shutdown_timeout=1, chat_template=template)) as server:
        warn_of_chat_template(engine)
        printed = capsys.readouterr().err
        assert (warning or "serves") in printed and ("warning" in printed) == (warning is not None)
        assert server.chat(max_tokens=1).status_code == status
        tokens = server.client.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
        assert status != 200 or tokens["count"] == 1


def test_a_folder_is_served_under_its_last_name(smollm2_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").symlink_to(smollm2_path)
    for model in (str(tmp_path / "my-model"), "my-model"):
        assert EngineConfig.from_engine_args(EngineArgs(model=model)).model_config.name == "my-model"
    assert EngineConfig.from_engine_args(EngineArgs()).model_config.name == "smollm2-135m"


def serve(port, start_engine):
    return run_server(start_engine, ServerSettings(port=port))


@pytest.mark.timeout(120)  # it has hung once
def test_a_port_that_was_taken_while_the_model_loaded_is_one_sentence(smollm2_path):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))

        def start_engine(others):
            other.listen()
            return scripted_engine(smollm2_path)

        with pytest.raises(ConfigError, match="cannot listen on 127.0.0.1, port .* choose another --port"):
            serve(other.getsockname()[1], start_engine)


def test_another_error_of_the_system_is_not_blamed_on_the_port(smollm2_path, monkeypatch):
    async def fail(self):
        raise OSError("No space left on device")

    monkeypatch.setattr("uvicorn.Server.main_loop", fail)
    with pytest.raises(OSError, match="No space left"):
        serve(0, lambda others: scripted_engine(smollm2_path))
