"""A real browser for tests of the page: Chromium of the system, driven by Playwright."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from agentrl.extras.view.app import Pages, build_app
from agentrl.extras.view.sources import open_sources

NAMES = ("chromium", "chromium-browser", "google-chrome")
KEY = "testkey"


def executable() -> str:
    """Return the browser of this machine; skip the test if there is none, and fail in CI.

    `.ci/run` installs one, and sets AGENTRL_NO_BROWSER if it could not.
    """
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    why = None if found else "no Chromium on this machine (apt install chromium)"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        why = "playwright is not installed (make setup)"
    if why is None:
        assert found is not None
        return found
    if os.environ.get("CI") == "true" and not os.environ.get("AGENTRL_NO_BROWSER"):
        pytest.fail(f"{why}; AGENTRL_NO_BROWSER=1 skips the tests in a browser")
    pytest.skip(why)


@contextmanager
def launched() -> Iterator[Any]:
    """Start the browser, and yield Playwright's handle of it; skip or fail as `executable`."""
    path = executable()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        found = playwright.chromium.launch(executable_path=path, args=[*options, "--disable-gpu"])
        try:
            yield found
        finally:
            found.close()


@contextmanager
def served(folders: Sequence[Path]) -> Iterator[str]:
    """Serve the page in a thread and yield its address."""
    settings = uvicorn.Config(
        build_app(Pages(open_sources(folders)), KEY),
        port=0,
        log_level="error",
        lifespan="off",
        timeout_graceful_shutdown=0,
    )
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            thread.join(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/{KEY}/"
    finally:
        server.should_exit = True
        thread.join()


class Tab:
    """A page in the browser. `complaints`: violations of its policy, and errors of its scripts."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address = page, address
        self.complaints: list[str] = []
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _hear(self, message: Any) -> None:
        if message.type == "error":
            self.complaints.append(message.text)

    def open(self, place: str) -> None:
        """Open a place such as `#/attempts`, and wait until it is drawn."""
        self.page.goto(self.address + place)
        self.drawn(place)

    def drawn(self, place: str) -> None:
        self.page.wait_for_selector(f"#main[data-drawn^='{place}']")

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def texts(self, selector: str) -> list[str]:
        return [text.strip() for text in self.page.locator(selector).all_inner_texts()]
