"""The page's parts, found and used as a person would."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import BrowserContext, Locator, Page, expect

expect.set_options(timeout=5_000)


def listen(page: Page, complaints: list[str]) -> None:
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))


@contextmanager
def tab(context: BrowserContext, url: str) -> Iterator[Page]:
    """A tab with nothing in it yet. What a page of this server keeps in the browser goes when the tab is closed."""
    page = context.new_page()
    try:
        yield page
    finally:
        page.goto(f"{url}/docs")  # the page is left: what it keeps is kept
        page.evaluate("localStorage.clear()")
        for each in context.pages[1:]:
            each.close()
        context.clear_cookies()
        context.clear_permissions()


@contextmanager
def opened(context: BrowserContext, url: str, complaints: list[str]) -> Iterator[Page]:
    """The page of the server of the small model. Whatever it complains about in the console fails the test."""
    with tab(context, url) as page:
        listen(page, complaints)
        page.goto(url)
        expect(part(page, "model")).to_contain_text("small")
        yield page
    assert complaints == []


def part(within: Page | Locator, name: str) -> Locator:
    return within.locator(f'[data-part="{name}"]').first


def panel(page: Page, name: str) -> Locator:
    return page.locator(f"#panel-{name}")


def said(page: Page, name: str = "fill") -> Locator:
    """What is said at a tab's own button."""
    return part(panel(page, name), "notice")


def done(page: Page, name: str = "fill") -> Locator:
    """A tab whose text is written."""
    expect(part(panel(page, name), "go")).not_to_have_text("Stop")
    expect(panel(page, name)).not_to_have_class(re.compile("running"))
    expect(panel(page, name).locator(".texts .cell").first).to_be_visible()
    return panel(page, name)


def put(page: Page, text: str, name: str = "fill") -> None:
    """The text typed, if need be in the place of one that was written."""
    back = part(panel(page, name), "edit-text")
    if back.is_visible():
        back.click()
    page.fill(f"#{name}-text", text)


def fill(page: Page, text: str) -> Locator:
    put(page, text)
    part(panel(page, "fill"), "go").click()
    return done(page)


def pin(page: Page, seed: int = 1) -> None:
    """From now on every text is written with this seed."""
    page.fill("#seed", str(seed))
    expect(page.locator("#pin")).to_be_checked()


def shown(result: Locator, row: int = 0) -> str:
    """The text as it stands on the page; a mask is _, its space with it."""
    mask = "e => e.matches?.('.mask') ? '\\ue000' : e.textContent"  # a text may hold a _ of its own
    nodes = result.locator(".canvas").nth(row).evaluate(f"e => [...e.childNodes].map({mask})")
    return "".join(nodes).replace(" \ue000", "_").replace("\ue000", "_").replace("\xa0", "").replace("↵", "")


def listen_in(page: Page) -> None:
    """From now on `heard` knows what the server sends: of a stream the browser itself keeps nothing for sure."""
    page.evaluate("""() => {
        const ask = window.fetch;
        window.fetch = async (...how) => {
            const answer = await ask(...how);
            window.heard = answer.clone().text();
            return answer;
        };
    }""")


def heard(page: Page) -> Any:
    """The last answer; of a stream its last event."""
    *_, last = page.evaluate("window.heard").strip().splitlines()
    return json.loads(last.removeprefix("data: "))


def levels(cells: Locator, kind: str) -> list[int]:
    """The shade that each has, as its class says: sure-3, hard-5."""
    classes = cells.evaluate_all("all => all.map(e => e.className)")
    return [int(found) for each in classes for found in re.findall(rf"\b{kind}-(\d+)\b", each)]


def select(page: Page, start: int, end: int) -> None:
    page.locator("#fill-text").evaluate("(e, at) => { e.focus(); e.setSelectionRange(...at); }", [start, end])


def act(page: Page, cell: Locator, name: str) -> None:
    cell.click()
    page.get_by_role("dialog", name="About this token").get_by_role("button", name=name, exact=True).click()


def undo(page: Page, name: str = "fill") -> None:
    part(panel(page, name), "undo").click()
