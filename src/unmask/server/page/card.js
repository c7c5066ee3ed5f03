// A small card beside what it is about: under it, or at the bottom of a phone.

import { make } from "./make.js";

const LINGER = 250; // milliseconds in which the pointer may come from the element to its card

export class Card {
  constructor(name) {
    this.card = make("div", { class: "about", role: "dialog", "aria-label": name, hidden: true });
    this.pinned = false;
    this.card.addEventListener("pointerenter", () => clearTimeout(this.timer));
    this.card.addEventListener("pointerleave", () => this.leave());
    document.addEventListener("keydown", (event) => event.key === "Escape" && !this.card.hidden && this.close(true));
    document.addEventListener("pointerdown", (event) => {
      if (!this.card.contains(event.target) && !event.target.closest?.('[aria-haspopup="dialog"]')) this.close();
    });
    window.addEventListener("resize", () => this.close());
  }

  /** pinned: it stays until it is closed. focus: its first control is focused. */
  open(element, children, { pinned = false, focus = false } = {}) {
    if (this.pinned && !pinned) return;
    clearTimeout(this.timer);
    this.pinned = pinned;
    this.element?.removeAttribute("aria-expanded");
    this.element = element;
    element.setAttribute("aria-expanded", "true"); // what the card is about, also when the pointer is elsewhere
    this.card.replaceChildren(...children);
    if (!this.card.isConnected) document.querySelector("main").append(this.card);
    this.card.hidden = false;
    this.#place(element);
    if (focus) this.card.querySelector("button, input")?.focus();
  }

  leave() {
    if (!this.pinned) this.timer = setTimeout(() => this.close(), LINGER);
  }

  close(back = false) {
    if (back) this.element?.focus(); // first: whoever is focused is shown
    clearTimeout(this.timer);
    this.element?.removeAttribute("aria-expanded");
    this.card.hidden = true;
    this.pinned = false;
  }

  /** Under the element, or above where there is no room; never beyond the sides. */
  #place(element) {
    const { card } = this;
    if (getComputedStyle(card).position === "fixed") {
      if (this.pinned) element.scrollIntoView({ block: "nearest" }); // nothing moves under a pointer that only passes
      return;
    }
    const at = element.getClientRects()[0] ?? element.getBoundingClientRect();
    const width = document.documentElement.clientWidth;
    const left = Math.max(8, Math.min(at.left, width - card.offsetWidth - 8));
    const below = at.bottom + 6;
    const top = below + card.offsetHeight > window.innerHeight && at.top > card.offsetHeight + 6 ? at.top - card.offsetHeight - 6 : below;
    card.style.left = `${left + window.scrollX}px`;
    card.style.top = `${top + window.scrollY}px`;
  }
}
