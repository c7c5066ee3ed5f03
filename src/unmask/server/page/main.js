// The page: three tabs around one server.

import { about } from "./about.js";
import { Code, Controls, Sentence } from "./asking.js";
import { gapsIn, ids, withGaps } from "./cells.js";
import { ConstraintBox } from "./constraint.js";
import { find, make } from "./make.js";
import { Score } from "./score.js";
import { Refused, Server } from "./server.js";
import { keep, keepField, kept } from "./store.js";
import { Writing } from "./writing.js";

const TABS = ["fill", "generate", "score"];
const panel = (tab) => document.getElementById(`panel-${tab}`);
const text = (tab) => document.getElementById(`${tab}-text`);
let info = { begin: 0, end: null, autoregressive: false };
let tab = "fill";
let away = false;

// --- what is said ---

const notice = find("notice");

function say(message, kind = "") {
  notice.textContent = message;
  notice.className = `notice ${kind}`;
  notice.hidden = message === "";
}

/** The server away and back; a restart may bring another model. */
function waiting(message) {
  if (message) say(message, "wait");
  else if (away) {
    say("The server is back.");
    meet();
  }
  away = message !== "";
}

/** Do it, and say kindly what went wrong. */
async function tried(act) {
  try {
    if (!away) say("");
    return await act();
  } catch (error) {
    if (error.name === "AbortError") return undefined;
    const known = error instanceof Sentence || error instanceof Refused;
    const message = error.message.replace(/\.?$/, ".");
    say(error instanceof Sentence ? message : known ? `That did not work: ${message}` : `Something went wrong in this page: ${message}`, "error");
    if (!known) console.error(error);
    return undefined;
  }
}

const dialog = document.querySelector("dialog");

function askKey(wasWrong) {
  find("key-said").textContent = wasWrong ? "That key was not accepted." : "It is kept until you close this tab.";
  const field = document.getElementById("key");
  field.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "ok" ? field.value.trim() : null), { once: true });
  });
}

const server = new Server({ say: waiting, askKey, onKey: () => asked() });
const code = new Code(() => server.hasKey);
const controls = new Controls(asked);
const constraint = new ConstraintBox(server, { room, order: () => controls.order, onChange: asked });
const score = new Score(panel("score"), server);
const writings = {};
const pasts = Object.fromEntries(TABS.map((of) => [of, typedBefore(of)]));
const futures = { fill: [], generate: [], score: [] };

async function meet() {
  await tried(async () => {
    const before = info.model;
    info = await server.ask("/info");
    if (before !== undefined && before !== info.model) say(`The server is back, with another model: ${info.model}.`);
    const size = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(info.parameters);
    find("model").textContent = `${info.model} · ${size} parameters · window of ${info.window} tokens`;
    document.title = `unmask · ${info.model}`;
    controls.meet(info);
    find("one-way").hidden = !info.autoregressive;
    sides();
    asked();
  });
}

// --- what is asked ---

/** The request of a tab as it stands. */
function request(of) {
  if (of === "score") return { route: "/score", body: { texts: [text("score").value] } };
  const more = { ...controls.how(of), ...musts() };
  if (of === "fill") return { route: "/fill", body: { text: withGaps(text("fill").value), ...more } };
  return { route: "/trace", body: { ...(text("generate").value ? { prompt: text("generate").value } : {}), ...more } };
}

/** An autoregressive model sees one position at a time and can hold no constraint. */
const musts = () => (info.autoregressive ? {} : constraint.fields());

/** What the constraint must fit into. */
async function room(signal) {
  if (info.autoregressive) return null;
  if (tab === "fill") return gapsIn(text("fill").value).length ? { text: withGaps(text("fill").value) } : null;
  if (tab !== "generate") return null;
  const { length = info.window } = controls.how("generate");
  const prompt = text("generate").value;
  const taken = prompt ? (await server.ask("/tokenize", { text: prompt }, { signal })).tokens.length : 0;
  const left = length - taken - info.begin;
  return left > 0 ? { length: left } : null;
}

