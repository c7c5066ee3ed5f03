"""The page in a real browser: what it does with a text is done once, by mouse or by keys."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from browsing import act, done, fill, heard, levels, listen_in, panel, part, pin, put, said, select, shown, tab
from playwright.sync_api import BrowserContext, Page, expect
from small_server import Running, random_model, running
from starlette.testclient import TestClient

from matrix import ALL
from unmask import load
from unmask.model import Model
from unmask.samplers.ancestral import Ancestral
from unmask.samplers.left_to_right import LeftToRight
from unmask.server.app import PAGE, make_app
from unmask.text.editing import fill as fill_gaps


@pytest.fixture
def slow(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow enough that the steps of a text can be told apart."""
    step = server.jobs.engine._step

    def slowly(*given: Any) -> None:
        time.sleep(0.15)
        step(*given)

    monkeypatch.setattr(server.jobs.engine, "_step", slowly)


# --- fill ---


def test_selected_words_become_a_gap(page: Page) -> None:
    page.fill("#fill-text", "😀 the old café is open")
    select(page, 12, 14)  # some letters of a word are the word
    part(page, "mask").click()
    expect(page.locator("#fill-text")).to_have_value("😀 the old [MASK:1..8] is open")
    expect(page.locator(".chip")).to_have_text("[MASK:1..8]as long as fits")
    select(page, 4, 4)  # so is a caret in it; both together may be so long in 32 ways
    part(page, "mask").click()
    expect(page.locator("#fill-text")).to_have_value("😀 [MASK:1..4] old [MASK:1..8] is open")
    select(page, 0, 30)
    part(page, "mask").click()
    expect(said(page)).to_contain_text("a gap in this selection already")
    part(panel(page, "fill"), "undo").click()
    expect(page.locator("#fill-text")).to_have_value("😀 the old [MASK:1..8] is open")
    page.fill("#fill-text", "a [MASK:1..8] and a [MASK:1..4] in one text")
    select(page, 35, 38)  # no more can be tried: as long as it was
    part(page, "mask").click()
    expect(page.locator("#fill-text")).to_have_value("a [MASK:1..8] and a [MASK:1..4] in [MASK:3] text")


@pytest.mark.skipif(not ALL, reason="the built-in model takes its time: make faults")
def test_the_built_in_model_does_the_examples_well() -> None:
    """As the page would ask it, over several seeds: whole sentences, the right choice."""
    page, examples = ((PAGE / name).read_text(encoding="utf-8") for name in ("index.html", "examples.js"))
    how = {name: float(re.findall(rf'id="{name}"[^>]* value="([\d.]+)"', page)[0]) for name in ("steps", "temperature")}
    how["steps"] = int(how["steps"])
    gap, prompt, choice = (json.loads(text) for text in re.findall(r'^    text: (".*"),$', examples, re.MULTILINE))
    [first] = re.findall(r'<textarea id="fill-text"[^>]*>(.*?)</textarea>', page)
    assert first == gap  # what stands there before anything is clicked
    with TestClient(make_app(load("stories", device="cpu"), name="stories"), base_url="http://localhost") as client:

        def ask(route: str, **body: Any) -> Any:
            return client.post(route, json=how | body).json()

        written = [one["text"] for one in ask("/fill", text=gap, n=2, seed=1)["texts"]]
        for text in written:
            assert re.fullmatch(r"([A-Z][^.!?]*[a-z]\.( |$))+", text), text
            assert not re.search(r"\b(\w+) \1\b", text), text
        assert len(set(written)) > 1
        for one in ask("/fill", text=choice, choices=["Yes", "No"], n=1, seed=1)["texts"]:
            assert '"No," said Mom' in one["text"]
        story = ask("/v1/completions", prompt=prompt, max_tokens=48, seed=1)["choices"][0]["text"]
        assert len(re.findall(r"[a-z][.!?]", story)) >= 2, story


def test_a_text_without_a_gap_is_answered_kindly(page: Page) -> None:
    page.fill("#fill-text", "nothing is missing")
    part(panel(page, "fill"), "go").click()
    expect(said(page)).to_contain_text("There is no gap yet")
    assert page.input_value("#fill-text") == "nothing is missing"


