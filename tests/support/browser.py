"""JupyterLab and Chromium for tests: a server with nobody's settings, and a browser that looks at it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: `pip install playwright`")

ROOT = Path(__file__).parents[2]
SCREENSHOTS = ROOT / "out" / "browser"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("MINIVLLM_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
ARGUMENTS += ["--disable-component-update", "--disable-sync"]
PATIENCE = 60
"""Seconds until something must have happened. On a machine that runs other tests beside, most takes longer than one thinks."""
sync_api.expect.set_options(timeout=PATIENCE * 1000)

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: `apt-get install chromium`")


@contextlib.contextmanager
def serve(folder):
    """A JupyterLab that shows what is in `folder / "root"`, at the address that is yielded."""
    root = folder / "root"
    settings = folder / "settings" / "@jupyterlab" / "notebook-extension"
    settings.mkdir(parents=True)
    (settings / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')  # all cells are on the page
    settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        **{f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")},
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "IPYTHONDIR": str(folder / "ipython"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0", "--IdentityProvider.token=", f"--ServerApp.root_dir={root}",
        f"--LabApp.app_settings_dir={ROOT / 'tools' / 'jupyterlab'}",
    ]  # fmt: skip
    log = (folder / "server.log").open("w+")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for_server(process, address, folder / "server.log")
        yield address
    finally:
        end_group(process)
        log.close()


def open_page(browser, height=1000):
    """An empty page that answers JupyterLab's questions with their default.

    On a busy machine it asks which kernel to take when a cell is run before the one it has started is connected.
    """
    page = browser.new_page(viewport={"width": 1280, "height": height})
    page.set_default_timeout(PATIENCE * 1000)
    page.add_locator_handler(page.locator(".jp-Dialog"), accept)
    return page


def accept(dialog):
    print("JupyterLab asked:", dialog.first.inner_text())
    dialog.first.locator(".jp-mod-accept").click()


def run_all_cells(page, patience=180):
    """Run all cells, and wait until the last one is done.

    JupyterLab drops what it is told to run before the kernel is connected, so it is told again while nothing runs.
    """
    idle = page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]")
    prompts = page.locator(".jp-Notebook .jp-CodeCell .jp-InputArea-prompt")
    idle.wait_for()
    end = time.monotonic() + patience
    now_idle = False
    while prompts.last.inner_text() in ("[ ]:", "[*]:"):
        if time.monotonic() > end:
            pytest.fail(f"The notebook has not run within {patience} s: {prompts.all_inner_texts()}")
        was_idle, now_idle = now_idle, idle.is_visible()
        if was_idle and now_idle:
            page.get_by_role("menuitem", name="Run", exact=True).click()
            page.locator("#jp-mainmenu-run").get_by_text("Run All Cells", exact=True).click()
            page.wait_for_timeout(3000)  # on a busy machine it is a while until it is seen to run
        page.wait_for_timeout(200)


def picture(box, patience=PATIENCE):
    """The bytes of the PNG in a cell's output. Once more if another takes its place while the browser reads it."""
    source = "async image => { await image.decode(); return [...new Uint8Array(await (await fetch(image.src)).arrayBuffer())]; }"
    end = time.monotonic() + patience
    while True:
        try:
            return bytes(box.locator("img").first.evaluate(source))
        except sync_api.Error:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def wait_for_server(process, address, log):
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{address}/api/status", timeout=2).close()
            return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"JupyterLab did not answer within {PATIENCE} s:\n{log.read_text()[-3000:]}")


def end_group(process):
    """End the server and its kernels: nicely, which lets it end them, and then whatever is left of the group."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(page, condition, patience=PATIENCE):
    """What a condition comes to when it is true."""
    end = time.monotonic() + patience
    while not (found := condition()):
        assert time.monotonic() < end, f"it did not come about within {patience} s"
        page.wait_for_timeout(50)
    return found


def screenshot(shown, name):
    """Leave a picture of a page, or of an element."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    shown.screenshot(path=SCREENSHOTS / f"{name}.png")


@contextlib.contextmanager
def open_browser():
    """A browser."""
    with sync_api.sync_playwright() as playwright:
        browser = launch(playwright.chromium)
        try:
            yield browser
        finally:
            browser.close()


def launch(chromium, attempts=3):
    """A browser. Once in a while one hangs when it starts, and the next does not."""
    for attempt in range(1, attempts + 1):
        try:
            return chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=10_000)
        except sync_api.TimeoutError:
            if attempt == attempts:
                raise
