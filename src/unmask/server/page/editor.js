// A text field and what lies over it: the same text, unseen, that makes the field as high as its text and holds the gaps
// as chips. What is typed stays plain text, spelled as the server reads it.

import { Card } from "./card.js";
import { fresh, gapsIn, label, settled, spelling } from "./gaps.js";
import { make } from "./make.js";

export class Editor {
  /** gaps: whether [MASK:5] and ____ are gaps here. marked(): [from, to] of the words to underline, or null.
      before(): a gap is about to be changed by its card. */
  constructor(field, { gaps = false, marked = () => null, before = () => {} } = {}) {
    Object.assign(this, { field, gaps, marked, before });
    this.over = field.parentElement.querySelector(".over");
    field.addEventListener("input", () => this.#settle(field.selectionEnd));
    field.addEventListener("blur", () => this.#settle());
    this.draw();
    if (!gaps) return;
    this.card = new Card("Length of this gap");
    this.caret = 0;
    field.addEventListener("keydown", (event) => this.#whole(event));
    document.addEventListener("selectionchange", () => document.activeElement === field && this.#aside());
    this.over.addEventListener("click", (event) => this.#open(event.target.closest(".chip")));
    this.over.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      this.#open(event.target.closest(".chip"), true);
    });
  }

  get value() {
    return this.field.value;
  }

  /** Runs of underscores become chips when nothing more is typed at them. */
  #settle(caret = -1) {
    if (this.gaps) {
      const next = settled(this.value, caret);
      if (next.text !== this.value) this.#replace(next.text, caret < 0 ? this.field.selectionEnd : next.caret);
    }
    if (caret >= 0) this.draw(); // else nothing was typed, and a chip that is being clicked must stay
  }

  /** Put in a way that the browser's own undo can take back, where it may. */
  #replace(text, caret) {
    const { field } = this;
    let from = 0;
    while (from < text.length && text[from] === field.value[from]) from += 1;
    let same = 0;
    while (same < Math.min(text.length, field.value.length) - from && text.at(-1 - same) === field.value.at(-1 - same)) same += 1;
    const piece = text.slice(from, text.length - same);
    field.setSelectionRange(from, field.value.length - same);
    if (document.activeElement !== field || !document.execCommand("insertText", false, piece)) {
      field.setRangeText(piece, from, field.value.length - same, "end");
      field.dispatchEvent(new Event("input"));
    }
    field.setSelectionRange(caret, caret);
  }

  draw() {
    const { value } = this;
    const nodes = [];
    let end = 0;
    const plain = (to) => end < to && nodes.push(make("span", { "aria-hidden": "true" }, value.slice(end, to)));
    const gaps = this.gaps ? gapsIn(value) : [];
    gaps.forEach((gap, k) => {
      plain(gap.from);
      const name = label(gap);
      const about = { class: "chip", role: "button", tabindex: "0", "aria-haspopup": "dialog", "data-gap": k, "aria-label": `Gap ${k + 1}: ${name}. Change its length` };
      const spelled = make("span", { "aria-hidden": "true" }, value.slice(gap.from, gap.to));
      nodes.push(make("span", about, spelled, make("span", { class: "chip-label", "aria-hidden": "true" }, gap.loose ? "" : name)));
      end = gap.to;
    });
    const mark = this.marked();
    if (mark !== null) {
      plain(mark[0]);
      nodes.push(make("mark", { "aria-hidden": "true" }, value.slice(...mark)));
      [, end] = mark;
    }
    nodes.push(make("span", { "aria-hidden": "true" }, `${value.slice(end)}\u200b`));
    this.over.replaceChildren(...nodes);
  }

  // --- a gap is one thing: the caret stands before or behind it, and what deletes a part of it deletes it whole ---

  #at(caret) {
    return gapsIn(this.value).find(({ loose, from, to }) => !loose && from < caret && caret < to);
  }

  #aside() {
    const { field } = this;
    const { selectionStart: start, selectionEnd: end } = field;
    const gap = start === end ? this.#at(end) : undefined;
    if (gap) field.setSelectionRange(...Array(2).fill(this.caret <= gap.from ? gap.to : gap.from));
    this.caret = field.selectionEnd;
  }

  #whole(event) {
    const { selectionStart: start, selectionEnd: end } = this.field;
    if (start !== end || !["Backspace", "Delete"].includes(event.key)) return;
    const edge = event.key === "Backspace" ? "to" : "from";
    const gap = gapsIn(this.value).find((one) => !one.loose && one[edge] === end);
    if (gap) this.field.setSelectionRange(gap.from, gap.to);
  }

  // --- its length ---

  #open(chip, focus = false) {
    if (!chip) return;
    const at = Number(chip.dataset.gap);
    const gap = gapsIn(this.value)[at];
    const fits = gap.loose || gap.least < gap.most;
    const others = this.value.slice(0, gap.from) + this.value.slice(gap.to);
    const room = fresh(others);
    this.untouched = true;
    const limits = fits && !gap.loose ? gap : { least: 1, most: Math.max(room.most, 2) };
    const number = (name, value) => make("input", { type: "number", min: "1", max: "4096", value, inputmode: "numeric", "aria-label": name });
    const [least, most, exact] = [number("Least tokens", limits.least), number("Most tokens", limits.most), number("Tokens", fits ? 4 : gap.least)];
    const kind = (checked) => make("input", { type: "radio", name: "gap-kind", checked });
    const [any, one] = [kind(fits), kind(!fits)];
    const change = () => {
      const [a, b] = one.checked ? [exact, exact] : [least, most];
      if (![a, b].every((field) => field.checkValidity() && Number.isSafeInteger(field.valueAsNumber))) return;
      this.#put(at, { least: Math.min(a.valueAsNumber, b.valueAsNumber), most: Math.max(a.valueAsNumber, b.valueAsNumber) });
    };
    for (const field of [least, most]) field.addEventListener("input", () => (any.checked = true));
    exact.addEventListener("input", () => (one.checked = true));
    for (const field of [least, most, exact, any, one]) field.addEventListener("input", change);
    const remove = make("button", { type: "button", class: "small", onclick: () => this.#put(at, null) }, "Remove the gap");
    const done = make("button", { type: "button", class: "small", onclick: () => this.#close(at) }, "Done");
    const nodes = [
      make("p", { class: "about-head" }, make("strong", {}, "Length in tokens")),
      make("div", { class: "gap-row" }, make("label", {}, any, " as long as fits"), make("span", {}, least, " to ", most)),
      make("div", { class: "gap-row" }, make("label", {}, one, " exactly"), make("span", {}, exact)),
      make("div", { class: "about-actions" }, done, remove),
    ];
    this.card.open(chip, nodes, { pinned: true, focus });
  }

  #close(at) {
    this.card.close();
    (this.over.querySelector(`[data-gap="${at}"]`) ?? this.field).focus();
  }

  #put(at, gap) {
    if (this.untouched) this.before(); // one thing to undo, however often the number is changed
    this.untouched = false;
    const { field, value } = this;
    const { from, to } = gapsIn(value)[at];
    const spaced = !gap && value[from - 1] === " " && (value[to] ?? " ") === " "; // one of two spaces goes as well
    field.value = value.slice(0, spaced ? from - 1 : from) + (gap ? spelling(gap) : "") + value.slice(to);
    field.dispatchEvent(new Event("input"));
    const chip = this.over.querySelector(`[data-gap="${at}"]`);
    if (!gap) {
      this.card.close();
      field.focus();
    } else if (chip) {
      this.card.element = chip; // the one that was clicked has been drawn anew
      chip.setAttribute("aria-expanded", "true");
    }
  }
}
