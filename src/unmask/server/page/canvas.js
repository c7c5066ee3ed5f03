// Cells as text on the page.

import { lateness, masked, spelled, sureness } from "./cells.js";
import { make, percent, roving, visible } from "./make.js";

/** Draws rows into an element and keeps what did not change, so that only new tokens move.
    on.look(place, element) when a cell is pointed at or focused, on.open(...) when it is clicked, on.leave(). */
export class Canvas {
  constructor(root, on) {
    this.root = root;
    this.on = on;
    this.drawn = [];
    roving(root, ".cell", (cell) => on.open(place(cell), cell, true));
    for (const [name, call] of [["focusin", "look"], ["click", "open"]]) {
      root.addEventListener(name, (event) => {
        const element = event.target.closest?.(".cell");
        if (element) on[call](place(element), element);
      });
    }
    // Only a pointer that moves points at something: text may also come to lie under one that rests.
    root.addEventListener("pointermove", (event) => {
      const element = event.target.closest?.(".cell");
      if (element && element !== this.looked && event.pointerType !== "touch") on.look(place(element), element);
      this.looked = element;
    });
    root.addEventListener("pointerleave", () => {
      this.looked = null;
      on.leave();
    });
  }

  /** steps: in how many the row is written, against which a token is early or late. */
  draw(row, steps) {
    if (this.drawn.length > row.length) {
      for (const { parts } of this.drawn.splice(row.length)) parts.forEach((part) => part.remove());
    }
    const spellings = spelled(row);
    row.forEach((cell, k) => {
      const before = this.drawn[k];
      if (before?.cell === cell && before.spelling === spellings[k]) return;
      const focused = before && before.parts.includes(document.activeElement);
      const parts = pieces(cell, k, spellings[k], steps);
      if (before) {
        before.parts[0].before(...parts);
        before.parts.forEach((part) => part.remove());
      } else this.root.append(...parts);
      this.drawn[k] = { cell, parts, spelling: spellings[k] };
      if (focused) parts.find((part) => part.tabIndex !== undefined)?.focus();
    });
    if (this.steps !== steps) this.#shade(steps);
    if (!this.root.querySelector('[tabindex="0"]')) this.root.querySelector(".cell")?.setAttribute("tabindex", "0");
  }

  /** It took fewer steps than it might have: who was late among them is known now. */
  #shade(steps) {
    this.steps = steps;
    for (const { cell, parts } of this.drawn) {
      if (cell.step === undefined || cell.given) continue;
      const element = parts.find((part) => part.classList?.contains("written"));
      element?.classList.remove(...[...element.classList].filter((name) => name.startsWith("late-")));
      element?.classList.add(`late-${lateness(cell.step, steps)}`);
    }
  }
}

const place = (element) => Number(element.dataset.at);

/** The nodes of a cell: space before it, the cell itself, a line's end behind it. */
function pieces(cell, at, spelling, steps) {
  const about = { "data-at": at, role: "button", tabindex: "-1", "aria-haspopup": "dialog" };
  if (masked(cell)) {
    const label = cell.was ? `masked by hand, was ${visible(cell.was.text)}` : "masked";
    // The space is part of the mask: which token comes, and whether it brings one, is not known yet.
    return [text(" "), make("span", { ...about, class: "cell mask", "aria-label": label }, "\u2003\u2002")];
  }
  if (spelling === "") return [text("")]; // shown with the bytes before it
  const [, before, word, behind] = spelling.match(/^(\s*)(.*?)(\s*)$/s);
  const ends = word === "" && before.includes("\n"); // a line's end has a sign, so that it can be pointed at
  const shown = ends ? "↵" : word || before;
  const kinds = ["cell"];
  let label = visible(spelling);
  if (cell.given) kinds.push("given");
  else {
    kinds.push("written", `sure-${sureness(cell.prob)}`, `late-${lateness(cell.step, steps)}`);
    label += `, ${percent(cell.prob)}`;
  }
  if (cell.locked) {
    kinds.push("locked");
    label += ", locked";
  }
  if (word === "") kinds.push("blank");
  else if (before === "") kinds.push("glued");
  const element = make("span", { ...about, class: kinds.join(" "), "aria-label": label }, shown);
  return ends ? [element, text(before)] : word === "" ? [element] : [text(before), element, text(behind)];
}

const text = (content) => document.createTextNode(content);
