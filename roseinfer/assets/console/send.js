// One request of the playground: what is sent, what comes back, and how fast it came as seen from here.
import { ApiError, call, events } from "./api.js";
import { changeTurn, conversation, newTurn, RUNNING } from "./conversation.js";
import { hello, modelOf, samplingOf } from "./data.js";
import { known, roundUp } from "./format.js";
import { presetNamed } from "./presets.js";
import { notePrompt } from "./prompts.js";

let running = null;

export const stop = () => running?.abort();

// What is promised to a request sent now: the objectives of the class or preset, or those set by hand.
export function asked(settings, classes) {
  const { ttft_ms = null, tpot_ms = null, e2e_ms = null } = classes[settings.class] ?? presetNamed(settings.preset) ?? settings;
  return { class: classes[settings.class] ? settings.class : "", ttft_ms, tpot_ms, e2e_ms };
}

function sloOf(promised) {
  const slo = promised.class ? { class: promised.class } : {};
  for (const name of ["ttft_ms", "tpot_ms", "e2e_ms"]) if (!promised.class && promised[name] !== null) slo[name] = promised[name];
  return { ...slo, report: true };
}

function bodyOf(settings, turns, promised) {
  const model = modelOf(hello.get(), settings.model);
  const common = {
    ...(model && { model }),
    ...samplingOf(hello.get(), settings.model),
    ...(settings.temperature !== null && { temperature: settings.temperature }),
    ...(settings.topP !== null && { top_p: settings.topP }),
    max_tokens: settings.maxTokens,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    slo: sloOf(promised),
  };
  if (settings.mode === "completion") return { prompt: turns[turns.length - 1].text, ...common };
  const said = turns
    .filter((turn) => turn.role === "user" || turn.text)
    .map((turn) => ({ role: turn.role, content: turn.text }));
  return { messages: settings.system ? [{ role: "system", content: settings.system }, ...said] : said, ...common };
}

// Sends the draft as the next turn.
export function sendDraft() {
  const { draft, turns, mode } = conversation.get();
  if (!draft.trim() || running) return;
  conversation.set({ draft: "", turns: [...turns, newTurn("user", { text: mode === "chat" ? draft.trim() : draft })] });
  return answer();
}

// Sends the last question again; its answer so far, if any, goes.
export function sendAgain() {
  if (running) return;
  const { turns } = conversation.get();
  const last = turns.findLastIndex((turn) => turn.role === "user");
  if (last < 0) return;
  conversation.set({ turns: turns.slice(0, last + 1) });
  return answer();
}

async function answer() {
  const settings = conversation.get();
  const promised = asked(settings, hello.get().classes ?? {});
  const turn = newTurn("assistant", {
    text: "",
    reasoning: "",
    tools: [],
    state: "waiting",
    promised,
    began: performance.now(),
    seen: { ttft_ms: null, tpot_ms: null, e2e_ms: null, tokens: 0 },
    points: [],
  });
  const body = bodyOf(settings, settings.turns, promised);
  conversation.set({ turns: [...settings.turns, turn] });
  running = new AbortController();
  try {
    const response = await call(`v1/${settings.mode === "chat" ? "chat/completions" : "completions"}`, { body, signal: running.signal });
    notePrompt(response.headers.get("x-request-id"), settings.turns.at(-1).text);
    await receive(turn, response);
  } catch (error) {
    if (error instanceof ApiError) notePrompt(error.requestId, settings.turns.at(-1).text);
    changeTurn(turn.id, failure(error, running.signal.aborted));
  } finally {
    running = null;
  }
}

function failure(error, stopped) {
  if (stopped) return { state: "stopped" };
  if (!(error instanceof ApiError)) return { state: "failed", error: error.shown ?? "No answer from the server, or the connection broke." };
  const common = { requestId: error.requestId, error: error.message };
  if (error.fields.code === "slo_unattainable") return { ...common, state: "refused", refusal: error.fields };
  return { ...common, state: "failed", status: error.status };
}

async function receive(turn, response) {
  const began = turn.began;
  const patch = { requestId: response.headers.get("x-request-id") };
  let { text, reasoning } = turn;
  let tokens = 0;
  let first = null;
  const tools = [];
  const points = [];
  let complete = false;
  for await (const { data } of events(response)) {
    if (data === "[DONE]") {
      complete = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw Object.assign(new Error(), { shown: chunk.error.message });
    patch.answerId = chunk.id;
    const now = performance.now() - began;
    const [choice] = chunk.choices;
    if (choice) {
      const delta = choice.delta ?? choice;
      text += delta.content ?? choice.text ?? "";
      reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
      addTools(tools, delta.tool_calls ?? []);
      if (choice.finish_reason) patch.finish = choice.finish_reason;
    }
    if (chunk.usage?.slo) patch.told = chunk.usage.slo;
    tokens = chunk.usage?.completion_tokens ?? tokens + (choice ? 1 : 0);
    if (choice && tokens > 0) {
      first ??= now;
      points.push([now, tokens]);
    }
    const seen = { ttft_ms: first, tpot_ms: tokens > 1 ? (points.at(-1)[0] - first) / (tokens - 1) : null, e2e_ms: null, tokens };
    changeTurn(turn.id, { ...patch, text, reasoning, tools: [...tools], seen, points, state: "streaming" });
  }
  if (!complete) throw Object.assign(new Error(), { shown: "The answer was cut off before its end." });
  const { turns } = conversation.get();
  const held = turns.find((one) => one.id === turn.id);
  changeTurn(turn.id, { state: "done", seen: { ...held.seen, e2e_ms: performance.now() - began }, points: thinned(points) });
}

function addTools(tools, deltas) {
  for (const { index = 0, function: said = {} } of deltas) {
    const tool = (tools[index] = { name: "", arguments: "", ...tools[index] });
    tool.name += said.name ?? "";
    tool.arguments += said.arguments ?? "";
  }
}

// What is kept of an answer's course: enough to draw it again.
function thinned(points) {
  const every = Math.ceil(points.length / 200);
  return points.filter((_, i) => i % every === 0 || i === points.length - 1);
}

export const isRunning = (turn) => RUNNING.has(turn?.state);

// The objective to ask for instead of the one that was refused: {name, ms, least}. What could just be kept is rounded
// up with room for noise, which the scheduler does not foresee: half of it, for a first token as
// much again and at least 20 ms.
export function offer(turn) {
  const { reason, attainable_ms: attainable, predicted_ttft_ms: predicted } = turn.refusal;
  const name = `${reason}_ms`;
  const before = turn.promised[name];
  const least = known(attainable) ? attainable : reason === "ttft" && known(predicted) ? predicted : null;
  if (least === null) return known(before) ? { name, ms: roundUp(before * 2), least: null } : null;
  const room = reason === "ttft" ? Math.max(least * 2, least + 20) : least * 1.5;
  return { name, ms: roundUp(Math.max(room, (before ?? 0) * 1.1)), least };
}

// Asks for `name` within `ms`, with the other objectives as they were, and sends again.
export function loosen(turn, { name, ms }) {
  const { ttft_ms, tpot_ms, e2e_ms } = turn.promised;
  conversation.set({ class: "", preset: "", ttft_ms, tpot_ms, e2e_ms, [name]: ms });
  return sendAgain();
}
