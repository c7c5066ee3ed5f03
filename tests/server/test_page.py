"""The page in a real browser: everything that it offers is done once, by mouse or by keys."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.base import AXE_FILE_PATH
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
from small_server import Running, random_model, running

from unmask.model import Model
from unmask.samplers.ancestral import Ancestral
from unmask.samplers.left_to_right import LeftToRight
from unmask.server.doors import Doors

expect.set_options(timeout=5_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if found is None:
        pytest.skip("NO BROWSER: the page was NOT looked at; install chromium to run these tests")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model()


@pytest.fixture(scope="module")
def server(model: Model) -> Iterator[Running]:
    with running(model) as found:
        yield found


@pytest.fixture
def slow(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow enough that the steps of a text can be told apart."""
    step = server.desk.engine._step

    def slowly(*given: Any) -> None:
        time.sleep(0.15)
        step(*given)

    monkeypatch.setattr(server.desk.engine, "_step", slowly)


@pytest.fixture
def complaints() -> list[str]:
    return []


@pytest.fixture
def page(browser: Browser, server: Running, complaints: list[str]) -> Iterator[Page]:
    """The page, just opened. Whatever it complains about in the console fails the test."""
    with browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce") as context:
        page = context.new_page()
        listen(page, complaints)
        page.goto(server.url)
        expect(part(page, "model")).to_contain_text("small")
        yield page
    assert complaints == []


def listen(page: Page, complaints: list[str]) -> None:
    page.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))


def part(within: Page | Locator, name: str) -> Locator:
    return within.locator(f'[data-part="{name}"]').first


def panel(page: Page, name: str) -> Locator:
    return page.locator(f"#panel-{name}")


def done(page: Page, name: str = "fill") -> Locator:
    """The finished result of a tab."""
    expect(part(panel(page, name), "go")).not_to_have_text("Stop")
    result = panel(page, name).locator(".result:not(.running)")
    expect(result.locator(".cell").first).to_be_visible()
    return result


def fill(page: Page, text: str) -> Locator:
    page.fill("#fill-text", text)
    part(panel(page, "fill"), "go").click()
    return done(page)


def shown(result: Locator, row: int = 0) -> str:
    """The text as it stands on the page; a mask is _, its space with it."""
    mask = "e => e.matches?.('.mask') ? '_' : e.textContent"
    nodes = result.locator(".canvas").nth(row).evaluate(f"e => [...e.childNodes].map({mask})")
    return "".join(nodes).replace(" _", "_").replace("\xa0", "").replace("↵", "")


def select(page: Page, start: int, end: int) -> None:
    page.locator("#fill-text").evaluate("(e, at) => { e.focus(); e.setSelectionRange(...at); }", [start, end])


# --- fill ---


def test_selected_words_become_a_gap(page: Page) -> None:
    page.fill("#fill-text", "😀 the old café is open")
    select(page, 12, 14)  # some letters of a word are the word
    part(page, "mask").click()
    expect(page.locator("#fill-text")).to_have_value("😀 the old [MASK:5] is open")
    expect(page.locator(".behind mark").first).to_have_text("[MASK:5]")
    select(page, 4, 4)  # so is a caret in it
    part(page, "mask").click()
    expect(page.locator("#fill-text")).to_have_value("😀 [MASK:3] old [MASK:5] is open")
    select(page, 0, 30)
    part(page, "mask").click()
    expect(part(page, "notice")).to_contain_text("a gap in this selection already")
    part(panel(page, "fill"), "undo").click()
    expect(page.locator("#fill-text")).to_have_value("😀 the old [MASK:5] is open")


def test_a_text_without_a_gap_is_answered_kindly(page: Page) -> None:
    page.fill("#fill-text", "nothing is missing")
    part(panel(page, "fill"), "go").click()
    expect(part(page, "notice")).to_contain_text("There is no gap yet")
    assert page.input_value("#fill-text") == "nothing is missing"


