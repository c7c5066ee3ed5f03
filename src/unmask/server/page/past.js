// Undo and redo of a tab: what was typed where something else took its place, and what was written.

import { find } from "./make.js";
import { keep, kept } from "./store.js";

const LETTERS = 200_000; // of former texts that a browser is asked to keep for each tab

export class Past {
  /** tab: its name. text(): what is typed. put(text): the same again. writing: what it has written, or undefined. */
  constructor(tab, panel, { text, put, writing, after }) {
    Object.assign(this, { tab, text, put, writing, after, futures: [] });
    const texts = kept(`${tab}-past`, []);
    this.pasts = Array.isArray(texts) ? texts.filter((one) => typeof one === "string").map((one) => ({ text: one })) : [];
    [this.undo, this.redo] = ["undo", "redo"].map((name) => find(name, panel));
    this.undo.addEventListener("click", () => this.#turn(this.pasts, this.futures));
    this.redo.addEventListener("click", () => this.#turn(this.futures, this.pasts));
    this.#count();
  }

  /** Called before something happens. typed: it changes the text field; else what is typed there is left alone.
      Comes back: the moment that undo will return to. */
  remember({ typed = false } = {}) {
    const now = this.#moment(typed);
    this.pasts.push(...this.futures.filter((then) => then.text !== null), now); // undone, but typed: it is not thrown away
    this.futures.length = 0;
    this.#count();
    return now;
  }

  forget(then) {
    const at = this.pasts.indexOf(then);
    if (at >= 0) this.pasts.splice(at, 1);
    this.#count();
  }

  /** Half a text is nothing to return to: what is done while one is written leaves it alone. */
  #moment(typed) {
    const writing = this.writing();
    const found = { text: typed ? this.text() : null };
    return writing === undefined || writing.running ? found : { ...found, state: writing.state, drafting: writing.drafting };
  }

  /** From one pile to the other: undo, and undo of undo. */
  #turn(from, to) {
    if (this.writing()?.running) return;
    const then = from.pop();
    if (then === undefined) return;
    to.push(this.#moment(then.text !== null));
    if (then.text !== null) this.put(then.text);
    if (then.state) this.writing().restore(then.state, then.drafting);
    this.after();
    this.#count();
  }

  /** Texts that something else has taken the place of can be had back after a reload, too. */
  #count() {
    this.undo.disabled = this.pasts.length === 0;
    this.redo.disabled = this.futures.length === 0;
    const texts = this.pasts.flatMap((then) => (then.text === null ? [] : [then.text]));
    while (texts.reduce((sum, one) => sum + one.length, 0) > LETTERS) texts.shift();
    keep(`${this.tab}-past`, texts.slice(-10));
  }
}
