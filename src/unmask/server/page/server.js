// The one way to the server: brings the key, waits until a server that is away is back, reads its events.

const KEY = "unmask-key";
const OPENED = "unmask-opened"; // left by the page that asks for the key before this one may be loaded
const BETWEEN = 1000; // milliseconds between two looks at a server that is away

/** The server's own sentence about what it will not do. */
export class Refused extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

class Lost extends Error {}

export class Server {
  /** say(text): told while it waits and "" when it goes on. askKey(): resolves to a key. onKey(): there is a new one. */
  constructor({ say, askKey, onKey }) {
    Object.assign(this, { say, askKey, onKey, asking: null });
    try {
      sessionStorage.removeItem(OPENED);
    } catch {
      // Nothing was left there.
    }
  }

  get hasKey() {
    return read() !== null;
  }

  /** The answer to a request; given onEvent, the answer is a stream and the result is its last event.
      A request that a restart cuts short is sent again: same seed, same text. */
  async ask(path, body, { signal, onEvent } = {}) {
    for (;;) {
      try {
        const answer = await this.#fetch(path, body, signal);
        const found = onEvent ? await events(answer, onEvent) : await answer.json();
        this.say("");
        return found;
      } catch (error) {
        if (error instanceof Refused && error.status === 401) await this.#newKey(signal);
        else if (error instanceof Refused && (error.status === 429 || error.status === 503)) {
          this.say(error.status === 429 ? "The server is busy. Trying again…" : "The server is stopping. Trying again…");
          await pause(error.wait ?? BETWEEN, signal);
        } else if (error instanceof Lost) await this.#back(signal);
        else {
          this.say("");
          throw error;
        }
      }
    }
  }

  async #fetch(path, body, signal) {
    const headers = {};
    if (read() !== null) headers.authorization = `Bearer ${read()}`;
    if (body !== undefined) headers["content-type"] = "application/json";
    const how = { method: body === undefined ? "GET" : "POST", headers, signal };
    if (body !== undefined) how.body = JSON.stringify(body);
    let answer;
    try {
      answer = await fetch(path, how);
    } catch (error) {
      throw error.name === "AbortError" ? error : new Lost();
    }
    if (answer.ok) return answer;
    const said = (await answer.json().catch(() => ({}))).error ?? {};
    const refused = new Refused(answer.status, said.message ?? `the server answered ${answer.status}`, said.code);
    const seconds = Number(answer.headers.get("retry-after"));
    if (seconds > 0) refused.wait = 1000 * Math.min(seconds, 10);
    throw refused;
  }

  /** Returns when the server answers again. */
  async #back(signal) {
    this.say("The server is not answering. Your text is safe; trying again…");
    for (;;) {
      await pause(BETWEEN, signal);
      try {
        if ((await fetch("/health", { signal })).ok) return;
      } catch (error) {
        if (error.name === "AbortError") throw error;
      }
    }
  }

  async #newKey(signal) {
    // Several calls may find the door closed at once; one question serves them all.
    this.asking ??= this.askKey(this.hasKey).finally(() => (this.asking = null));
    const key = await this.asking;
    signal?.throwIfAborted();
    if (key === null) throw new Refused(0, "this server needs its API key", "no_key");
    try {
      sessionStorage.setItem(KEY, key);
    } catch {
      held = key;
    }
    this.onKey();
  }
}

let held = null; // where the session keeps nothing

function read() {
  try {
    return sessionStorage.getItem(KEY) ?? held;
  } catch {
    return held;
  }
}

/** Server-sent events of a POST, which EventSource cannot do. */
async function events(answer, onEvent) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let last = null;
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      throw error.name === "AbortError" ? error : new Lost();
    }
    if (part.done) break;
    rest += part.value;
    for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) {
      const [, kind, data] = rest.slice(0, end).match(/^event: (\w+)\ndata: (.*)$/s) ?? [];
      rest = rest.slice(end + 2);
      if (kind === undefined) continue;
      const event = JSON.parse(data);
      if (kind === "error") throw broken(event.error ?? {});
      last = kind === "end" ? event : null;
      onEvent(kind, event);
    }
  }
  if (last === null) throw new Lost(); // cut off before its end
  return last;
}

function broken({ message, code }) {
  return code === "stopping" ? new Lost() : new Refused(400, message ?? "something went wrong", code);
}

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}
