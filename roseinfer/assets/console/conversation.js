// The conversation of the playground: plain data, kept in this browser, and in files by import and export.
import { isTurn, newId, whole } from "./saved.js";
import { createStore, recall, remember } from "./store.js";

const FORMAT = "roseinfer-conversation";
const MAX_IMPORT_BYTES = 8 * 1024 * 1024;
const DEFAULTS = {
  mode: "chat", // or "completion"
  model: "",
  system: "",
  temperature: null, // null: what the server suggests
  topP: null,
  maxTokens: 128,
  class: "", // of the server's; its objectives count while it is chosen
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

export function clear() {
  conversation.set({ turns: [] });
}

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