@pytest.mark.usefixtures("slow")
def test_fill_shows_every_step(page: Page, model: Model) -> None:
    page.evaluate("""() => {
        window.seen = [];
        new MutationObserver(() => window.seen.push(document.querySelectorAll('#panel-fill .cell.mask').length))
            .observe(document.querySelector('#panel-fill .result'), { childList: true, subtree: true });
    }""")
    page.fill("#temperature", "1")
    page.fill("#steps", "8")
    result = fill(page, "ab __________ yz")  # ten tokens
    [wanted] = model.fill("ab [MASK:10] yz", sampler=Ancestral(steps=8, temperature=1.0), seed=1)
    assert shown(result) == wanted
    counts = page.evaluate("window.seen")
    assert max(counts) == 10
    assert counts[-1] == 0
    assert len(set(counts)) > 2  # they opened one after another
    written = result.locator(".cell.written")
    expect(written).to_have_count(10)
    assert all(re.search(r"\bsure-[0-4]\b", cell.get_attribute("class") or "") for cell in written.all())
    assert re.fullmatch(r"\d+\.\d s", part(result, "seconds").inner_text())
    assert re.fullmatch(r"[4-8] network calls", part(result, "calls").inner_text())


def test_runners_up_by_mouse_and_by_keys(page: Page) -> None:
    result = fill(page, "ab____yz")
    card = page.get_by_role("dialog", name="About this token")
    result.locator(".cell.written").first.hover()
    expect(card.get_by_role("list", name="Runners-up").locator("li")).to_have_count(5)
    expect(card).to_contain_text("%")
    page.mouse.move(2, 2)
    expect(card).to_be_hidden()
    result.locator(".cell").first.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(card).to_contain_text("written in step")
    page.keyboard.press("Enter")
    expect(card.get_by_role("button").first).to_be_focused()
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()
    expect(result.locator('[data-at="3"]')).to_be_focused()


def test_a_runner_up_is_taken(page: Page) -> None:
    result = fill(page, "ab____yz")
    result.locator('[data-at="3"]').click()
    other = page.locator(".about .other").first
    letter = other.locator("span").first.inner_text()
    other.click()
    assert shown(result)[3] == letter.replace("␣", " ")
    expect(result.locator('[data-at="3"]')).to_have_class(re.compile("locked"))


def act(page: Page, cell: Locator, name: str) -> None:
    cell.click()
    page.get_by_role("dialog", name="About this token").get_by_role("button", name=name, exact=True).click()


def test_mask_again_lock_write_anew_undo(page: Page) -> None:
    result = fill(page, "ab________yz")
    first = shown(result)
    act(page, result.locator('[data-at="4"]'), "Mask again")
    assert shown(result) == first[:4] + "_" + first[5:]
    part(result, "masks").click()
    done(page)
    assert shown(result)[:4] + shown(result)[5:] == first[:4] + first[5:]
    expect(result.locator(".cell.mask")).to_have_count(0)
    second = shown(result)

    act(page, result.locator('[data-at="3"]'), "Lock")
    act(page, result.locator('[data-at="5"]'), "Lock")
    part(result, "anew").click()
    done(page)
    third = shown(result)
    assert third != second
    assert [third[k] for k in (0, 1, 3, 5, 10, 11)] == [second[k] for k in (0, 1, 3, 5, 10, 11)]
    assert page.input_value("#seed") == "2"
    expect(result.locator(".cell.locked")).to_have_count(2)

    undo = part(panel(page, "fill"), "undo")
    undo.click()
    assert shown(result) == second
    for _ in range(3):
        undo.click()
    assert shown(result)[4] == "_"
    page.fill("#fill-text", "typed meanwhile")
    undo.click()
    assert shown(result) == first
    undo.click()
    expect(panel(page, "fill").locator(".result")).to_be_hidden()
    expect(undo).to_be_disabled()
    assert page.input_value("#fill-text") == "typed meanwhile"
    part(panel(page, "fill"), "redo").click()
    assert shown(panel(page, "fill").locator(".result")) == first


def test_a_given_token_may_be_masked_and_put_back(page: Page) -> None:
    result = fill(page, "ab__yz")
    before = shown(result)
    act(page, result.locator('[data-at="5"]'), "Mask again")
    assert shown(result) == before[:5] + "_"
    act(page, result.locator('[data-at="5"]'), "Put back")
    assert shown(result) == before


