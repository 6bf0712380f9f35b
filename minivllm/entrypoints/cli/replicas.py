"""`minivllm replicas`: lists a server's replicas, and restarts them one after another while it serves."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from minivllm.entrypoints.cli.options import add_command, add_option
from minivllm.entrypoints.cli.serve import API_KEY_VARIABLE
from minivllm.errors import ConfigError

POLL_SECONDS = 0.2


def add_replicas_command(commands) -> None:  # noqa: ANN001
    """Register `minivllm replicas`."""
    summary = "list the replicas of a running server, or restart them"
    parser = add_command(commands, "replicas", run_list, summary, "minivllm replicas restart --rolling")
    parser.set_defaults(base_url="http://127.0.0.1:8000", api_key=None)
    _add_server_options(parser)
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    summary = "restart replicas while the others serve: no answer is lost"
    restart = add_command(actions, "restart", run_restart, summary, "minivllm replicas restart 0 2")
    restart.add_argument("ranks", nargs="*", type=int, metavar="RANK", help="the replicas to restart, one after another")
    restart.add_argument("--rolling", action="store_true", help="restart all of them, one after another")
    add_option(restart, "--timeout SECONDS", 600.0, "how long a replica may take to finish what it has and to be ready again")
    _add_server_options(restart)


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    """The options may stand before or after `restart`. Without a default, those after it do not reset those before it."""
    for name, value, help in (
        ("--base-url", "URL", "of the server (default: http://127.0.0.1:8000)"),
        ("--api-key", "KEY", f"of the server; by default {API_KEY_VARIABLE} in the environment"),
    ):
        parser.add_argument(name, metavar=value, default=argparse.SUPPRESS, help=help)


class _Server:
    """A running server, over HTTP."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import httpx

        key = arguments.api_key or os.environ.get(API_KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._url = arguments.base_url.rstrip("/").removesuffix("/v1")
        try:
            self._client = httpx.Client(base_url=self._url, headers=headers, timeout=30)
        except (httpx.InvalidURL, UnicodeError) as error:
            raise ConfigError(f"--base-url is {arguments.base_url!r}, which is not a URL: {error}.") from None

    def ask(self, method: str, path: str) -> dict[str, Any]:
        """The server's answer.

        Raises:
            ConfigError: There is none, or it is an error.
        """
        import httpx

        try:
            headers = {"Content-Type": "application/json"} if method == "POST" else None
            response = self._client.request(method, path, headers=headers)
            content = response.json()
        except httpx.HTTPError as error:
            raise ConfigError(f"There is no answer from {self._url}: {error or type(error).__name__}.") from None
        except ValueError:
            raise ConfigError(f"{self._url}{path} is not minivllm's: its answer is not JSON.") from None
        if response.status_code >= 400 or "error" in content:
            message = content.get("error", {}).get("message", f"status {response.status_code}")
            raise ConfigError(f"{self._url} refuses. {message}")
        return content

    def replicas(self) -> dict[int, dict[str, Any]]:
        """The replicas, by rank."""
        return {replica["rank"]: replica for replica in self.ask("GET", "/replicas")["replicas"]}


def run_list(arguments: argparse.Namespace) -> int:
    """Print a table."""
    content = _Server(arguments).ask("GET", "/replicas")
    print(f"{'rank':>4}  {'state':10}{'running':>8}{'waiting':>9}{'cache':>7}{'deaths':>8}{'process':>9}")
    for replica in content["replicas"]:
        row = "{rank:4}  {state:10}{running:8}{waiting:9}{kv_cache_usage:7.0%}{deaths:8}{process_id:9}"
        print(row.format(**replica | {"process_id": replica["process_id"] or ""}))
    print(f"streams resumed elsewhere: {content['streams_resumed']}, lost: {content['streams_lost']}")
    return 0


def _wait_for_others(server: _Server, rank: int, timeout: float) -> None:
    """Wait until replicas that are starting are ready: while this one restarts, they get its requests."""
    end = time.monotonic() + timeout
    while coming := [
        other for other, replica in server.replicas().items() if other != rank and replica["state"] in ("starting", "unreachable")
    ]:
        if time.monotonic() > end:
            raise ConfigError(f"Replicas {coming} are not ready after {timeout:.0f} seconds: replica {rank} was left alone.")
        time.sleep(POLL_SECONDS)


def run_restart(arguments: argparse.Namespace) -> int:
    """Restart replicas, one after another."""
    server = _Server(arguments)
    replicas = server.replicas()
    if arguments.rolling == bool(arguments.ranks):
        raise ConfigError("Say which replicas to restart: their ranks, or --rolling for all of them.")
    ranks = arguments.ranks or sorted(replicas)
    for rank in ranks:
        start = time.monotonic()
        _wait_for_others(server, rank, arguments.timeout)
        old = server.replicas().get(rank, {}).get("process_id")
        server.ask("POST", f"/replicas/{rank}/restart")
        print(f"Replica {rank} finishes what it has ... ", end="", file=sys.stderr, flush=True)
        while True:
            time.sleep(POLL_SECONDS)
            replica = server.replicas()[rank]
            if replica["state"] == "ready" and replica["process_id"] != old:
                break
            if time.monotonic() - start > arguments.timeout:
                raise ConfigError(
                    f"Replica {rank} is {replica['state']} after {arguments.timeout:.0f} seconds: the others were left alone."
                )
        print(f"and is back after {time.monotonic() - start:.1f} s.", file=sys.stderr, flush=True)
    return 0
