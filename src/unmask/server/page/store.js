// What is typed stays in this browser, also over a reload or a crash; a browser that keeps nothing still works.
// Each tab has its own, so that two of them do not write over each other; a new tab begins with what was typed last.

const NAME = "unmask";
const PLACES = [() => sessionStorage, () => localStorage]; // a browser may refuse to name them

function all() {
  for (const place of PLACES) {
    try {
      const found = JSON.parse(place().getItem(NAME));
      if (found !== null && typeof found === "object" && !Array.isArray(found)) return found;
    } catch {
      // The next place, or nothing.
    }
  }
  return {};
}

export function kept(key, otherwise) {
  const found = all()[key];
  return typeof found === typeof otherwise ? found : otherwise;
}

export function keep(key, value) {
  const text = JSON.stringify({ ...all(), [key]: value });
  for (const place of PLACES) {
    try {
      place().setItem(NAME, text);
    } catch {
      // Private windows may refuse; the page goes on without.
    }
  }
}

/** A field whose value is kept from now on and put back now. */
export function keepField(field, key) {
  field.value = kept(key, field.value);
  field.addEventListener("input", () => keep(key, field.value));
}
