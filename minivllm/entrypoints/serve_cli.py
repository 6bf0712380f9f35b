"""The command line of the server: `minivllm serve`."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from minivllm.config import EngineArgs
from minivllm.entrypoints.options import add_command, add_engine_options, engine_args
from minivllm.entrypoints.request_log import LOG_LEVELS

if TYPE_CHECKING:
    from minivllm.engine.async_llm_engine import AsyncLLMEngine

MODES = ("continuous", "static")
API_KEY_VARIABLE = "MINIVLLM_API_KEY"


def add_serve_command(commands) -> None:  # noqa: ANN001
    """The command and its options."""
    parser = add_command(
        commands, "serve", run_serve, "answer requests over HTTP, as OpenAI does", "minivllm serve smollm2-135m --port 8000"
    )
    parser.add_argument("served_model", nargs="?", metavar="MODEL", help="the same as --model")
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 lets other machines in (default: %(default)s)"
    )
    group.add_argument("--port", type=int, default=8000, help="port to listen at; 0 takes a free one (default: %(default)s)")
    group.add_argument(
        "--api-key", action="append", metavar="KEY",
        help="answer only who sends this key; may be given several times. The environment variable "
        f"{API_KEY_VARIABLE} does the same, out of sight of others on this machine",
    )  # fmt: skip
    group.add_argument(
        "--max-request-bytes", type=int, default=2**20, help="the longest body of a request (default: %(default)s)"
    )
    group.add_argument(
        "--max-waiting", type=int, default=1024,
        help="continuations that may wait beyond the max_num_seqs that run; who asks for more gets status 429 (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--request-timeout", type=float, metavar="SECONDS", help="end an answer that takes longer")
    group.add_argument(
        "--shutdown-timeout", type=float, default=30.0, metavar="SECONDS",
        help="how long requests have to end after Ctrl-C or SIGTERM (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--restart-engine",
        action="store_true",
        help="start another engine when one dies; without it the server ends with status 1",
    )
    group.add_argument(
        "--mode", choices=MODES, default="continuous",
        help="how requests are batched (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="(default: %(default)s)")
    add_engine_options(parser)


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C, with an engine in a process of its own."""
    from minivllm.core.static_batching import StaticBatchScheduler
    from minivllm.engine.async_llm_engine import AsyncLLMEngine

    scheduler = {"scheduler_cls": StaticBatchScheduler} if arguments.mode == "static" else {}
    restart = arguments.restart_engine
    return serve(arguments, lambda args: AsyncLLMEngine.from_engine_args(dataclasses.replace(args, **scheduler), restart=restart))


def serve(arguments: argparse.Namespace, start_engine: Callable[[EngineArgs], AsyncLLMEngine]) -> int:
    """Serve an engine until Ctrl-C."""
    from minivllm.entrypoints.request_log import configure_logging
    from minivllm.entrypoints.server import run_server
    from minivllm.entrypoints.server_state import ServerSettings

    keys = [*(arguments.api_key or ()), *filter(None, [os.environ.get(API_KEY_VARIABLE)])]
    settings = ServerSettings(
        api_keys=tuple(keys),
        max_request_bytes=arguments.max_request_bytes,
        max_waiting=arguments.max_waiting,
        request_timeout=arguments.request_timeout,
        shutdown_timeout=arguments.shutdown_timeout,
    )
    args = EngineArgs(**engine_args(arguments))
    if arguments.served_model is not None:
        args = dataclasses.replace(args, model=arguments.served_model)
    configure_logging(arguments.log_level)
    return run_server(
        lambda: start_engine(args),
        settings,
        host=arguments.host,
        port=arguments.port,
    )
