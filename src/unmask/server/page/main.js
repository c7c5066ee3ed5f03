// The page: four tabs around one server.

import { about } from "./about.js";
import { Sentence, Settings } from "./asking.js";
import { COMPLETIONS, Code } from "./code.js";
import { ConstraintBox } from "./constraint.js";
import { Edit } from "./edit.js";
import { Editor } from "./editor.js";
import { EXAMPLES } from "./examples.js";
import { ids } from "./cells.js";
import { fresh, gapsIn, settled, spelling } from "./gaps.js";
import { find } from "./make.js";
import { Notices } from "./notices.js";
import { Past } from "./past.js";
import { Score } from "./score.js";
import { Server } from "./server.js";
import { keep, keepField, kept } from "./store.js";
import { Writing } from "./writing.js";

const TABS = ["fill", "generate", "edit", "score"];
const VERBS = { fill: "Fill", generate: "Generate", edit: "Rewrite", score: "Score" };
const panel = (tab) => document.getElementById(`panel-${tab}`);
const text = (tab) => document.getElementById(`${tab}-text`);
const goOf = (tab) => find("go", panel(tab));
let info = { begin: 0, end: null, autoregressive: false };
let tab = "fill";
let away = false;

// --- what is said ---

const notices = new Notices();

/** The server away and back; a restart may bring another model. */
function waiting(message) {
  if (message) notices.say(message, "wait");
  else if (away) {
    notices.say("The server is back.");
    meet();
  }
  away = message !== "";
}

