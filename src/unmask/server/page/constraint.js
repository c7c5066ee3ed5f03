// What the text must be, and whether it can be that in the room there is: asked while it is typed.

import { Sentence } from "./asking.js";
import { find } from "./make.js";
import { keepField, kept, keep } from "./store.js";

const WAIT = 300; // milliseconds without a key
const KINDS = {
  choices: { name: "choices", label: "The choices, one a line", example: "cat\ndog" },
  allow: { name: "words", label: "The words that may be used, one a line", example: "the\ncat\nsat" },
  forbid: { name: "words", label: "The words that may not be used, one a line", example: "sad" },
  regex: { name: "regex", label: "All of it matches", example: " [A-Z][a-z]+ the (cat|dog)" },
  json_schema: { name: "JSON schema", label: "It is JSON that this schema allows", example: '{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}' },
};

export class ConstraintBox {
  /** room(): what /fit is asked about, { text } or { length }; null where nothing is to be asked. sampler(): the one that
      is chosen as { name, label }; null where the model's own is. */
  constructor(server, { room, sampler, onChange }) {
    Object.assign(this, { server, room, sampler, holders: undefined });
    this.kind = document.getElementById("constraint-kind");
    this.text = document.getElementById("constraint");
    this.fit = find("fit");
    keepField(this.kind, "constraint-kind");
    if (!(this.kind.value in KINDS)) this.kind.value = ""; // one that this page does not know was kept
    this.#change();
    this.kind.addEventListener("input", () => {
      this.#change();
      onChange();
    });
    this.text.addEventListener("input", () => {
      keep(`constraint-${this.kind.value}`, this.text.value);
      onChange();
    });
  }

  #change() {
    const kind = this.kind.value;
    find("constraint").hidden = !kind;
    find("held").textContent = kind && KINDS[kind].name;
    if (!kind) return;
    this.text.value = kept(`constraint-${kind}`, KINDS[kind].example);
    document.querySelector('label[for="constraint"]').textContent = KINDS[kind].label;
  }

  /** kind: "" for none. text: kept as if it had been typed. */
  set({ kind, text }) {
    keep("constraint-kind", (this.kind.value = kind));
    if (kind) keep(`constraint-${kind}`, text);
    this.#change();
  }

  /** As fields of a request. */
  fields() {
    const kind = this.kind.value;
    if (!kind || !this.text.value.trim()) return {};
    this.#checkSampler();
    const lines = this.text.value.split("\n").filter((line) => line.trim() !== "");
    if (kind === "choices") return { choices: lines };
    if (kind === "allow" || kind === "forbid") return { constraints: [{ name: "words", [kind]: lines.flatMap((line) => line.trim().split(/[\s,]+/)), ignore_case: true }] };
    if (kind === "regex") return { regex: this.text.value };
    let schema;
    try {
      schema = JSON.parse(this.text.value);
    } catch {
      throw new Sentence("The schema is not JSON yet.");
    }
    if (schema === null || typeof schema !== "object" || Array.isArray(schema)) throw new Sentence("A schema is a JSON object.");
    return { json_schema: schema };
  }

  /** Not every sampler holds a constraint; /fit tells which do. */
  #checkSampler() {
    const sampler = this.sampler();
    if (sampler === null || this.holders === undefined || this.holders.includes(sampler.name)) return;
    const other = this.holders.length ? `Choose another, such as “${this.holders[0]}”, or leave` : "Leave";
    throw new Sentence(`The sampler “${sampler.label}” can hold no constraint. ${other} the constraint at “anything”.`);
  }

  /** Ask again whether it can fit, when the typing pauses. */
  check() {
    clearTimeout(this.timer);
    this.asking?.abort();
    let fields;
    try {
      fields = this.fields();
    } catch (error) {
      this.#say("no", error.message);
      return;
    }
    if (!Object.keys(fields).length) {
      this.#say("", "");
      return;
    }
    this.#say("", "Looking whether it can fit…");
    this.timer = setTimeout(() => this.#ask(fields), WAIT);
  }

  async #ask(fields) {
    this.asking = new AbortController();
    try {
      const { signal } = this.asking;
      const room = await this.room(signal);
      if (room === null) {
        this.#say("", "");
        return;
      }
      const { fits, reason, samplers } = await this.server.ask("/fit", { ...room, ...fields }, { signal });
      this.holders = samplers;
      this.#checkSampler();
      this.#say(fits ? "yes" : "no", fits ? "This can fit." : `This cannot fit: ${reason}`);
    } catch (error) {
      if (error.name === "AbortError") return;
      this.#say("no", error instanceof Sentence ? error.message : `This cannot fit: ${error.message}`);
    }
  }

  #say(how, text) {
    this.fit.className = `fit ${how}`;
    this.fit.textContent = text;
  }
}
