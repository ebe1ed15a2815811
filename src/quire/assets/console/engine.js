// The engine: what it does, and its memory as it changes.
import { allowImages } from "./chat.js";
import { $, ask, events, make } from "./common.js";
import { drawLine, drawMap, palette } from "./draw.js";

const HISTORY = 240; // values of a chart
const ROWS = 12; // of a table, unless all are asked for
const HELP = {
  running: "Requests that take part in steps",
  waiting: "Requests in the queue: new ones, and preempted ones that are computed again",
  swapped: "Requests that were preempted and whose pages wait in the host's memory",
  "tokens/s": "Tokens that the model computes each second, of prompts and outputs",
  "ms per step": "Time of a step: one pass of the model over a batch",
  "slices per step": "Sequences in a step's batch, on average",
  "memory in use, %": "Part of the KV memory that requests hold, without cached pages that could be dropped",
  "host pages": "Pages of the host's memory that hold swapped requests",
  preempted: "How often a request gave up its memory to others, since the start",
  "prefix hit rate, %": "Part of all prompts' tokens that was found in the prefix cache and not computed again, since the start",
  "drafts accepted, %": "Part of the draft tokens of speculative decoding that the model accepted, since the start",
  "accepted length": "Tokens that a sequence with draft tokens gets from a step, on average since the start",
  steps: "Passes of the model over a batch, since the start",
  "saved by sharing, %": "Part of the memory that requests would need without shared pages and that sharing saves",
  "ms to the first token": "From a request's arrival to its first token, on average of the last moment",
  "ms between tokens": "From one token of a request to its next, on average of the last moment",
};
const times = [], series = {
  "tokens/s": [], "ms to the first token": [], "ms between tokens": [], running: [], waiting: [], "memory in use, %": [],
};
let before = null, scene = null, painted = true;

// A group's pages, or its host pages: those of nobody are told as none.
function cellsOf({ cells, pages, per }) {
  if (!cells) return new Uint8Array(Math.ceil(pages / per));
  return Uint8Array.from(atob(cells), (character) => character.charCodeAt(0));
}

const figures = new Map();
function figure(place, name) {
  if (!figures.has(name)) {
    const made = make("figure"), canvas = make("canvas", undefined, { role: "img" }), caption = make("figcaption");
    const scale = make("p", "", { class: "scale" });
    if (HELP[name]) made.title = HELP[name];
    made.append(caption, canvas, scale);
    place.append(made);
    figures.set(name, { made, canvas, caption, scale });
  }
  return figures.get(name);
}

const boxes = new Map();
function box(name) {
  if (!boxes.has(name)) {
    const made = make("div", undefined, { title: HELP[name] }), value = make("dd");
    made.append(make("dt", name), value);
    $("numbers").append(made);
    boxes.set(name, value);
  }
  return boxes.get(name);
}

export function explain() {
  $("help").replaceChildren(...Object.entries(HELP).flatMap(([name, text]) => [make("dt", name), make("dd", text)]));
}

const shortly = (value) => value === null ? "-" : value >= 1e6 ? `${(value / 1e6).toFixed(1)}M` : value >= 1e4 ? `${(value / 1e3).toFixed(1)}k`
  : Number.isInteger(value) ? String(value) : value.toFixed(1);

// The mean of the latencies since the scene before, in ms; null: there were none.
function latency(now, kind) {
  const [count, seconds] = now.latencies[kind], [counted, summed] = before ? before.latencies[kind] : [count, seconds];
  return count > counted ? (seconds - summed) / (count - counted) * 1000 : null;
}

function numbers(now) {
  const rates = { "tokens/s": 0, "ms per step": 0, "slices per step": 0 };
  if (before && now.at > before.at) {
    const steps = now.steps - before.steps;
    rates["tokens/s"] = (now.computed - before.computed) / (now.at - before.at) * 1000;
    if (steps > 0) {
      rates["ms per step"] = (now.step_seconds - before.step_seconds) / steps * 1000;
      rates["slices per step"] = (now.rows - before.rows) / steps;
    }
  }
  const all = Object.values(now.bytes).reduce((a, b) => a + b, 0);
  const held = 100 * (all - now.bytes.free - now.bytes.cached) / Math.max(all, 1);
  const shown = {
    running: now.running, waiting: now.waiting, swapped: now.swapped, ...rates, "memory in use, %": held,
    "host pages": now.sharing.host_pages_used, preempted: Object.values(now.preempted).reduce((a, b) => a + b, 0),
    "prefix hit rate, %": 100 * now.sharing.hits / Math.max(now.sharing.queries, 1),
    ...(now.drafts && { "drafts accepted, %": 100 * now.drafts.accepted, "accepted length": now.drafts.length }),
    steps: now.steps, "saved by sharing, %": 100 * now.sharing.saved / Math.max(now.sharing.tables, 1),
  };
  const lines = { ...shown, "ms to the first token": latency(now, "first"), "ms between tokens": latency(now, "between") };
  for (const [name, value] of Object.entries(shown)) box(name).textContent = shortly(value);
  times.push(now.at);
  for (const name of Object.keys(series)) series[name].push(lines[name]);
  if (times.length > HISTORY) for (const values of [times, ...Object.values(series)]) values.shift();
}