def test_replay(page: Page) -> None:
    result = fill(page, "ab________yz")
    end = shown(result)
    slider = part(result, "replay")
    steps = int(slider.get_attribute("max") or 0)
    assert steps > 2
    masks = []
    for step in range(steps + 1):
        slider.fill(str(step))
        masks.append(result.locator(".cell.mask").count())
        expect(part(result, "step")).to_have_text(f"step {step} of {steps}")
    assert masks[0] == 8
    assert masks[-1] == 0
    assert masks == sorted(masks, reverse=True)
    assert shown(result) == end
    part(result, "play").click()
    expect(part(result, "step")).to_have_text(f"step {steps} of {steps}")


def test_three_alternatives_with_their_bounds(page: Page, model: Model) -> None:
    page.check("#fill-three")
    page.fill("#temperature", "1")
    page.fill("#steps", "4")
    result = fill(page, "ab________yz")
    expect(result.locator(".card")).to_have_count(3)
    texts = model.fill(["ab[MASK:8]yz"] * 3, sampler=Ancestral(steps=4, temperature=1.0), seed=1)
    assert [shown(result, row) for row in range(3)] == texts
    bounds = [model.score(text, num_samples=32).bits_per_byte for text in texts]
    said = result.locator(".bound").all_inner_texts()
    assert said == [f"bound {bound:.2f} bits/byte" for bound in bounds]
    best = bounds.index(min(bounds))
    expect(result.locator(".card").nth(best)).to_have_class(re.compile("best"))
    tops = {card.bounding_box()["y"] for card in result.locator(".card").all()}  # type: ignore[index]
    assert len(tops) == 1  # side by side
    result.locator(".card").nth(2).get_by_role("button", name="Take this one").click()
    expect(result.locator(".card")).to_have_count(1)
    assert shown(result) == texts[2]
    part(result, "replay").fill("0")
    expect(result.locator(".cell.mask")).to_have_count(8)


def test_gaps_of_unknown_length(page: Page, model: Model) -> None:
    page.fill("#temperature", "1")
    page.fill("#steps", "1")
    result = fill(page, "ab[MASK:1..2]yz")
    assert shown(result) == model.fill("ab[MASK:1..2]yz", sampler=Ancestral(steps=1, temperature=1.0), seed=1)[0]


@pytest.mark.usefixtures("slow")
def test_stop_keeps_what_was_there(page: Page) -> None:
    before = shown(fill(page, "ab__yz"))
    page.fill("#fill-text", "[MASK:30]")
    go = part(panel(page, "fill"), "go")
    go.click()
    expect(go).to_have_text("Stop")
    go.click()
    assert shown(done(page)) == before


# --- generate ---


def test_generate_with_its_controls(page: Page, model: Model) -> None:
    page.click("#tab-generate")
    for field, value in {"length": "20", "steps": "5", "temperature": "0.5", "seed": "7"}.items():
        page.fill(f"#{field}", value)
    page.select_option("#sampler", "left_to_right")
    for prompt in ("", "ab"):
        page.fill("#generate-text", prompt)
        part(panel(page, "generate"), "go").click()
        result = done(page, "generate")
        expect(part(result, "calls")).to_have_text("5 network calls")
        sampler = LeftToRight(steps=5, temperature=0.5)
        assert shown(result) == model.generate(1, 20, prompt, sampler=sampler, seed=7)[0]
    text = shown(result)
    part(result, "use").click()
    expect(page.locator("#fill-text")).to_have_value(text)
    expect(panel(page, "fill")).to_be_visible()


