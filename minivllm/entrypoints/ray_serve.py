"""The server as a Ray Serve application: `serve run minivllm.entrypoints.ray_serve:app model=smollm2-135m`.

Each replica of the deployment is an engine with the app of `minivllm serve`, behind Ray Serve's proxies, which choose a replica for each request and
start more or fewer of them by the length of their queues. docs/clusters.md shows both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any, get_type_hints

from starlette.applications import Starlette
from starlette.routing import Mount

from minivllm.config import EngineArgs
from minivllm.distributed.ray_cluster import connect, environment_of_actors, import_ray, resources_of_replica
from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.entrypoints.cli.serve import limit_steps
from minivllm.entrypoints.server.api_server import make_app
from minivllm.entrypoints.server.request_log import configure_logging
from minivllm.entrypoints.server.state import ServerSettings, ServerState
from minivllm.errors import ConfigError

_SETTINGS = (
    "api_keys",
    "max_request_bytes",
    "max_waiting",
    "request_timeout",
    "allowed_origins",
    "salt_by_key",
    "escape_special_tokens",
)
"""Of `ServerSettings`; Ray Serve has its own for the rest."""
_state: ServerState
"""Of this process's replica."""


class MinivllmServer:
    """A replica of the deployment.

    Args:
        args: The engine's.
        settings: The server's.
    """

    def __init__(self, args: EngineArgs, settings: ServerSettings) -> None:
        global _state
        configure_logging(settings.log_level)
        self._engine = AsyncLLMEngine.from_engine_args(limit_steps(args), restart=False)
        _state = ServerState(self._engine, settings)

    def check_health(self) -> None:
        """Raise an error if the engine is dead: Ray Serve replaces this replica then."""
        self._engine.check_health()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the engine could not be started
            self._engine.shutdown()


def app(args: dict[str, Any]) -> Any:
    """The application.

    Args:
        args: Engine arguments and some of the server's settings, by name, as text or as values; `deployment` has options of the deployment, such as
            `num_replicas`, as for `serve.deployment`.

    Raises:
        ConfigError: Ray Serve is not installed, or an argument is unknown or wrong.
    """
    import_ray()
    try:
        from ray import serve
    except ImportError as error:
        raise ConfigError(f"Ray Serve is not installed here ({error}): `pip install 'minivllm[ray]'`.") from None
    options = dict(args.get("deployment") or {})
    engine_args, settings = read_arguments({name: value for name, value in args.items() if name != "deployment"})
    if os.environ.get("MINIVLLM_API_KEY") and not settings.api_keys:
        raise ConfigError("MINIVLLM_API_KEY is set, but Ray Serve would show it to whoever asks: give api_keys, or unset it.")
    parallel = engine_args.parallel_config()
    if parallel.has_replicas:
        raise ConfigError("Ray Serve starts the replicas: set num_replicas of the deployment, and leave out data_parallel_size.")
    connect(parallel.ray_address)  # to see whether there are GPUs
    resources = resources_of_replica(parallel, engine_args.device)
    actor = {
        "num_cpus": resources["CPU"],
        "num_gpus": resources.get("GPU", 0),
        "runtime_env": {"env_vars": environment_of_actors()},
    }
    defaults = {
        "name": "minivllm",
        "max_ongoing_requests": engine_args.max_num_seqs + settings.max_waiting,
        "ray_actor_options": actor,
    }
    deployment = serve.deployment(serve.ingress(_make_app)(MinivllmServer), **defaults | options)
    return deployment.bind(engine_args, settings)


def read_arguments(args: dict[str, Any]) -> tuple[EngineArgs, ServerSettings]:
    """Arguments of both kinds by name. Text, as from `serve run`, becomes what the argument takes.

    Raises:
        ConfigError: One is unknown, or its value is wrong.
    """
    of_engine, of_server = get_type_hints(EngineArgs), get_type_hints(ServerSettings)
    engine: dict[str, Any] = {"enable_chunked_prefill": True}
    server: dict[str, Any] = {"host": "0.0.0.0"}
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for name, value in args.items():
        if name in known:
            engine[name] = _convert(name, value, str(of_engine[name]))
        elif name in _SETTINGS:
            server[name] = _convert(name, value, str(of_server[name]))
        else:
            raise ConfigError(f"There is no argument {name!r}: they are those of `minivllm serve`, with _ for -, and deployment.")
    return EngineArgs(**engine), ServerSettings(**server)


def _convert(name: str, value: Any, kind: str) -> Any:
    """A value of an argument whose type is written as `kind`."""
    if not isinstance(value, str):
        return tuple(value) if isinstance(value, list) else value
    if value in ("None", "null"):
        return None
    try:
        if "bool" in kind:
            return {"true": True, "false": False}[value.lower()]
        if "tuple" in kind:
            return tuple(value.split(","))
        if "int" in kind:
            return int(value)
        return float(value) if "float" in kind else value
    except (KeyError, ValueError):
        raise ConfigError(f"{name} is {value!r}, which is not what it takes.") from None


def _make_app() -> Starlette:
    """The app of this process's replica, in one that answers Ray Serve at its start and end, which are no requests."""
    return Starlette(routes=[Mount("", make_app(_state))])
