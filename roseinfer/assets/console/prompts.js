// The first words of the prompts that this browser has sent, by request id. The server keeps none.
import { createStore, recall, remember } from "./store.js";

const MAX_PROMPTS = 200;
const MAX_CHARS = 80;

const isEntry = (entry) => Array.isArray(entry) && entry.length === 2 && entry.every((text) => typeof text === "string");
const saved = recall("prompts", []);

export const prompts = createStore(new Map(Array.isArray(saved) ? saved.filter(isEntry).slice(-MAX_PROMPTS) : []));

export function notePrompt(requestId, text) {
  if (!requestId) return;
  const words = text.trim().slice(0, 4 * MAX_CHARS).replace(/\s+/g, " ");
  const first = words.length > MAX_CHARS ? `${words.slice(0, MAX_CHARS).trimEnd()}…` : words;
  prompts.set((held) => new Map([...held, [requestId, first]].slice(-MAX_PROMPTS)));
  remember("prompts", [...prompts.get()]);
}

export function forgetPrompts(requestIds) {
  const gone = new Set(requestIds);
  prompts.set((held) => new Map([...held].filter(([id]) => !gone.has(id))));
  remember("prompts", [...prompts.get()]);
}