/** Do what a button is for, and say at that button what went wrong. */
async function tried(act, button) {
  try {
    if (button && !away) notices.at(button);
    return await act();
  } catch (error) {
    if (error.name !== "AbortError") notices.tell(error);
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

for (const of of TABS) keepField(text(of), `${of}-text`); // first: everything below reads them
const server = new Server({ say: waiting, askKey, onKey: () => asked() });
const code = new Code(() => server.hasKey);
const settings = new Settings(() => asked());
const constraint = new ConstraintBox(server, { room, sampler: () => settings.sampler, onChange: () => asked() });
const score = new Score(panel("score"), server);
const writings = {};
const pasts = {};
const editors = {};
let edit;

async function meet() {
  await tried(async () => {
    const before = info.model;
    info = await server.ask("/info");
    if (before !== undefined && before !== info.model) notices.say(`The server is back, with another model: ${info.model}.`);
    const size = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(info.parameters);
    find("model").textContent = `${info.model} · ${size} parameters · window of ${info.window} tokens`;
    document.title = `unmask · ${info.model}`;
    settings.meet(info);
    sides();
    asked();
  });
}

// --- what is asked ---

/** The request of a tab as it stands, as a program would send it. */
function request(of) {
  if (of === "score") return { route: "/score", body: { texts: [text("score").value] } };
  const { score: scored, ...how } = settings.how(of);
  const more = { ...how, ...musts() };
  if (of === "edit") return { route: "/edit", body: { ...edit.fields(), ...more } };
  if (of === "fill") return { route: "/fill", body: { text: settled(text("fill").value).text, ...more, ...(scored ? { score: true } : {}) } };
  return { route: COMPLETIONS, body: { ...(info.model && { model: info.model }), prompt: text("generate").value, max_tokens: settings.maxTokens, ...more } };
}

/** The same for /trace, which tells every step: it counts the prompt's tokens as well. */
async function traced(of, signal) {
  const { body } = request(of);
  if (of === "fill") return body;
  const { model, max_tokens: most, ...more } = body;
  return { ...more, length: info.begin + (await taken(signal)) + most, ...(body.n > 1 ? { score: true } : {}) };
}

/** Tokens of the prompt. */
async function taken(signal) {
  const prompt = text("generate").value;
  return prompt ? (await server.ask("/tokenize", { text: prompt }, { signal })).tokens.length : 0;
}

/** An autoregressive model sees one position at a time and can hold no constraint. */
const musts = () => (info.autoregressive ? {} : constraint.fields());

/** What the constraint must fit into. */
async function room() {
  if (info.autoregressive || tab === "score") return null;
  if (tab === "generate") return { length: settings.maxTokens };
  if (tab === "fill") return gapsIn(text("fill").value).length ? { text: settled(text("fill").value).text } : null;
  const { text: all, with_length: lengths } = edit.fields();
  const at = edit.marked;
  return at ? { text: `${all.slice(0, at[0])}[MASK:${lengths.join("..")}]${all.slice(at[1])}` } : null;
}

/** What was written is as good as the request it was written for. */
function basis(of) {
  try {
    return JSON.stringify(request(of));
  } catch {
    return ""; // it is being typed; whoever presses the button is told
  }
}

/** Something that a request is made of has changed. */
function asked() {
  if (edit === undefined) return; // the page is still being put together
  try {
    code.show(request(tab));
  } catch {
    code.show(null);
  }
  for (const of of ["fill", "generate"]) writings[of].compare(basis(of));
  constraint.check();
}

// --- what is done ---

async function write(of, prepare, carry) {
  const go = goOf(of);
  const before = pasts[of].remember();
  about.close();
  go.textContent = "Stop";
  const { seed } = settings.how(of);
  let kept;
  try {
    const writing = writings[of].write(prepare, { basis: basis(of), seed, carry });
    go.focus({ preventScroll: true }); // what was focused may be gone while it writes
    kept = await writing;
  } finally {
    if (!kept) pasts[of].forget(before); // nothing has happened
    rest(of);
  }
}

/** The button's name, and whether what stands there is still what is asked for. */
function rest(of) {
  const writing = writings[of];
  if (writing === undefined || writing.running) return;
  goOf(of).textContent = writing.drafting ? VERBS[of] : `${VERBS[of]} again`;
  writing.compare(basis(of));
}

/** Begin, or stop what has begun. */
async function go(of) {
  if (of === "score" || of === "edit") await measure(of);
  else if (writings[of].running) writings[of].stop.abort();
  else await begin(of);
}

async function begin(of) {
  if (of === "fill" && !gapsIn(text("fill").value).length) {
    throw new Sentence("There is no gap yet. Select some words and mask them, or type ____ where something is missing.");
  }
  request(of); // whatever is wrong with it is told before anything happens
  settings.nextSeed();
  await write(of, (signal) => traced(of, signal));
}

/** What is answered at once. */
async function measure(of) {
  const tool = of === "score" ? score : edit;
  if (tool.running) {
    tool.stop.abort();
    return;
  }
  if (!text(of).value.trim()) throw new Sentence(of === "score" ? "Type something to measure." : "Type a text first.");
  if (of === "edit" && edit.marked === null) throw new Sentence("Select the words of the text that should be written anew, or type them below it.");
  if (of === "edit") settings.nextSeed();
  const { body } = request(of);
  goOf(of).textContent = "Stop";
  try {
    await (of === "score" ? score.measure(body) : edit.write(body));
  } finally {
    goOf(of).textContent = VERBS[of];
  }
}

/** The row as it stands goes on: its masks are filled. */
async function again(of, row) {
  if (writings[of].state.of.model !== info.model || writings[of].state.of.vocabulary !== info.vocabulary) {
    throw new Sentence("The server has another model now, to which these tokens mean nothing. Use it as text and go on there.");
  }
  settings.nextSeed();
  const { n, score: _, ...how } = settings.how(of);
  await write(of, () => ({ tokens: ids(row), ...how, ...musts() }), row);
}

function setText(of, value) {
  text(of).value = value;
  text(of).dispatchEvent(new Event("input"));
}

/** What was written becomes what is typed: in this tab or in another. */
function take(of, value) {
  pasts[of].remember({ typed: true });
  setText(of, value);
  writings[of]?.draft();
  show(of);
}

/** The selected words, or the word at the caret, become a gap: as long as fits, or as they were. */
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
  if (gapsIn(value).some(({ from, to }) => from < end && to > start)) throw new Sentence("There is a gap in this selection already.");
  const points = (to) => Array.from(value.slice(0, to)).length; // the server counts characters, JavaScript half of some
  const { gaps } = await server.ask("/tokenize", { text: value, spans: [[points(start), points(end)]] });
  if (field.value !== value) return; // typed on meanwhile
  pasts.fill.remember({ typed: true });
  const gap = spelling(fresh(value, gaps[0]));
  setText("fill", value.slice(0, start) + gap + value.slice(end));
  field.focus();
  field.setSelectionRange(start + gap.length, start + gap.length);
}

async function example({ tab: of, text: value, constraint: wanted = { kind: "", text: "" } }) {
  writings[of].stop?.abort();
  constraint.set(wanted);
  if (text(of).value !== value) pasts[of].remember({ typed: true });
  setText(of, value);
  writings[of].draft();
  show(of);
  await begin(of);
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
  if (!away) notices.clear();
  asked();
}

/** What this tab and this model have. */
function sides() {
  find("settings").hidden = tab === "score";
  find("must").hidden = tab === "score" || info.autoregressive;
  find("kind-name").textContent = { fill: "Each gap must be", generate: "The text must be" }[tab] ?? "The new words must be";
  for (const each of document.querySelectorAll('[data-for="generate"]')) each.hidden = tab !== "generate";
  for (const each of document.querySelectorAll("[data-any-order]")) each.hidden = info.autoregressive;
  for (const each of document.querySelectorAll("[data-one-way]")) each.hidden = !info.autoregressive;
  if (info.autoregressive && tab === "edit") show("fill");
}

for (const of of TABS) {
  const field = text(of);
  const marked = () => (of === "edit" ? (edit?.marked ?? null) : null);
  editors[of] = new Editor(field, { gaps: of === "fill", marked, before: () => pasts[of].remember({ typed: true }) });
  pasts[of] = new Past(of, panel(of), {
    text: () => field.value,
    put: (value) => setText(of, value),
    writing: () => writings[of],
    after: () => about.close(),
  });
  field.addEventListener("input", () => asked());
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) tried(() => go(of), goOf(of));
  });
  goOf(of).addEventListener("click", () => tried(() => go(of), goOf(of)));
  document.getElementById(`tab-${of}`).addEventListener("click", () => show(of));
}

