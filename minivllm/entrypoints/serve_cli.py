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
    """Register `minivllm serve`."""
    parser = add_command(
        commands, "serve", run_serve, "serve an OpenAI-compatible HTTP API", "minivllm serve smollm2-135m --port 8000"
    )
    parser.add_argument("served_model", nargs="?", metavar="MODEL", help="the same as --model")
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 accepts other machines (default: %(default)s)"
    )
    group.add_argument("--port", type=int, default=8000, help="port to listen on; 0 picks a free one (default: %(default)s)")
    group.add_argument(
        "--api-key", action="append", metavar="KEY",
        help=f"require this API key; may be repeated. {API_KEY_VARIABLE} in the environment sets one that other users cannot see",
    )  # fmt: skip
    group.add_argument("--max-request-bytes", type=int, default=2**20, help="largest request body (default: %(default)s)")
    group.add_argument(
        "--max-waiting", type=int, default=1024,
        help="sequences that may wait beyond the max_num_seqs running; further requests get status 429 (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--request-timeout", type=float, metavar="SECONDS", help="abort requests that take longer")
    group.add_argument(
        "--shutdown-timeout", type=float, default=30.0, metavar="SECONDS",
        help="grace period of running requests after Ctrl-C or SIGTERM (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--restart-engine",
        action="store_true",
        help="restart the engine when it dies; without this option the server exits with status 1",
    )
    group.add_argument(
        "--mode", choices=MODES, default="continuous",
        help="how requests are batched (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="(default: %(default)s)")
    add_engine_options(parser)


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C, with the engine in its own process."""
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
