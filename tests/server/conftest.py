"""What the server's tests share: a small model, the app around it, and the same as a server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from browsing import opened
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright
from small_server import Running, random_model, running
from starlette.testclient import TestClient

from unmask.model import Model
from unmask.server.app import make_app
from unmask.server.compiling import Compiler
from unmask.server.limits import Limits


@pytest.fixture(scope="session")
def small() -> Model:
    return random_model()


@pytest.fixture(scope="module")
def compiler(small: Model) -> Iterator[Compiler]:
    made = Compiler(small.tokenizer)
    yield made
    made.close()


@pytest.fixture(scope="session")
def server(small: Model) -> Iterator[Running]:
    """One server for the tests that only ask."""
    with running(small) as found:
        yield found


@pytest.fixture(scope="session")
def client(small: Model) -> Iterator[TestClient]:
    """The app without a socket between."""
    limits = Limits(budget=1 << 14, length=128, requests=16)
    with TestClient(make_app(small, name="small", limits=limits), base_url="http://localhost") as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of one module: as long as it is there no test can have an event loop of its own."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if found is None:
        pytest.skip("NO BROWSER: the page was NOT looked at; install chromium to run these tests")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=found,
            args=["--no-sandbox", "--renderer-process-limit=1", "--disable-site-isolation-trials"],
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def context(browser: Browser) -> Iterator[BrowserContext]:
    """One for all tabs that need no other: a tab in it is opened in a quarter of the time."""
    with browser.new_context(reduced_motion="reduce", viewport={"width": 1280, "height": 900}) as context:
        context.new_page()
        yield context


@pytest.fixture
def complaints() -> list[str]:
    return []


@pytest.fixture
def page(context: BrowserContext, server: Running, complaints: list[str]) -> Iterator[Page]:
    """The page, just opened."""
    with opened(context, server.url, complaints) as page:
        yield page


@pytest.fixture
def phone(browser: Browser, server: Running, complaints: list[str]) -> Iterator[Page]:
    """The page on a phone."""
    how: Any = {"reduced_motion": "reduce", "viewport": {"width": 390, "height": 700}, "has_touch": True}
    with browser.new_context(**how) as context, opened(context, server.url, complaints) as page:
        yield page
