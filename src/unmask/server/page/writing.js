// A text while it is written and afterwards: steps as they come, replay, masks and locks by hand, alternatives.

import { about } from "./about.js";
import { Canvas } from "./canvas.js";
import * as cells from "./cells.js";
import { find, make } from "./make.js";

const RUNNERS_UP = 5;
const EMPTY = { rows: [], start: [], steps: [], bounds: [], cost: null };

/** on.changed(): something that undo can take back is about to happen. on.again(tokens, row): fill these tokens. */
export class Writing {
  constructor(panel, { server, info, on }) {
    Object.assign(this, { server, info, on, state: EMPTY, canvases: [] });
    this.root = panel.querySelector(".result");
    this.root.append(document.getElementById("result").content.cloneNode(true));
    this.part = (name) => find(name, this.root);
    this.slider = this.part("replay");
    this.slider.addEventListener("input", () => this.#draw());
    this.part("play").addEventListener("click", () => this.#play());
    this.part("masks").addEventListener("click", () => this.on.again(this.state.rows[0]));
    this.part("anew").addEventListener("click", () => this.on.again(cells.anew(this.state.rows[0])));
  }

  get text() {
    return this.state.texts?.[0] ?? "";
  }

  get running() {
    return this.stop !== undefined;
  }

  restore(state) {
    this.state = state;
    this.#rest();
  }

  /** Have it written. carry: the row of which this is a continuation. Resolves to whether it came to its end. */
  async write(body, carry) {
    this.stop?.abort();
    clearInterval(this.playing);
    const stop = (this.stop = new AbortController());
    const before = this.state;
    const began = performance.now();
    this.root.hidden = false;
    this.root.classList.add("running");
    const clock = setInterval(() => this.#cost({ seconds: (performance.now() - began) / 1000, live: true }), 100);
    let state = EMPTY;
    const show = (next) => {
      this.state = state = next;
      this.#toEnd();
      this.#draw();
    };
    const hear = (kind, event) => {
      if (this.stop !== stop) return;
      if (kind === "start") {
        const rows = cells.fromStart(event, this.info().begin, carry);
        show({ ...EMPTY, start: rows, rows, several: body.n > 1 });
      } else if (kind === "step") {
        const rows = cells.afterStep(state.rows, event, this.info().begin);
        show({ ...state, rows, steps: [...state.steps, event], cost: event });
      }
    };
    try {
      const end = await this.server.ask("/trace", { ...body, runners_up: RUNNERS_UP }, { signal: stop.signal, onEvent: hear });
      if (this.stop !== stop) return false;
      if (end.texts.some((one) => one.tokens === undefined)) await this.#plain(end, state, show);
      state = { ...this.state, cost: end, bounds: end.texts.map((one) => one.bound), texts: end.texts.map((one) => one.text) };
      show({ ...state, rows: state.rows.map((row) => cells.upToEnd(row, this.info().end)) });
      return true;
    } catch (error) {
      // What was there before is worth more than half a text.
      if (this.stop === stop) this.state = before;
      if (error.name !== "AbortError") throw error;
      return false;
    } finally {
      clearInterval(clock);
      if (this.stop === stop) {
        this.stop = undefined;
        this.root.classList.remove("running");
        this.#rest();
      }
    }
  }

  /** With gaps of unknown length the best of many rows is told as text alone. */
  async #plain(end, state, show) {
    const rows = [];
    for (const one of end.texts) {
      const { tokens } = await this.server.ask("/tokenize", { text: one.text });
      rows.push(tokens.map(({ token, text }) => ({ id: token, text, given: true })));
    }
    show({ ...state, rows, steps: [] });
  }

  // --- how it is shown ---

  #rest() {
    this.#toEnd();
    this.root.hidden = this.state.rows.length === 0;
    this.#draw();
    this.#cost(this.state.cost);
  }

  #toEnd() {
    this.slider.max = this.state.steps.length; // first: no value may lie beyond it
    this.slider.value = this.state.steps.length;
  }