@pytest.mark.usefixtures("slow")
def test_fill_shows_every_step(page: Page, small: Model) -> None:
    page.evaluate("""() => {
        window.seen = [];
        new MutationObserver(() => window.seen.push(document.querySelectorAll('#panel-fill .cell.mask').length))
            .observe(document.querySelector('#panel-fill .texts'), { childList: true, subtree: true });
    }""")
    pin(page)
    page.fill("#temperature", "1")
    page.fill("#steps", "8")
    result = fill(page, "ab [MASK:10] yz")  # ten tokens
    [wanted] = small.fill("ab [MASK:10] yz", sampler=Ancestral(steps=8, temperature=1.0), seed=1)
    assert shown(result) == wanted
    counts = page.evaluate("window.seen")
    assert max(counts) == 10
    assert counts[-1] == 0
    assert len(set(counts)) > 2  # they opened one after another
    expect(result.locator(".cell.written")).to_have_count(10)


def test_tokens_are_coloured_by_how_likely_they_were(context: BrowserContext) -> None:
    sharp = random_model()  # the small model finds everything unlikely
    with torch.no_grad():
        sharp.denoiser.output.weight.mul_(12)
    with running(sharp) as server, tab(context, server.url) as page:
        page.goto(server.url)
        expect(part(page, "model")).to_contain_text("small")
        pin(page)
        page.fill("#temperature", "1")
        page.fill("#steps", "8")
        listen_in(page)
        result = fill(page, "ab [MASK:20] yz")
        told = heard(page)["texts"][0]["tokens"]
        probs = [token["model_prob"] for token in told if "model_prob" in token]
        wanted = [sum(prob >= edge for edge in (0.1, 0.3, 0.6, 0.9)) for prob in probs]
        assert set(wanted) == {0, 1, 2, 3, 4}
        assert levels(result.locator(".cell.written"), "sure") == wanted
        look = "all => all.map(e => getComputedStyle(e).backgroundColor)"
        legend = result.locator('[data-legend="sure"] i').evaluate_all(look)
        assert len(set(legend)) == 5
        assert result.locator(".cell.written").evaluate_all(look) == [legend[level] for level in wanted]


@pytest.mark.usefixtures("slow")
def test_the_meter_runs_while_it_writes(page: Page) -> None:
    page.evaluate("""() => {
        window.seen = [];
        const result = document.querySelector('#panel-fill');
        const read = (name) => parseFloat(result.querySelector(`[data-part="${name}"]`).textContent);
        const look = () => result.matches('.running') && window.seen.push(['seconds', 'calls', 'left'].map(read));
        new MutationObserver(look).observe(result.querySelector('.meter'), { childList: true, subtree: true });
    }""")
    page.fill("#steps", "8")
    listen_in(page)
    result = fill(page, "ab [MASK:10] yz")
    end = heard(page)
    seen = page.evaluate("window.seen")
    seconds, calls, left = (
        [row[k] for row in seen if not math.isnan(row[k])] for k in range(3)
    )  # as soon as there is one
    for counted in (seconds, calls):
        assert counted == sorted(counted)
        assert len(set(counted)) > 2
    assert left == sorted(left, reverse=True)
    assert len(set(left)) > 2
    assert max(left) <= 10
    assert max(calls) <= end["calls"]
    expect(part(result, "calls")).to_have_text(f"{end['calls']} network calls")
    expect(part(result, "seconds")).to_have_text(f"{end['seconds']:.1f} s")
    expect(part(result, "left")).to_have_text("")


def test_runners_up_by_mouse_and_by_keys(page: Page) -> None:
    result = fill(page, "ab[MASK:4]yz")
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
    expect(result.locator(".cell[aria-expanded]")).to_have_attribute("data-at", "3")
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()
    expect(result.locator('[data-at="3"]')).to_be_focused()
    expect(result.locator(".cell[aria-expanded]")).to_have_count(0)


def test_a_runner_up_is_taken(page: Page) -> None:
    pin(page)
    result = fill(page, "ab[MASK:4]yz")
    result.locator('[data-at="3"]').click()
    other = page.locator(".about .other").first
    letter = other.locator("span").first.inner_text()
    other.click()
    assert shown(result)[3] == letter.replace("␣", " ")
    expect(result.locator('[data-at="3"]')).to_have_class(re.compile("locked"))


