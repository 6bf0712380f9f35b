"""Makes the documentation's pictures.

    python tools/pictures.py                       # the drawings: a few seconds, and the same each time
    python tools/pictures.py live_page failover    # recorded from a server in Chromium, which needs playwright; about two minutes each

docs/sweep.png comes from the command in docs/benchmarks.md, and docs/static_vs_continuous.png from `minivllm demo`.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import math
import random
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "benchmarks"))

from server_process import start_server  # noqa: E402

from minivllm.bench.summary import ServedRequest  # noqa: E402
from minivllm.bench.workloads import generate_requests  # noqa: E402
from minivllm.simulation.engine import simulate  # noqa: E402
from minivllm.simulation.what_if import what_if  # noqa: E402
from minivllm.viz.engine_map import draw_engine_map  # noqa: E402
from minivllm.viz.serving import draw_serving  # noqa: E402
from minivllm.viz.step import draw_step  # noqa: E402
from minivllm.viz.timeline import draw_requests  # noqa: E402

SERVING_MODES = ROOT / "benchmarks" / "results" / "serving_modes_2026-11-21.json"
SERVER = ("smollm2-135m", "--max-model-len", "1024", "--num-gpu-blocks-override", "96")
LOAD_SECONDS = 66
SYSTEM = "You are a patient storyteller. You answer in plain words, you never use lists, and every story has a lighthouse in it."
QUESTIONS = (
    "Tell me a story.",
    "Who lives there?",
    "What does the keeper see at night?",
    "How does it end?",
    "Why is the sea so loud?",
)
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
KILL_AFTER, END_AFTER, FRAME_SECONDS = 3.0, 14.0, 0.25
"""Seconds of docs/failover.gif."""


def draw_map() -> None:
    """docs/engine_map.png: the parts of the engine."""
    draw_engine_map().savefig(DOCS / "engine_map.png", dpi=120)


def draw_timeline() -> None:
    """docs/requests.png: requests that compete for few blocks."""
    few_blocks = what_if(num_gpu_blocks=32, max_num_seqs=6, arrival_rate=5.0, num_requests=24, seed=5)
    draw_requests(few_blocks).savefig(DOCS / "requests.png", dpi=120)


def draw_crowded_step() -> None:
    """docs/step.png: the step that preempts most, of a run whose prompts begin alike and do not fit the cache."""
    requests = generate_requests(
        20, arrival_rate=12.0, distribution="uniform", mean_prompt_len=40, mean_output_len=64, num_shared_prompt_tokens=32, seed=3
    )
    trace = simulate(
        list(requests),
        max_num_seqs=10,
        num_gpu_blocks=48,
        num_cpu_blocks=24,
        enable_prefix_caching=True,
        preemption_mode="swap",
    ).trace
    assert trace is not None
    crowded = max(range(len(trace)), key=lambda number: (len(trace[number].preempted), trace[number].num_waiting))
    draw_step(trace, crowded).savefig(DOCS / "step.png", dpi=120)


def draw_serving_modes() -> None:
    """docs/serving_modes.png: the stored measurement."""
    modes = json.loads(SERVING_MODES.read_text(encoding="utf-8"))["modes"]
    served = {mode: [ServedRequest(**request) for request in measured["requests"]] for mode, measured in modes.items()}
    draw_serving(served, "64 long-tailed requests, 4 per second, to three servers").savefig(DOCS / "serving_modes.png", dpi=150)


@asynccontextmanager
async def open_page(url: str, width: int, height: int) -> AsyncIterator[Any]:
    """A playwright page in the installed Chromium, with this address open."""
    from playwright.async_api import async_playwright

    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = await browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
        await page.goto(url)
        yield page
        await browser.close()


async def ask(session: aiohttp.ClientSession, url: str, rng: random.Random) -> None:
    """One request, for one to three answers."""
    body = {
        "model": SERVER[0],
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": rng.choice(QUESTIONS)}],
        "n": rng.choice((1, 1, 2, 3)),
        "max_tokens": int(rng.lognormvariate(3.9, 0.7)) + 8,
        "ignore_eos": True,
    }
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        await response.read()


async def send_waves(url: str) -> None:
    """Conversations that begin alike, in two waves; at the crest more arrive than may run. Runs until it is cancelled."""
    rng, loop = random.Random(0), asyncio.get_running_loop()
    start, tasks = loop.time(), set()
    async with aiohttp.ClientSession() as session:
        try:
            while True:
                tasks.add(asyncio.create_task(ask(session, url, rng)))
                rate = 0.65 - 0.55 * math.cos(4 * math.pi * (loop.time() - start) / LOAD_SECONDS + 3.9)
                await asyncio.sleep(rng.expovariate(rate))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def photograph(url: str, picture: Path) -> None:
    """The live page at the crest of the second wave."""
    async with open_page(url, 1400, 900) as page:
        loading = asyncio.create_task(send_waves(url))
        await page.wait_for_timeout((LOAD_SECONDS - 8) * 1000)
        await page.get_by_role("textbox", name="Prompt").fill("Tell me a short story about a lighthouse keeper.")
        await page.get_by_role("button", name="Send", exact=True).click()
        for _ in range(100):  # until a request waits; the page's security policy forbids playwright's wait_for_function
            if int(await page.locator("#waiting-count").inner_text() or 0) > 0:
                break
            await page.wait_for_timeout(100)
        await page.screenshot(path=picture)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)


def photograph_live_page(name: str, num_replicas: int) -> None:
    """Start a server, load it, and photograph its live page."""
    options = ("--max-num-seqs", "12", "--enable-prefix-caching", "--data-parallel-size", str(num_replicas))
    with start_server(*SERVER, *options) as server:
        asyncio.run(photograph(server.base_url, DOCS / f"{name}.png"))


async def record_kill(url: str) -> list[tuple[float, bytes]]:
    """Eight answers stream and replica 1 is killed by its button: the frames, each with its second."""
    frames: list[tuple[float, bytes]] = []
    async with open_page(url, 1180, 760) as page:
        await page.locator("#max-tokens").fill("160")
        await page.get_by_role("button", name="Send 8 at once").click()
        await page.wait_for_timeout(1500)
        start, is_killed = time.perf_counter(), False
        while (now := time.perf_counter() - start) < END_AFTER:
            if now > KILL_AFTER and not is_killed:
                is_killed = True
                await page.get_by_role("button", name="Kill replica 1").click()
            frames.append((now, await page.screenshot()))
            await asyncio.sleep(max(0.0, FRAME_SECONDS - (time.perf_counter() - start - now)))
    return frames


def record_failover() -> None:
    """docs/failover.gif: the live page while a replica is killed."""
    from PIL import Image

    with start_server(*SERVER, "--data-parallel-size", "3", "--allow-kill") as server:
        frames = asyncio.run(record_kill(server.base_url))
    times = [moment for moment, _ in frames]
    durations = [round(1000 * (after - before)) for before, after in zip(times, [*times[1:], times[-1] + 3], strict=True)]
    images = [Image.open(io.BytesIO(data)).convert("RGB") for _, data in frames]
    images = [image.resize((image.width * 3 // 4, image.height * 3 // 4)) for image in images]
    palette = images[len(images) // 2].quantize(64)
    first, *others = (image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images)
    first.save(DOCS / "failover.gif", save_all=True, append_images=others, duration=durations, loop=0, optimize=True)


DRAWINGS: dict[str, Callable[[], None]] = {
    "engine_map": draw_map,
    "requests": draw_timeline,
    "step": draw_crowded_step,
    "serving_modes": draw_serving_modes,
}
RECORDINGS: dict[str, Callable[[], None]] = {
    "live_page": lambda: photograph_live_page("live_page", 1),
    "live_replicas": lambda: photograph_live_page("live_replicas", 4),
    "failover": record_failover,
}


def main() -> None:
    """Make the pictures that are named, or all drawings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(DRAWINGS | RECORDINGS)} (default: the first four)")
    names = parser.parse_args().names or list(DRAWINGS)
    if unknown := set(names) - set(DRAWINGS | RECORDINGS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    for name in names:
        (DRAWINGS | RECORDINGS)[name]()


if __name__ == "__main__":
    main()
