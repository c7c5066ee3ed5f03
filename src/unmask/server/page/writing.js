// A text while it is written and afterwards: steps as they come, replay, masks and locks by hand, alternatives.

import { about } from "./about.js";
import { Canvas } from "./canvas.js";
import * as cells from "./cells.js";
import { colours } from "./colours.js";
import { copy, find, make } from "./make.js";
import { Pace, between } from "./pace.js";

const RUNNERS_UP = 5;
// of: what the server said of its model, as tokens mean nothing to another one. basis: the request it was written for.
// all: every row that was written and its steps, of which `picked` are shown. ways: where a gap's length was unknown,
// for each text its rows from the best to the worst. expected: steps that it may take.
const EMPTY = { of: null, basis: "", seed: null, num: 1, rows: [], start: [], steps: [], expected: 0, bounds: [], texts: [], cost: null, all: null, picked: [], ways: [] };

/** on.changed(): something that undo can take back is about to happen. on.again(row, button): fill its masks. */
export class Writing {
  constructor(panel, { server, info, on }) {
    Object.assign(this, { panel, server, info, on, state: EMPTY, canvases: [], drafting: true });
    this.root = panel.querySelector(".result");
    this.root.append(document.getElementById("result").content.cloneNode(true));
    this.part = (name) => find(name, panel);
    this.list = this.part("texts");
    this.slider = this.part("replay");
    this.slider.addEventListener("input", () => this.#draw());
    this.part("play").addEventListener("click", () => this.#play());
    this.part("masks").addEventListener("click", ({ target }) => this.on.again(this.state.rows[0], target));
    this.part("anew").addEventListener("click", ({ target }) => this.on.again(cells.anew(this.state.rows[0]), target));
    this.part("copy").addEventListener("click", ({ target }) => copy(this.text, target));
    this.part("seed").addEventListener("click", ({ target }) => copy(String(this.state.seed), target));
    colours(this.root);
    this.#rest();
  }

  get text() {
    return this.state.texts[0] ?? "";
  }

  get running() {
    return this.stop !== undefined;
  }

  /** drafting: whether the text field is in its own place. */
  restore(state, drafting) {
    Object.assign(this, { state, drafting });
    this.#rest();
  }

  /** The text field takes its place again; what was written stands below. */
  draft() {
    this.drafting = true;
    this.#rest();
  }

  /** basis: the request as it stands now. What was written for another one is dimmed. */
  compare(basis) {
    const stale = !this.running && this.state.rows.length > 0 && basis !== this.state.basis;
    this.panel.classList.toggle("stale", stale);
    this.part("stale").hidden = !stale;
  }

  /** Have it written. prepare(signal): the body of the request. carry: the row of which this is a continuation.
      Resolves to whether there is something new: the text, or as much of it as there was when it was stopped. */
  async write(prepare, { basis, seed, carry }) {
    this.stop?.abort();
    clearInterval(this.playing);
    const stop = (this.stop = new AbortController());
    const before = [this.state, this.drafting];
    const began = performance.now();
    this.panel.classList.add("running");
    this.root.hidden = false;
    this.compare(basis);
    const clock = setInterval(() => this.#cost({ seconds: (performance.now() - began) / 1000, live: true }), 100);
    let body;
    let state = EMPTY;
    const show = (next) => {
      this.state = state = next;
      this.#toEnd();
      this.#draw();
    };
    const pace = new Pace(([kind, event]) => {
      if (this.stop !== stop) return;
      if (kind === "start") {
        const of = this.info();
        const rows = cells.fromStart(event, of.begin, carry);
        const masks = rows[0].filter(cells.masked).length;
        const expected = Math.min(masks, body.steps ?? masks);
        pace.wait = between(expected);
        this.drafting = (body.n ?? 1) > 1;
        show({ ...EMPTY, of, basis, seed, start: rows, rows, expected, num: body.n ?? 1 });
      } else if (kind === "step") {
        const rows = cells.afterStep(state.rows, event, state.of.begin);
        show({ ...state, rows, steps: [...state.steps, event], cost: event });
      }
    });
    const hear = (kind, event) => {
      if (kind === "start") pace.clear(); // it may be sent again after a restart
      pace.push([kind, event]);
    };
    try {
      body = await prepare(stop.signal);
      const end = await this.server.ask("/trace", { ...body, runners_up: RUNNERS_UP }, { signal: stop.signal, onEvent: hear });
      await Promise.race([pace.drained(), aborted(stop.signal)]);
      if (this.stop !== stop) return false;
      const ended = { ...state, cost: end, bounds: end.texts.map((one) => one.bound), texts: end.texts.map((one) => one.text) };
      if (end.texts.some((one) => one.tokens === undefined)) show({ ...ended, rows: await this.#plain(end), steps: [] });
      else {
        const ways = end.texts.map((one) => one.ranked ?? []);
        const { start, steps } = state;
        show({ ...ended, ways, all: { start, steps }, ...this.#picking(state, end.texts.map((one) => one.row)) });
      }
      return true;
    } catch (error) {
      const kept = error.name === "AbortError" && this.stop === stop && state.rows.length > 0;
      if (kept) this.#half(state);
      else if (this.stop === stop) this.restore(...before);
      if (error.name !== "AbortError") throw error;
      return kept;
    } finally {
      clearInterval(clock);
      pace.clear();
      if (this.stop === stop) {
        this.stop = undefined;
        this.panel.classList.remove("running");
        this.#rest();
      }
    }
  }

  /** What there is of a text that was stopped: its masks are gaps that can be filled, or edited. */
  #half(state) {
    const picked = this.#watched(state);
    const { start, steps } = state;
    const next = { ...state, all: { start, steps }, ...this.#picking(state, picked) };
    this.state = { ...next, texts: next.rows.map(cells.textOf) };
  }

  /** Of a text beyond the window a constraint shows the network a part: its tokens are not told. */
  async #plain(end) {
    const rows = [];
    for (const one of end.texts) {
      const { tokens } = await this.server.ask("/tokenize", { text: one.text });
      rows.push(tokens.map(({ token, text }) => ({ id: token, text, given: true })));
    }
    return rows;
  }

  #picking(all, picked) {
    const { begin, end } = all.of ?? this.state.of;
    const { rows, ...more } = cells.only(all, picked, begin);
    return { ...more, picked, rows: rows.map((row) => cells.upToEnd(row, end)) };
  }

  // --- how it is shown ---

  #rest() {
    this.#toEnd();
    this.root.hidden = this.state.rows.length === 0;
    this.#draw();
    this.#cost(this.state.cost);
    const seed = this.part("seed");
    seed.hidden = this.state.seed === null;
    seed.textContent = seed.dataset.name = `seed ${this.state.seed}`;
    this.on.rest();
  }

  /** In the place of the text field, or below it and its buttons. */
  #place() {
    const paper = this.part("paper");
    this.drafting ||= this.state.rows.length === 0;
    paper.hidden = !this.drafting;
    this.part("hint").hidden = this.drafting;
    this.panel.querySelector(`#${this.panel.id.replace("panel-", "")}-hint`).hidden = !this.drafting;
    const before = this.drafting ? this.part("notice") : paper;
    if (before.nextElementSibling !== this.list) before.after(this.list);
    this.part("edit-text").hidden = this.drafting || this.running;
    const mask = this.part("mask");
    if (mask) mask.hidden = !this.drafting;
  }

  #toEnd() {
    this.slider.max = this.state.steps.length; // first: no value may lie beyond it
    this.slider.value = this.state.steps.length;
  }

  /** The rows at the slider's step; at its end as they stand now. */
  #shown() {
    const { of, rows, start, steps } = this.state;
    const step = Number(this.slider.value);
    if (step >= steps.length) return rows;
    let found = start;
    for (const event of steps.slice(0, step)) found = cells.afterStep(found, event, of.begin);
    return found;
  }

  /** A gap of unknown length has a row for each length it could have: while they are written one of them is shown. */
  #watched({ rows, num }) {
    const ways = Math.max(1, Math.floor(rows.length / num));
    return Array.from({ length: Math.min(num, rows.length) }, (_, text) => text * ways + Math.floor(ways / 2));
  }