def test_mask_again_lock_write_anew_undo(page: Page) -> None:
    pin(page)
    result = fill(page, "ab[MASK:8]yz")
    first = shown(result)
    act(page, result.locator('[data-at="4"]'), "Mask again")
    assert shown(result) == first[:4] + "_" + first[5:]
    pin(page, 2)
    part(result, "masks").click()
    done(page)
    assert shown(result)[:4] + shown(result)[5:] == first[:4] + first[5:]
    expect(result.locator(".cell.mask")).to_have_count(0)
    second = shown(result)

    act(page, result.locator('[data-at="3"]'), "Lock")
    act(page, result.locator('[data-at="5"]'), "Lock")
    pin(page, 3)
    part(result, "anew").click()
    done(page)
    third = shown(result)
    assert third != second
    assert [third[k] for k in (0, 1, 3, 5, 10, 11)] == [second[k] for k in (0, 1, 3, 5, 10, 11)]
    expect(result.locator(".cell.locked")).to_have_count(2)

    undo = part(panel(page, "fill"), "undo")
    undo.click()
    assert shown(result) == second
    for _ in range(3):
        undo.click()
    assert shown(result)[4] == "_"
    put(page, "typed meanwhile")
    undo.click()
    assert shown(result) == first
    undo.click()
    expect(result.locator(".texts")).to_be_hidden()
    expect(undo).to_be_disabled()
    assert page.input_value("#fill-text") == "typed meanwhile"
    part(panel(page, "fill"), "redo").click()
    assert shown(result) == first


def test_a_given_token_may_be_masked_and_put_back(page: Page) -> None:
    pin(page)
    result = fill(page, "ab[MASK:2]yz")
    before = shown(result)
    act(page, result.locator('[data-at="5"]'), "Mask again")
    assert shown(result) == before[:5] + "_"
    act(page, result.locator('[data-at="5"]'), "Put back")
    assert shown(result) == before


def test_replay(page: Page) -> None:
    result = fill(page, "ab[MASK:8]yz")
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


@pytest.mark.parametrize("tab", ["fill", "generate"])
def test_three_alternatives_with_their_bounds(page: Page, tab: str, small: Model) -> None:
    page.click(f"#tab-{tab}")
    page.check(f"#{tab}-three")
    pin(page)
    page.fill("#temperature", "1")
    page.fill("#steps", "4")
    sampler = Ancestral(steps=4, temperature=1.0)
    if tab == "fill":
        page.fill("#fill-text", "ab[MASK:8]yz")
        texts = small.fill(["ab[MASK:8]yz"] * 3, sampler=sampler, seed=1)
    else:
        page.fill("#generate-text", "ab")
        page.fill("#max-tokens", "8")
        texts = small.generate(3, 10, "ab", sampler=sampler, seed=1)
    part(panel(page, tab), "go").click()
    result = done(page, tab)
    expect(result.locator(".card")).to_have_count(3)
    assert len(set(texts)) == 3
    assert [shown(result, row) for row in range(3)] == texts
    bounds = [small.score(text, num_samples=32).bits_per_byte for text in texts]
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


def test_gaps_of_unknown_length(page: Page, small: Model) -> None:
    pin(page)
    page.fill("#temperature", "1")
    page.fill("#steps", "1")
    result = fill(page, "ab[MASK:1..2]yz")
    [best] = fill_gaps(small, "ab[MASK:1..2]yz", sampler=Ancestral(steps=1, temperature=1.0), seed=1)
    assert shown(result) == best.text
    written = result.locator(".cell.written")
    expect(written).to_have_count(len(best.text) - 4)
    written.first.hover()
    expect(page.get_by_role("list", name="Runners-up").locator("li")).to_have_count(5)
    page.mouse.move(2, 2)
    part(result, "replay").fill("0")
    expect(result.locator(".cell.mask")).to_have_count(len(best.text) - 4)
    part(result, "replay").fill("1")
    # What was tried, the best of it marked; another may be shown and is then the text.
    part(result, "ways").get_by_text("2 lengths tried, this is the best").click()
    tried = part(result, "ways").locator("li")
    bits = [f"{way.nats / math.log(2):.0f} bits" for way in best.ways]
    expect(tried.locator(".bound")).to_have_text([f"{bits[0]}, best", bits[1]])
    expect(tried.nth(0).get_by_role("button")).to_be_disabled()
    tried.nth(1).get_by_role("button", name="Show").click()
    assert shown(result) == best.ways[1].text
    expect(part(result, "ways")).to_contain_text("this is not the best")
    part(result, "use").click()
    expect(page.locator("#fill-text")).to_have_value(best.ways[1].text)
    undo = part(panel(page, "fill"), "undo")
    undo.click()
    undo.click()
    assert shown(result) == best.text
    act(page, written.first, "Mask again")
    part(result, "masks").click()
    done(page)
    expect(result.locator(".cell.mask")).to_have_count(0)
    expect(part(result, "ways")).to_be_hidden()


