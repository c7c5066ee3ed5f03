// What arrives at once is shown one after another, no faster than the eye follows.

const ALL = 2400; // milliseconds for all steps of a text together, if they come faster
const [LEAST, MOST] = [40, 200]; // between two of them

/** Milliseconds between two of so many steps; none for whoever asked for less motion. */
export function between(steps) {
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return 0;
  return Math.max(LEAST, Math.min(MOST, ALL / Math.max(1, steps)));
}

export class Pace {
  constructor(show) {
    Object.assign(this, { show, queue: [], wait: 0, timer: undefined, idle: () => {} });
  }

  push(thing) {
    this.queue.push(thing);
    if (this.timer === undefined) this.#next();
  }

  #next() {
    this.timer = undefined;
    while (this.queue.length) {
      this.show(this.queue.shift());
      if (this.wait === 0) continue;
      this.timer = setTimeout(() => this.#next(), this.wait);
      return;
    }
    this.idle();
  }

  /** Resolves when all that came so far has been shown. */
  drained() {
    if (this.timer === undefined) return Promise.resolve();
    return new Promise((resolve) => (this.idle = resolve));
  }

  clear() {
    clearTimeout(this.timer);
    this.timer = undefined;
    this.queue = [];
    this.idle();
  }
}
