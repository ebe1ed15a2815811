// The texts of one request as a tree: what several of them begin with stands once, and they part where they do. They are
// compared token by token where the borders of tokens are known, else word by word, and in scripts that have no spaces
// between words letter by letter.
import { make } from "./common.js";

const letters = new Intl.Segmenter(undefined, { granularity: "grapheme" });
const SPACED = /^[\u0000-\u1fff\u2010-\u205e]*$/u; // scripts with spaces between words

function words(text) {
  const found = text.match(/\s*\S+|\s+/g) || [];
  return found.flatMap((word) => SPACED.test(word) ? [word] : Array.from(letters.segment(word), ({ segment }) => segment));
}

// The parts of an answer, [text, log-probability or null] as they came, cut into pieces that don't depend on how they
// came.
export function cut(parts) {
  const pieces = [];
  let loose = "";
  const settle = () => {
    for (const word of words(loose)) pieces.push([word, null]);
    loose = "";
  };
  for (const [text, logprob] of parts) {
    if (logprob === null) {
      loose += text;
    } else {
      settle();
      pieces.push([text, logprob]);
    }
  }
  settle();
  return pieces;
}

// Pieces as text: a coloured span for each that has a log-probability, one text for those between.
function spans(pieces) {
  const made = [];
  let loose = "";
  for (const [text, logprob] of pieces) {
    if (logprob === null) {
      loose += text;
      continue;
    }
    if (loose) made.push(loose);
    loose = "";
    const span = make("span", text), share = Math.exp(logprob);
    span.style.background = `color-mix(in srgb, var(--high) ${Math.round(100 * share)}%, var(--low))`;
    span.title = `${(100 * share).toFixed(1)} %`;
    made.push(span);
  }
  return loose ? [...made, loose] : made;
}

// Items for what `samples` ({pieces, fate, name}) say from their piece `from` on; those before are the same in all.
function grow(list, samples, from) {
  const groups = new Map();
  for (const sample of samples) {
    const first = sample.pieces.length > from ? sample.pieces[from][0] : null;
    groups.set(first, [...(groups.get(first) || []), sample]);
  }
  for (const group of groups.values()) {
    const [{ pieces, fate }] = group;
    let to = from;
    while (to < pieces.length && group.every((one) => to < one.pieces.length && one.pieces[to][0] === pieces[to][0])) to++;
    const item = make("li"), text = make("span", undefined, { class: "text" });
    text.append(...spans(pieces.slice(from, to)));
    item.append(text);
    if (group.every((one) => one.pieces.length === to)) {
      const names = samples.length > 1 || group.length > 1 ? group.map((one) => one.name).join(", ") : "";
      if (names || fate) item.append(make("span", ` ${[names, fate].filter(Boolean).join(" ")}`, { class: "fate" }));
    } else {
      const inner = make("ul", undefined, { class: "tree" });
      grow(inner, group, to);
      item.append(inner);
    }
    list.append(item);
  }
}

// `samples`: {parts, fate}.
export function show(place, samples) {
  const list = make("ul", undefined, { class: samples.length > 1 ? "tree" : "tree alone" });
  grow(list, samples.map(({ parts, fate }, at) => ({ pieces: cut(parts), fate, name: `#${at + 1}` })), 0);
  place.replaceChildren(list);
}