def test_three_of_unknown_length(page: Page, small: Model) -> None:
    page.check("#fill-three")
    pin(page)
    page.fill("#temperature", "1")
    page.fill("#steps", "2")
    result = fill(page, "ab[MASK:1..3]yz")
    found = fill_gaps(small, ["ab[MASK:1..3]yz"] * 3, sampler=Ancestral(steps=2, temperature=1.0), seed=1)
    assert [shown(result, row) for row in range(3)] == [one.text for one in found]
    expect(result.locator(".card.best")).to_have_count(1)
    result.locator(".card").nth(2).get_by_role("button", name="Take this one").click()
    assert shown(result) == found[2].text
    expect(result.locator(".ways li")).to_have_count(3)


@pytest.mark.usefixtures("slow")
def test_stop_keeps_the_half_written_text(page: Page) -> None:
    pin(page)
    before = shown(fill(page, "ab[MASK:2]yz"))
    put(page, "AB [MASK:30] YZ")
    page.fill("#steps", "30")
    go, undo = part(panel(page, "fill"), "go"), part(panel(page, "fill"), "undo")
    go.click()
    result = panel(page, "fill")
    expect(result.locator(".cell").first).to_have_text("A")
    expect(result.locator(".cell.written").first).to_be_visible()
    undo.click()  # nothing to take back yet
    go.click()
    half = shown(done(page))
    assert half.startswith("AB ")
    assert half.endswith(" YZ")
    assert 0 < half.count("_") < 30
    # It can be edited: masks that stand together are one gap of so many tokens,
    part(result, "use").click()
    typed = page.input_value("#fill-text")
    assert re.sub(r"\[MASK:(\d+)\]", lambda gap: "_" * int(gap[1]), typed) == half
    undo.click()
    # or written to its end: what stands there stays.
    part(result, "masks").click()
    whole = shown(done(page))
    assert len(whole) == len(half) == 36
    assert all(a in ("_", b) for a, b in zip(half, whole, strict=True))
    undo.click()
    assert shown(result) == half
    for _ in range(2):  # what was typed meanwhile is not thrown away
        undo.click()
    assert shown(result) == before


@pytest.mark.usefixtures("slow")
def test_words_masked_while_three_are_written_come_back(page: Page) -> None:
    typed = "ab [MASK:12] yz"
    page.fill("#fill-text", typed)
    page.check("#fill-three")  # these leave the text field where it is
    go, undo = part(panel(page, "fill"), "go"), part(panel(page, "fill"), "undo")
    texts = panel(page, "fill").locator(".texts")
    go.click()
    expect(texts.locator(".cell.written").first).to_be_visible()
    select(page, 13, 15)
    part(page, "mask").click()
    expect(page.locator("#fill-text")).to_have_value("ab [MASK:12] [MASK:1..8]")
    whole = shown(done(page))
    expect(panel(page, "fill")).to_have_class(re.compile("stale"))
    undo.click()
    expect(page.locator("#fill-text")).to_have_value(typed)
    assert shown(panel(page, "fill")) == whole  # the text alone was taken back
    expect(panel(page, "fill")).not_to_have_class(re.compile("stale"))
    undo.click()
    expect(texts).to_be_hidden()
    expect(undo).to_be_disabled()


# --- generate ---


def test_generate_with_its_controls(page: Page, small: Model) -> None:
    page.click("#tab-generate")
    for field, value in {"steps": "5", "temperature": "0.5", "seed": "7"}.items():
        page.fill(f"#{field}", value)
    page.select_option("#sampler", "left_to_right")
    for prompt in ("", "ab"):
        put(page, prompt, "generate")
        page.fill("#max-tokens", str(20 - len(prompt)))  # a token is a letter here
        part(panel(page, "generate"), "go").click()
        result = done(page, "generate")
        expect(part(result, "calls")).to_have_text("5 network calls")
        sampler = LeftToRight(steps=5, temperature=0.5)
        assert shown(result) == small.generate(1, 20, prompt, sampler=sampler, seed=7)[0]
    text = shown(result)
    part(result, "use").click()
    expect(page.locator("#fill-text")).to_have_value(text)
    expect(panel(page, "fill")).to_be_visible()