  /** The rows at the slider's step; at its end as they stand now. */
  #shown() {
    const { rows, start, steps } = this.state;
    const step = Number(this.slider.value);
    if (step >= steps.length) return rows;
    let found = start;
    for (const event of steps.slice(0, step)) found = cells.afterStep(found, event, this.info().begin);
    return found;
  }

  #draw() {
    const { steps, bounds, rows } = this.state;
    // A gap of unknown length has a row for each length it could have: while they are written the first few are shown.
    const shown = this.#shown().slice(0, 3).map((row) => cells.upToEnd(row, this.info().end));
    const list = this.part("texts");
    if (this.canvases.length !== shown.length) {
      this.canvases = shown.map((_, row) => this.#canvas(row));
      list.replaceChildren(...this.canvases.map(({ card }) => card));
    }
    list.classList.toggle("several", shown.length > 1);
    const nats = bounds.map((bound) => bound?.bits_per_byte ?? Infinity);
    shown.forEach((row, i) => {
      const { canvas, card } = this.canvases[i];
      canvas.draw(row);
      card.classList.toggle("best", shown.length > 1 && nats[i] === Math.min(...nats) && Number.isFinite(nats[i]));
      find("bound", card).textContent = boundText(bounds[i]);
      find("take", card).hidden = shown.length === 1 || this.running;
    });
    const at = Number(this.slider.value);
    this.part("replay-row").hidden = steps.length === 0;
    this.part("step").textContent = `step ${at} of ${steps.length}`;
    this.slider.setAttribute("aria-valuetext", `step ${at} of ${steps.length}`);
    const [row = []] = rows;
    const still = rows.length === 1 && !this.running && at >= steps.length;
    this.part("masks").hidden = !still || !row.some(cells.masked);
    this.part("anew").hidden = !still || !row.some((cell) => !cell.given && !cell.locked && !cells.masked(cell));
    this.part("hint").hidden = this.part("use").hidden = !still;
    this.part("measure").hidden = !still || row.some(cells.masked);
  }

  #cost(cost) {
    if (cost === null || cost === undefined) return;
    if (cost.seconds !== undefined) this.part("seconds").textContent = `${cost.seconds.toFixed(1)} s`;
    const calls = cost.calls ?? this.state.cost?.calls ?? 0;
    this.part("calls").textContent = `${calls} network call${calls === 1 ? "" : "s"}`;
    const open = this.state.rows.flat().filter(cells.masked).length;
    this.part("left").textContent = cost.live ? (open ? `${open} masked` : "") : "";
  }

  #canvas(row) {
    const text = make("div", { class: "canvas", role: "group", "aria-label": "The text, token by token" });
    const take = make("button", { type: "button", class: "small", "data-part": "take", onclick: () => this.#takeRow(row) }, "Take this one");
    const foot = make("div", { class: "card-foot" }, make("span", { class: "bound", "data-part": "bound" }), take);
    const card = make("div", { class: "card" }, text, foot);
    const look = (at, element, more) => this.#about(row, at, element, more);
    const canvas = new Canvas(text, {
      look: (at, element) => look(at, element, {}),
      open: (at, element, focus = false) => look(at, element, { pinned: true, focus }),
      leave: () => about.leave(),
    });
    return { canvas, card };
  }

  #play() {
    clearInterval(this.playing);
    const { steps } = this.state;
    this.slider.value = 0;
    this.#draw();
    this.playing = setInterval(() => {
      this.slider.value = Number(this.slider.value) + 1;
      this.#draw();
      if (Number(this.slider.value) >= steps.length) clearInterval(this.playing);
    }, Math.max(40, Math.min(250, 4000 / Math.max(1, steps.length))));
  }

  // --- what may be done with it ---

  #about(row, at, element, more) {
    const now = this.#shown()[row]?.[at];
    if (now === undefined) return;
    const still = !this.running && this.state.rows.length === 1 && Number(this.slider.value) >= this.state.steps.length;
    const change = (how) => () => this.#set(row, at, how);
    let actions = [];
    if (still && cells.masked(now)) actions = now.was ? [{ label: "Put back", act: change(cells.unmasking) }] : [];
    else if (still) {
      actions = [{ label: "Mask again", act: change(cells.masking) }];
      if (!now.given) actions.push({ label: now.locked ? "Unlock" : "Lock", act: change(cells.locking) });
    }
    const take = still && !now.given ? (other) => this.#set(row, at, (cell) => cells.taking(cell, other)) : undefined;
    about.show(element, now, { actions, take, ...more });
  }

  #set(row, at, how) {
    this.on.changed();
    const rows = this.state.rows.map((cellsOfRow, i) => (i === row ? cells.changed(cellsOfRow, at, how) : cellsOfRow));
    this.state = { ...this.state, rows, texts: rows.map(cells.textOf), bounds: [] };
    this.#draw();
  }

  #takeRow(row) {
    this.on.changed();
    const { rows, start, steps, bounds, texts, cost } = this.state;
    const mine = (step) => {
      const keep = step.row.flatMap((of, k) => (of === row ? [k] : []));
      const picked = { ...step, row: keep.map(() => 0), remasked: step.remasked.filter(([of]) => of === row).map(([, at]) => [0, at]) };
      for (const name of ["position", "token", "text", "log_prob", "model_prob", "others"]) {
        if (step[name]) picked[name] = keep.map((k) => step[name][k]);
      }
      return picked;
    };
    this.state = { ...EMPTY, rows: [rows[row]], start: [start[row]], steps: steps.map(mine), bounds: [bounds[row]], texts: [texts[row]], cost };
    this.#rest();
  }
}

function boundText(bound) {
  if (!bound || bound.bits_per_byte === null || bound.bits_per_byte === undefined) return "";
  return `bound ${bound.bits_per_byte.toFixed(2)} bits/byte`;
}