/** Something that a request is made of has changed. */
function asked() {
  try {
    code.show(request(tab));
  } catch {
    code.show(null); // it is being typed; whoever presses the button is told
  }
  constraint.check();
}

// --- the past ---

/** Called before something happens. typed: it changes the text field; else what is typed there is left alone.
    Comes back: the moment that undo will return to. */
function remember(of, { typed = false } = {}) {
  const now = moment(of, typed);
  pasts[of].push(...futures[of].filter((then) => then.text !== null)); // undone, but typed: it is not thrown away
  pasts[of].push(now);
  futures[of] = [];
  steps(of);
  return now;
}

function forget(of, past) {
  pasts[of] = pasts[of].filter((then) => then !== past);
  steps(of);
}

const LETTERS = 200_000; // of former texts that a browser is asked to keep for each tab

/** Texts that something else has taken the place of: they can be had back after a reload, too. */
function keepTyped(of) {
  const texts = pasts[of].flatMap((then) => (then.text === null ? [] : [then.text]));
  while (texts.reduce((sum, one) => sum + one.length, 0) > LETTERS) texts.shift();
  keep(`${of}-past`, texts.slice(-10));
}

function typedBefore(of) {
  const texts = kept(`${of}-past`, []);
  return Array.isArray(texts) ? texts.filter((one) => typeof one === "string").map((one) => ({ text: one })) : [];
}

/** Half a text is nothing to return to: what is done while one is written leaves it alone. */
function moment(of, typed) {
  const state = writings[of]?.running ? undefined : writings[of]?.state;
  return { text: typed ? text(of).value : null, state };
}

/** From one pile to the other: undo, and undo of undo. */
function turn(of, from, to) {
  if (writings[of]?.running) return;
  const then = from[of].pop();
  if (then === undefined) return;
  to[of].push(moment(of, then.text !== null));
  if (then.text !== null) setText(of, then.text);
  if (then.state) writings[of].restore(then.state);
  about.close();
  steps(of);
}

function steps(of) {
  find("undo", panel(of)).disabled = pasts[of].length === 0;
  find("redo", panel(of)).disabled = futures[of].length === 0;
  keepTyped(of);
}

function setText(of, value) {
  text(of).value = value;
  text(of).dispatchEvent(new Event("input"));
}

// --- what is done ---

async function write(of, body, carry) {
  const go = find("go", panel(of));
  const name = go.textContent;
  const before = remember(of);
  about.close();
  go.textContent = "Stop";
  let whole;
  try {
    whole = await writings[of].write(body, carry);
  } finally {
    go.textContent = name;
    if (!whole) forget(of, before); // nothing has happened
  }
}

async function go(of) {
  if (of === "score") {
    await measure();
    return;
  }
  if (writings[of].running) {
    writings[of].stop.abort();
    return;
  }
  if (of === "fill" && !gapsIn(text("fill").value).length) {
    throw new Sentence("There is no gap yet. Select some words and mask them, or type ____ where something is missing.");
  }
  await write(of, request(of).body);
}

async function measure() {
  if (score.running) {
    score.stop.abort();
    return;
  }
  if (!text("score").value.trim()) throw new Sentence("Type something to measure.");
  const go = find("go", panel("score"));
  go.textContent = "Stop";
  try {
    await score.measure(request("score").body);
  } finally {
    go.textContent = "Score";
  }
}

/** The row as it stands goes on: its masks are filled, with another seed, since the same would say the same again. */
async function again(of, row) {
  if (writings[of].state.of.model !== info.model || writings[of].state.of.vocabulary !== info.vocabulary) {
    throw new Sentence("The server has another model now, to which these tokens mean nothing. Use it as text and go on there.");
  }
  controls.nextSeed();
  const { length, n, score: _, ...how } = controls.how(of);
  await write(of, { tokens: ids(row), ...how, ...musts() }, row);
}