  #draw() {
    const { steps, bounds, rows, of, expected } = this.state;
    this.#place();
    const all = this.#shown();
    const shown = (this.running && all.length > this.state.num ? this.#watched(this.state).map((row) => all[row]) : all).map((row) => cells.upToEnd(row, of.end));
    if (this.canvases.length !== shown.length) {
      this.canvases = shown.map((_, row) => this.#canvas(row));
      this.list.replaceChildren(...this.canvases.map(({ card }) => card));
    }
    this.list.hidden = shown.length === 0;
    this.list.classList.toggle("several", shown.length > 1);
    const nats = bounds.map((bound) => bound?.bits_per_byte ?? Infinity);
    shown.forEach((row, i) => {
      const { canvas, card } = this.canvases[i];
      canvas.draw(row, this.running ? expected : steps.length);
      card.classList.toggle("best", shown.length > 1 && nats[i] === Math.min(...nats) && Number.isFinite(nats[i]));
      find("bound", card).textContent = boundText(bounds[i]);
      this.#ways(find("ways", card), i);
      find("take", card).hidden = shown.length === 1 || this.running;
    });
    const at = Number(this.slider.value);
    this.part("replay-row").hidden = steps.length === 0;
    this.part("step").textContent = `step ${at} of ${steps.length}`;
    this.slider.setAttribute("aria-valuetext", `step ${at} of ${steps.length}`);
    const [row = []] = rows;
    const still = rows.length === 1 && !this.running && at >= steps.length;
    this.part("masks").hidden = !still || !row.some(cells.masked);
    // Without a lock the tab's own button does the same.
    this.part("anew").hidden = !still || !row.some((cell) => cell.locked) || !cells.anew(row).some(cells.masked);
    for (const name of ["use", "copy"]) this.part(name).hidden = !still;
    this.part("measure").hidden = !still || row.some(cells.masked);
  }

  #cost(cost) {
    if (cost === null || cost === undefined) return;
    if (cost.seconds !== undefined) this.part("seconds").textContent = `${cost.seconds.toFixed(1)} s`;
    const calls = cost.calls ?? this.state.cost?.calls ?? 0;
    this.part("calls").textContent = `${calls} network call${calls === 1 ? "" : "s"}`;
    const open = this.state.rows.flat().filter(cells.masked).length;
    const { rows, num } = this.state;
    const left = rows.length > num ? `trying ${rows.length} lengths` : open ? `${open} masked` : "";
    this.part("left").textContent = cost.live ? left : "";
  }

