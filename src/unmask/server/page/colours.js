// What the colours of written tokens mean: how sure the network was, when they were opened, or nothing.

import { keep, kept } from "./store.js";

const KINDS = ["sure", "late", "none"];
let number = 0;

function choose(kind) {
  document.querySelector("main").dataset.colours = kind;
  for (const radio of document.querySelectorAll(".colours input")) radio.checked = radio.value === kind;
}

/** The switch of one result; all of them say the same. */
export function colours(root) {
  number += 1;
  for (const radio of root.querySelectorAll(".colours input")) {
    radio.name = `colours-${number}`;
    radio.addEventListener("change", () => {
      keep("colours", radio.value);
      choose(radio.value);
    });
  }
  const before = kept("colours", "sure");
  choose(KINDS.includes(before) ? before : "sure");
}