function drawCharts() {
  const seconds = Math.round((times.at(-1) - times[0]) / 1000), span = seconds < 120 ? `${seconds} s` : `${Math.round(seconds / 60)} min`;
  for (const [name, values] of Object.entries(series)) {
    const known = values.filter((value) => value !== null), { made, canvas, caption, scale } = figure($("charts"), name);
    made.hidden = !known.length;
    if (made.hidden) continue;
    caption.textContent = `${name}: ${shortly(known.at(-1))}`;
    scale.textContent = `min ${shortly(Math.min(...known))}, max ${shortly(Math.max(...known))}, last ${span}`;
    canvas.setAttribute("aria-label", `${caption.textContent}; ${scale.textContent}`);
    drawLine(canvas, times, values);
  }
}

// What is on a canvas is its label too, and says how many cells of each kind there are.
function map(name, kind, of, told) {
  const { canvas, caption } = figure($("groups"), name);
  canvas.hidden = !of.cells; // there are no cells if no host page is used
  caption.textContent = told + (of.per > 1 ? `; a cell is ${of.per} pages` : "");
  canvas.setAttribute("aria-label", caption.textContent);
  Object.assign(canvas.dataset, { kind, pages: of.pages, used: of.used, ...drawMap(canvas, cellsOf(of)) });
  return canvas;
}

function drawGroup(group, i) {
  const { host } = group, kind = group.window ? `window-${group.window}` : group.kind;
  const free = group.pages - group.used - group.cached, shared = `${group.shared} shared, saving ${group.saved}`;
  const layers = `${group.layers} layer${group.layers === 1 ? "" : "s"}`;
  const held = group.kind === "state" ? `of a state, cached after every ${group.page_tokens} tokens` : `of ${group.page_tokens} tokens`;
  const canvas = map(`group ${i}`, kind, group, `${kind}, ${layers}: ${group.pages} pages ${held}, ${group.used} used (${shared}), ${group.cached} cached, ` +
    `${free} ${group.common ? "free or another group's" : "free"}`);
  Object.assign(canvas.dataset, { saved: group.saved, bytes: group.page_bytes });
  if (host.pages) {
    map(`host ${i}`, kind, host, `${kind}, swapped out: ${host.used} of ${host.pages} host pages (${host.shared} shared)`);
  }
}

// The last steps, the latest first: as the engine notes them while somebody watches.
let steps = [];
function drawSteps(last) {
  const seen = steps.length ? steps[0][0] : 0, known = last.length && last[last.length - 1][0] < seen ? [] : steps;
  steps = [...last.filter(([step]) => known !== steps || step > seen).reverse(), ...known].slice(0, ROWS);
  $("steps").closest("table").hidden = !steps.length;
  $("no-steps").hidden = steps.length > 0;
  $("steps").replaceChildren(...steps.map((step) => {
    const row = make("tr");
    row.append(...step.map((value, i) => make("td", i < 5 ? String(value) : value.toFixed(1))));
    return row;
  }));
}

let all = false; // true: all listed requests are shown, not only the first
export function toggleAll() {
  all = !all;
  if (scene) drawRequests(scene);
}

function drawRequests(now) {
  const shown = all ? now.requests : now.requests.slice(0, ROWS), unlisted = now.requests_in_all - now.requests.length;
  $("count").textContent = now.requests_in_all;
  $("requests").closest("table").hidden = !shown.length;
  $("requests").replaceChildren(...shown.map((one) => {
    const row = make("tr"), name = make("td", undefined, { title: one.id }), swatch = make("span", undefined, { class: "swatch" });
    swatch.style.background = palette[one.colour];
    name.append(swatch, one.id.slice(0, 24));
    row.append(name, ...[one.state, one.prompt, one.found, one.tokens, one.branches, one.pages, one.preempted].map((value) => make("td", String(value))));
    return row;
  }));
  $("all").hidden = now.requests.length <= ROWS;
  $("all").textContent = all ? "Fewer" : `${now.requests_in_all - ROWS} more`;
  $("more").textContent = !now.requests_in_all ? "none" : all && unlisted ? `and ${unlisted} more, which are not listed` : "";
}

function draw() {
  painted = true;
  const now = scene;
  numbers(now);
  drawCharts();
  now.groups.forEach(drawGroup);
  drawSteps(now.last);
  drawRequests(now);
  allowImages(now.images);
  before = now;
  const scenes = Number(document.body.dataset.scenes || 0) + 1;
  Object.assign(document.body.dataset, { scenes, steps: now.steps, seconds: now.step_seconds });
}

export async function watch() {
  for (;;) {
    try {
      const models = await ask("../v1/models");
      if (models.status === 401) {
        $("unlock").hidden = false;
        $("state").textContent = "a key is needed";
        return;
      }
      $("unlock").hidden = true;
      $("model").textContent = (await models.json()).data[0].id;
      const response = await ask("events");
      if (!response.ok) throw new Error(`status ${response.status}`);
      $("state").textContent = "live";
      for await (const data of events(response)) {
        scene = JSON.parse(data);
        scene.at = performance.now();
        if (painted) {
          painted = false;
          requestAnimationFrame(draw);
        }
      }
    } catch (error) {
      $("state").textContent = `not connected: ${error.message}`;
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}
