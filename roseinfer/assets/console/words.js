// Plain words for the server's outcomes and causes.
export const OBJECTIVES = { ttft: "first token", tpot: "time per token", e2e: "whole answer" };

const REJECTED = {
  idle: "Even an idle server would be too slow for this.",
  price: "The server is overloaded, and this request is more work than those it serves.",
  pace: "The server is overloaded, and steps as short as this pace needs would displace too many other requests.",
  queue: "The prompts ahead of it take too long.",
  utilisation: "With this request, running ones would miss their token deadlines.",
  blocks: "The KV cache has no room for it in time.",
  seats: "All seats are taken, and none becomes free in time.",
  slots: "All slots for recurrent states are taken, and none becomes free in time.",
  step: "The step that was running at its arrival takes too long.",
  prompt_budget: "Its prompt does not fit into the remaining steps.",
  tenant: "Its tenant already has more than its share.",
  engine: "It came from another engine too late.",
  transit: "It reached the scheduler too late.",
};

export const whyRejected = (cause) => REJECTED[cause] ?? "The scheduler does not report the cause.";

const WAITED = {
  queue: "prompts ahead of it",
  utilisation: "a share of the machine",
  price: "the end of the overload",
  pace: "other requests' shorter steps",
  blocks: "room in the KV cache",
  load: "its prefix to load from host memory",
  seats: "a seat",
  slots: "a slot for its recurrent state",
  step: "the end of the running step",
  prompt_budget: "room in a step's prompt budget",
  tenant: "its tenant's share",
  parent: "the first choice to compute the prompt",
  grammar: "its grammar to compile",
  engine: "another engine that it left",
  transit: "its transit to the engine",
  idle: "nothing",
};

export const waitedFor = (cause) => WAITED[cause] ?? (cause ? cause.replaceAll("_", " ") : "an unknown cause");

const VERDICTS = {
  preempted: "preempted",
  sat_out: "steps without it",
  slow_steps: "slow steps",
  client: "client left",
};

// A cause or a verdict in two or three words, for a row of the list.
const SHORT = {
  idle: "out of reach",
  price: "overload",
  pace: "overload: pace",
  queue: "prompts ahead",
  utilisation: "machine is full",
  blocks: "KV cache",
  load: "host memory",
  seats: "seats",
  slots: "state slots",
  step: "running step",
  prompt_budget: "prompt budget",
  tenant: "tenant's share",
  parent: "first choice",
  grammar: "grammar",
  engine: "another engine",
  transit: "transit",
  other: "unknown",
  ...VERDICTS,
};

export const shortly = (cause) => (cause ? (SHORT[cause] ?? cause.replaceAll("_", " ")) : "");

const hasObjectives = (record) => Object.values(record.objectives ?? {}).some((value) => value !== null);

// Outcome of a request: `kind` selects colour and icon, `label` is its text.
export function outcomeOf(record) {
  if (record.state === "live") {
    return record.seen?.ttft_ms == null ? { kind: "live", label: "waiting" } : { kind: "live", label: "running" };
  }
  switch (record.outcome) {
    case "met":
      return hasObjectives(record) ? { kind: "kept", label: "in time" } : { kind: "plain", label: "served" };
    case "missed_ttft":
      return { kind: "late", label: "late start" };
    case "missed_tpot":
      return { kind: "late", label: "late tokens" };
    case "missed_e2e":
      return { kind: "late", label: "late end" };
    case "rejected":
      return { kind: "refused", label: "rejected" };
    case "timeout":
      return { kind: "late", label: "timed out" };
    case "aborted":
      return { kind: "plain", label: "client left" };
    case "failed":
      return { kind: "refused", label: "failed" };
    default:
      return record.status >= 400 ? { kind: "refused", label: `error ${record.status}` } : { kind: "plain", label: "ended" };
  }
}

// A class of requests by its name in the records.
export const className = (name) => ({ none: "no objectives", custom: "own objectives" })[name] ?? name ?? "no objectives";

// What late requests are judged by; other rows show their first token.
export const judgedBy = (record) => ({ missed_tpot: "tpot", missed_e2e: "e2e" })[record.outcome] ?? "ttft";

const USUAL_SPEED = 0.1; // Within this share, the machine is as fast as calibrated.

// The duration of steps compared with the cost model's prediction, for people.
export function speedWords(ratio) {
  if (!Number.isFinite(ratio) || ratio <= 0) return "–";
  if (Math.abs(ratio - 1) <= USUAL_SPEED) return "as calibrated";
  const factor = ratio > 1 ? ratio : 1 / ratio;
  return `${factor.toFixed(factor < 9.95 ? 1 : 0)} times ${ratio > 1 ? "slower" : "faster"} than calibrated`;
}

export const ICONS = { kept: "✓", late: "!", refused: "✕", live: "●", plain: "·" };
