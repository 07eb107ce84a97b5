// Received data, bounded: the newest requests, steps of each engine, and samples of the machine.
import { ApiError, getJson } from "./api.js";
import { openFeed } from "./feed.js";
import { createStore } from "./store.js";

export const MAX_REQUESTS = 1000;
const MAX_STEPS = 4096; // Of one engine.
const MAX_SAMPLES = 480; // Two minutes at four a second.

export const connection = createStore({ state: "connecting", why: "" });
export const hello = createStore({ version: "", models: [], policy: null, classes: {}, sampling: {}, engines: 1 });

// A server with several models describes each in `by_model`, and requires that requests name one.
export const modelOf = (said, chosen) => chosen || (said.by_model ? said.models[0] : "");
export const samplingOf = (said, chosen) => said.by_model?.[modelOf(said, chosen)]?.sampling ?? said.sampling ?? {};
// `version` counts changes; the data itself is changed in place.
export const machine = createStore({ version: 0, at: 0, engines: [], router: null, steps: new Map(), samples: [] });
export const requests = createStore({ version: 0, byKey: new Map(), sorted: [], dropped: 0 });

// A client may use a request id again; that of the answer is unique.
const keyOf = (record) => record.id ?? record.request_id;

export function addRequests(records, dropped = 0) {
  if (!records.length && !dropped) return;
  requests.set((held) => {
    const { byKey } = held;
    for (const record of records) {
      record.key = keyOf(record);
      const before = byKey.get(record.key);
      // A late answer must not revive a request that has ended.
      if (before?.state === "ended" && record.state === "live") continue;
      byKey.set(record.key, record);
    }
    const sorted = [...byKey.values()].sort((a, b) => b.created - a.created);
    for (const old of sorted.splice(MAX_REQUESTS)) byKey.delete(old.key);
    return { version: held.version + 1, byKey, sorted, dropped: held.dropped + dropped };
  });
}

export async function loadRequests() {
  const listed = await getJson(`v1/requests?limit=${MAX_REQUESTS}`);
  addRequests(listed.data);
}

// Find a received request by its answer's id or x-request-id.
export const heldRequest = (id) => requests.get().sorted.find((record) => record.request_id === id || record.id === id);

// Ask the server: {record}, null if unknown, or a {problem}.
export async function askForRequest(id) {
  try {
    const record = await getJson(`v1/requests/${encodeURIComponent(id)}`);
    addRequests([record]);
    return { record };
  } catch (error) {
    if (!(error instanceof ApiError)) return { problem: "No answer from the server." };
    return error.status === 404 ? { record: null } : { problem: error.message };
  }
}

function addSteps(held, rows) {
  for (const row of rows) {
    let ring = held.get(row[0]);
    if (!ring) held.set(row[0], (ring = []));
    // After a reconnection the server begins again with its newest.
    if (!ring.length || row[1] > ring[ring.length - 1][1]) ring.push(row);
  }
  for (const ring of held.values()) if (ring.length > MAX_STEPS) ring.splice(0, ring.length - MAX_STEPS);
}

const sum = (engines, name) => engines.reduce((total, engine) => total + (engine[name] ?? 0), 0);

function sampleOf(at, engines, before, ran) {
  const tokens = sum(engines, "generation_tokens");
  const prompts = sum(engines, "prompt_tokens");
  const span = before ? at - before.at : 0;
  const rate = (now, then) => (span > 0 && now >= then ? (now - then) / span : null);
  const used = engines.map((engine) => engine.utilisation).filter((value) => value !== null && value !== undefined);
  return {
    at,
    tokens,
    prompts,
    tokensPerS: before ? rate(tokens, before.tokens) : null,
    promptsPerS: before ? rate(prompts, before.prompts) : null,
    running: sum(engines, "running"),
    waiting: sum(engines, "waiting"),
    kv: sum(engines, "kv_blocks") ? sum(engines, "kv_blocks_used") / sum(engines, "kv_blocks") : null,
    slowdown: ran ? Math.min(...engines.map((engine) => engine.slowdown ?? Infinity)) : null, // of the last steps
    utilisation: used.length ? used.reduce((a, b) => a + b, 0) / used.length : null,
  };
}

function onTick(tick) {
  machine.set((held) => {
    const samples = held.samples;
    const last = samples[samples.length - 1];
    addSteps(held.steps, tick.steps);
    if (!last || tick.at > last.at) samples.push(sampleOf(tick.at, tick.engines, last, tick.steps.length > 0));
    if (samples.length > MAX_SAMPLES) samples.shift();
    return { ...held, version: held.version + 1, at: tick.at, engines: tick.engines, router: tick.router };
  });
  addRequests(tick.requests, tick.dropped);
}

export function watch() {
  const onEvent = (name, data) => {
    if (name === "hello") hello.set(data);
    else if (name === "tick") onTick(data);
  };
  return openFeed((state) => connection.get().state === "live" && state.state === "live" || connection.set(state), onEvent);
}

const SLOW = { from: 1.3, until: 1.2 }; // Times slower than calibrated: where the page begins and ceases to say so.
const SLOW_SAMPLES = 20; // Five seconds with steps: one slow step is no news.
const SLOW_WITHIN = 240; // One minute: what an idle machine did earlier is none either.

// How many times slower than calibrated the fastest engine has been for some seconds; null if it is not.
export const slowdown = createStore({ factor: null });

machine.subscribe(() => {
  const known = machine.get().samples.slice(-SLOW_WITHIN).map((sample) => sample.slowdown).filter(Number.isFinite);
  const recent = known.slice(-SLOW_SAMPLES);
  const middle = recent.sort((a, b) => a - b)[Math.floor(recent.length / 2)];
  const { factor } = slowdown.get();
  const is = recent.length === SLOW_SAMPLES && middle > (factor === null ? SLOW.from : SLOW.until);
  const next = is ? Math.round(middle * 10) / 10 : null;
  if (next !== factor) slowdown.set({ factor: next });
});
