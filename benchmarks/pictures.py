"""Makes the pictures of the page in docs/: the built-in model, used in a real browser.

    python benchmarks/pictures.py

Needs chromium and the test dependencies. Every picture shows a finished text.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

DOCS = Path(__file__).parent.parent / "docs"
MOST = 200_000  # bytes of a picture
CARD = 260  # pixels: a token's card and the space beside it


@contextmanager
def server() -> Iterator[str]:
    """Its address."""
    command = [sys.executable, "-m", "unmask", "serve", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait()


@contextmanager
def opened(browser: Browser, url: str, **look: Any) -> Iterator[Page]:
    with browser.new_context(reduced_motion="reduce", **look) as context:
        page = context.new_page()
        page.goto(url)
        expect(page.locator('[data-part="model"]')).to_contain_text("parameters")
        yield page


def write(page: Page, tab: str) -> Locator:
    """Press the button and wait for the end."""
    panel = page.locator(f"#panel-{tab}")
    go = panel.locator('[data-part="go"]').first
    go.click()
    expect(panel.locator(".cell, .word").first).to_be_visible(timeout=60_000)
    expect(go).not_to_have_text("Stop", timeout=60_000)
    return panel


def pin(page: Page, seed: int) -> None:
    """The same picture each time."""
    settings = page.locator('[data-part="settings"]')
    folded = settings.get_attribute("open") is None
    if folded:
        settings.locator("summary").click()
    page.fill("#seed", str(seed))
    if folded:
        settings.locator("summary").click()


def point_at_the_least_sure(panel: Locator) -> None:
    """Of those whose card hides neither the text, nor the step counter, nor the first buttons below."""
    left, right = (edges(panel.locator(f'[data-part="{name}"]')) for name in ("edit-text", "step"))
    cells = panel.locator(".cell").all()
    boxes = [edges(cell) for cell in cells]
    free = []
    for cell, box in zip(cells, boxes, strict=True):
        hidden = [b for b in boxes if b["y"] > box["y"] and b["end"] > box["x"] and b["x"] < box["x"] + CARD]
        written = "written" in (cell.get_attribute("class") or "")
        if written and not hidden and left["end"] < box["x"] < right["x"] - CARD:
            free.append(cell)
    min(free, key=lambda cell: cell.get_attribute("class") or "").hover()  # sure-0 comes first


def edges(element: Locator) -> dict[str, float]:
    box = element.bounding_box()
    assert box is not None
    return {"x": box["x"], "y": box["y"], "end": box["x"] + box["width"]}


def save(page: Page, name: str) -> None:
    path = DOCS / f"playground-{name}.png"
    page.screenshot(path=path)
    size = path.stat().st_size
    print(f"{path.name}: {size:,} bytes")
    assert size < MOST, f"{path} has more than {MOST:,} bytes: take a smaller part of the page"


def draw(browser: Browser, url: str) -> None:
    wide, phone = {"width": 1280, "height": 860}, {"width": 390, "height": 824}
    with opened(browser, url, viewport=wide) as page:
        pin(page, 1)
        point_at_the_least_sure(write(page, "fill"))
        save(page, "1280")
    with opened(browser, url, viewport=phone, has_touch=True) as page:
        pin(page, 1)
        write(page, "fill")
        page.evaluate("scrollTo(0, 0)")
        save(page, "390")
    with opened(browser, url, viewport=wide, color_scheme="dark") as page:
        page.click("#tab-generate")
        page.fill("#generate-text", "One day, a little girl named Lily found a")
        pin(page, 3)
        write(page, "generate").get_by_label("step", exact=True).check()
        save(page, "generate")
    with opened(browser, url, viewport=wide | {"height": 760}) as page:
        page.click("#tab-score")
        panel = write(page, "score")
        panel.locator(".word").last.hover()
        save(page, "score")


if __name__ == "__main__":
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if chromium is None:
        sys.exit("the pictures need a browser: install chromium")
    with server() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        draw(browser, url)
        browser.close()
