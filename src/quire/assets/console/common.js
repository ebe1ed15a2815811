// What the console's scripts have in common. What models and users say is only ever text: nothing here makes HTML of it.

export const $ = (id) => document.getElementById(id);
let key = sessionStorage.getItem("quire-key") || "";

export function useKey(given) {
  key = given;
  sessionStorage.setItem("quire-key", key);
}

export function make(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  return made;
}

export function ask(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (key) headers.Authorization = `Bearer ${key}`;
  return fetch(path, { ...options, headers, cache: "no-store" });
}

// Lines "data: ..." of a response, one after another.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
