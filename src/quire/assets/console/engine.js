// The engine: what it does, and its memory as it changes.
import { $, ask, events, make } from "./common.js";

const FREE = 0, CACHED = 1, SHARED = 2, PINNED = 3, FIRST = 4, HISTORY = 240;
const series = { "tokens/s": [], running: [], waiting: [], "memory in use, %": [] };
let before = null, scene = null, painted = true;

function colour(cell) {
  const style = getComputedStyle(document.documentElement);
  const names = ["--free", "--cached", "--shared", "--pinned"];
  if (cell < FIRST) return style.getPropertyValue(names[cell]).trim();
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  return `hsl(${((cell - FIRST) * 137.5) % 360} 62% ${dark ? 62 : 42}%)`;
}

let palette = [];
export function paint() {
  palette = Array.from({ length: 256 }, (_, cell) => colour(cell));
  $("legend").replaceChildren(...[["free", FREE], ["found by prefixes", CACHED], ["shared", SHARED],
    ["registered prefix", PINNED], ["one request's, a colour each", FIRST]].flatMap(([name, cell]) => {
    const swatch = make("span", undefined, { class: "swatch" });
    swatch.style.background = palette[cell];
    return [swatch, name];
  }));
}

function fit(canvas, height) {
  const width = Math.max(canvas.clientWidth, 50), scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width];
}

function drawMap(canvas, cells) {
  const width = Math.max(canvas.clientWidth, 50);
  const side = Math.max(2, Math.min(12, Math.floor(Math.sqrt((width * 220) / Math.max(cells.length, 1)))));
  const across = Math.max(1, Math.floor(width / side)), height = Math.ceil(cells.length / across) * side;
  const [context] = fit(canvas, Math.max(height, side));
  const gap = side > 4 ? 1 : 0, places = new Map();
  for (let i = 0; i < cells.length; i++) {
    if (!places.has(cells[i])) places.set(cells[i], []);
    places.get(cells[i]).push(i);
  }
  for (const [cell, all] of places) {
    context.fillStyle = palette[cell];
    for (const i of all) context.fillRect((i % across) * side, Math.floor(i / across) * side, side - gap, side - gap);
  }
}

function drawLine(canvas, values) {
  const height = 48, [context, width] = fit(canvas, height), most = Math.max(...values, 1e-9);
  context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--strong");
  context.lineWidth = 1.5;
  context.beginPath();
  values.forEach((value, i) => {
    const x = width * (1 - (values.length - 1 - i) / HISTORY), y = height - 2 - (height - 6) * (value / most);
    if (i) context.lineTo(x, y); else context.moveTo(x, y);
  });
  context.stroke();
}

function cellsOf(group) {
  return Uint8Array.from(atob(group.cells), (character) => character.charCodeAt(0));
}

const figures = new Map();
function figure(place, name) {
  if (!figures.has(name)) {
    const made = make("figure"), canvas = make("canvas", undefined, { role: "img" }), caption = make("figcaption");
    made.append(caption, canvas);
    place.append(made);
    figures.set(name, { canvas, caption });
  }
  return figures.get(name);
}

const shortly = (value) => value >= 1e6 ? `${(value / 1e6).toFixed(1)}M` : value >= 1e4 ? `${(value / 1e3).toFixed(1)}k`
  : Number.isInteger(value) ? String(value) : value.toFixed(1);

function numbers(now) {
  const rates = { "tokens/s": 0, "ms a step": 0, "rows a step": 0 };
  if (before && now.at > before.at) {
    const steps = now.steps - before.steps;
    rates["tokens/s"] = (now.computed - before.computed) / (now.at - before.at) * 1000;
    if (steps > 0) {
      rates["ms a step"] = (now.step_seconds - before.step_seconds) / steps * 1000;
      rates["rows a step"] = (now.rows - before.rows) / steps;
    }
  }
  const all = Object.values(now.bytes).reduce((a, b) => a + b, 0);
  const held = 100 * (all - now.bytes.free - now.bytes.cached) / Math.max(all, 1);
  const shown = {
    running: now.running, waiting: now.waiting, swapped: now.swapped, ...rates, "memory in use, %": held,
    "host pages": now.sharing.host_pages_used, preempted: Object.values(now.preempted).reduce((a, b) => a + b, 0),
    "found of prompts, %": 100 * now.sharing.hits / Math.max(now.sharing.queries, 1), steps: now.steps,
    "saved by sharing, %": 100 * now.sharing.saved / Math.max(now.sharing.tables, 1),
  };
  $("numbers").replaceChildren(...Object.entries(shown).map(([name, value]) => {
    const box = make("div");
    box.append(make("dt", name), make("dd", shortly(value)));
    return box;
  }));
  for (const name of Object.keys(series)) {
    series[name].push(shown[name]);
    if (series[name].length > HISTORY) series[name].shift();
  }
}

function draw() {
  painted = true;
  const now = scene;
  numbers(now);
  for (const [name, values] of Object.entries(series)) {
    const { canvas, caption } = figure($("charts"), name);
    caption.textContent = `${name}: ${shortly(values[values.length - 1])}`;
    canvas.setAttribute("aria-label", caption.textContent);
    drawLine(canvas, values);
  }
  now.groups.forEach((group, i) => {
    const { canvas, caption } = figure($("groups"), `group ${i}`);
    const kind = group.window ? `window of ${group.window}` : group.kind;
    caption.textContent = `${kind}, ${group.layers} layers: ${group.pages} pages of ${group.page_tokens} tokens, ` +
      `${group.used} used (${group.shared} shared), ${group.cached} cached` + (group.per > 1 ? `; a cell is ${group.per} pages` : "");
    canvas.setAttribute("aria-label", caption.textContent);
    Object.assign(canvas.dataset, { pages: group.pages, used: group.used, shared: group.shared, cached: group.cached });
    drawMap(canvas, cellsOf(group));
  });
  $("requests").replaceChildren(...now.requests.map((one) => {
    const row = make("tr"), name = make("td"), swatch = make("span", undefined, { class: "swatch" });
    swatch.style.background = palette[one.colour];
    name.append(swatch, one.id.slice(0, 24));
    row.append(name, ...[one.state, one.prompt, one.found, one.tokens, one.branches, one.pages, one.preempted].map((value) => make("td", String(value))));
    return row;
  }));
  const rest = now.requests_in_all - now.requests.length;
  $("more").textContent = rest > 0 ? `and ${rest} more` : now.requests_in_all ? "" : "none";
  before = now;
  document.body.dataset.scenes = String(Number(document.body.dataset.scenes || 0) + 1);
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
