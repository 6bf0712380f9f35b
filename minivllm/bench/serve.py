"""Loads a server as its users would, and times each request: `load_generator` decides when to send, `openai_client` sends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Iterable, Iterator

from tqdm.auto import tqdm

from minivllm.bench.load_generator import Load, generate_load
from minivllm.bench.openai_client import OpenAIClient
from minivllm.bench.served_request import ServedRequest
from minivllm.bench.workloads import WorkloadRequest
from minivllm.errors import ConfigError


async def measure_serving(
    client: OpenAIClient,
    model: str,
    requests: Iterable[WorkloadRequest],
    load: Load,
    *,
    num_requests: int | None = None,
    warm_up: Iterable[WorkloadRequest] = (),
    use_tqdm: bool = True,
) -> tuple[list[ServedRequest], bool]:
    """Send requests. Returns the result of each, ordered by start, and whether Ctrl-C stopped the run early.

    The requests may be endless if the load has a duration; `num_requests` is for the progress bar. The warm-up is sent first, all at
    once, unmeasured.

    Raises:
        ConfigError: A request of the warm-up failed.
    """
    await _warm_up(client, model, warm_up)
    interrupted = asyncio.Event()
    served: list[ServedRequest] = []
    with (
        _ctrl_c_sets(interrupted),
        tqdm(total=num_requests, desc="served", unit="request", disable=not use_tqdm, dynamic_ncols=True) as bar,
    ):

        async def send(request: WorkloadRequest, lateness: float) -> None:
            served.append(await client.send(request, model, lateness))
            bar.update()

        await generate_load(send, requests, load, interrupted)
    served.sort(key=lambda request: request.start)
    if served:
        origin = served[0].start
        for request in served:
            request.start -= origin
            request.end -= origin
    return served, interrupted.is_set()


async def _warm_up(client: OpenAIClient, model: str, requests: Iterable[WorkloadRequest]) -> None:
    for request in await asyncio.gather(*(client.send(request, model) for request in requests)):
        if request.error is not None:
            raise ConfigError(f"A request of the warm-up failed ({request.error}). {request.detail}".rstrip())


@contextlib.contextmanager
def _ctrl_c_sets(interrupted: asyncio.Event) -> Iterator[None]:
    """Ctrl-C stops the run but not the program, which still has results to print. A second Ctrl-C stops the program."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
        yield
        return
    loop = asyncio.get_running_loop()

    def stop() -> None:
        interrupted.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
