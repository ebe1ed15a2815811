// The console: a conversation with the model, and the engine's memory as it changes.
import { begin, send, stop } from "./chat.js";
import { $, useKey } from "./common.js";
import { paint } from "./draw.js";
import { watch } from "./engine.js";

$("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
$("stop").addEventListener("click", stop);
$("clear").addEventListener("click", begin);
$("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value);
  $("unlock").hidden = true;
  watch();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
paint();
watch();
