// The card of a token: how likely it was, what else it could have been, and what may be done with it.

import { Card } from "./card.js";
import { masked } from "./cells.js";
import { make, percent, visible } from "./make.js";

class About extends Card {
  /** actions: [{ label, act }]; take(other): a runner-up is chosen, undefined where that is not offered. */
  show(element, cell, { actions, take, ...how }) {
    this.open(element, this.#content(cell, actions, take), how);
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
}

export const about = new About("About this token");
