// The small card beside a token: how likely it was, what else it could have been, and what may be done with it.

import { masked } from "./cells.js";
import { make, percent, visible } from "./make.js";

const LINGER = 250; // milliseconds in which the pointer may come from the token to its card

class About {
  constructor() {
    this.card = make("div", { class: "about", role: "dialog", "aria-label": "About this token", hidden: true });
    this.pinned = false;
    this.card.addEventListener("pointerenter", () => clearTimeout(this.timer));
    this.card.addEventListener("pointerleave", () => this.leave());
    document.addEventListener("keydown", (event) => event.key === "Escape" && !this.card.hidden && this.close(true));
    document.addEventListener("pointerdown", (event) => {
      if (!this.card.contains(event.target) && !event.target.closest?.(".cell")) this.close();
    });
    window.addEventListener("resize", () => this.close());
  }

  /** actions: [{ label, act, hint }]; take(other): a runner-up is chosen, undefined where that is not offered. */
  show(element, cell, { actions, take, pinned = false, focus = false }) {
    if (this.pinned && !pinned) return;
    clearTimeout(this.timer);
    this.pinned = pinned;
    this.element?.removeAttribute("aria-expanded");
    this.element = element;
    element.setAttribute("aria-expanded", "true"); // which token the card is about, also when the pointer is elsewhere
    this.card.replaceChildren(...this.#content(cell, actions, take));
    if (!this.card.isConnected) document.querySelector("main").append(this.card);
    this.card.hidden = false;
    this.#place(element);
    if (focus) this.card.querySelector("button")?.focus();
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

  #content(cell, actions, take) {
    const head = make("p", { class: "about-head" });
    if (masked(cell)) head.append(make("strong", {}, "masked"), cell.was ? ` was “${visible(cell.was.text)}”` : "");
    else if (cell.given) head.append(make("strong", {}, visible(cell.text)), " as given");
    else head.append(make("strong", {}, visible(cell.text)), make("span", { class: "prob" }, percent(cell.prob)));
    const found = [head];
    if (cell.step !== undefined && !masked(cell)) found.push(make("p", { class: "quiet" }, `written in step ${cell.step}`));
    if (cell.others?.length && !masked(cell)) {
      const list = make("ol", { class: "others", "aria-label": "Runners-up" });
      for (const other of cell.others) {
        const bar = make("span", { class: "bar" });
        bar.style.inlineSize = `${Math.max(1, 100 * other.model_prob)}%`;
        const inside = [make("span", {}, visible(other.text)), make("span", { class: "prob" }, percent(other.model_prob)), bar];
        const act = () => this.#done(() => take(other));
        list.append(make("li", {}, make(take ? "button" : "div", take ? { type: "button", class: "other", onclick: act } : { class: "other" }, ...inside)));
      }
      found.push(list);
    }
    const row = make("div", { class: "about-actions" });
    for (const { label, act } of actions) {
      row.append(make("button", { type: "button", class: "small", onclick: () => this.#done(act) }, label));
    }
    if (actions.length) found.push(row);
    return found;
  }

  #done(act) {
    const at = this.element?.dataset.at;
    const root = this.element?.parentElement;
    this.close();
    act();
    root?.querySelector(`[data-at="${at}"]`)?.focus({ preventScroll: true });
    this.close();
  }

  /** Under the token, or above where there is no room; never beyond the sides. */
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

export const about = new About();
