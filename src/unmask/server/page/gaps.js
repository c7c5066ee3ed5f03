// Gaps in a text, as the server spells them: [MASK] is one token, [MASK:5] five, [MASK:1..8] as many as fit best.
// Whoever types a run of underscores means such a gap too. No function here touches the page.

const GAP = /\[MASK(?::(\d+)(?:\.\.(\d+))?)?\]|_{2,}/g;
const LENGTHS = 8; // that are tried of a gap unless more is asked for
const TRIED = 32; // ways to read all gaps of a text together: each is written and scored
const OWN = 4; // tokens of a gap in whose place nothing stood

/** The gaps of a text: where each begins and ends, its least and most tokens; loose: a run of underscores. */
export function gapsIn(text) {
  return [...text.matchAll(GAP)].map((found) => {
    const [all, least, most] = found;
    const place = { from: found.index, to: found.index + all.length, loose: all.startsWith("_") };
    return { ...place, least: Number(least ?? 1), most: Number(most ?? least ?? 1) };
  });
}

export const spelling = ({ least, most }) => (least === most ? `[MASK:${least}]` : `[MASK:${least}..${most}]`);

export function label({ least, most, loose = false }) {
  if (loose || (least === 1 && most > 1)) return "as long as fits";
  return least === most ? `${least} token${least === 1 ? "" : "s"}` : `${least}–${most} tokens`;
}

/** A new gap for this text: as long as fits, as far as the other gaps leave lengths to try; else as long as the words
    that stood there, own tokens. */
export function fresh(text, own = OWN) {
  const spelled = gapsIn(text).filter(({ loose }) => !loose);
  const taken = spelled.reduce((ways, { least, most }) => ways * Math.max(1, most + 1 - least), 1);
  const num = Math.min(LENGTHS, Math.floor(TRIED / taken));
  if (num < 2) return { least: own, most: own };
  const least = own <= num ? 1 : own - Math.floor(num / 2);
  return { least, most: least + num - 1 };
}

/** The text with every run of underscores spelled out, save one that the caret is at: it may still grow. */
export function settled(text, caret = -1) {
  let found = text;
  for (;;) {
    const loose = gapsIn(found).find(({ loose, from, to }) => loose && !(from <= caret && caret <= to));
    if (loose === undefined) return { text: found, caret };
    const spelled = spelling(fresh(found));
    found = found.slice(0, loose.from) + spelled + found.slice(loose.to);
    if (caret > loose.from) caret += spelled.length - (loose.to - loose.from);
  }
}
