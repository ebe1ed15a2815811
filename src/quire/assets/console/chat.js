// The conversation.
import { $, ask, events, make } from "./common.js";
import { render } from "./markdown.js";
import { show } from "./tree.js";

const STORED = "quire-conversation", MAX_STORED = 500_000; // UTF-16 units, which are 1 MB
const PARAMETERS = ["temperature", "top_p", "max_tokens", "seed", "n"];

// Exchanges {text, images, lost, samples}: a message with its pictures as data: URIs and the number of those that a
// reload lost, and the samples {parts, fate, thoughts} of the answer. A part is [text, log-probability or null].
// `stopper` stops the answer that is under way. A new conversation replaces this object, so that an answer that ends
// later belongs to the old one.
let talk = { exchanges: [], stopper: null };
let acceptsImages = false; // if the model does
let images = []; // of the next message

export function begin() {
  stop();
  talk = { exchanges: [], stopper: null };
  $("log").replaceChildren();
  attach([]);
  store();
  settle();
}

// The log follows the answer unless the user has scrolled up.
let following = true;
export function noteScroll() {
  const log = $("log");
  following = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

export function follow() {
  if (following) $("log").scrollTop = $("log").scrollHeight;
}

export function stop() {
  if (talk.stopper) talk.stopper.abort();
}

function settle() {
  $("stop").disabled = !talk.stopper;
  $("send").disabled = Boolean(talk.stopper);
  if (!talk.stopper) $("message").focus();
}

// What the model sees of an answer: its first sample.
const textOf = (sample) => sample.parts.map(([text]) => text).join("");
const answer = ({ samples }) => samples[0] ? textOf(samples[0]) : "";

// Stores the newest exchanges that have an answer in this tab, without pictures.
export function store() {
  const kept = [];
  let room = MAX_STORED;
  for (const exchange of talk.exchanges.filter(answer).reverse()) {
    const lost = exchange.lost + exchange.images.length, written = JSON.stringify({ ...exchange, images: [], lost });
    room -= written.length + 1;
    if (room < 1) break;
    kept.unshift(written);
  }
  try {
    sessionStorage.setItem(STORED, `[${kept.join()}]`);
  } catch { // a browser may refuse to store; then a reload begins a new conversation
  }
}

export function restore() {
  talk.exchanges = JSON.parse(sessionStorage.getItem(STORED) || "[]");
  for (const exchange of talk.exchanges) showExchange(exchange).draw();
}

function messages() {
  return talk.exchanges.filter((exchange, at) => answer(exchange) || at === talk.exchanges.length - 1).flatMap((exchange) => {
    const urls = exchange.images.map((url) => ({ type: "image_url", image_url: { url } })), answered = answer(exchange);
    const text = exchange.text ? [{ type: "text", text: exchange.text }] : [];
    const question = { role: "user", content: urls.length ? [...text, ...urls] : exchange.text };
    return answered ? [question, { role: "assistant", content: answered }] : [question];
  });
}

// Only parameters that the user has set are sent: for others the model's defaults hold.
function request() {
  const body = { messages: messages(), stream: true };
  for (const name of PARAMETERS) if ($(name).value.trim()) body[name] = Number($(name).value);
  if ($("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: 1 });
  if ($("how").value === "beams") body.use_beam_search = true; // it looks for the likeliest, whatever the temperature
  return body;
}

// Pictures

export function allowImages(allowed) {
  acceptsImages = allowed;
  $("pictures").hidden = !allowed;
}

// Adds files to the next message. The server refuses a file that is too large or not a picture, and says why.
export function addFiles(files) {
  if (!acceptsImages) $("note").textContent = "This model reads only text: it takes no pictures.";
  else for (const file of files) {
    const reader = new FileReader();
    reader.addEventListener("load", () => attach([...images, reader.result]));
    reader.readAsDataURL(file);
  }
}

const picture = (url, i) => make("img", undefined, { src: url, alt: `picture ${i + 1}` });

function attach(urls) {
  images = urls;
  $("note").textContent = "";
  $("attached").replaceChildren(...urls.map((url, i) => {
    const made = make("button", undefined, { type: "button", "aria-label": `Remove picture ${i + 1}`, title: "Remove" });
    made.append(picture(url, i), "✕");
    made.addEventListener("click", () => attach(images.filter((_, at) => at !== i)));
    return made;
  }));
}

// Turns

function turn(who) {
  const shown = make("div", undefined, { class: "turn" });
  shown.append(make("b", who));
  $("log").append(shown);
  return shown;
}

function showThoughts(place, samples) {
  for (const [at, sample] of samples.entries()) {
    if (!sample || !sample.thoughts) continue;
    let aside = place.querySelector(`[data-sample="${at}"]`);
    if (!aside) {
      const box = make("details", undefined, { class: "thoughts" });
      aside = make("div", "", { class: "text", "data-sample": at });
      box.append(make("summary", samples.length > 1 ? `thoughts of sample ${at + 1}` : "thoughts"), aside);
      place.append(box);
    }
    aside.textContent = sample.thoughts;
  }
}

// One sample is shown as Markdown, several as a tree, and so is one whose tokens have probabilities.
function showSamples(place, samples) {
  if (!samples.length) return;
  if (samples.length > 1 || samples[0].parts.some(([, logprob]) => logprob !== null)) {
    show(place, samples);
    return;
  }
  if (!place.firstChild) place.append(make("div", undefined, { class: "markdown" }), make("span", "", { class: "fate" }));
  render(place.firstChild, textOf(samples[0]));
  place.lastChild.textContent = samples[0].fate;
}

// Adds an exchange to the log. Returns the model's turn, and what draws its answer.
function showExchange(exchange) {
  const asked = turn("you"), shown = turn("model"), aside = make("div"), place = make("div");
  asked.append(make("div", exchange.text, { class: "text" }), ...exchange.images.map(picture));
  if (exchange.lost) asked.append(make("p", `Pictures that were not kept: ${exchange.lost}`, { class: "fate" }));
  shown.append(aside, place);
  const draw = () => {
    showThoughts(aside, exchange.samples);
    showSamples(place, exchange.samples.filter(Boolean));
    follow();
  };
  return { shown, draw };
}

function take(samples, choice) {
  const sample = samples[choice.index] || (samples[choice.index] = { parts: [], fate: "", thoughts: "" });
  const delta = choice.delta || {}, text = delta.content || "", thought = delta.reasoning_content || "";
  const scored = !thought && choice.logprobs && choice.logprobs.content; // beside thoughts, tokens of both
  sample.thoughts += thought;
  let rest = text;
  for (const one of scored || []) {
    if (!one.token || !rest.startsWith(one.token)) continue; // an end token isn't part of the text
    sample.parts.push([one.token, one.logprob]);
    rest = rest.slice(one.token.length);
  }
  const last = sample.parts.at(-1);
  if (rest && last && last[1] === null) last[0] += rest;
  else if (rest) sample.parts.push([rest, null]);
  if (choice.finish_reason) sample.fate = choice.finish_reason === "stop" ? "" : `(${choice.finish_reason})`;
}

export async function send() {
  const text = $("message").value.trim(), mine = talk;
  if ((!text && !images.length) || mine.stopper) return;
  const exchange = { text, images, lost: 0, samples: [] };
  $("message").value = "";
  attach([]);
  mine.exchanges.push(exchange);
  const { shown, draw } = showExchange(exchange);
  following = true;
  follow();
  mine.stopper = new AbortController();
  settle();
  let due = false;
  const drawSoon = () => {
    if (!due) requestAnimationFrame(() => { due = false; draw(); });
    due = true;
  };
  try {
    const response = await ask("../v1/chat/completions", {
      method: "POST", body: JSON.stringify(request()), signal: mine.stopper.signal,
      headers: { "Content-Type": "application/json" },
    });
    if (!response.ok) throw new Error((await response.json()).error?.message || `status ${response.status}`);
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      for (const choice of chunk.choices) take(exchange.samples, choice);
      drawSoon();
    }
  } catch (error) {
    const stopped = error.name === "AbortError";
    shown.append(make("p", stopped ? "stopped" : error.message, { class: "error" }));
    if (!stopped && mine === talk && !answer(exchange) && !$("message").value) { // the user can change it and send it again
      $("message").value = text;
      attach(exchange.images);
    }
  }
  drawSoon();
  mine.stopper = null;
  if (mine !== talk) return;
  store();
  settle();
}
