// Cells as text on the page.

import { masked, spelled, sureness } from "./cells.js";
import { make, percent, roving, visible } from "./make.js";

/** Draws rows into an element and keeps what did not change, so that only new tokens move.
    on.look(place, element) when a cell is pointed at or focused, on.open(...) when it is clicked, on.leave(). */
export class Canvas {
  constructor(root, on) {
    this.root = root;
    this.on = on;
    this.drawn = [];
    roving(root, ".cell", (cell) => on.open(place(cell), cell, true));
    for (const [name, call] of [["pointerover", "look"], ["focusin", "look"], ["click", "open"]]) {
      root.addEventListener(name, (event) => {
        const element = event.target.closest?.(".cell");
        if (element && !(name === "pointerover" && event.pointerType === "touch")) on[call](place(element), element);
      });
    }
    root.addEventListener("pointerleave", () => on.leave());
  }

  draw(row) {
    if (this.drawn.length > row.length) {
      for (const { parts } of this.drawn.splice(row.length)) parts.forEach((part) => part.remove());
    }
    const spellings = spelled(row);
    row.forEach((cell, k) => {
      const before = this.drawn[k];
      if (before?.cell === cell && before.spelling === spellings[k]) return;
      const focused = before && before.parts.includes(document.activeElement);
      const parts = pieces(cell, k, spellings[k]);
      if (before) {
        before.parts[0].before(...parts);
        before.parts.forEach((part) => part.remove());
      } else this.root.append(...parts);
      this.drawn[k] = { cell, parts, spelling: spellings[k] };
      if (focused) parts.find((part) => part.tabIndex !== undefined)?.focus();
    });
    if (!this.root.querySelector('[tabindex="0"]')) this.root.querySelector(".cell")?.setAttribute("tabindex", "0");
  }
}

const place = (element) => Number(element.dataset.at);

/** The nodes of a cell: space before it, the cell itself, a line's end behind it. */
function pieces(cell, at, spelling) {
  const about = { "data-at": at, role: "button", tabindex: "-1", "aria-haspopup": "dialog" };
  if (masked(cell)) {
    const label = cell.was ? `masked by hand, was ${visible(cell.was.text)}` : "masked";
    // The space is part of the mask: which token comes, and whether it brings one, is not known yet.
    return [text(" "), make("span", { ...about, class: "cell mask", "aria-label": label }, "\u2003\u2002")];
  }
  if (spelling === "") return [text("")]; // shown with the bytes before it
  const [, before, word, behind] = spelling.match(/^(\s*)(.*?)(\s*)$/s);
  const shown = word === "" ? (before.includes("\n") ? "↵" : "\u00a0") : word;
  const kinds = ["cell"];
  let label = visible(spelling);
  if (cell.given) kinds.push("given");
  else {
    kinds.push("written", `sure-${sureness(cell.prob)}`);
    label += `, ${percent(cell.prob)}`;
  }
  if (cell.locked) {
    kinds.push("locked");
    label += ", locked";
  }
  if (word === "") kinds.push("blank");
  else if (before === "") kinds.push("glued");
  const element = make("span", { ...about, class: kinds.join(" "), "aria-label": label }, shown);
  return word === "" ? [element, text(before)] : [text(before), element, text(behind)];
}

const text = (content) => document.createTextNode(content);
