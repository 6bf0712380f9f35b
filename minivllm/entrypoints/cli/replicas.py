"""`minivllm replicas`: lists a server's replicas, restarts them one after another, or has more or fewer of them, while it serves."""

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
PASSING = ("starting", "unreachable", "draining")
"""States of a replica that will be another soon."""


def add_replicas_command(commands) -> None:  # noqa: ANN001
    """Register `minivllm replicas`."""
    summary = "list the replicas of a running server, restart them, or have more or fewer"
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
    summary = "start further replicas, or let the last ones finish their requests and end: no answer is lost"
    scale = add_command(actions, "scale", run_scale, summary, "minivllm replicas scale 4")
    scale.add_argument("size", type=int, metavar="N", help="how many replicas there are to be")
    add_option(scale, "--timeout SECONDS", 600.0, "how long it may take until they are ready, or gone")
    _add_server_options(scale)


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

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The server's answer, to a JSON body if it is a POST.

        Raises:
            ConfigError: There is none, or it is an error.
        """
        return self._ask(method, path, body)[1]

    def restart(self, rank: int, *, may_wait: bool) -> bool:
        """Restart a replica. False if it cannot be at the moment, and `may_wait`. Raises the errors of `ask`."""
        status, _ = self._ask("POST", f"/replicas/{rank}/restart", None, allowed=(409,) if may_wait else ())
        return status != 409

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None, allowed: tuple[int, ...] = ()
    ) -> tuple[int, dict[str, Any]]:
        """Status and content of the answer. Errors with an allowed status are not raised."""
        import httpx

        try:
            headers = {"Content-Type": "application/json"} if method == "POST" else None
            response = self._client.request(method, path, headers=headers, json=body)
            content = response.json()
        except httpx.HTTPError as error:
            raise ConfigError(f"There is no answer from {self._url}: {error or type(error).__name__}.") from None
        except ValueError:
            raise ConfigError(f"{self._url}{path} is not minivllm's: its answer is not JSON.") from None
        if response.status_code not in allowed and (response.status_code >= 400 or "error" in content):
            message = content.get("error", {}).get("message", f"status {response.status_code}")
            raise ConfigError(f"{self._url} refuses. {message}")
        return response.status_code, content

    def replicas(self) -> dict[int, dict[str, Any]]:
        """The replicas, by rank."""
        return {replica["rank"]: replica for replica in self.ask("GET", "/replicas")["replicas"]}


def run_list(arguments: argparse.Namespace) -> int:
    """Print a table."""
    content = _Server(arguments).ask("GET", "/replicas")
    print(f"{'rank':>4}  {'state':12}{'running':>8}{'waiting':>9}{'cache':>7}{'deaths':>8}{'process':>9}")
    for replica in content["replicas"]:
        row = "{rank:4}  {state:12}{running:8}{waiting:9}{kv_cache_usage:7.0%}{deaths:8}{process_id:9}"
        print(row.format(**replica | {"process_id": replica["process_id"] or ""}))
    print(f"streams resumed elsewhere: {content['streams_resumed']}, lost: {content['streams_lost']}")
    return 0


def _wait_for_all(server: _Server, rank: int, timeout: float) -> str:
    """Wait until no replica is on its way: this one must be ready, and the others get its requests. Returns this one's state."""
    end = time.monotonic() + timeout
    while True:
        states = {other: replica["state"] for other, replica in server.replicas().items()}
        if not (coming := [other for other, state in states.items() if state in PASSING]):
            return states.get(rank, "gone")
        if time.monotonic() > end:
            raise ConfigError(f"Replicas {coming} are not ready after {timeout:.0f} seconds: replica {rank} was left alone.")
        time.sleep(POLL_SECONDS)


def run_restart(arguments: argparse.Namespace) -> int:
    """Restart replicas, one after another."""
    server = _Server(arguments)
    replicas = server.replicas()
    if arguments.rolling == bool(arguments.ranks):
        raise ConfigError("Say which replicas to restart: their ranks, or --rolling for all of them.")
    for rank in arguments.ranks or sorted(replicas):
        _restart(server, rank, arguments.timeout, must_be_there=not arguments.rolling)
    return 0


def _restart(server: _Server, rank: int, timeout: float, *, must_be_there: bool) -> None:
    """Restart a replica, and wait until the next process is ready."""
    start = time.monotonic()
    while True:
        state = _wait_for_all(server, rank, timeout)
        if state != "ready" and not must_be_there:
            print(f"Replica {rank} is {state}: there is nothing to restart.", file=sys.stderr)
            return
        old = server.replicas().get(rank, {}).get("process_id")
        if server.restart(rank, may_wait=state == "ready" and time.monotonic() - start < timeout):
            break
        time.sleep(POLL_SECONDS)  # it has just died, or somebody else restarts it
    print(f"Replica {rank} finishes what it has ... ", end="", file=sys.stderr, flush=True)
    while True:
        time.sleep(POLL_SECONDS)
        replica, seconds = server.replicas()[rank], time.monotonic() - start
        if replica["state"] == "ready" and replica["process_id"] != old:
            break
        if replica["state"] == "given up" or seconds > timeout:
            raise ConfigError(f"Replica {rank} is {replica['state']} after {seconds:.0f} seconds: the others were left alone.")
    print(f"and is back after {time.monotonic() - start:.1f} s.", file=sys.stderr, flush=True)


def run_scale(arguments: argparse.Namespace) -> int:
    """Have more or fewer replicas, and wait until they are ready, or gone."""
    server, start = _Server(arguments), time.monotonic()
    server.ask("POST", "/replicas/scale", {"size": arguments.size})
    shown: dict[int, str] = {}
    while True:
        content = server.ask("GET", "/replicas")
        states = {replica["rank"]: replica["state"] for replica in content["replicas"]}
        if content["size"] == arguments.size:
            _show_changes(shown, states)
            if len(states) == arguments.size and set(states.values()) == {"ready"}:
                are = "is 1 replica" if arguments.size == 1 else f"are {arguments.size} replicas"
                print(f"There {are}, after {time.monotonic() - start:.1f} s.", file=sys.stderr)
                return 0
        if failed := [rank for rank, state in states.items() if rank < arguments.size and state == "given up"]:
            raise ConfigError(f"Replicas {failed} died too often and are given up: see the server's log.")
        if time.monotonic() - start > arguments.timeout:
            left = {rank: state for rank, state in states.items() if rank >= arguments.size or state != "ready"}
            words = ", ".join(f"replica {rank} is {state}" for rank, state in left.items()) or "the coordinator does not answer"
            raise ConfigError(f"After {arguments.timeout:.0f} seconds there are not {arguments.size} replicas yet: {words}.")
        time.sleep(POLL_SECONDS)


def _show_changes(shown: dict[int, str], states: dict[int, str]) -> None:
    """Print the states that have not been shown yet, except for replicas that were ready from the start."""
    is_first = not shown
    for rank in sorted(shown.keys() | states):
        state = states.get(rank, "gone")
        if shown.get(rank) != state:
            shown[rank] = state
            if not (is_first and state == "ready"):
                print(f"Replica {rank} is {state}.", file=sys.stderr, flush=True)
