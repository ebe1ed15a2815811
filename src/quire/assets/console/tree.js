// Samples of one request as a tree.
import { make } from "./common.js";

// A sample's pieces: [text, log-probability or null].
function piece([text, logprob]) {
  const made = make("span", text);
  if (logprob !== null) {
    const share = Math.exp(logprob);
    made.style.background = `color-mix(in srgb, var(--high) ${Math.round(100 * share)}%, var(--low))`;
    made.title = `${(100 * share).toFixed(1)} %`;
  }
  return made;
}

// Samples that begin alike share a branch of the tree.
function grow(list, samples) {
  const groups = new Map();
  for (const sample of samples) {
    const first = sample.pieces.length ? sample.pieces[0][0] : "";
    groups.set(first, [...(groups.get(first) || []), sample]);
  }
  for (const group of groups.values()) {
    let common = 0;
    while (group.every((s) => common < s.pieces.length && s.pieces[common][0] === group[0].pieces[common][0])) common++;
    if (group.length === 1) common = group[0].pieces.length;
    const item = make("li");
    const text = make("span", undefined, { class: "text" });
    text.append(...group[0].pieces.slice(0, common).map(piece));
    item.append(text);
    if (group.length === 1) {
      if (group[0].fate) item.append(make("span", ` ${group[0].fate}`, { class: "fate" }));
    } else if (group.every((s) => s.pieces.length === common)) {
      item.append(make("span", ` ${group.length} samples alike ${group[0].fate}`, { class: "fate" }));
    } else {
      const inner = make("ul", undefined, { class: "tree" });
      grow(inner, group.map((s) => ({ pieces: s.pieces.slice(common), fate: s.fate })));
      item.append(inner);
    }
    list.append(item);
  }
}

export function show(place, samples) {
  const list = make("ul", undefined, { class: samples.length > 1 ? "tree" : "tree alone" });
  grow(list, samples);
  place.replaceChildren(list);
}

