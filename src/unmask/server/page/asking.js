// What the controls ask for, as fields of a request; and the same request as code.

import { find } from "./make.js";
import { keepField, kept, keep } from "./store.js";

const field = (id) => document.getElementById(id);
const NUMBERS = ["length", "steps", "temperature", "seed"];

export class Controls {
  constructor(onChange) {
    for (const id of [...NUMBERS, "sampler"]) keepField(field(id), id);
    for (const id of [...NUMBERS, "sampler"]) field(id).addEventListener("input", onChange);
    for (const id of ["fill-three", "generate-three"]) {
      field(id).checked = kept(id, field(id).checked); // which may have been ticked before this script came
      field(id).addEventListener("change", () => {
        keep(id, field(id).checked);
        onChange();
      });
    }
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
  get order() {
    const [{ value, label }] = field("sampler").selectedOptions;
    return value && !this.oneWay ? { name: value, label } : null;
  }

  /** Raises a sentence where a field holds no number. */
  how(tab) {
    const found = {};
    if (tab === "generate") found.length = this.#number("length", "Length");
    if (!this.oneWay) found.steps = this.#number("steps", "Steps");
    found.temperature = this.#number("temperature", "Temperature");
    found.seed = this.#number("seed", "Seed") ?? 0;
    if (this.order) found.sampler = this.order.name;
    if (field(`${tab}-three`).checked) Object.assign(found, { n: 3, score: true });
    return Object.fromEntries(Object.entries(found).filter(([, value]) => value !== undefined));
  }

  #number(id, name) {
    const { value, validity, min, max } = field(id);
    if (value === "" && !validity.badInput) return undefined;
    const number = Number(value);
    const whole = id === "temperature" || Number.isSafeInteger(number);
    if (validity.badInput || !whole) throw new Sentence(`${name} must be a${id === "temperature" ? "" : " whole"} number.`);
    if ((min !== "" && number < Number(min)) || (max !== "" && number > Number(max))) {
      throw new Sentence(`${name} must lie between ${min} and ${max}.`);
    }
    return number;
  }

  nextSeed() {
    const seed = field("seed");
    seed.value = (Number(seed.value) || 0) + 1;
    seed.dispatchEvent(new Event("input"));
  }
}

/** Said to the person as it is. */
export class Sentence extends Error {}

export class Code {
  constructor(hasKey) {
    this.hasKey = hasKey;
    this.language = kept("language", "curl");
    this.request = null;
    for (const name of ["curl", "python"]) {
      find(name).addEventListener("click", () => {
        keep("language", (this.language = name));
        this.#draw();
      });
    }
    find("copy").addEventListener("click", () => this.#copy());
    const box = find("code");
    box.open = kept("code-open", false);
    box.addEventListener("toggle", () => keep("code-open", box.open));
  }

  show(request) {
    this.request = request;
    this.#draw();
  }

  #draw() {
    for (const name of ["curl", "python"]) find(name).setAttribute("aria-pressed", String(name === this.language));
    const spell = this.language === "curl" ? curl : python;
    find("request").textContent = this.request ? spell(this.request, location.origin, this.hasKey()) : "";
    find("copy").textContent = "Copy";
  }

  async #copy() {
    const code = find("request");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      // Without https only a selection can be copied.
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    find("copy").textContent = "Copied";
  }
}

/** A command line for a shell.

    curl({ route: "/fill", body: { text: "a [MASK]" } }, "http://localhost:8000", false) */
export function curl({ route, body }, origin, hasKey) {
  const lines = [`curl -s${route === "/trace" ? "N" : ""} ${origin}${route}`, "  -H 'content-type: application/json'"];
  if (hasKey) lines.push('  -H "authorization: Bearer $UNMASK_API_KEY"');
  lines.push(`  -d '${JSON.stringify(body).replaceAll("'", "'\\''")}'`);
  return lines.join(" \\\n");
}

/** A program that needs nothing but Python; it prints the texts. */
export function python({ route, body }, origin, hasKey) {
  const key = hasKey ? ', "authorization": f"Bearer {os.environ[\'UNMASK_API_KEY\']}"' : "";
  const fields = Object.entries(body).map(([name, value]) => `    ${literal(name)}: ${literal(value)},`);
  const print = {
    "/fill": ["    for one in json.load(answer)[\"texts\"]:", "        print(one[\"text\"])"],
    "/trace": [
      "    for line in answer:",
      "        if line.startswith(b\"data: \"):",
      "            event = json.loads(line[6:])  # a step; the last one is the end",
      "for one in event[\"texts\"]:",
      "    print(one[\"text\"])",
    ],
    "/score": ["    for one in json.load(answer)[\"texts\"]:", "        print(one[\"bits_per_byte\"])"],
  }[route];
  return [
    "import json",
    ...(hasKey ? ["import os"] : []),
    "import urllib.request",
    "",
    "body = {",
    ...fields,
    "}",
    `headers = {"content-type": "application/json"${key}}`,
    `request = urllib.request.Request("${origin}${route}", json.dumps(body).encode(), headers)`,
    "with urllib.request.urlopen(request) as answer:",
    ...print,
  ].join("\n");
}

function literal(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([k, v]) => `${literal(k)}: ${literal(v)}`).join(", ")}}`;
  return JSON.stringify(value);
}
