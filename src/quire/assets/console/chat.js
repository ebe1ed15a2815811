// The conversation.
import { $, ask, events, make } from "./common.js";
import { show } from "./tree.js";

// What was said, and what stops the answer under way. A new conversation takes its place: an answer that still ends is
// the old one's.
let talk = { turns: [], stopper: null };

export function begin() {
  stop();
  talk = { turns: [], stopper: null };
  $("log").replaceChildren();
  settle();
}

export function stop() {
  if (talk.stopper) talk.stopper.abort();
}

function settle() {
  $("stop").disabled = !talk.stopper;
  $("send").disabled = Boolean(talk.stopper);
  if (!talk.stopper) $("message").focus();
}

function number(id) {
  const value = $(id).value.trim();
  return value === "" ? undefined : Number(value);
}

function request() {
  const n = number("n") || 1;
  const body = {
    messages: talk.turns, stream: true, temperature: number("temperature"), top_p: number("top_p"),
    max_tokens: number("max_tokens"), seed: number("seed"), n,
  };
  if ($("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: 1 });
  if ($("how").value === "beams") body.use_beam_search = true; // it looks for the likeliest, whatever the temperature
  return body;
}

function turn(who) {
  const shown = make("div", undefined, { class: "turn" });
  shown.append(make("b", who));
  $("log").append(shown);
  return shown;
}

function showThoughts(place, samples) {
  for (const [at, sample] of samples.entries()) {
    if (!sample || !sample.thoughts) continue;
    if (!sample.aside) {
      const box = make("details", undefined, { class: "thoughts" });
      sample.aside = make("div", "", { class: "text" });
      box.append(make("summary", samples.length > 1 ? `thoughts of sample ${at + 1}` : "thoughts"), sample.aside);
      place.append(box);
    }
    sample.aside.textContent = sample.thoughts;
  }
}

function take(samples, choice) {
  const sample = samples[choice.index] || (samples[choice.index] = { said: [], fate: "", thoughts: "" });
  const delta = choice.delta || {}, text = delta.content || "", thought = delta.reasoning_content || "";
  const scored = !thought && choice.logprobs && choice.logprobs.content; // beside thoughts, tokens of both
  sample.thoughts += thought;
  let rest = text;
  for (const one of scored || []) {
    if (!one.token || !rest.startsWith(one.token)) continue; // an end token isn't part of the text
    sample.said.push([one.token, one.logprob]);
    rest = rest.slice(one.token.length);
  }
  if (rest) sample.said.push([rest, null]);
  if (choice.finish_reason) sample.fate = choice.finish_reason === "stop" ? "" : `(${choice.finish_reason})`;
}

export async function send() {
  const text = $("message").value.trim(), mine = talk;
  if (!text || mine.stopper) return;
  $("message").value = "";
  mine.turns.push({ role: "user", content: text });
  turn("you").append(make("div", text, { class: "text" }));
  const shown = turn("model"), aside = make("div"), place = make("div");
  shown.append(aside, place);
  mine.stopper = new AbortController();
  settle();
  const samples = [];
  let due = false;
  const draw = () => {
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      showThoughts(aside, samples);
      show(place, samples.filter(Boolean));
      $("log").scrollTop = $("log").scrollHeight;
    });
  };
  try {
    const response = await ask("../v1/chat/completions", {
      method: "POST", body: JSON.stringify(request()), signal: mine.stopper.signal,
      headers: { "Content-Type": "application/json" },
    });
    if (!response.ok) throw new Error((await response.json()).error?.message || `status ${response.status}`);
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const said = JSON.parse(data);
      if (said.error) throw new Error(said.error.message);
      for (const choice of said.choices) take(samples, choice);
      draw();
    }
  } catch (error) {
    const said = error.name === "AbortError" ? "stopped" : error.message;
    shown.append(make("p", said, { class: "error" }));
  }
  draw();
  const first = samples[0] ? samples[0].said.map(([piece]) => piece).join("") : "";
  if (first) mine.turns.push({ role: "assistant", content: first });
  else mine.turns.pop();
  mine.stopper = null;
  if (mine === talk) settle();
}