  #canvas(row) {
    const text = make("div", { class: "canvas", role: "group", "aria-label": "The text, token by token" });
    const take = make("button", { type: "button", class: "small", "data-part": "take", onclick: () => this.#takeRow(row) }, "Take this one");
    const foot = make("div", { class: "card-foot" }, make("span", { class: "bound", "data-part": "bound" }), take);
    const ways = make("details", { class: "ways", "data-part": "ways" }, make("summary"), make("ol"));
    const card = make("div", { class: "card" }, text, foot, ways);
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
    this.state = { ...this.state, rows, texts: rows.map(cells.textOf), bounds: [], ways: [] };
    this.#draw();
  }

  #takeRow(row) {
    this.on.changed();
    this.drafting = false;
    const { rows, bounds, texts, ways, picked, all } = this.state;
    const one = { rows: [rows[row]], bounds: [bounds[row]], texts: [texts[row]], ways: ways.slice(row, row + 1) };
    this.state = { ...this.state, ...one, ...(all ? this.#picking(all, [picked[row]]) : {}) };
    this.#rest();
  }

  /** The lengths that a gap could have: which was the best, and the others to be had. */
  #ways(box, row) {
    const ways = this.state.ways[row] ?? [];
    box.hidden = ways.length < 2 || this.running;
    if (box.hidden) return;
    const best = this.state.picked[row] === ways[0].row;
    box.querySelector("summary").textContent = `${ways.length} lengths tried, ${best ? "this is the best" : "this is not the best"}`;
    const items = ways.map((way, k) => {
      const mine = way.row === this.state.picked[row];
      const bits = way.nats === null ? "" : `${(way.nats / Math.LN2).toFixed(0)} bits`;
      const said = make("span", { class: "bound" }, `${bits}${k === 0 ? ", best" : ""}`);
      const take = make("button", { type: "button", class: "small", disabled: mine, onclick: () => this.#takeWay(row, way) }, mine ? "Shown" : "Show");
      return make("li", { class: mine ? "mine" : "" }, make("span", { class: "way" }, way.text), said, take);
    });
    box.querySelector("ol").replaceChildren(...items);
  }

  #takeWay(row, way) {
    this.on.changed();
    const put = (list, value) => list.map((old, i) => (i === row ? value : old));
    const { picked, texts, bounds, all } = this.state;
    const next = this.#picking(all, put(picked, way.row));
    this.state = { ...this.state, ...next, texts: put(texts, way.text), bounds: put(bounds, undefined) };
    this.#rest();
    this.canvases[row]?.card.querySelector("summary").focus(); // the button that was pressed is gone
  }
}

function boundText(bound) {
  if (!bound || bound.bits_per_byte === null || bound.bits_per_byte === undefined) return "";
  return `bound ${bound.bits_per_byte.toFixed(2)} bits/byte`;
}

function aborted(signal) {
  return new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason)));
}
