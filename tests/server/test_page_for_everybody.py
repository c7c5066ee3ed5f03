"""The page when something goes wrong, and for everybody: errors, restarts, keys, a phone, no mouse."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.base import AXE_FILE_PATH
from browsing import act, done, fill, listen, panel, part, pin, said, select, shown, tab, undo
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect
from small_server import Running, random_model, running

from matrix import ALL
from unmask.model import Model
from unmask.server.access import Access

COVERED = """e => [...e.querySelectorAll(".cell")].filter(cell => {
    const lines = [...cell.getClientRects()].sort((a, b) => b.width - a.width);
    const {left, top, width, height} = lines[0];
    const hit = document.elementFromPoint(left + width / 2, top + height / 2);
    return hit !== cell && !cell.contains(hit);
}).map(cell => cell.textContent)"""


NARROW = """e => {
    const blank = '<span class="cell blank"> </span>';
    const narrow = [..."[]()!|'.,:;`ijlI1"].map(sign => `<span class="cell glued">${sign}</span>`);
    e.innerHTML = blank + narrow.join(blank) + blank;
}"""


def test_no_token_is_covered_by_its_neighbour(page: Page) -> None:
    """A narrow one between two spaces could not be clicked: the second space lay over it."""
    canvas = fill(page, "ab[MASK:4]yz").locator(".canvas").first
    assert canvas.evaluate(COVERED) == []
    canvas.evaluate(NARROW)
    assert canvas.evaluate(COVERED) == []


# --- what goes wrong ---


def test_errors_are_told_kindly(page: Page, complaints: list[str]) -> None:
    notice = said(page)
    page.fill("#steps", "2.5")
    part(panel(page, "fill"), "go").click()
    expect(notice).to_have_text("Steps must be a whole number.")
    page.fill("#steps", "4")
    page.fill("#fill-text", "[MASK:9..3]")
    part(panel(page, "fill"), "go").click()
    expect(notice).to_contain_text("That did not work: ")
    expect(notice).to_contain_text("the smaller number comes first")
    page.fill("#fill-text", "[MASK:99999]")
    part(panel(page, "fill"), "go").click()
    expect(notice).to_contain_text("ask for less")
    fill(page, "ab[MASK:2]")
    expect(notice).to_be_hidden()
    assert all("400 (Bad Request)" in complaint for complaint in complaints)  # the browser notes every refusal
    complaints.clear()


Start = Callable[..., Any]


@contextmanager
def restarting(model: Model, context: BrowserContext) -> Iterator[tuple[Page, Callable[[], None], Start]]:
    """A page on a server, how that is stopped, and how one is started in its place."""
    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        server = first.enter_context(running(model))
        with tab(context, server.url) as page:
            page.goto(server.url)
            yield page, first.close, lambda model, **how: stack.enter_context(running(model, port=server.port, **how))


def test_it_survives_a_restart(small: Model, context: BrowserContext) -> None:
    with restarting(small, context) as (page, stop, start):
        expect(part(page, "model")).to_contain_text("small")
        page.fill("#fill-text", "my own words [MASK:4]")
        stop()
        part(panel(page, "fill"), "go").click()
        expect(said(page)).to_contain_text("not answering. Your text is safe")
        page.locator("#fill-text").press_sequentially("!")
        start(small)
        expect(said(page)).to_have_text("The server is back.")
        assert shown(done(page)).startswith("my own words ")
        page.click("#tab-score")
        page.reload()
        expect(panel(page, "score")).to_be_visible()
        page.click("#tab-fill")
        expect(page.locator("#fill-text")).to_have_value("my own words [MASK:4]!")


def test_a_restart_with_another_model(small: Model, context: BrowserContext) -> None:
    """Its tokens are others: what stands there is still text, and nothing of the old model is sent to the new one."""
    with restarting(small, context) as (page, stop, start):
        result = fill(page, "ab[MASK:4]yz")
        before = shown(result)
        act(page, result.locator('[data-at="3"]'), "Mask again")
        stop()
        page.click("#tab-score")
        part(panel(page, "score"), "go").click()
        expect(said(page, "score")).to_contain_text("not answering")
        start(random_model(seed=1), name="other")
        expect(said(page, "score")).to_have_text("The server is back, with another model: other.")
        expect(part(page, "model")).to_contain_text("other")
        page.click("#tab-fill")
        part(result, "masks").click()
        expect(result.locator(".result .notice")).to_contain_text("The server has another model now")
        undo(page)
        assert shown(result) == before
        part(result, "use").click()
        expect(page.locator("#fill-text")).to_have_value(before)


def test_a_score_can_be_stopped_while_the_server_is_away(small: Model, context: BrowserContext) -> None:
    with restarting(small, context) as (page, stop, start):
        expect(part(page, "model")).to_contain_text("small")
        page.click("#tab-score")
        stop()
        go = part(panel(page, "score"), "go")
        go.click()
        expect(said(page, "score")).to_contain_text("not answering. Your text is safe")
        expect(go).to_have_text("Stop")
        go.click()
        expect(go).to_have_text("Score")
        go.click()
        expect(go).to_have_text("Stop")
        start(small)
        expect(panel(page, "score").locator(".word").first).to_be_visible()
        expect(said(page, "score")).to_have_text("The server is back.")


def test_nothing_typed_is_lost(page: Page, server: Running) -> None:
    # Not to another tab,
    page.fill("#fill-text", "typed in the first tab [MASK:2]")
    second = page.context.new_page()
    second.goto(server.url)
    expect(second.locator("#fill-text")).to_have_value("typed in the first tab [MASK:2]")
    second.fill("#fill-text", "typed in the second")
    page.reload()
    expect(page.locator("#fill-text")).to_have_value("typed in the first tab [MASK:2]")
    second.close()
    # not to what takes its place, also over a reload,
    page.click("#tab-generate")
    page.fill("#max-tokens", "8")
    part(panel(page, "generate"), "go").click()
    part(done(page, "generate"), "use").click()
    taken = page.input_value("#fill-text")
    assert taken != "typed in the first tab __"
    page.reload()
    undo(page)
    expect(page.locator("#fill-text")).to_have_value("typed in the first tab [MASK:2]")
    # and not to an undo that goes too far and is followed by something else.
    select(page, 0, 5)
    part(page, "mask").click()
    expect(page.locator("#fill-text")).to_have_value("[MASK:1..8] in the first tab [MASK:2]")
    page.fill("#fill-text", "[MASK:1..8] and a long way on")
    undo(page)
    select(page, 6, 8)
    part(page, "mask").click()
    undo(page)
    undo(page)
    expect(page.locator("#fill-text")).to_have_value("[MASK:1..8] and a long way on")


def test_an_autoregressive_model(ar_model: Model, context: BrowserContext, complaints: list[str]) -> None:
    with running(ar_model) as server, tab(context, server.url) as page:
        listen(page, complaints)
        page.goto(server.url)
        expect(part(page, "one-way")).to_be_visible()
        for hidden in ("#steps", "#sampler", "#constraint-kind"):
            expect(page.locator(hidden)).to_be_hidden()
        pin(page)
        page.fill("#temperature", "1")
        assert shown(fill(page, "the [MASK:4]")) == ar_model.fill("the [MASK:4]", seed=1)[0]
        page.click("#tab-generate")
        page.fill("#max-tokens", "10")
        page.fill("#generate-text", "a ")
        part(panel(page, "generate"), "go").click()
        assert shown(done(page, "generate")) == ar_model.generate(1, 12, "a ", seed=1)[0]
        page.click("#tab-score")
        page.fill("#score-text", "the cat xq")
        part(panel(page, "score"), "go").click()
        page.locator(".word").last.hover()
        expect(part(panel(page, "score"), "word")).to_have_text(re.compile(r"“xq”: [1-9]\d*\.\d bits in 2 tokens"))
    assert complaints == []


def test_what_is_cut_short_or_put_off_is_sent_again(page: Page, complaints: list[str]) -> None:
    half = 'event: start\ndata: {"mask": 257, "rows": [[{"token": 257, "text": null}]]}\n\n'
    busy = '{"error": {"message": "the server is busy", "code": "busy"}}'
    answers: list[dict[str, Any]] = [
        {"status": 200, "content_type": "text/event-stream", "body": half},
        {"status": 429, "content_type": "application/json", "headers": {"retry-after": "1"}, "body": busy},
    ]
    page.route("**/trace", lambda route: route.fulfill(**answers.pop(0)) if answers else route.continue_())
    page.fill("#fill-text", "ab[MASK:4]yz")
    part(panel(page, "fill"), "go").click()
    expect(said(page)).to_contain_text("not answering")
    expect(said(page)).to_contain_text("busy")
    result = done(page)
    assert answers == []
    expect(result.locator(".cell.mask")).to_have_count(0)
    expect(result.locator(".cell.written")).to_have_count(4)
    assert all("429" in complaint for complaint in complaints)
    complaints.clear()


OLD, NEW = "the-old-key-of-the-server", "the-new-key-of-the-server"


def sign_in(page: Page, key: str) -> None:
    expect(page.get_by_role("heading", name="This server needs its API key")).to_be_visible()
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Go on").click()


def test_who_has_no_key_is_asked_by_our_own_page(small: Model, browser: Browser) -> None:
    """Never by the browser: no answer may carry a challenge that it has a dialog for."""
    with ExitStack() as stack, browser.new_context(viewport={"width": 390, "height": 844}) as context:
        first = stack.enter_context(ExitStack())
        port = first.enter_context(running(small, access=Access(key=OLD))).port
        url = f"http://127.0.0.1:{port}"
        page = context.new_page()
        refused: list[tuple[str, str | None]] = []
        page.on("response", lambda r: refused.append((r.url, r.headers.get("www-authenticate"))) if not r.ok else None)
        complaints: list[str] = []
        listen(page, complaints)
        answer = page.goto(url)
        assert answer is not None
        assert answer.status == 401
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        axe = context.new_cdp_session(page)  # our policy lets no script in, so it is brought in as a debugger would
        axe.send("Page.setBypassCSP", {"enabled": True})
        page.reload()
        page.evaluate(Path(AXE_FILE_PATH).read_text(encoding="utf-8"))
        assert page.evaluate("axe.run()")["violations"] == []
        axe.send("Page.setBypassCSP", {"enabled": False})
        page.reload()
        sign_in(page, "not-the-key")
        expect(page.get_by_role("status")).to_have_text("That key was not accepted.")
        sign_in(page, "kein Schlüssel")  # no header can say this
        expect(page.get_by_role("status")).to_have_text("That key was not accepted.")
        assert not any("Content Security Policy" in complaint for complaint in complaints)
        sign_in(page, f" {OLD} ")
        expect(part(page, "model")).to_contain_text("small")  # it is not asked for twice
        assert shown(fill(page, "ab[MASK:2]yz")).startswith("ab")
        page.reload()
        expect(part(page, "model")).to_contain_text("small")
        page.get_by_role("link", name="Docs").click()
        expect(page.get_by_role("heading", name="Routes")).to_be_visible()
        assert {challenge for _, challenge in refused} == {'Bearer realm="unmask"'}
        assert all(OLD not in cookie["value"] for cookie in context.cookies())  # type: ignore[typeddict-item]

        # Another tab has the page by the cookie, and asks for the key itself.
        second = context.new_page()
        second.goto(url)
        expect(second.get_by_role("dialog", name="This server needs its API key")).to_be_visible()

        # After a restart the cookie is void: the tab's key opens the page again by itself.
        first.close()
        stack.enter_context(running(small, access=Access(key=OLD), port=port))
        page.goto(url)
        expect(part(page, "model")).to_contain_text("small")
        assert "unmask-opened" not in page.evaluate("Object.keys(sessionStorage)")


def test_a_browser_that_sends_no_cookie_is_told(
    small: Model, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Access, "_has_cookie", lambda *_: False)
    with running(small, access=Access(key=OLD)) as server, browser.new_context() as context:
        page = context.new_page()
        page.goto(server.url)
        sign_in(page, OLD)
        expect(page.get_by_role("status")).to_contain_text("keeps no cookie")  # rather than opening it for ever


def test_the_page_asks_for_a_key_that_has_changed(small: Model, browser: Browser) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        port = first.enter_context(running(small, access=Access(key=OLD))).port
        context = stack.enter_context(browser.new_context())
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{port}")
        sign_in(page, OLD)
        expect(part(page, "model")).to_contain_text("small")
        first.close()
        stack.enter_context(running(small, access=Access(key=NEW), port=port))
        page.fill("#fill-text", "my own words [MASK:4]")
        part(panel(page, "fill"), "go").click()
        dialog = page.get_by_role("dialog", name="This server needs its API key")
        expect(dialog).to_be_visible()
        page.fill("#key", "not-the-key")
        page.keyboard.press("Enter")
        expect(part(page, "key-said")).to_have_text("That key was not accepted.")
        page.fill("#key", NEW)
        page.get_by_role("button", name="Go on").click()
        assert shown(done(page)).startswith("my own words ")
        assert page.evaluate("sessionStorage.getItem('unmask-key')") == NEW
        assert page.evaluate("JSON.stringify({...localStorage})").find(NEW) < 0
        page.get_by_text("API", exact=True).click()
        expect(part(page, "request")).to_contain_text("Bearer $UNMASK_API_KEY")
        assert NEW not in page.content()
        page.reload()  # the cookie is of the old server: the new key opens the page
        expect(page.locator("#fill-text")).to_have_value("my own words [MASK:4]")


def test_what_is_ticked_before_the_script_comes_stays(context: BrowserContext, server: Running) -> None:
    with tab(context, server.url) as page:
        held: list[Route] = []
        page.route("**/main.js", lambda route: held.append(route))
        page.goto(server.url, wait_until="commit")
        page.check("#fill-three")
        held[0].continue_()
        expect(part(page, "model")).to_contain_text("parameters")
        expect(page.locator("#fill-three")).to_be_checked()


def test_no_request_leaves_the_server(small: Model, browser: Browser) -> None:
    with running(small, access=Access(key=OLD)) as server, browser.new_context() as context:
        asked: list[str] = []
        context.on("request", lambda request: asked.append(request.url))
        page = context.new_page()
        page.goto(server.url)
        sign_in(page, OLD)
        expect(part(page, "model")).to_contain_text("parameters")
        page.get_by_text("API", exact=True).click()
        page.check("#fill-three")
        page.select_option("#constraint-kind", "regex")
        page.fill("#constraint", "[a-z]*")
        result = fill(page, "ab[MASK:2..3]yz")
        expect(part(page, "fit")).to_have_text("This can fit.")
        result.get_by_role("button", name="Take this one").first.click()
        part(result, "measure").click()
        expect(page.locator(".word").first).to_be_visible()
        page.click("#tab-generate")
        page.select_option("#constraint-kind", "")
        page.fill("#max-tokens", "8")
        part(panel(page, "generate"), "go").click()
        done(page, "generate")
        page.get_by_role("link", name="Docs").click()
        expect(page.get_by_role("heading", name="Routes")).to_be_visible()
        page.get_by_role("link", name="openapi.json").click()
        expect(page.locator("body")).to_contain_text("/fill")
    paths = {url.removeprefix(server.url) for url in asked}
    assert {"/", "/page/main.js", "/info", "/fit", "/trace", "/score", "/docs", "/openapi.json"} <= paths
    assert all(path.startswith("/") for path in paths)


# --- for everybody ---


@pytest.mark.parametrize(("scheme", "width"), [("light", 390), ("dark", 1280)][: 2 if ALL else 1])
def test_it_is_accessible_and_fits(page: Page, scheme: Any, width: int) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 844})
    page.evaluate(Path(AXE_FILE_PATH).read_text(encoding="utf-8"))

    def look() -> None:
        found = page.evaluate("axe.run({ resultTypes: ['violations'] })")["violations"]
        said = [(v["id"], [(n["html"][:120], n.get("failureSummary")) for n in v["nodes"][:3]]) for v in found]
        assert said == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width

    page.get_by_text("API", exact=True).click()
    page.select_option("#constraint-kind", "regex")
    page.fill("#constraint", "[a-z]*")
    expect(part(page, "fit")).to_contain_text("fit")
    page.select_option("#constraint-kind", "")
    page.check("#fill-three")
    fill(page, "ab[MASK:4]yz")
    look()
    page.uncheck("#fill-three")
    page.fill("#steps", "2")
    result = fill(page, "ab[MASK:4]yz" + "long" * 14)  # a word wider than a phone
    result.locator(".cell.written").last.click()
    expect(page.get_by_role("dialog", name="About this token")).to_be_visible()
    look()
    page.keyboard.press("Escape")
    page.fill("#steps", "12")  # what was written is dimmed
    expect(result).to_have_class(re.compile("stale"))
    look()
    fill(page, "ab[MASK:30]yz")
    result.get_by_label("step", exact=True).check()
    look()
    part(result, "edit-text").click()
    page.locator(".chip").click()
    expect(page.get_by_role("dialog", name="Length of this gap")).to_be_visible()
    look()
    page.keyboard.press("Escape")
    page.click("#tab-edit")
    page.fill("#edit-text", "in the garden")
    page.fill("#edit-span", "the")
    part(panel(page, "edit"), "go").click()
    expect(page.locator(".edits li")).to_have_count(3)
    look()
    page.click("#tab-generate")
    look()
    page.click("#tab-score")
    page.fill("#score-text", "some words of a text")
    part(panel(page, "score"), "go").click()
    expect(page.locator(".word")).to_have_count(5)
    look()
    page.fill("#score-text", "")
    part(panel(page, "score"), "go").click()
    expect(said(page, "score")).to_contain_text("Type something")
    look()


def test_the_routes_are_a_page_too(page: Page) -> None:
    page.get_by_role("link", name="Docs").click()
    expect(page.get_by_role("heading", name="Routes")).to_be_visible()
    page.evaluate(Path(AXE_FILE_PATH).read_text(encoding="utf-8"))
    assert page.evaluate("axe.run()")["violations"] == []


def test_by_keys_alone(page: Page) -> None:
    page.locator("#tab-fill").focus()
    page.keyboard.press("ArrowRight")
    expect(panel(page, "generate")).to_be_visible()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Tab")
    expect(page.locator("#fill-text")).to_be_focused()
    page.keyboard.press("Control+a")
    page.keyboard.type("ab____yz")  # which becomes a chip
    page.keyboard.press("Control+Enter")
    result = done(page)
    expect(part(result, "go")).to_be_focused()
    name = "(e => e.dataset.part ?? (e.id || e.className))(document.activeElement)"
    reached: list[str] = []
    while "go" not in reached and len(reached) < 40:
        page.keyboard.press("Tab")
        reached.append(page.evaluate(name))
    assert {"edit-text", "undo", "play", "replay", "seed", "copy", "use", "measure"} <= set(reached)
    assert sum("cell" in name for name in reached) == 1  # one stop for the whole text, arrows within
    expect(result).to_be_visible()
