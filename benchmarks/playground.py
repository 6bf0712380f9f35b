"""The playground in headless Chromium on this machine, offline: until its first step is drawn, frames a second while 64 sequences play, and a step with nothing beside it.

make book && python benchmarks/playground.py --json playground.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from pathlib import Path

from minivllm.bench.report import format_table, report
from minivllm.entrypoints.playground.server import make_server

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {"num_gpu_blocks": 512, "max_num_seqs": 64, "num_requests": 200, "mean_prompt_len": 32, "mean_output_len": 64}
FRAMES = """async (seconds) => {
    let frames = 0, running = true;
    const count = () => { frames += 1; if (running) requestAnimationFrame(count); };
    requestAnimationFrame(count);
    await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
    running = false;
    return frames / seconds;
}"""
STEPS = """async (settings) => {
    const { Python } = await import("./python.js");
    const python = new Python();
    await python.call({ begin: settings, code: "" });
    await python.call({ advance: 30 });
    const times = [], sizes = [];
    for (let i = 0; i < 200; i += 1) {
        const start = performance.now();
        const { report } = await python.call({ advance: 1 });
        times.push(performance.now() - start);
        sizes.push(report.num_running);
    }
    return [times, sizes];
}"""


def main() -> None:
    """Measure, print and store."""
    sys.path.insert(0, str(ROOT / "tests/support"))
    from browser import open_browser

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="store the results here")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    loads, rates, times = [], [], []
    with make_server(ROOT / "out/book/html/playground", 0) as server, open_browser() as browser:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for _ in range(arguments.repeats):
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            start = time.perf_counter()
            page.goto(f"http://127.0.0.1:{server.server_port}/index.html")
            page.wait_for_selector("body[data-ready]")
            page.click("#step")
            page.wait_for_selector("#batch-rows tr")
            loads.append(time.perf_counter() - start)
            for name, value in SETTINGS.items():
                page.fill(f"[name={name}]", str(value))
            page.select_option("[name=arrivals]", "at-once")
            page.fill("#speed", "6")
            page.click("#play")
            page.wait_for_function("() => document.getElementById('running-count').textContent === '64'")
            rates.append(page.evaluate(FRAMES, 1.5))
            assert int(page.inner_text("#running-count")) > 40
            page.click("#play")  # to pause: a step is measured while nothing else runs
            of_page, sizes = page.evaluate(STEPS, {**SETTINGS, "num_requests": 64, "max_num_seqs": 16, "mean_output_len": 400, "distribution": "uniform", "arrivals": "at-once"})  # fmt: skip
            assert set(sizes) == {16}
            times += of_page
            page.close()
        server.shutdown()
    step, p95 = statistics.median(times), sorted(times)[int(0.95 * len(times))]
    rows = [
        ("first step drawn after loading", f"{statistics.median(loads):.1f} s", f"{max(loads):.1f} s", "5 s"),
        ("frames a second, 64 sequences and 512 blocks", f"{statistics.median(rates):.0f}", f"{min(rates):.0f}", "30"),
        ("a step of 16 sequences, to the page and back", f"{step:.1f} ms", f"{p95:.1f} ms (p95)", "10 ms"),
    ]
    table = format_table(("in headless Chromium", "median", "worst", "bar"), rows)
    results = {"load_seconds": loads, "frames_per_second": rates, "step_ms": {"median": step, "p95": p95}}
    report("The playground", table, results, file=arguments.json)


if __name__ == "__main__":
    main()
