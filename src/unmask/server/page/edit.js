// Words of a text written anew, in several lengths: the best of them, to choose from.

import { copy, find, make } from "./make.js";

const MORE = 2; // tokens a replacement may have beyond the words it replaces

export class Edit {
  /** use(text): one of the edits is taken. */
  constructor(panel, server, { field, use, changed }) {
    Object.assign(this, { panel, server, field, use });
    this.span = document.getElementById("edit-span");
    this.root = panel.querySelector(".edits");
    this.occurrence = 1;
    // Whoever selects words in the text means these.
    document.addEventListener("selectionchange", () => {
      const { selectionStart: start, selectionEnd: end, value } = field;
      const words = value.slice(start, end);
      if (document.activeElement !== field || !words.trim()) return;
      const from = start + words.length - words.trimStart().length;
      this.span.value = words.trim();
      this.occurrence = places(value, this.span.value).indexOf(from) + 1;
      changed();
    });
    this.span.addEventListener("input", () => {
      this.occurrence = 1;
      changed();
    });
    changed();
  }

  get running() {
    return this.stop !== undefined;
  }

  /** Where the words stand, as [from, to]; null where they do not. */
  get marked() {
    const at = this.span.value ? (places(this.field.value, this.span.value)[this.occurrence - 1] ?? -1) : -1;
    return at < 0 ? null : [at, at + this.span.value.length];
  }

  /** As fields of a request. */
  fields() {
    const [text, replace] = [this.field.value, this.span.value];
    const more = places(text, replace).length > 1 ? { occurrence: this.occurrence } : {};
    return { text, replace, ...more, with_length: [1, Math.max(4, replace.trim().split(/\s+/).length + MORE)], n: 3 };
  }

  async write(body) {
    this.stop = new AbortController();
    this.panel.classList.add("running");
    try {
      this.#show(body, await this.server.ask("/edit", body, { signal: this.stop.signal }));
    } finally {
      this.stop = undefined;
      this.panel.classList.remove("running");
    }
  }

  #show({ text }, { edits, calls, seconds }) {
    const [from] = this.marked ?? [0];
    const items = edits.map((edit, k) => {
      const end = from + edit.replacement.length;
      const shown = make("p", { class: "canvas" }, text.slice(0, from), make("mark", {}, edit.replacement), edit.text.slice(end));
      const bits = edit.nats === null ? "" : `bound ${(edit.nats / Math.LN2).toFixed(0)} bits`;
      const take = make("button", { type: "button", class: "small", onclick: () => this.use(edit.text) }, "Take this one");
      const hold = make("button", { type: "button", class: "small", onclick: ({ target }) => copy(edit.text, target) }, "Copy");
      return make("li", { class: `card${k ? "" : " best"}` }, shown, make("div", { class: "card-foot" }, make("span", { class: "bound" }, bits), make("span", { class: "pair" }, take, hold)));
    });
    find("edits", this.panel).replaceChildren(...items);
    find("edit-cost", this.panel).textContent = `${seconds.toFixed(1)} s · ${calls} network calls · the best first, by the bound of the whole text`;
    this.root.hidden = false;
  }
}

function places(text, words) {
  const found = [];
  for (let at = words ? text.indexOf(words) : -1; at >= 0; at = text.indexOf(words, at + 1)) found.push(at);
  return found;
}
