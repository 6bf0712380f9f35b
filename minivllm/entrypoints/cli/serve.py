"""The command line of the server: `minivllm serve`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.config import EngineArgs
from minivllm.entrypoints.cli.options import add_command, add_engine_options, add_option, options_for
from minivllm.entrypoints.server.request_log import LOG_LEVELS
from minivllm.errors import ConfigError

if TYPE_CHECKING:
    from minivllm.engine.async_llm_engine import AsyncLLMEngine
    from minivllm.entrypoints.server.launcher import ApiServerProcesses

API_KEY_VARIABLE = "MINIVLLM_API_KEY"
TOKENS_PER_STEP = {"cpu": (256, 128), "cuda": (1024, 512)}
"""By device: the default of `max_num_batched_tokens` with chunked prefill, and how much of it is left for prompts when `max_num_seqs` sequences
decode. With more, a long prompt holds up every running answer; with less, prompts wait (docs/serving.md)."""


def add_serve_command(commands) -> None:  # noqa: ANN001
    """Register `minivllm serve`."""
    parser = add_command(
        commands, "serve", run_serve, "serve an OpenAI-compatible HTTP API", "minivllm serve smollm2-135m --port 8000"
    )
    parser.add_argument("served_model", nargs="?", metavar="MODEL", help="the same as --model")
    group = parser.add_argument_group("server")
    add_option(group, "--host", "127.0.0.1", "address to listen on; 0.0.0.0 accepts other machines")
    add_option(group, "--port", 8000, "port to listen on; 0 picks a free one")
    group.add_argument(
        "--api-key", action="append", default=[], metavar="KEY",
        help=f"require this API key; may be repeated. {API_KEY_VARIABLE} in the environment sets one that other users cannot see",
    )  # fmt: skip
    add_option(group, "--max-request-bytes", 2**20, "largest request body")
    waiting = "sequences that may wait beyond the max_num_seqs running; further requests get status 429"
    add_option(group, "--max-waiting", 1024, waiting)
    add_option(group, "--request-timeout SECONDS", float, "abort requests that take longer")
    add_option(group, "--shutdown-timeout SECONDS", 30.0, "grace period of running requests after Ctrl-C or SIGTERM")
    group.add_argument(
        "--restart-engine", action=argparse.BooleanOptionalAction,
        help="start another engine when one dies, and continue its requests there; without it, the server exits with status 1 when the last one dies "
        "(default: with --data-parallel-size)",
    )  # fmt: skip
    kill = "show buttons on the live page that kill replicas; only where no other machine can reach it"
    add_option(group, "--allow-kill", False, kill)
    headless = "serve no HTTP here: run --data-parallel-size-local replicas for the API server at --data-parallel-address"
    add_option(group, "--headless", False, headless)
    add_option(group, "--api-server-count", 1, "processes that serve HTTP, on the same port and for the same replicas")
    add_option(group, "--chat-template FILE", Path, "a Jinja template to use instead of the model's")
    group.add_argument(
        "--allowed-origins", nargs="+", default=[], metavar="ORIGIN",
        help='web pages that may use the server from a browser (CORS), such as https://example.org; "*" for all',
    )  # fmt: skip
    group.add_argument(
        "--allowed-hosts", nargs="+", default=[], metavar="NAME",
        help="names under which requests may ask for the server, such as that of a proxy in front of it (default: on loopback without an API key, only those of "
        'this machine; else any); "*" for all',
    )  # fmt: skip
    salt = "clients with different API keys share no blocks in the prefix cache, unless they send a cache_salt"
    add_option(group, "--salt-by-key", False, salt)
    escape = "read special tokens in the content of messages as plain text, so that no message can pretend to be several"
    add_option(group, "--escape-special-tokens", False, escape)
    add_option(group, "--mode", "continuous", "how requests are batched", choices=("continuous", "static"))
    add_option(group, "--log-level", "info", "least important messages to log", choices=LOG_LEVELS)
    add_engine_options(parser, enable_chunked_prefill=True)


def add_make_key_command(commands) -> None:  # noqa: ANN001
    """Register `minivllm make-key`."""
    summary = "make the key that machines with replicas of a model share"
    parser = add_command(commands, "make-key", run_make_key, summary, "minivllm make-key replicas.key")
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="a new file; copy it to all machines, and give it as --data-parallel-key-file"
    )


def run_make_key(arguments: argparse.Namespace) -> int:
    """Write the file."""
    from minivllm.distributed.sockets import make_key_file

    make_key_file(arguments.file)
    print(f"{arguments.file} has a new key. Copy it to all machines, readable for their user alone.")
    return 0


def limit_steps(args: EngineArgs) -> EngineArgs:
    """The arguments, with the default `max_num_batched_tokens` for chunked prefill on this device if none is given."""
    from minivllm.worker.worker import resolve_device

    if not args.enable_chunked_prefill or args.max_num_batched_tokens is not None:
        return args
    least, for_prompts = TOKENS_PER_STEP[resolve_device(args.device).type]
    return dataclasses.replace(args, max_num_batched_tokens=max(least, args.max_num_seqs + for_prompts))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}.") from None


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve, with one API server or several."""
    if arguments.api_server_count == 1:
        return serve(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # or the folder would be left behind
    with tempfile.TemporaryDirectory(prefix="minivllm-metrics-", ignore_cleanup_errors=True) as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder  # before prometheus_client is imported
        try:
            return serve(arguments)
        finally:
            del os.environ["PROMETHEUS_MULTIPROC_DIR"]


def serve(arguments: argparse.Namespace, make_engine: Callable[[EngineArgs], AsyncLLMEngine] | None = None) -> int:
    """Serve until Ctrl-C. `make_engine` starts an engine of another kind."""
    from minivllm.core.static_batching import StaticBatchScheduler
    from minivllm.distributed.ray_cluster import import_ray
    from minivllm.engine.async_llm_engine import AsyncLLMEngine
    from minivllm.entrypoints.server.launcher import run_server
    from minivllm.entrypoints.server.request_log import configure_logging
    from minivllm.entrypoints.server.state import ServerSettings, is_loopback

    args = EngineArgs(**options_for(EngineArgs, arguments))
    restart = args.parallel_config().has_replicas if arguments.restart_engine is None else arguments.restart_engine
    is_local = is_loopback(arguments.host)
    if arguments.allow_kill and not is_local:
        raise ConfigError(
            f"With --allow-kill the server listens for this machine alone, not on {arguments.host}: leave out --host."
        )
    api_keys = (*arguments.api_key, *filter(None, [os.environ.get(API_KEY_VARIABLE)]))
    settings = ServerSettings(
        **options_for(ServerSettings, arguments)
        | {
            "api_keys": api_keys,
            "allowed_hosts": tuple(arguments.allowed_hosts),
            "allowed_origins": tuple(arguments.allowed_origins),
            "chat_template": arguments.chat_template and _read_text(arguments.chat_template),
            "may_manage": is_local or bool(api_keys),
        }
    )
    if arguments.mode == "static":  # which has no chunked prefill
        args = dataclasses.replace(args, enable_chunked_prefill=False, scheduler_cls=StaticBatchScheduler)
    if arguments.served_model is not None:
        if args.model not in (EngineArgs.model, arguments.served_model):
            raise ConfigError(f"Two models are given, {arguments.served_model} and --model {args.model}: leave one out.")
        args = dataclasses.replace(args, model=arguments.served_model)
    configure_logging(arguments.log_level)
    if args.data_parallel_backend == "ray":
        import_ray()
    if arguments.headless:
        from minivllm.entrypoints.cli.headless import run_headless

        if args.data_parallel_backend == "ray":
            raise ConfigError(
                "Ray starts the replicas on all nodes of its cluster: leave out --headless, or --data-parallel-backend."
            )
        if arguments.api_server_count != 1:
            raise ConfigError("With --headless there is no API server here: leave out --api-server-count.")
        return run_headless(limit_steps(args), restart=restart)
    if args.data_parallel_start_rank:
        raise ConfigError("The API server's machine has the replicas from 0 on: --data-parallel-start-rank is for --headless.")

    def start_engine(others: ApiServerProcesses | None) -> AsyncLLMEngine:
        if make_engine is not None:
            return make_engine(limit_steps(args))
        return AsyncLLMEngine.from_engine_args(limit_steps(args), restart=restart, others=others)

    return run_server(start_engine, settings)
