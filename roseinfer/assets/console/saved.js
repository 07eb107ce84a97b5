// A conversation as storage or a file holds it, made whole: whatever else is written there, the page can draw it.
const OBJECTIVES = ["ttft_ms", "tpot_ms", "e2e_ms"];
const ENDED = ["done", "stopped", "refused", "failed"];
const WORDS = ["reasoning", "error", "requestId", "answerId", "finish"];

export const newId = () => crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
export const isTurn = (turn) => typeof turn?.text === "string" && ["user", "assistant"].includes(turn.role);

const number = (value) => (Number.isFinite(value) ? value : null);
const numbers = (said, names) => Object.fromEntries(names.map((name) => [name, number(said?.[name])]));
const words = (said, names) => Object.fromEntries(names.filter((name) => typeof said?.[name] === "string").map((name) => [name, said[name]]));
const listed = (value, is) => (Array.isArray(value) ? value.filter(is) : []);

const isPoint = (point) => Array.isArray(point) && point.length === 2 && point.every(Number.isFinite);
const isTool = (tool) => typeof tool?.name === "string" && typeof tool.arguments === "string";

function wholeTurn(turn) {
  const { role, text } = turn;
  const id = typeof turn.id === "string" ? turn.id : newId();
  if (role === "user") return { id, role, text };
  const { told } = turn;
  return {
    id,
    role,
    text,
    ...words(turn, WORDS),
    // What ran when the page was closed has ended with it.
    state: ENDED.includes(turn.state) ? turn.state : "stopped",
    status: number(turn.status),
    promised: { ...words(turn.promised, ["class"]), ...numbers(turn.promised, OBJECTIVES) },
    seen: { ...numbers(turn.seen, OBJECTIVES), tokens: number(turn.seen?.tokens) },
    told: told && { ...numbers(told, OBJECTIVES), met: typeof told.met === "boolean" ? told.met : null },
    refusal: { ...words(turn.refusal, ["reason", "cause"]), ...numbers(turn.refusal, ["predicted_ttft_ms", "attainable_ms"]) },
    points: listed(turn.points, isPoint),
    tools: listed(turn.tools, isTool),
  };
}

const FITS = {
  mode: (value) => ["chat", "completion"].includes(value),
  temperature: (value) => value === null || (value >= 0 && value <= 2),
  topP: (value) => value === null || (value > 0 && value <= 1),
  maxTokens: (value) => Number.isInteger(value) && value > 0,
};
for (const name of OBJECTIVES) FITS[name] = (value) => value === null || (Number.isFinite(value) && value > 0);

// The fields of `defaults`, as they were saved where that is possible.
export function whole(given, defaults) {
  // What was saved before there were presets has objectives of its own.
  const own = given && given.preset === undefined && OBJECTIVES.some((name) => given[name] != null);
  const saved = own ? { ...given, preset: "" } : given;
  const fits = (name) => (FITS[name] ?? ((value) => typeof value === typeof defaults[name]))(saved?.[name]);
  const kept = Object.keys(defaults).filter(fits);
  return { ...defaults, ...Object.fromEntries(kept.map((name) => [name, saved[name]])), turns: listed(saved?.turns, isTurn).map(wholeTurn) };
}
