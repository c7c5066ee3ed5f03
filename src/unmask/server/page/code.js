// The request as it stands, as code: Generate by OpenAI's client, the rest by our own routes.

import { copy, find } from "./make.js";
import { kept, keep } from "./store.js";

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
    find("copy-code").addEventListener("click", () => copy(find("request").textContent, find("copy-code")));
    const box = find("code");
    box.open = kept("code-open", false);
    box.addEventListener("toggle", () => keep("code-open", box.open));
  }

  /** request: { route, body, model }, null where it is not one yet. */
  show(request) {
    this.request = request;
    this.#draw();
  }

  #draw() {
    for (const name of ["curl", "python"]) find(name).setAttribute("aria-pressed", String(name === this.language));
    const openai = this.request?.route === COMPLETIONS;
    const spell = this.language === "curl" ? curl : openai ? client : python;
    find("request").textContent = this.request ? spell(this.request, location.origin, this.hasKey()) : "";
    find("streams").hidden = !openai;
  }
}

export const COMPLETIONS = "/v1/completions";
const OPENAI = ["model", "prompt", "max_tokens", "n", "temperature", "seed"]; // the client's own; others are our extras

/** A command line for a shell.

    curl({ route: "/fill", body: { text: "a [MASK]" } }, "http://localhost:8000", false) */
export function curl({ route, body }, origin, hasKey) {
  const lines = [`curl -s ${origin}${route}`, "  -H 'content-type: application/json'"];
  if (hasKey) lines.push('  -H "authorization: Bearer $UNMASK_API_KEY"');
  lines.push(`  -d '${JSON.stringify(body).replaceAll("'", "'\\''")}'`);
  return lines.join(" \\\n");
}

/** A program with OpenAI's client; it prints what is written after the prompt. */
export function client({ body }, origin, hasKey) {
  const key = hasKey ? 'os.environ["UNMASK_API_KEY"]' : '"none"';
  const fields = Object.entries(body).filter(([name]) => OPENAI.includes(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI.includes(name)));
  return [
    ...(hasKey ? ["import os", ""] : []),
    "import openai",
    "",
    `client = openai.OpenAI(base_url="${origin}/v1", api_key=${key})`,
    "done = client.completions.create(",
    ...fields.map(([name, value]) => `    ${name}=${literal(value)},`),
    ...(Object.keys(extra).length ? [`    extra_body=${literal(extra)},`] : []),
    ")",
    "for choice in done.choices:",
    "    print(choice.text)",
  ].join("\n");
}

const PRINTED = { "/fill": ["texts", "text"], "/edit": ["edits", "text"], "/score": ["texts", "bits_per_byte"] };

/** A program that needs nothing but Python; it prints the texts. */
export function python({ route, body }, origin, hasKey) {
  const key = hasKey ? ', "authorization": f"Bearer {os.environ[\'UNMASK_API_KEY\']}"' : "";
  const [list, field] = PRINTED[route];
  return [
    "import json",
    ...(hasKey ? ["import os"] : []),
    "import urllib.request",
    "",
    "body = {",
    ...Object.entries(body).map(([name, value]) => `    ${literal(name)}: ${literal(value)},`),
    "}",
    `headers = {"content-type": "application/json"${key}}`,
    `request = urllib.request.Request("${origin}${route}", json.dumps(body).encode(), headers)`,
    "with urllib.request.urlopen(request) as answer:",
    `    for one in json.load(answer)["${list}"]:`,
    `        print(one["${field}"])`,
  ].join("\n");
}

function literal(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([k, v]) => `${literal(k)}: ${literal(v)}`).join(", ")}}`;
  return JSON.stringify(value);
}
