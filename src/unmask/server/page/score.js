// A text's bound, and which words it comes from.

import { words } from "./cells.js";
import { find, make, roving } from "./make.js";

const HARD = 12; // bits at which a word is as dark as it gets

export class Score {
  constructor(panel, server) {
    this.server = server;
    this.root = panel.querySelector(".scored");
    this.part = (name) => find(name, this.root);
    const look = (event) => {
      const word = event.target.closest?.("[data-bits]");
      if (word) this.part("word").textContent = word.dataset.bits;
    };
    roving(this.part("words"), ".word", (word) => look({ target: word }));
    for (const kind of ["pointerover", "focusin", "click"]) this.part("words").addEventListener(kind, look);
  }

  get running() {
    return this.stop !== undefined;
  }

  async measure(body) {
    this.stop = new AbortController();
    try {
      this.#show(body.texts[0], await this.server.ask("/score", body, { signal: this.stop.signal }));
    } finally {
      this.stop = undefined;
    }
  }

  #show(text, { texts, calls }) {
    const [bound] = texts;
    const number = (value) => (value === null || value === undefined ? "–" : value.toFixed(2));
    this.part("bits").textContent = number(bound.bits_per_byte);
    this.part("interval").textContent = bound.bits_per_byte_ci95?.map(number).join(" – ") ?? "–";
    this.part("all").textContent = bound.nats === null ? "–" : (bound.nats / Math.LN2).toFixed(0);
    this.part("calls").textContent = calls;
    const nodes = words(text, bound.by_token).flatMap((word) => {
      const [, before, shown, behind] = word.text.match(/^(\s*)(.*?)(\s*)$/s);
      if (shown === "") return [before];
      const level = Math.max(0, Math.min(6, Math.round((6 * word.bits) / HARD)));
      const pieces = word.tokens.length === 1 ? "" : ` in ${word.tokens.length} tokens`;
      const said = `“${shown}”: ${word.bits.toFixed(1)} bits${pieces}`;
      const about = { class: `word hard-${level}`, tabindex: "-1", role: "note", "aria-label": said, "data-bits": said };
      return [before, make("span", about, shown), behind];
    });
    this.part("words").replaceChildren(...nodes);
    this.part("words").querySelector(".word")?.setAttribute("tabindex", "0");
    this.part("word").textContent = "Point at a word to see its bits.";
    this.root.hidden = false;
  }
}
