// Markdown as elements. Text becomes text nodes, never HTML. Only links to http and https become links. Pictures become
// links, since the page loads nothing from other hosts.
import { make } from "./common.js";

const MAX_DEPTH = 8; // of nested blocks and of nested marks; deeper ones stay text
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`]*)$/, HEADING = /^ {0,3}(#{1,6}) +(.*)$/, QUOTE = /^ {0,3}> ?/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/, ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const DELIMITERS = /^ *\|?(?: *:?-+:? *\|)+(?: *:?-+:? *)?$/; // of a table, below its header
const INLINE = new RegExp([
  /\\(?<escaped>[!-/:-@[-`{-~])/,
  /(?<!`)(?<ticks>`{1,3})(?!`)(?<code>.{1,1000}?)(?<!`)\k<ticks>(?!`)/,
  /(?<image>!?)\[(?<label>[^[\]\n]{1,500})\]\((?<href>https?:\/\/(?:[^\s()<>]|\([^\s()<>]{0,200}\)){1,2000})(?: "[^"\n]{0,200}")?\)/,
  /(?<url>https?:\/\/[^\s<>"`]{0,2000}[^\s<>"`.,;:!?)'*_\]])/,
  /(?<mark>\*{1,3}|~~|(?<!\w)_{1,3})(?![\s*_~])(?<inner>.{1,1000}?)(?<![\s*_~])\k<mark>(?![*~]|(?<=_)\w)/,
].map(({ source }) => source).join("|"), "gs");
const MARKS = { 1: ["em"], 2: ["strong"], 3: ["strong", "em"], "~~": ["del"] };

// Appends a paragraph's text to `parent`, with its links, codes and marks as elements.
function inline(parent, text, depth = 0) {
  let from = 0;
  for (const { index, 0: whole, groups } of depth > MAX_DEPTH ? [] : text.matchAll(INLINE)) {
    parent.append(text.slice(from, index));
    from = index + whole.length;
    const href = groups.href || groups.url;
    if (groups.escaped) {
      parent.append(groups.escaped);
    } else if (groups.code) {
      parent.append(make("code", groups.code.replace(/^ (.*) $/s, "$1")));
    } else if (href && !parent.closest("a")) {
      const link = make("a", undefined, { href, rel: "noopener noreferrer", target: "_blank" });
      parent.append(link);
      inline(link, groups.label || href, groups.label ? depth + 1 : MAX_DEPTH + 1);
    } else if (href) {
      parent.append(whole);
    } else {
      let place = parent;
      for (const name of MARKS[groups.mark] || MARKS[groups.mark.length]) place = place.appendChild(make(name));
      inline(place, groups.inner, depth + 1);
    }
  }
  parent.append(text.slice(from));
}

