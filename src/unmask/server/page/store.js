// What is typed stays in this browser, also over a reload or a crash; a browser that keeps nothing still works.

const NAME = "unmask";

function all() {
  try {
    const found = JSON.parse(localStorage.getItem(NAME) ?? "{}");
    return found !== null && typeof found === "object" && !Array.isArray(found) ? found : {};
  } catch {
    return {};
  }
}

export function kept(key, otherwise) {
  const found = all()[key];
  return typeof found === typeof otherwise ? found : otherwise;
}

export function keep(key, value) {
  try {
    localStorage.setItem(NAME, JSON.stringify({ ...all(), [key]: value }));
  } catch {
    // Private windows may refuse; the page goes on without.
  }
}

/** A field whose value is kept from now on and put back now. */
export function keepField(field, key) {
  field.value = kept(key, field.value);
  field.addEventListener("input", () => keep(key, field.value));
}
