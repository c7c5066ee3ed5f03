// What the settings ask for, as fields of a request.

import { find } from "./make.js";
import { keepField, kept, keep } from "./store.js";

const field = (id) => document.getElementById(id);
const NUMBERS = ["max-tokens", "steps", "temperature", "seed"];
const TICKED = ["fill-three", "generate-three", "pin"];
const SEEDS = 1_000_000; // of this many one is drawn each time: short enough to be read out

/** Said to the person as it is. */
export class Sentence extends Error {}

export class Settings {
  constructor(onChange) {
    for (const id of [...NUMBERS, "sampler"]) keepField(field(id), id);
    for (const id of TICKED) field(id).checked = kept(id, field(id).checked); // which may have been ticked before this script came
    for (const id of TICKED) field(id).addEventListener("change", () => keep(id, field(id).checked));
    field("seed").addEventListener("input", () => this.#pin()); // whoever types a seed wants that one
    for (const id of [...NUMBERS, "sampler"]) field(id).addEventListener("input", onChange);
    for (const id of ["fill-three", "generate-three"]) field(id).addEventListener("change", onChange);
    const narrow = matchMedia("(max-width: 56rem)").matches;
    for (const name of ["settings", "must"]) find(name).open = !narrow; // on a phone the text comes first
    this.onChange = onChange;
  }

  #pin() {
    field("pin").checked = true;
    keep("pin", true);
  }

  /** What this server has: samplers, or a model that goes from left to right, a token a call. */
  meet({ samplers: names, autoregressive }) {
    this.oneWay = autoregressive;
    const select = field("sampler");
    for (const id of ["steps", "sampler"]) field(id).closest("label").hidden = autoregressive;
    const wanted = kept("sampler", "");
    select.replaceChildren(select.options[0], ...names.map((name) => new Option(name.replaceAll("_", " "), name)));
    select.value = names.includes(wanted) ? wanted : "";
  }

  /** The sampler that is chosen, and what it is called here; null where the model's own is. */
  get sampler() {
    const [{ value, label }] = field("sampler").selectedOptions;
    return value && !this.oneWay ? { name: value, label } : null;
  }

  get maxTokens() {
    return this.#number("max-tokens", "Max tokens") ?? 64;
  }

  /** Raises a sentence where a field holds no number. */
  how(tab) {
    const found = {};
    if (!this.oneWay) found.steps = this.#number("steps", "Steps");
    found.temperature = this.#number("temperature", "Temperature");
    found.seed = this.#number("seed", "Seed") ?? 0;
    if (this.sampler) found.sampler = this.sampler.name;
    if (field(`${tab}-three`)?.checked) Object.assign(found, { n: 3, score: true });
    return Object.fromEntries(Object.entries(found).filter(([, value]) => value !== undefined));
  }

  #number(id, name) {
    const { value, validity, min, max } = field(id);
    field(id).removeAttribute("aria-invalid");
    if (value === "" && !validity.badInput) return undefined;
    const number = Number(value);
    const whole = id === "temperature" || Number.isSafeInteger(number);
    const wrong = (message) => {
      field(id).setAttribute("aria-invalid", "true");
      return new Sentence(message);
    };
    if (validity.badInput || !whole) throw wrong(`${name} must be a${id === "temperature" ? "" : " whole"} number.`);
    if ((min !== "" && number < Number(min)) || (max !== "" && number > Number(max))) {
      throw wrong(`${name} must lie between ${min} and ${max}.`);
    }
    return number;
  }

  /** Another text each time, unless the seed is pinned. */
  nextSeed() {
    if (field("pin").checked) return;
    field("seed").value = Math.floor(SEEDS * Math.random());
    keep("seed", field("seed").value);
    this.onChange();
  }
}
