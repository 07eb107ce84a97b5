// Objectives that this server can be expected to meet: multiples of what a request takes alone on its machine.
import { machine } from "./data.js";
import { roundUp } from "./format.js";
import { createStore } from "./store.js";

const PROMPT_TOKENS = 200; // of a usual first message, template included
const MAX_DRIFT = 0.3; // Presets change only when the speed has changed by this share.
const UNKNOWN = { first_ms: 240, token_ms: 40 }; // generous, until the server has measured its speed

// Factors of the time alone, and milliseconds that are added for the way to the server.
const LEVELS = [
  { name: "relaxed", label: "Relaxed", first: 20, token: 10, more_ms: 200 },
  { name: "normal", label: "Normal", first: 8, token: 5, more_ms: 100 },
  { name: "tight", label: "Tight", first: 3, token: 2, more_ms: 30 },
];
export const DEFAULT_PRESET = "normal";

// What the fastest engine takes for the first token of a usual prompt and for each further token.
export function speedOf(engines) {
  const known = engines.filter((one) => one.step_ms > 0).sort((a, b) => a.step_ms - b.step_ms);
  if (!known.length) return null;
  const [{ step_ms: step, prompt_token_ms: token = 0 }] = known;
  return { first_ms: step + PROMPT_TOKENS * token, token_ms: step };
}

export const speed = createStore({ ...UNKNOWN, measured: false });

machine.subscribe(() => {
  const now = speedOf(machine.get().engines);
  const held = speed.get();
  const drift = (name) => Math.abs(now[name] / held[name] - 1) > MAX_DRIFT;
  if (now && (!held.measured || drift("first_ms") || drift("token_ms"))) speed.set({ ...now, measured: true });
});

export function presetsOf({ first_ms, token_ms }) {
  return LEVELS.map(({ name, label, first, token, more_ms }) => ({
    name,
    label,
    ttft_ms: roundUp(first * first_ms + more_ms),
    tpot_ms: roundUp(token * token_ms),
  }));
}

export const presetNamed = (name) => presetsOf(speed.get()).find((preset) => preset.name === name);