/** The selected words, or the word at the caret, become a gap of as many tokens as they had. */
async function maskSelection() {
  const field = text("fill");
  const value = field.value;
  let [start, end] = [field.selectionStart, field.selectionEnd];
  const word = /[\p{L}\p{N}'’]/u;
  while (start < end && /\s/.test(value[start])) start += 1;
  while (end > start && /\s/.test(value[end - 1])) end -= 1;
  while (start > 0 && word.test(value[start - 1]) && (start === end || word.test(value[start]))) start -= 1;
  while (end < value.length && word.test(value[end]) && (end === start || word.test(value[end - 1]))) end += 1;
  if (start === end) throw new Sentence("Select the words that should be written anew, then mask them.");
  if (gapsIn(value).some(([from, to]) => from < end && to > start)) throw new Sentence("There is a gap in this selection already.");
  const points = (to) => Array.from(value.slice(0, to)).length; // the server counts characters, JavaScript half of some
  const { masked } = await server.ask("/tokenize", { text: value, spans: [[points(start), points(end)]] });
  if (field.value !== value) return; // typed on meanwhile
  remember("fill", { typed: true });
  setText("fill", masked);
  const behind = masked.length - (value.length - end);
  field.focus();
  field.setSelectionRange(behind, behind);
}

// --- the page ---

function show(name, focus = false) {
  tab = name;
  keep("tab", name);
  about.close();
  for (const each of TABS) {
    const button = document.getElementById(`tab-${each}`);
    button.setAttribute("aria-selected", String(each === name));
    button.tabIndex = each === name ? 0 : -1;
    panel(each).hidden = each !== name;
    if (each === name && focus) button.focus();
  }
  sides();
  if (!away) say("");
  asked();
}

/** The controls that this tab and this model have. */
function sides() {
  find("how").hidden = tab === "score";
  find("must").hidden = tab === "score" || info.autoregressive;
  document.querySelector('[data-for="generate"]').hidden = tab !== "generate";
}

/** What stands behind a text field: the same text with its gaps marked. It also makes the field as high as its text. */
function underlay(of) {
  const behind = find("behind", panel(of));
  const value = text(of).value;
  const nodes = [];
  let end = 0;
  for (const [from, to] of of === "fill" ? gapsIn(value) : []) {
    nodes.push(value.slice(end, from), make("mark", {}, value.slice(from, to)));
    end = to;
  }
  behind.replaceChildren(...nodes, `${value.slice(end)}\u200b`);
}

for (const of of TABS) {
  keepField(text(of), `${of}-text`);
  text(of).addEventListener("input", () => {
    underlay(of);
    asked();
  });
  text(of).addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) tried(() => go(of));
  });
  underlay(of);
  steps(of);
  find("go", panel(of)).addEventListener("click", () => tried(() => go(of)));
  find("undo", panel(of)).addEventListener("click", () => turn(of, pasts, futures));
  find("redo", panel(of)).addEventListener("click", () => turn(of, futures, pasts));
  document.getElementById(`tab-${of}`).addEventListener("click", () => show(of));
}

for (const of of ["fill", "generate"]) {
  const writing = (writings[of] = new Writing(panel(of), {
    server,
    info: () => info,
    on: { changed: () => remember(of), again: (row) => tried(() => again(of, row)) },
  }));
  writing.part("use").addEventListener("click", () => {
    remember("fill", { typed: true });
    setText("fill", writing.text);
    show("fill");
    text("fill").focus();
  });
  writing.part("measure").addEventListener("click", () => {
    remember("score", { typed: true });
    setText("score", writing.text);
    show("score");
    tried(() => go("score"));
  });
}

find("mask", panel("fill")).addEventListener("click", () => tried(maskSelection));

document.querySelector('[role="tablist"]').addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: TABS.length - 1 }[event.key];
  if (step) show(TABS[(TABS.indexOf(tab) + step) % TABS.length], true);
});

const before = kept("tab", "fill");
show(TABS.includes(before) ? before : "fill");
meet();
