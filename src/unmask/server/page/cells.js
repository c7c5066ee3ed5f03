// Rows of cells: what the page knows of each token. No function here touches the page, and none changes what it is given.
//
// A cell: id (null: masked), text, given (typed, not written), prob, others (runners-up), step, locked, was (before it was
// masked by hand).

export const masked = (cell) => cell.id === null;

/** The canvas before the first step. carry: the row as it stood, of which this is a continuation. */
export function fromStart(event, begin, carry) {
  return event.rows.map((row) =>
    row.slice(begin).map(({ token, text }, k) => {
      if (text === null) return { id: null };
      return carry?.[k]?.id === token ? carry[k] : { id: token, text, given: true };
    }),
  );
}

/** The rows after a step. */
export function afterStep(rows, step, begin) {
  const next = rows.map((row) => row.slice());
  for (const [row, position] of step.remasked) {
    if (position >= begin) next[row][position - begin] = { id: null, remasked: true };
  }
  step.position.forEach((position, k) => {
    if (position < begin) return;
    const prob = step.model_prob?.[k] ?? Math.exp(step.log_prob[k] ?? -Infinity);
    const cell = { id: step.token[k], text: step.text[k], prob, others: step.others?.[k] ?? [], step: step.step };
    next[step.row[k]][position - begin] = cell;
  });
  return next;
}

const SIDE_BY_SIDE = ["position", "token", "text", "log_prob", "model_prob", "others"]; // lists of a step

/** Of rows that were written together these, with the steps that wrote them. */
export function only({ start, steps }, wanted, begin) {
  const place = new Map(wanted.map((row, i) => [row, i]));
  const mine = [];
  for (const step of steps) {
    const keep = step.row.flatMap((of, k) => (place.has(of) ? [k] : []));
    const remasked = step.remasked.filter(([of]) => place.has(of)).map(([of, at]) => [place.get(of), at]);
    if (!keep.length && !remasked.length) continue;
    const one = { ...step, step: mine.length + 1, row: keep.map((k) => place.get(step.row[k])), remasked };
    for (const name of SIDE_BY_SIDE) if (step[name]) one[name] = keep.map((k) => step[name][k]);
    mine.push(one);
  }
  const began = wanted.map((row) => start[row]);
  return { start: began, steps: mine, rows: mine.reduce((rows, step) => afterStep(rows, step, begin), began) };
}

/** What is shown of a row: nothing behind its end. */
export function upToEnd(row, end) {
  const at = row.findIndex((cell) => cell.id === end && !cell.given);
  return at < 0 ? row : row.slice(0, at);
}

const BYTE = /^<0x([0-9A-F]{2})>$/;

/** How each cell of a row is spelled. Bytes that make a character together stand with the first of them; the others are
    empty. Bytes that make none, as long as their neighbours are masked, stay as the server names them. */
export function spelled(row) {
  const found = row.map((cell) => (masked(cell) ? null : cell.text));
  const byte = (k) => parseInt(found[k]?.match(BYTE)?.[1] ?? "", 16);
  for (let k = 0; k < row.length; k += 1) {
    const first = byte(k);
    const length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : first >= 0xc2 ? 2 : 0;
    const bytes = Array.from({ length }, (_, i) => byte(k + i));
    if (!length || bytes.some(Number.isNaN)) continue;
    try {
      found[k] = new TextDecoder("utf-8", { fatal: true }).decode(Uint8Array.from(bytes));
      found.fill("", k + 1, k + length);
    } catch {
      // Not a character.
    }
  }
  return found;
}

/** The row as text. Masks that stand together are one gap; where words bring their spaces, it has one before it. */
export function textOf(row) {
  const leads = row.some((cell) => !masked(cell) && /^ \S/.test(cell.text));
  const texts = spelled(row);
  let found = "";
  for (let k = 0; k < row.length; k += 1) {
    if (texts[k] !== null) {
      found += texts[k];
      continue;
    }
    let end = k;
    while (end + 1 < row.length && texts[end + 1] === null) end += 1;
    found += `${leads && found !== "" && !found.endsWith(" ") ? " " : ""}[MASK:${end + 1 - k}]`;
    k = end;
  }
  return found;
}

/** Ids for the server, null for each mask. */
export const ids = (row) => row.map((cell) => cell.id);

export function changed(row, at, change) {
  return row.map((cell, k) => (k === at ? change(cell) : cell));
}

export const masking = (cell) => ({ id: null, was: cell });
export const unmasking = (cell) => cell.was ?? cell;
export const locking = (cell) => ({ ...cell, locked: !cell.locked });

/** Another token in the place of this one, which becomes a runner-up. */
export function taking(cell, other) {
  const mine = { token: cell.id, text: cell.text, model_prob: cell.prob };
  const others = [mine, ...cell.others.filter((o) => o.token !== other.token)];
  others.sort((a, b) => b.model_prob - a.model_prob);
  return { ...cell, id: other.token, text: other.text, prob: other.model_prob, others, locked: true };
}

/** Everything that was written and is not locked, masked again. */
export function anew(row) {
  return row.map((cell) => (masked(cell) || cell.given || cell.locked ? cell : masking(cell)));
}

/** 0 (unlikely) to 4 (sure). */
export function sureness(prob) {
  return [0.1, 0.3, 0.6, 0.9].filter((edge) => prob >= edge).length;
}

/** 0 (opened first) to 5 (opened last). */
export function lateness(step, steps) {
  return Math.max(0, Math.min(5, Math.floor((6 * (step - 1)) / Math.max(1, steps))));
}

/** Words of a scored text: tokens up to the next space, with their bits together. */
export function words(text, tokens) {
  const points = Array.from(text); // the server counts characters, JavaScript half of some
  const found = [];
  for (const token of tokens) {
    const piece = points.slice(token.start, token.end).join("");
    const last = found.at(-1);
    if (last === undefined || /^\s/.test(piece) || /\s$/.test(last.text)) found.push({ text: "", bits: 0, tokens: [], end: 0 });
    const word = found.at(-1);
    word.text += points.slice(Math.max(token.start, word.end), token.end).join("");
    word.end = token.end;
    word.tokens.push(token);
    word.bits = token.nats === null || token.nats === undefined ? word.bits : word.bits + token.nats / Math.LN2;
  }
  return found;
}
