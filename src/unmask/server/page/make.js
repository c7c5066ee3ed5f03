// Small pieces of page.

/** make("p", { class: "quiet" }, "text", child): an element; a property named on… listens. */
export function make(name, about = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(about)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

export const find = (name, within = document) => within.querySelector(`[data-part="${name}"]`);

/** Of many elements one is in the tab order; arrows lead to the others. press(element): Enter or space. */
export function roving(root, selector, press = () => {}) {
  root.addEventListener("keydown", (event) => {
    const all = [...root.querySelectorAll(selector)];
    const at = all.indexOf(event.target.closest(selector));
    if (at < 0) return;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + 8, ArrowUp: at - 8, Home: 0, End: all.length - 1 };
    if (event.key in to) {
      const next = all[Math.max(0, Math.min(all.length - 1, to[event.key]))];
      for (const each of all) each.setAttribute("tabindex", each === next ? "0" : "-1");
      next.focus();
    } else if (event.key === "Enter" || event.key === " ") press(all[at]);
    else return;
    event.preventDefault();
  });
}

export function percent(prob) {
  return prob >= 0.995 ? "99+ %" : prob < 0.001 ? "<0.1 %" : `${(100 * prob).toFixed(prob < 0.0995 ? 1 : 0)} %`;
}

/** A token's text where its spaces and line ends would not be seen. */
export const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").trim() || "␣";

/** The text to the clipboard; the button says so for a moment. */
export async function copy(text, button) {
  const name = button.dataset.name ?? (button.dataset.name = button.textContent);
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without https only a selection can be copied.
    const held = make("textarea", { class: "hidden", "aria-hidden": "true", tabindex: "-1" });
    held.value = text;
    document.body.append(held);
    held.select();
    document.execCommand("copy");
    held.remove();
    button.focus({ preventScroll: true });
  }
  button.textContent = "Copied";
  clearTimeout(Number(button.dataset.timer));
  button.dataset.timer = setTimeout(() => (button.textContent = name), 2000);
}
