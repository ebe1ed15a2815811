// What the console draws: maps of pages, and lines.
import { $, make } from "./common.js";

const FREE = 0, CACHED = 1, SHARED = 2, PINNED = 3, FIRST = 4;
const ORANGE = 40, PURPLE = [240, 310]; // hues of shared and pinned pages, which requests don't get
export let palette = [];

function colour(cell) {
  const style = getComputedStyle(document.documentElement);
  const names = ["--free", "--cached", "--shared", "--pinned"];
  if (cell < FIRST) return style.getPropertyValue(names[cell]).trim();
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const skipped = ORANGE + PURPLE[1] - PURPLE[0];
  const hue = ORANGE + ((((cell - FIRST) * 137.5) % 360) * (360 - skipped)) / 360;
  return `hsl(${hue < PURPLE[0] ? hue : hue + PURPLE[1] - PURPLE[0]} 62% ${dark ? 62 : 42}%)`;
}

export function paint() {
  palette = Array.from({ length: 256 }, (_, cell) => colour(cell));
  $("legend").replaceChildren(...[["free", FREE], ["cached", CACHED], ["shared", SHARED],
    ["registered prefix", PINNED], ["used by one request, a colour each", FIRST]].flatMap(([name, cell]) => {
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

// A square for each of `cells`. Returns how many there are of each kind.
export function drawMap(canvas, cells) {
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
  const count = (cell) => (places.get(cell) || []).length, found = { free: count(FREE), cached: count(CACHED),
    shared: count(SHARED), pinned: count(PINNED) };
  return { ...found, owned: cells.length - Object.values(found).reduce((a, b) => a + b, 0) };
}

// A line through `values` of `times`, from 0 at the bottom to the greatest at the top; where one is null there is none,
// and one alone is a dot.
export function drawLine(canvas, times, values) {
  const height = 48, [context, width] = fit(canvas, height), most = Math.max(...values, 1e-9);
  const first = times[0], last = times.at(-1);
  context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--strong");
  context.lineWidth = 1.5;
  context.lineCap = "round";
  context.beginPath();
  values.forEach((value, i) => {
    if (value === null) return;
    const x = last > first ? 2 + (width - 4) * (times[i] - first) / (last - first) : width - 2;
    const y = height - 2 - (height - 6) * (value / most);
    if ((values[i - 1] ?? null) === null) context.moveTo(x - 1, y);
    context.lineTo(x, y);
  });
  context.stroke();
}