@pytest.mark.parametrize("tab", ["fill", "generate", "edit", "score"] if ALL else ["generate", "edit"])
def test_the_same_in_code(page: Page, tab: str, tmp_path: Path) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click(f"#tab-{tab}")
    page.fill("#steps", "4") if tab != "score" else None
    page.fill(f"#{tab}-text", 'It\'s "é" \\ [MASK:2]' if tab == "fill" else 'It\'s "é" \\')
    page.fill("#max-tokens", "9") if tab == "generate" else None
    page.fill("#edit-span", "t's") if tab == "edit" else None
    part(panel(page, tab), "go").click()
    if tab == "score":
        expect(panel(page, tab).locator(".scored")).to_be_visible()
        wanted = part(panel(page, tab), "bits").inner_text()
    elif tab == "edit":
        expect(page.locator(".edits li")).to_have_count(3)
        wanted = "\n".join(page.locator(".edits .canvas").all_text_contents())
    else:
        wanted = shown(done(page, tab))
    page.get_by_text("API", exact=True).click()
    code = {}
    for language in ("python", "curl"):
        part(page, language).click()
        part(page, "copy-code").click()
        expect(part(page, "copy-code")).to_have_text("Copied")
        code[language] = page.evaluate("navigator.clipboard.readText()")
    program = tmp_path / "request.py"
    program.write_text(code["python"], encoding="utf-8")
    run: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60, "encoding": "utf-8"}
    printed = subprocess.run([sys.executable, "-X", "utf8", str(program)], check=True, **run).stdout
    if tab == "score":
        assert f"{float(printed):.2f}" == wanted
    elif tab == "generate":
        assert "openai.OpenAI(base_url=" in code["python"]
        assert f'It\'s "é" \\{printed}' == f"{wanted}\n"  # the client is given what comes after the prompt
        expect(part(page, "streams")).to_contain_text("block or left_to_right")
    else:
        assert printed == f"{wanted}\n"
    if shutil.which("curl"):
        answer = subprocess.run(["bash", "-c", code["curl"]], check=True, **run).stdout
        assert '"error"' not in answer
        assert {"generate": '"choices"', "edit": '"edits"'}.get(tab, '"texts"') in answer


# --- constraint, score ---


def test_a_constraint_and_whether_it_can_fit(page: Page) -> None:
    page.fill("#fill-text", "ab [MASK:4] yz")
    page.select_option("#constraint-kind", "regex")
    fit = part(page, "fit")
    page.fill("#constraint", "[0-9]{5}")
    expect(fit).to_contain_text("This cannot fit")
    page.fill("#constraint", "[0-9]{4}")
    expect(fit).to_have_text("This can fit.")
    assert re.fullmatch(r"ab \d{4} yz", shown(fill(page, "ab [MASK:4] yz")))
    put(page, "ab [MASK:3] yz")  # the room changes
    expect(fit).to_contain_text("at least 4")
    page.select_option("#constraint-kind", "json_schema")
    page.fill("#constraint", '{"enum": ["x"')
    expect(fit).to_have_text("The schema is not JSON yet.")
    page.fill("#constraint", '{"enum": ["x"]}')
    expect(fit).to_have_text("This can fit.")
    assert shown(fill(page, "ab [MASK:3] yz")) == 'ab "x" yz'
    page.click("#tab-generate")
    page.fill("#max-tokens", "2")
    expect(fit).to_contain_text("This cannot fit")
    page.fill("#max-tokens", "12")
    expect(fit).to_have_text("This can fit.")
    part(panel(page, "generate"), "go").click()
    assert shown(done(page, "generate")) == '"x"'
    page.select_option("#constraint-kind", "regex")
    expect(page.locator("#constraint")).to_have_value("[0-9]{4}")  # each kind has its own