async function copy(code, button) {
  try {
    await navigator.clipboard.writeText(code.textContent);
  } catch { // over plain HTTP, except from this machine, there is no clipboard
    getSelection().selectAllChildren(code);
    document.execCommand("copy");
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

function codeBlock(language, text) {
  const box = make("div", undefined, { class: "code" }), button = make("button", "Copy", { type: "button" });
  const code = make("code", text), pre = make("pre", undefined, { tabindex: 0 }), bar = make("div");
  button.addEventListener("click", () => copy(code, button));
  pre.append(code);
  bar.append(make("span", language.trim()), button);
  box.append(bar, pre);
  return box;
}

const cells = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());

function table([header, delimiters, ...rows]) {
  const sides = cells(delimiters).map((cell) => cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left");
  const row = (line, name) => {
    const made = make("tr"), given = cells(line);
    for (const [i, side] of sides.entries()) {
      const cell = make(name);
      cell.style.textAlign = side;
      inline(cell, given[i] || "");
      made.append(cell);
    }
    return made;
  };
  const box = make("div", undefined, { class: "scroll", tabindex: 0 }), made = make("table"), head = make("thead"), body = make("tbody");
  head.append(row(header, "th"));
  body.append(...rows.map((line) => row(line, "td")));
  made.append(head, body);
  box.append(made);
  return box;
}

// Returns the end of the block that begins at line `at`, and a function that makes its element. With `joined`, a
// paragraph precedes the line: returns null if the line belongs to it. A numbered list ends a paragraph only if it begins
// with 1.
function block(lines, at, depth, joined = false) {
  const line = lines[at], until = (ends, end = at + 1) => {
    while (end < lines.length && !ends(lines[end], end)) end++;
    return end;
  };
  const fence = FENCE.exec(line), heading = HEADING.exec(line), item = ITEM.exec(line);
  if (fence) {
    const indent = line.search(/\S/), close = until((other) => other.trim().startsWith(fence[1]) && !/[^`~]/.test(other.trim()));
    const inside = lines.slice(at + 1, close).map((other) => other.slice(Math.min(indent, other.search(/\S|$/))));
    return [close + 1, () => codeBlock(fence[2], inside.join("\n"))];
  }
  if (heading) {
    return [at + 1, () => {
      const made = make(`h${Math.min(6, heading[1].length + 2)}`); // the page has h1 and h2
      inline(made, heading[2]);
      return made;
    }];
  }
  if (RULE.test(line)) return [at + 1, () => make("hr")];
  if (QUOTE.test(line) && depth < MAX_DEPTH) {
    const end = until((other) => !QUOTE.test(other));
    return [end, () => fill(make("blockquote"), lines.slice(at, end).map((other) => other.replace(QUOTE, "")), depth + 1)];
  }
  if (item && depth < MAX_DEPTH && !(joined && /\d/.test(item[2]) && parseInt(item[2], 10) !== 1)) return list(lines, at, item, depth);
  if (line.includes("|") && DELIMITERS.test(lines[at + 1] ?? "")) {
    const end = until((other) => !other.includes("|"), at + 2);
    return [end, () => table(lines.slice(at, end))];
  }
  if (joined) return null;
  const end = until((other, i) => !other.trim() || block(lines, i, depth, true));
  return [end, () => {
    const made = make("p");
    inline(made, lines.slice(at, end).join("\n").trim());
    return made;
  }];
}

// Returns the same as `block` for a list, whose first line matches ITEM.
function list(lines, at, [, { length: indent }, marker], depth) {
  const starts = [], kind = /\d/.test(marker) ? "ol" : "ul";
  let end = at;
  for (let i = at; i < lines.length; i++) {
    if (!lines[i].trim()) continue;
    const item = ITEM.exec(lines[i]), same = item && item[1].length === indent && item[2].at(-1) === marker.at(-1);
    if (same && !RULE.test(lines[i])) starts.push(i);
    else if (lines[i].search(/\S/) <= indent) break;
    end = i + 1;
  }
  return [end, () => {
    const made = make(kind, undefined, kind === "ol" ? { start: parseInt(marker, 10) } : {});
    for (const [i, start] of starts.entries()) {
      const offset = ITEM.exec(lines[start])[0].length, inside = lines.slice(start, starts[i + 1] ?? end).map((line, j) =>
        line.slice(j ? Math.min(offset, line.search(/\S|$/)) : offset));
      made.append(fill(make("li"), inside, depth + 1));
    }
    return made;
  }];
}

// Yields the source of each block, and a function that makes its element.
function* blocks(lines, depth) {
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const [end, build] = block(lines, at, depth);
    yield [lines.slice(at, end).join("\n"), build];
    at = end;
  }
}

function fill(parent, lines, depth) {
  for (const [, build] of blocks(lines, depth)) parent.append(build());
  return parent;
}

// Shows `text` in `place`. As it grows, elements of blocks that haven't changed stay.
export function render(place, text) {
  const lines = text.split(/\r?\n/).map((line) => line.replace(/^[ \t]+/, (space) => space.replaceAll("\t", "    ")));
  const shown = place.shown || (place.shown = []); // {source, made} of each block
  let count = 0;
  for (const [source, build] of blocks(lines, 0)) {
    const old = shown[count];
    if (!old || old.source !== source) {
      const made = build();
      if (old) old.made.replaceWith(made);
      else place.append(made);
      shown[count] = { source, made };
    }
    count++;
  }
  for (const { made } of shown.splice(count)) made.remove();
}
