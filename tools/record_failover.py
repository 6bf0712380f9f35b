"""Records docs/failover.gif: eight answers stream on the live page of a server with three replicas, one of which is killed by its button.

python tools/record_failover.py    # needs playwright and Chromium; about a minute
"""

from __future__ import annotations

import asyncio
import io
import sys
import time
from pathlib import Path

from PIL import Image
from playwright.async_api import async_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tools")]

from photograph_live_page import browser_path  # noqa: E402
from server_process import start_server  # noqa: E402

OPTIONS = (
    "smollm2-135m",
    "--data-parallel-size",
    "3",
    "--allow-kill",
    "--max-model-len",
    "1024",
    "--num-gpu-blocks-override",
    "96",
)
WIDTH, HEIGHT = 1180, 760
KILL_AFTER, END_AFTER = 3.0, 14.0
"""Seconds from the first frame."""
FRAME_SECONDS = 0.25
PATH = ROOT / "docs" / "failover.gif"


async def record(url: str) -> list[tuple[float, bytes]]:
    """Frames, and when each was taken."""
    frames: list[tuple[float, bytes]] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox", "--disable-gpu"])
        page = await browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        await page.goto(url)
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
        await browser.close()
    return frames


def main() -> int:
    """Start a server, record it, and write the picture."""
    with start_server(*OPTIONS) as server:
        frames = asyncio.run(record(server.base_url))
    times = [moment for moment, _ in frames]
    durations = [round(1000 * (after - before)) for before, after in zip(times, [*times[1:], times[-1] + 3], strict=True)]
    images = [Image.open(io.BytesIO(data)).convert("RGB").resize((WIDTH * 3 // 4, HEIGHT * 3 // 4)) for _, data in frames]
    palette = images[len(images) // 2].quantize(64)
    images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    images[0].save(PATH, save_all=True, append_images=images[1:], duration=durations, loop=0, optimize=True)
    print(f"{PATH.relative_to(ROOT)}: {len(images)} frames, {PATH.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