@pytest.mark.parametrize("tab", ["fill", "generate"])
def test_a_sampler_that_holds_no_constraint_is_named_before_anything_is_pressed(page: Page, tab: str) -> None:
    page.click(f"#tab-{tab}")
    page.fill(f"#{tab}-text", "ab [MASK:4]" if tab == "fill" else "")
    page.fill("#max-tokens", "8") if tab == "generate" else None
    page.select_option("#constraint-kind", "regex")
    page.fill("#constraint", "[0-9]{4}")
    fit = part(page, "fit")
    expect(fit).to_have_text("This can fit.")
    written: list[str] = []
    page.on("request", lambda request: written.append(request.url) if request.url.endswith("/trace") else None)
    page.select_option("#sampler", "refine")
    sentence = "The sampler “refine” can hold no constraint. Choose another, such as “ancestral”, or"
    expect(fit).to_contain_text(sentence)
    expect(fit).to_have_class("fit no")
    part(panel(page, tab), "go").click()
    expect(said(page, tab)).to_contain_text(sentence)
    assert written == []
    page.reload()  # the page remembers the sampler and asks again who holds one
    expect(fit).to_contain_text(sentence)
    page.select_option("#constraint-kind", "")
    part(panel(page, tab), "go").click()
    done(page, tab)  # without a constraint it writes
    page.select_option("#constraint-kind", "regex")
    expect(fit).to_contain_text(sentence)
    page.select_option("#sampler", "block")
    expect(fit).to_have_text("This can fit.")
    part(panel(page, tab), "go").click()
    assert re.fullmatch(r"ab \d{4}|\d{4}", shown(done(page, tab)))


def test_score(page: Page, small: Model) -> None:
    page.click("#tab-score")
    page.fill("#score-text", "the 😀 sat, twice")
    part(panel(page, "score"), "go").click()
    words = page.locator(".word")
    expect(words).to_have_text(["the", "😀", "sat,", "twice"])
    bound = small.score("the 😀 sat, twice", num_samples=16)
    expect(part(panel(page, "score"), "bits")).to_have_text(f"{bound.bits_per_byte:.2f}")
    assert page.locator(".scored .canvas").inner_text() == "the 😀 sat, twice"
    words.nth(1).hover()
    expect(part(panel(page, "score"), "word")).to_have_text(re.compile(r"“😀”: [\d.]+ bits in 4 tokens"))


def test_words_are_shaded_by_their_bits(page: Page) -> None:
    text = "b c d e , 5 A x 😀 the"
    page.click("#tab-score")
    page.fill("#score-text", text)
    listen_in(page)
    part(panel(page, "score"), "go").click()
    words = page.locator(".word")
    expect(words).to_have_text(text.split())
    tokens = heard(page)["texts"][0]["by_token"]
    bits = []
    for word in re.finditer(r"\S+", text):
        mine = [token for token in tokens if word.start() <= token["start"] and token["end"] <= word.end()]
        bits.append(sum(token["nats"] for token in mine) / math.log(2))
    wanted = [min(6, math.floor(each / 2 + 0.5)) for each in bits]  # two bits a shade, as dark as it gets at twelve
    assert len(set(wanted)) > 3
    assert levels(words, "hard") == wanted
    shades = dict(
        zip(wanted, words.evaluate_all("all => all.map(e => getComputedStyle(e).backgroundColor)"), strict=True)
    )
    assert len(set(shades.values())) == len(shades)
    for k, each in enumerate(bits):
        words.nth(k).hover()
        expect(part(panel(page, "score"), "word")).to_contain_text(f"”: {each:.1f} bits")


@pytest.mark.parametrize("tab", ["fill", "generate"])
def test_what_was_written_is_scored(page: Page, tab: str, small: Model) -> None:
    page.click("#tab-score")
    page.fill("#score-text", "typed before")
    page.click(f"#tab-{tab}")
    page.fill(f"#{tab}-text", "ab[MASK:4]yz" if tab == "fill" else "ab")
    page.fill("#max-tokens", "8") if tab == "generate" else None
    part(panel(page, tab), "go").click()
    result = done(page, tab)
    text = shown(result)
    result.get_by_role("button", name="Score it").click()
    expect(panel(page, "score")).to_be_visible()
    expect(page.locator("#score-text")).to_have_value(text)
    expect(part(panel(page, "score"), "bits")).to_have_text(f"{small.score(text, num_samples=16).bits_per_byte:.2f}")
    assert page.locator(".scored .canvas").inner_text() == text
    part(panel(page, "score"), "undo").click()
    expect(page.locator("#score-text")).to_have_value("typed before")
