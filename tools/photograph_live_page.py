"""Takes the documentation's picture of the live page, docs/live_page.png, after a busy minute of a real server.

    python tools/photograph_live_page.py                           # needs playwright and Chromium; about two minutes
    python tools/photograph_live_page.py --data-parallel-size 4    # docs/live_replicas.png

Conversations that begin alike arrive in waves: some ask for several answers, so they share blocks, and at the crest more arrive than may run.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import shutil
import sys
from pathlib import Path

import aiohttp
from playwright.async_api import async_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from server_process import start_server  # noqa: E402

OPTIONS = ("smollm2-135m", "--max-num-seqs", "12", "--max-model-len", "1024", "--num-gpu-blocks-override", "96")
SECONDS = 66
SYSTEM = "You are a patient storyteller. You answer in plain words, you never use lists, and every story has a lighthouse in it."
QUESTIONS = (
    "Tell me a story.",
    "Who lives there?",
    "What does the keeper see at night?",
    "How does it end?",
    "Why is the sea so loud?",
)
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


async def ask(session: aiohttp.ClientSession, url: str, chance: random.Random) -> None:
    """One request, of one or several answers."""
    body = {
        "model": OPTIONS[0],
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": chance.choice(QUESTIONS)}],
        "n": chance.choice((1, 1, 2, 3)),
        "max_tokens": int(chance.lognormvariate(3.9, 0.7)) + 8,
        "ignore_eos": True,
    }
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        await response.read()


async def load(url: str) -> None:
    """Requests in two waves, the second one at its crest when the picture is taken."""
    chance, loop = random.Random(0), asyncio.get_running_loop()
    start, tasks = loop.time(), set()
    async with aiohttp.ClientSession() as session:
        try:
            while True:
                tasks.add(asyncio.create_task(ask(session, url, chance)))
                rate = 0.65 - 0.55 * math.cos(4 * math.pi * (loop.time() - start) / SECONDS + 3.9)
                await asyncio.sleep(chance.expovariate(rate))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def browser_path() -> str | None:
    """The installed Chromium."""
    return next(filter(None, map(shutil.which, CHROMIUM)), None)


async def photograph(url: str, picture: Path) -> None:
    """Watch the page for the whole minute, with one prompt of its own, and take its picture."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox", "--disable-gpu"])
        page = await browser.new_page(viewport={"width": 1400, "height": 900})
        await page.goto(url)
        loading = asyncio.create_task(load(url))
        await page.wait_for_timeout((SECONDS - 8) * 1000)
        await page.get_by_role("textbox", name="Prompt").fill("Tell me a short story about a lighthouse keeper.")
        await page.get_by_role("button", name="Send", exact=True).click()
        for _ in range(100):  # until somebody waits; the page's security policy forbids playwright's wait_for_function
            if int(await page.locator("#waiting-count").inner_text() or 0) > 0:
                break
            await page.wait_for_timeout(100)
        await page.screenshot(path=picture)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await browser.close()


def main() -> int:
    """Start a server, load it, and take the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-parallel-size", type=int, default=1, help="replicas (default: %(default)s)")
    size = parser.parse_args().data_parallel_size
    picture = ROOT / "docs" / ("live_page.png" if size == 1 else "live_replicas.png")
    with start_server(*OPTIONS, "--enable-prefix-caching", "--data-parallel-size", str(size)) as server:
        asyncio.run(photograph(server.base_url, picture))
    return 0


if __name__ == "__main__":
    sys.exit(main())
