"""What somebody who has never seen the page meets on it: examples, seeds, chips, errors where they are looked for."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Any

import pytest
from browsing import act, done, fill, heard, listen_in, panel, part, pin, put, said, shown, tab
from playwright.sync_api import BrowserContext, Page, expect
from small_server import Running

from unmask.model import Model
from unmask.samplers.ancestral import Ancestral

# --- the first screen ---


def test_the_first_screen_says_what_this_is(phone: Page) -> None:
    expect(part(phone, "lead")).to_have_text(re.compile(r"^A language model that writes in any order: [^.]+\.$"))
    for shown_first in ("Fill a gap", "Write a story", "Let it choose"):
        expect(phone.get_by_role("button", name=shown_first)).to_be_in_viewport(ratio=1)
    expect(part(panel(phone, "fill"), "go")).to_be_in_viewport(ratio=1)
    # Settings are folded on a phone, and are called what the field calls them.
    expect(phone.locator("aside summary")).to_have_text(["Settings", re.compile("^Constraint"), "API"])
    expect(phone.locator("#steps")).to_be_hidden()
    phone.get_by_text("Settings", exact=True).click()
    expect(phone.get_by_label("Sampler")).to_be_visible()


def test_an_example_is_one_click(page: Page) -> None:
    page.fill("#fill-text", "my own words")
    go = {tab: part(panel(page, tab), "go") for tab in ("fill", "generate")}

    def asked(name: str, tab: str) -> Any:
        with page.expect_request("**/trace") as sent:
            page.get_by_role("button", name=name).click()
        go[tab].click()  # to stop it: the texts are long for so small a model
        expect(go[tab]).not_to_have_text("Stop")
        return sent.value.post_data_json

    choice = asked("Let it choose", "fill")
    assert choice["choices"] == ["Yes", "No"]
    assert '"[MASK:1..3]," said Mom.' in choice["text"]
    story = asked("Write a story", "generate")
    assert story["prompt"] == "One day, a little girl named Lily found a"
    gap = asked("Fill a gap", "fill")
    assert gap["text"].startswith("The little bear was sad because [MASK:1..8].")
    assert "choices" not in story | gap  # the constraint was the other example's
    undo = part(panel(page, "fill"), "undo")
    while undo.is_enabled():
        undo.click()
    expect(page.locator("#fill-text")).to_have_value("my own words")


# --- seeds ---


def test_a_new_seed_each_time_unless_it_is_pinned(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.fill("#steps", "2")
    seeds, texts = [], []
    for _ in range(2):
        texts.append(shown(fill(page, "ab[MASK:12]yz")))
        seeds.append(page.input_value("#seed"))
        expect(part(panel(page, "fill"), "seed")).to_have_text(f"seed {seeds[-1]}")
    assert len(set(seeds)) == len(set(texts)) == 2
    page.check("#pin")
    assert shown(fill(page, "ab[MASK:12]yz")) == texts[1]
    assert page.input_value("#seed") == seeds[1]
    part(panel(page, "fill"), "seed").click()
    assert page.evaluate("navigator.clipboard.readText()") == seeds[1]
    page.uncheck("#pin")
    page.fill("#seed", seeds[0])  # whoever types a seed wants that one
    expect(page.locator("#pin")).to_be_checked()
    assert shown(fill(page, "ab[MASK:12]yz")) == texts[0]


# --- where it is written, and what becomes of it ---


def test_a_text_is_filled_in_place(page: Page) -> None:
    paper = panel(page, "fill").locator(".paper")
    before = paper.bounding_box()
    assert before is not None
    put(page, "ab [MASK:4] yz")
    page.locator("#fill-text").focus()
    page.mouse.move(before["x"] + 25, before["y"] + 34)  # where the first word is
    page.keyboard.press("Control+Enter")
    result = done(page)
    expect(paper).to_be_hidden()
    expect(page.locator(".about:visible")).to_have_count(0)  # text that comes under a pointer is not pointed at
    page.mouse.move(before["x"] + 26, before["y"] + 34)
    expect(page.get_by_role("dialog", name="About this token")).to_be_visible()
    page.mouse.move(2, 2)
    after = result.locator(".card").bounding_box()
    assert after is not None
    assert (after["x"], after["y"], after["width"]) == pytest.approx((before["x"], before["y"], before["width"]), abs=1)
    part(result, "edit-text").click()
    expect(page.locator("#fill-text")).to_be_focused()
    expect(page.locator("#fill-text")).to_have_value("ab [MASK:4] yz")


def test_what_no_longer_fits_text_or_settings_is_dimmed(page: Page) -> None:
    result = fill(page, "ab [MASK:4] yz")
    cell = result.locator(".cell.written").first
    colour = "e => getComputedStyle(e).backgroundColor"
    bright = cell.evaluate(colour)
    page.fill("#temperature", "0.4")
    expect(result).to_have_class(re.compile("stale"))
    expect(part(result, "stale")).to_be_visible()
    assert cell.evaluate(colour) != bright
    page.fill("#temperature", "0.7")
    expect(result).not_to_have_class(re.compile("stale"))
    assert cell.evaluate(colour) == bright
    part(result, "edit-text").click()
    expect(result).not_to_have_class(re.compile("stale"))
    page.fill("#fill-text", "ab [MASK:4] y")
    expect(result).to_have_class(re.compile("stale"))
    done(fill(page, "ab [MASK:4] y").page)
    expect(result).not_to_have_class(re.compile("stale"))


def test_copy(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    pin(page)
    result = fill(page, "ab[MASK:4]yz")
    part(result, "copy").click()
    expect(part(result, "copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == shown(result)
    act(page, result.locator('[data-at="3"]'), "Mask again")
    text = shown(result).replace("_", "[MASK:1]")
    part(result, "copy").click()
    expect(part(result, "copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == text


def test_colours_by_step_by_confidence_or_none(page: Page) -> None:
    pin(page)
    page.fill("#steps", "6")
    result = fill(page, "ab[MASK:12]yz")
    cells = result.locator(".cell.written")
    look = "all => all.map(e => getComputedStyle(e).backgroundColor)"
    steps = int(part(result, "replay").get_attribute("max") or 0)
    result.get_by_label("step", exact=True).check()
    legend = result.locator('[data-legend="late"] i')
    expect(legend.first).to_be_visible()
    expect(result.locator('[data-legend="sure"]')).to_be_hidden()
    written = []
    for k in range(cells.count()):
        cells.nth(k).hover()
        found = re.search(r"written in step (\d+)", page.locator(".about").inner_text())
        assert found
        written.append(int(found[1]))
    assert len(set(written)) > 2
    shades = legend.evaluate_all(look)
    assert len(set(shades)) == 6
    assert cells.evaluate_all(look) == [shades[6 * (step - 1) // steps] for step in written]
    page.mouse.move(2, 2)
    result.get_by_label("off", exact=True).check()
    assert set(cells.evaluate_all(look)) == {"rgba(0, 0, 0, 0)"}
    page.reload()
    expect(page.locator("main")).to_have_attribute("data-colours", "none")


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_the_first_play_is_one_the_eye_can_follow(context: BrowserContext, server: Running, motion: Any) -> None:
    """All steps come at once; they are shown one after another, save to whoever wants less motion."""
    body = {"text": "ab[MASK:6]yz", "steps": 6, "runners_up": 5}
    head = {"content-type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{server.url}/trace", json.dumps(body).encode(), head)
    ) as answer:
        events = answer.read().decode()
    with tab(context, server.url) as page:
        page.emulate_media(reduced_motion=motion)
        page.goto(server.url)
        expect(part(page, "model")).to_contain_text("small")
        page.route("**/trace", lambda route: route.fulfill(content_type="text/event-stream", body=events))
        page.evaluate("""() => {
            window.seen = new Set();
            const look = () => {
                const canvas = document.querySelector('#panel-fill .canvas');
                if (canvas) window.seen.add(canvas.querySelectorAll('.mask').length);
                requestAnimationFrame(look);
            };
            look();
        }""")
        page.fill("#steps", "6")
        fill(page, "ab[MASK:6]yz")
        page.wait_for_function("window.seen.has(0)")  # a text may be written before the next frame
        seen = page.evaluate("[...window.seen]")
    steps = events.count("event: step")
    assert seen[-1] == 0
    assert len(seen) == (steps + 1 if motion == "no-preference" else 1)


# --- errors ---


def test_errors_stand_at_the_button_that_was_pressed(phone: Page) -> None:
    result = fill(phone, "ab[MASK:8]yz")
    act(phone, result.locator('[data-at="3"]'), "Mask again")
    phone.get_by_text("Settings", exact=True).click()
    phone.fill("#steps", "2.5")
    phone.locator("aside").get_by_text("Settings", exact=True).click()
    for name in ("masks", "go"):
        button = part(result, name)
        button.click()
        notice = button.locator("xpath=ancestor::div[contains(@class, 'actions')]/following-sibling::p[1]")
        expect(notice).to_have_text("Steps must be a whole number.")
        expect(notice).to_have_attribute("role", "status")
        expect(notice).to_be_in_viewport(ratio=1)
        expect(button).to_be_in_viewport(ratio=1)
        expect(button).to_be_focused()
        expect(phone.locator(".notice:not(:empty)")).to_have_count(1)  # and nowhere else
    expect(phone.locator("#steps")).to_have_attribute("aria-invalid", "true")


# --- gaps as chips ---


def test_typed_underscores_become_a_chip(page: Page) -> None:
    field = page.locator("#fill-text")
    field.fill("")
    field.press_sequentially("ab ____")
    expect(field).to_have_value("ab ____")  # it may still grow
    field.press_sequentially(" yz")
    expect(field).to_have_value("ab [MASK:1..8] yz")
    chip = page.get_by_role("button", name="Gap 1: as long as fits")
    expect(chip).to_be_visible()
    # It is one thing: the caret goes past it, and Backspace takes all of it.
    for _ in range(4):
        page.keyboard.press("ArrowLeft")
    expect(field).to_have_js_property("selectionStart", 3)
    page.keyboard.press("ArrowRight")
    expect(field).to_have_js_property("selectionStart", 14)
    page.keyboard.press("Backspace")
    expect(field).to_have_value("ab  yz")
    expect(page.locator(".chip")).to_have_count(0)


def test_a_gap_s_length_is_set_on_its_chip(page: Page, small: Model) -> None:
    pin(page)
    page.fill("#steps", "4")
    put(page, "ab[MASK:1..8]yz")
    chip = page.locator(".chip")
    # It covers what it stands for, so that gaps have one look.
    expect(chip.locator(".chip-label")).to_have_text("as long as fits")
    chip.focus()
    page.keyboard.press("Enter")
    card = page.get_by_role("dialog", name="Length of this gap")
    expect(card.get_by_label("as long as fits")).to_be_focused()
    card.get_by_label("Most tokens").fill("3")
    expect(page.locator("#fill-text")).to_have_value("ab[MASK:1..3]yz")
    card.get_by_label("Tokens", exact=True).fill("5")
    expect(page.locator("#fill-text")).to_have_value("ab[MASK:5]yz")
    card.get_by_role("button", name="Done").click()
    expect(chip).to_be_focused()
    expect(chip.locator(".chip-label")).to_have_text("5 tokens")
    part(panel(page, "fill"), "go").click()
    [wanted] = small.fill("ab[MASK:5]yz", sampler=Ancestral(steps=4, temperature=0.7), seed=1)
    assert shown(done(page)) == wanted
    part(panel(page, "fill"), "edit-text").click()
    chip.click()
    card.get_by_role("button", name="Remove the gap").click()
    expect(page.locator("#fill-text")).to_have_value("abyz")
    part(panel(page, "fill"), "undo").click()
    expect(page.locator("#fill-text")).to_have_value("ab[MASK:5]yz")


# --- edit, choices, words ---


def test_words_are_written_anew(page: Page) -> None:
    page.fill("#steps", "2")
    page.click("#tab-edit")
    page.fill("#edit-text", "a cat and a cat")
    page.locator("#edit-text").evaluate("e => { e.focus(); e.setSelectionRange(12, 15); }")
    expect(page.locator("#edit-span")).to_have_value("cat")
    expect(page.locator("#panel-edit .over mark")).to_have_text("cat")
    listen_in(page)
    with page.expect_request("**/edit") as sent:
        part(panel(page, "edit"), "go").click()
    wanted = {"text": "a cat and a cat", "replace": "cat", "occurrence": 2, "with_length": [1, 4], "n": 3, "steps": 2}
    assert wanted.items() <= sent.value.post_data_json.items()
    edits = page.locator(".edits li")
    expect(edits).to_have_count(3)
    told = heard(page)["edits"]
    assert edits.locator(".canvas").all_text_contents() == [one["text"] for one in told]
    assert edits.locator("mark").all_text_contents() == [one["replacement"] for one in told]
    edits.nth(1).get_by_role("button", name="Take this one").click()
    expect(page.locator("#edit-text")).to_have_value(told[1]["text"])
    part(panel(page, "edit"), "undo").click()
    expect(page.locator("#edit-text")).to_have_value("a cat and a cat")
    page.fill("#edit-span", "dog")
    part(panel(page, "edit"), "go").click()
    expect(said(page, "edit")).to_contain_text("Select the words")


def test_choices_and_words_are_offered(page: Page) -> None:
    page.fill("#steps", "4")
    fit = part(page, "fit")
    page.select_option("#constraint-kind", "choices")
    page.get_by_label("The choices, one a line").fill("one of two\nthe other")
    assert shown(fill(page, "ab [MASK:9..10] yz")) in ("ab one of two yz", "ab the other yz")
    page.select_option("#constraint-kind", "allow")
    page.get_by_label("The words that may be used, one a line").fill("x\ny")
    assert set(re.findall(r"\w+", shown(fill(page, "ab [MASK:6] yz")))) <= {"ab", "yz", "x", "y", "X", "Y"}
    page.select_option("#constraint-kind", "forbid")
    page.get_by_label("The words that may not be used, one a line").fill("no, never")
    put(page, "ab [MASK:2] yz")
    expect(fit).to_have_text("This can fit.")
    page.get_by_text("API", exact=True).click()
    asked = '"constraints":[{"name":"words","forbid":["no","never"],"ignore_case":true}]'
    expect(part(page, "request")).to_contain_text(asked)
