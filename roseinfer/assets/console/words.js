// The server's names for outcomes and causes, in plain words.
export const OBJECTIVES = { ttft: "first token", tpot: "time per token", e2e: "whole answer" };

const REFUSED = {
  idle: "Even an idle server would be too slow for this.",
  price: "More is asked of the server than it can do, and this request is more work than those it serves.",
  pace: "More is asked of the server than it can do, and steps as short as this pace needs would cost too many others their place.",
  queue: "The prompts ahead of it take too long.",
  utilisation: "Those that run need the machine: with this one, they would not all have their tokens in time.",
  blocks: "There is no room for it in the KV cache in time.",
  seats: "All seats are taken, and none comes free in time.",
  step: "The step that ran when it came takes too long.",
  prompt_budget: "Its prompt does not fit into the steps that are left until then.",
  tenant: "Its tenant already has more than its share.",
  engine: "It came from another engine, and too late.",
  transit: "It reached the scheduler too late.",
};

export const whyRefused = (cause) => REFUSED[cause] ?? "The scheduler does not say what stood against it.";

const WAITED = {
  queue: "prompts ahead of it",
  utilisation: "a share of the machine",
  price: "less work being asked for",
  pace: "a slower pace around it",
  blocks: "room in the KV cache",
  load: "its prefix to come from host memory",
  seats: "a seat",
  step: "the running step to end",
  prompt_budget: "a place in a step's prompt budget",
  tenant: "its tenant's share",
  parent: "the first sample to compute the prompt",
  grammar: "its grammar to compile",
  engine: "another engine, which it left",
  transit: "its way to the engine",
  idle: "nothing",
};

export const waitedFor = (cause) => WAITED[cause] ?? (cause ? cause.replaceAll("_", " ") : "an unnamed reason");

const VERDICTS = {
  preempted: "lost its blocks",
  sat_out: "sat out steps",
  slow_steps: "steps were slow",
  client: "the client read slowly or left",
};

// A cause or a verdict in two or three words, for a line of the list.
const SHORT = {
  idle: "out of reach",
  price: "overload",
  pace: "overload: pace",
  queue: "prompts ahead",
  utilisation: "machine is full",
  blocks: "KV cache",
  load: "host memory",
  seats: "seats",
  step: "running step",
  prompt_budget: "prompt budget",
  tenant: "tenant's share",
  parent: "its first sample",
  grammar: "grammar",
  engine: "another engine",
  transit: "on its way",
  other: "not said",
  ...VERDICTS,
};

export const shortly = (cause) => (cause ? (SHORT[cause] ?? cause.replaceAll("_", " ")) : "");

const hasObjectives = (record) => Object.values(record.objectives ?? {}).some((value) => value !== null);

// What became of a request: `kind` chooses colour and icon, `label` says it.
export function outcomeOf(record) {
  if (record.state === "live") {
    return record.seen?.ttft_ms == null ? { kind: "live", label: "waiting" } : { kind: "live", label: "running" };
  }
  switch (record.outcome) {
    case "met":
      return hasObjectives(record) ? { kind: "kept", label: "kept" } : { kind: "plain", label: "served" };
    case "missed_ttft":
      return { kind: "late", label: "late start" };
    case "missed_tpot":
      return { kind: "late", label: "late tokens" };
    case "missed_e2e":
      return { kind: "late", label: "late end" };
    case "rejected":
      return { kind: "refused", label: "refused" };
    case "timeout":
      return { kind: "late", label: "timed out" };
    case "aborted":
      return { kind: "plain", label: "left" };
    case "failed":
      return { kind: "refused", label: "failed" };
    default:
      return record.status >= 400 ? { kind: "refused", label: `error ${record.status}` } : { kind: "plain", label: "ended" };
  }
}

export const ICONS = { kept: "✓", late: "!", refused: "✕", live: "●", plain: "·" };
