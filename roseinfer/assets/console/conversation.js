// The conversation of the playground and earlier ones: plain data, kept in this browser; import and export use files.
import { DEFAULT_PRESET } from "./presets.js";
import { forgetPrompts } from "./prompts.js";
import { isTurn, newId, whole } from "./saved.js";
import { createStore, recall, remember } from "./store.js";

const FORMAT = "roseinfer-conversation";
const MAX_IMPORT_BYTES = 8 * 1024 * 1024;
const MAX_EARLIER = 30;
const MAX_EARLIER_CHARS = 2_000_000; // a browser stores about five million
const DEFAULTS = {
  mode: "chat", // or "completion"
  model: "",
  system: "",
  temperature: null, // null: what the server suggests
  topP: null,
  maxTokens: 128,
  preset: DEFAULT_PRESET, // see presets.js; its objectives count while it is chosen
  class: "", // of the server's, likewise
  ttft_ms: null,
  tpot_ms: null,
  e2e_ms: null,
  draft: "",
  turns: [],
};
export const RUNNING = new Set(["waiting", "streaming"]);

export const conversation = createStore(whole(recall("conversation", {}), DEFAULTS));

let saving = 0;
conversation.subscribe(() => {
  // Not with every token.
  saving ||= setTimeout(() => {
    saving = 0;
    save();
  }, 500);
});
addEventListener("pagehide", save);

function save() {
  remember("conversation", conversation.get());
}

export const newTurn = (role, fields) => ({ id: newId(), role, ...fields });

export function changeTurn(id, patch) {
  conversation.set((held) => ({
    ...held,
    turns: held.turns.map((turn) => (turn.id === id ? { ...turn, ...patch } : turn)),
  }));
}

// --- earlier conversations --------------------------------------------------------------------------------------
const KEPT = ["mode", "model", "system", "turns"];
const isEarlier = (one) => typeof one?.id === "string" && Array.isArray(one.turns) && one.turns.some(isTurn);

function wholeEarlier(saved) {
  const earlier = Array.isArray(saved) ? saved.filter(isEarlier).slice(0, MAX_EARLIER) : [];
  return earlier.map((one) => ({ id: one.id, ...pick(whole(one, DEFAULTS), KEPT) }));
}

const pick = (from, names) => Object.fromEntries(names.map((name) => [name, from[name]]));

// The newest first.
export const earlier = createStore({ list: wholeEarlier(recall("earlier", [])) });
export const titleOf = ({ turns }) => turns.find((turn) => turn.role === "user")?.text.trim().slice(0, 120) || "No message";

function keep(list) {
  const kept = [];
  let chars = 0;
  for (const one of list.slice(0, MAX_EARLIER)) {
    chars += JSON.stringify(one).length;
    if (chars <= MAX_EARLIER_CHARS) kept.push(one);
  }
  earlier.set({ list: kept });
  remember("earlier", kept);
}

// Begins an empty conversation and keeps the present one.
export function begin() {
  const held = conversation.get();
  if (held.turns.length) keep([{ id: newId(), ...pick(whole(held, DEFAULTS), KEPT) }, ...earlier.get().list]);
  conversation.set({ turns: [] });
}

export function reopen(id) {
  const one = earlier.get().list.find((each) => each.id === id);
  if (!one) return;
  begin();
  keep(earlier.get().list.filter((each) => each.id !== id));
  const { id: _, ...said } = one;
  conversation.set(said);
}

export function forget(ids) {
  const { list } = earlier.get();
  const gone = list.filter((one) => ids.includes(one.id));
  forgetPrompts(gone.flatMap((one) => one.turns.map((turn) => turn.requestId)));
  keep(list.filter((one) => !ids.includes(one.id)));
}

// Forgets the present conversation as well as a kept one.
export function discard() {
  forgetPrompts(conversation.get().turns.map((turn) => turn.requestId));
  conversation.set({ turns: [] });
}

// --- files ------------------------------------------------------------------------------------------------------
export function exported() {
  const { draft, ...kept } = conversation.get();
  return JSON.stringify({ format: FORMAT, version: 1, saved: new Date().toISOString(), ...kept }, null, 2);
}

// Raises an Error that says what is wrong with a file that is no conversation.
export async function importFile(file) {
  if (file.size > MAX_IMPORT_BYTES) throw new Error("The file is larger than 8 MiB");
  let said;
  try {
    said = JSON.parse(await file.text());
  } catch {
    throw new Error("The file is not JSON");
  }
  if (said?.format !== FORMAT || said.version !== 1) throw new Error("The file is not a conversation of this console");
  if (!Array.isArray(said.turns) || !said.turns.every(isTurn)) throw new Error("The file's turns are damaged");
  const turns = said.turns.map((turn) => ({ ...turn, id: newId() })); // a file may say one twice
  conversation.set(whole({ ...said, turns }, DEFAULTS));
}