@pytest.mark.parametrize("tab", ["fill", "generate", "score"])
def test_the_same_in_code(page: Page, tab: str, tmp_path: Path) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click(f"#tab-{tab}")
    page.fill(f"#{tab}-text", "It's \"é\" \\ __" if tab == "fill" else "It's \"é\" \\")
    page.fill("#length", "16", force=True) if tab == "generate" else None
    part(panel(page, tab), "go").click()
    if tab == "score":
        expect(panel(page, tab).locator(".scored")).to_be_visible()
        wanted = part(panel(page, tab), "bits").inner_text()
    else:
        wanted = shown(done(page, tab))
    page.get_by_text("The same in code").click()
    code = {}
    for language in ("python", "curl"):
        part(page, language).click()
        part(page, "copy").click()
        expect(part(page, "copy")).to_have_text("Copied")
        code[language] = page.evaluate("navigator.clipboard.readText()")
    program = tmp_path / "request.py"
    program.write_text(code["python"], encoding="utf-8")
    run: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60, "encoding": "utf-8"}
    printed = subprocess.run([sys.executable, "-X", "utf8", str(program)], check=True, **run).stdout
    if tab == "score":
        assert f"{float(printed):.2f}" == wanted
    else:
        assert printed == f"{wanted}\n"
    if shutil.which("curl"):
        answer = subprocess.run(["bash", "-c", code["curl"]], check=True, **run).stdout
        assert '"error"' not in answer
        assert '"texts"' in answer


# --- constraint, score ---


def test_a_constraint_and_whether_it_can_fit(page: Page) -> None:
    page.fill("#fill-text", "ab ____ yz")
    page.select_option("#constraint-kind", "regex")
    fit = part(page, "fit")
    page.fill("#constraint", "[0-9]{5}")
    expect(fit).to_contain_text("This cannot fit")
    page.fill("#constraint", "[0-9]{4}")
    expect(fit).to_have_text("This can fit.")
    assert re.fullmatch(r"ab \d{4} yz", shown(fill(page, "ab ____ yz")))
    page.fill("#fill-text", "ab ___ yz")  # the room changes
    expect(fit).to_contain_text("at least 4")
    page.select_option("#constraint-kind", "json_schema")
    page.fill("#constraint", '{"enum": ["x"')
    expect(fit).to_have_text("The schema is not JSON yet.")
    page.fill("#constraint", '{"enum": ["x"]}')
    expect(fit).to_have_text("This can fit.")
    assert shown(fill(page, "ab ___ yz")) == 'ab "x" yz'
    page.click("#tab-generate")
    page.fill("#length", "2")
    expect(fit).to_contain_text("This cannot fit")
    page.fill("#length", "12")
    expect(fit).to_have_text("This can fit.")
    part(panel(page, "generate"), "go").click()
    assert shown(done(page, "generate")) == '"x"'
    page.select_option("#constraint-kind", "regex")
    expect(page.locator("#constraint")).to_have_value("[0-9]{4}")  # each kind has its own


def test_score(page: Page, model: Model) -> None:
    page.click("#tab-score")
    page.fill("#score-text", "the 😀 sat, twice")
    part(panel(page, "score"), "go").click()
    words = page.locator(".word")
    expect(words).to_have_text(["the", "😀", "sat,", "twice"])
    bound = model.score("the 😀 sat, twice", num_samples=16)
    expect(part(panel(page, "score"), "bits")).to_have_text(f"{bound.bits_per_byte:.2f}")
    assert all(re.search(r"hard-[0-6]", word.get_attribute("class") or "") for word in words.all())
    assert page.locator(".scored .canvas").inner_text() == "the 😀 sat, twice"
    words.nth(1).hover()
    expect(part(panel(page, "score"), "word")).to_have_text(re.compile(r"😀: [\d.]+ bits in 4 tokens"))


# --- what goes wrong ---


def test_errors_are_told_kindly(page: Page, complaints: list[str]) -> None:
    notice = part(page, "notice")
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
    fill(page, "ab__")
    expect(notice).to_be_hidden()
    assert all("400 (Bad Request)" in complaint for complaint in complaints)  # the browser notes every refusal
    complaints.clear()


def test_it_survives_a_restart(page: Page, model: Model, browser: Browser) -> None:
    with ExitStack() as stack, browser.new_context() as context:
        first = stack.enter_context(ExitStack())
        port = first.enter_context(running(model)).port
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{port}")
        expect(part(page, "model")).to_contain_text("small")
        page.fill("#fill-text", "my own words ____")
        first.close()
        part(panel(page, "fill"), "go").click()
        expect(part(page, "notice")).to_contain_text("not answering. Your text is safe")
        page.locator("#fill-text").press_sequentially("!")
        stack.enter_context(running(model, port=port))
        expect(part(page, "notice")).to_have_text("The server is back.")
        assert shown(done(page)).startswith("my own words ")
        page.click("#tab-score")
        page.reload()
        expect(panel(page, "score")).to_be_visible()
        page.click("#tab-fill")
        expect(page.locator("#fill-text")).to_have_value("my own words ____!")