for (const of of ["fill", "generate"]) {
  const writing = (writings[of] = new Writing(panel(of), {
    server,
    info: () => info,
    on: { changed: () => pasts[of].remember(), again: (row, button) => tried(() => again(of, row), button), rest: () => rest(of) },
  }));
  writing.part("edit-text").addEventListener("click", () => {
    writing.draft();
    text(of).focus();
  });
  writing.part("use").addEventListener("click", () => {
    take("fill", writing.text);
    text("fill").focus();
  });
  writing.part("measure").addEventListener("click", () => {
    take("score", writing.text);
    tried(() => go("score"), goOf("score"));
  });
}

edit = new Edit(panel("edit"), server, {
  field: text("edit"),
  use: (value) => take("edit", value),
  changed: () => {
    editors.edit.draw();
    asked();
  },
});
editors.edit.draw();
find("mask", panel("fill")).addEventListener("click", ({ target }) => tried(maskSelection, target));
for (const button of document.querySelectorAll("[data-example]")) {
  button.addEventListener("click", () => tried(() => example(EXAMPLES[button.dataset.example]), button));
}

document.querySelector('[role="tablist"]').addEventListener("keydown", (event) => {
  const shown = TABS.filter((each) => !document.getElementById(`tab-${each}`).hidden);
  const step = { ArrowRight: 1, ArrowLeft: shown.length - 1 }[event.key];
  if (step) show(shown[(shown.indexOf(tab) + step) % shown.length], true);
});

const before = kept("tab", "fill");
show(TABS.includes(before) ? before : "fill");
meet();
