"""JupyterLab on loopback with copies of the notebooks, and a real chromium that looks at it. Nothing is fetched."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from workbench.base.paths import NOTEBOOKS, ROOT

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
QUIET_LAB = {
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True,
    }
}  # fmt: skip
SCREENSHOTS = ROOT / "build" / "screenshots"


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """The address of a running JupyterLab whose root is a copy of the notebooks, and that folder."""
    home, notebooks = tmp_path_factory.mktemp("jupyter"), tmp_path_factory.mktemp("lab") / "notebooks"
    shutil.copytree(NOTEBOOKS, notebooks)
    (home / "config" / "labconfig").mkdir(parents=True)
    (home / "config" / "labconfig" / "default_setting_overrides.json").write_text(json.dumps(QUIET_LAB))
    folders = {
        "JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime",
        "IPYTHONDIR": "ipython", "JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "WORKBENCH_RUNS": "runs",
    }  # fmt: skip
    environment = {**os.environ, **{name: str(home / folder) for name, folder in folders.items()}}
    port = _free_port()
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}",
        "--ServerApp.port_retries=0", "--IdentityProvider.token=t", f"--ServerApp.root_dir={notebooks}", "--allow-root",
    ]  # fmt: skip
    with (home / "log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        _wait_for(f"http://127.0.0.1:{port}/api/status?token=t", home / "log")
        yield f"http://127.0.0.1:{port}", notebooks
    finally:
        server.terminate()
        server.wait(20)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _wait_for(address: str, log: Path) -> None:
    for _ in range(240):
        try:
            urllib.request.urlopen(address, timeout=2).close()
            return
        except OSError:
            time.sleep(0.25)
    pytest.fail(f"JupyterLab did not start: {log.read_text()[-2000:]}")


@pytest.fixture(scope="session")
def browser(chromium, tmp_path_factory):
    """A chromium context; every request to another host than ours is noted in `context.strangers`, and refused."""
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(tmp_path_factory.mktemp("profile")), executable_path=chromium, headless=True, args=FLAGS,
            viewport={"width": 1280, "height": 1000},
        )  # fmt: skip
        context.set_default_timeout(180_000)  # no test of speed: other tests have the processors too
        context.strangers = []

        def check(route, request):
            if request.url.startswith(("http://127.0.0.1", "file:", "data:", "blob:")):
                route.continue_()
            else:
                context.strangers.append(request.url)
                route.abort()

        context.route("**/*", check)
        yield context
        context.close()


@pytest.fixture(scope="module")
def open_notebook(lab, browser):
    """Open a notebook and run all its cells; the page, whose cells' outputs are in `.jp-Cell-outputArea`. The kernels
    end with the file's tests, or they would go on predicting beside the next ones."""
    address, _ = lab
    pages = []

    def opened(name):
        page = browser.new_page()
        pages.append(page)
        page.goto(f"{address}/lab/tree/{name}?token=t&reset")
        page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-CodeCell")
        page.get_by_text("| Idle").first.wait_for()
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        return page

    yield opened
    for page in pages:
        page.close()
    with urllib.request.urlopen(f"{address}/api/kernels?token=t") as answer:
        kernels = json.load(answer)
    for kernel in kernels:
        request = urllib.request.Request(f"{address}/api/kernels/{kernel['id']}?token=t", method="DELETE")
        urllib.request.urlopen(request).close()


@pytest.fixture
def screenshot():
    def taken(page, name):
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / f"{name}.png")

    return taken
