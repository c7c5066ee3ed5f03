// What is said, where it is looked for: at the button that was pressed.

import { Sentence } from "./asking.js";
import { find } from "./make.js";
import { Refused } from "./server.js";

const top = find("notice"); // for what nobody pressed a button for

export class Notices {
  constructor() {
    this.place = top;
  }

  /** From now on at this button: in the line under its row. */
  at(button) {
    this.say("");
    this.place = button.closest(".actions").nextElementSibling;
  }

  say(message, kind = "") {
    const { place } = this;
    place.textContent = message;
    place.className = `notice ${kind}`;
    if (message) place.scrollIntoView({ block: "nearest" });
  }

  clear() {
    this.say("");
    this.place = top;
  }

  /** Kindly what went wrong. */
  tell(error) {
    const known = error instanceof Sentence || error instanceof Refused;
    const message = error.message.replace(/\.?$/, ".");
    this.say(error instanceof Sentence ? message : known ? `That did not work: ${message}` : `Something went wrong in this page: ${message}`, "error");
    if (!known) console.error(error);
  }
}
