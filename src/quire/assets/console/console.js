// The console: a conversation with the model, and the engine's memory as it changes.
import { addFiles, begin, follow, noteScroll, restore, send, stop, store } from "./chat.js";
import { $, useKey } from "./common.js";
import { paint } from "./draw.js";
import { explain, toggleAll, watch } from "./engine.js";

$("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
const takeFiles = (event, { files, types }) => {
  if (!files.length || types.includes("text/plain")) return; // office programs copy a text with its picture
  event.preventDefault();
  addFiles(files);
};
$("message").addEventListener("paste", (event) => takeFiles(event, event.clipboardData));
$("chat").addEventListener("dragover", (event) => event.preventDefault());
$("chat").addEventListener("drop", (event) => takeFiles(event, event.dataTransfer));
$("picture").addEventListener("change", (event) => { addFiles(event.target.files); event.target.value = ""; });
$("log").addEventListener("scroll", noteScroll);
new ResizeObserver(follow).observe($("log"));
$("stop").addEventListener("click", stop);
$("all").addEventListener("click", toggleAll);
$("clear").addEventListener("click", begin);
addEventListener("pagehide", store); // an answer may be under way
$("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value);
  $("unlock").hidden = true;
  watch();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
if (matchMedia("(max-width: 820px)").matches) for (const panel of document.querySelectorAll("#engine details")) panel.open = false;
paint();
explain();
watch();
restore();