def test_the_page_asks_for_the_key(model: Model, browser: Browser) -> None:
    old, new = "the-old-key-of-the-server", "the-new-key-of-the-server"
    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        port = first.enter_context(running(model, doors=Doors(key=old))).port
        login: Any = {"username": "any", "password": old}
        context = stack.enter_context(browser.new_context(http_credentials=login))
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{port}")
        expect(part(page, "model")).to_contain_text("small")  # what the browser asked for serves the page too
        first.close()
        stack.enter_context(running(model, doors=Doors(key=new), port=port))
        part(panel(page, "fill"), "go").click()
        dialog = page.get_by_role("dialog", name="This server needs its API key")
        expect(dialog).to_be_visible()
        page.fill("#key", "not-the-key")
        page.keyboard.press("Enter")
        expect(part(page, "key-said")).to_have_text("That key was not accepted.")
        page.fill("#key", new)
        page.get_by_role("button", name="Go on").click()
        done(page)
        assert page.evaluate("sessionStorage.getItem('unmask-key')") == new
        assert page.evaluate("JSON.stringify({...localStorage})").find(new) < 0
        page.get_by_text("The same in code").click()
        expect(part(page, "request")).to_contain_text("Bearer $UNMASK_API_KEY")
        assert new not in page.content()


# --- for everybody ---


@pytest.mark.parametrize(("scheme", "width"), [("light", 390), ("dark", 1280)])
def test_it_is_accessible_and_fits(page: Page, scheme: Any, width: int) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 844})
    page.evaluate(Path(AXE_FILE_PATH).read_text(encoding="utf-8"))

    def look() -> None:
        found = page.evaluate("axe.run({ resultTypes: ['violations'] })")["violations"]
        said = [(v["id"], [(n["html"][:120], n.get("failureSummary")) for n in v["nodes"][:3]]) for v in found]
        assert said == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width

    page.get_by_text("The same in code").click()
    page.select_option("#constraint-kind", "regex")
    page.fill("#constraint", "[a-z]*")
    expect(part(page, "fit")).to_contain_text("fit")
    page.select_option("#constraint-kind", "")
    page.check("#fill-three")
    fill(page, "ab____yz")
    look()
    page.uncheck("#fill-three")
    page.fill("#steps", "2")
    result = fill(page, "ab____yz" + "long" * 14)  # a word wider than a phone
    result.locator(".cell.written").last.click()
    expect(page.locator(".about")).to_be_visible()
    look()
    page.keyboard.press("Escape")
    page.click("#tab-generate")
    look()
    page.click("#tab-score")
    page.fill("#score-text", "some words of a text")
    part(panel(page, "score"), "go").click()
    expect(page.locator(".word")).to_have_count(5)
    look()
    page.fill("#score-text", "")
    part(panel(page, "score"), "go").click()
    expect(part(page, "notice")).to_contain_text("Type something")
    look()


def test_by_keys_alone(page: Page) -> None:
    page.locator("#tab-fill").focus()
    page.keyboard.press("ArrowRight")
    expect(panel(page, "generate")).to_be_visible()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Tab")
    expect(page.locator("#fill-text")).to_be_focused()
    page.keyboard.press("Control+a")
    page.keyboard.type("ab____yz")
    page.keyboard.press("Control+Enter")
    result = done(page)
    reached = []
    while "tab-fill" not in reached and len(reached) < 40:
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.dataset.part ?? (document.activeElement.id || document.activeElement.className)"))
    assert {"go", "mask", "undo", "play", "replay", "anew", "use", "measure"} <= set(reached)
    assert sum("cell" in name for name in reached) == 1  # one stop for the whole text, arrows within
    expect(result).to_be_visible()
