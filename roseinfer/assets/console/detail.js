// One request: the verdict in a sentence, where its time went, and all that is known of it.
import { html, useEffect, useRef } from "./vendor/htm-preact-3.1.1.js";
import { clock, count, ms, msAgainst } from "./format.js";
import { prompts } from "./prompts.js";
import { useStore } from "./store.js";
import { className, ICONS, OBJECTIVES, outcomeOf, waitedFor, whyRejected } from "./words.js";

const MAX_SEGMENTS = 120;
const PHASES = { prefill: "computed its prompt", decode: "wrote its answer" };

export function Detail({ record, problem, id, onClose }) {
  const heading = useRef(null);
  useEffect(() => {
    // Beside the list the keys stay with it; where this covers the list, it has them.
    if (matchMedia("(max-width: 760px)").matches) heading.current.focus({ preventScroll: true });
  }, [id]);
  return html`<aside class="detail" aria-label="Request details">
    <header>
      <h2 tabindex="-1" ref=${heading}>Request</h2>
      <button type="button" class="close" aria-label="Close" aria-keyshortcuts="Escape" onClick=${onClose}>✕</button>
    </header>
    ${problem && html`<p class="hint">Cannot load the request: ${problem}</p>`}
    ${record === undefined && !problem && html`<p class="hint">Loading…</p>`}
    ${record === null && html`<p class="hint">Unknown request: the server keeps the newest 1,024 requests, without invalid ones.</p>`}
    ${record && html`<${Known} record=${record} />`}
  </aside>`;
}

function Known({ record }) {
  const { kind, label } = outcomeOf(record);
  const why = record.why ?? {};
  const refused = why.refused;
  const prompt = useStore(prompts).get(record.request_id);
  return html`<div class="known">
    <p class="lead"><span class=${`badge ${kind}`}><i aria-hidden="true">${ICONS[kind]}</i>${label}</span> <span class="dim">${record.api}, ${clock(record.created)}</span></p>
    ${prompt && html`<p class="prompt">${prompt} <span class="dim">(sent from this browser)</span></p>`}
    ${why.summary && html`<p class="sentence">${why.summary}</p>`}
    ${refused && html`<div class="notice refused">${!why.summary && html`<p>${whyRejected(refused.cause)}</p>`}
      <dl class="pairs">
        ${refused.attainable_ms == null && refused.predicted_ttft_ms != null && html`<div><dt>Predicted first token</dt><dd>${ms(refused.predicted_ttft_ms)}</dd></div>`}
        ${refused.attainable_ms != null && html`<div><dt>${capital(OBJECTIVES[refused.objective])} attainable</dt><dd>${ms(refused.attainable_ms)}</dd></div>`}
      </dl></div>`}
    <${Timeline} record=${record} />
    <${Promises} record=${record} />
    <${Waits} waited=${why.waited_ms} />
    <${Facts} record=${record} why=${why} />
    <details class="raw"><summary>JSON</summary><pre class="code" tabindex="0">${pretty(record)}</pre></details>
  </div>`;
}

const capital = (text) => (text ? text[0].toUpperCase() + text.slice(1) : "");
const pretty = ({ key, ...said }) => JSON.stringify(said, null, 2);

// --- where its time went ----------------------------------------------------------------------------------------
function Timeline({ record }) {
  const segments = (record.why?.timeline ?? []).slice(0, MAX_SEGMENTS).filter((one) => one.to_ms !== null && one.to_ms > one.from_ms);
  if (!segments.length) return null;
  const end = Math.max(...segments.map((one) => one.to_ms), record.seen?.e2e_ms ?? 0);
  const marks = [
    { name: "first token due", at: record.objectives?.ttft_ms },
    { name: "end due", at: record.objectives?.e2e_ms },
  ].filter((mark) => mark.at != null && mark.at <= end * 4);
  const scale = Math.max(end, ...marks.map((mark) => mark.at)) * 1.02;
  const percentOf = (at) => `${(100 * at) / scale}%`;
  return html`<section class="timeline" aria-label="Timeline">
    <h3>Timeline</h3>
    <div class="bar" aria-hidden="true">
      ${segments.map((one) => html`<span class=${`segment ${one.phase}`} style=${{ left: percentOf(one.from_ms), width: percentOf(one.to_ms - one.from_ms) }}></span>`)}
      ${record.seen?.ttft_ms != null && html`<span class="first" style=${{ left: percentOf(record.seen.ttft_ms) }}></span>`}
      ${marks.map((mark) => html`<span class="due" style=${{ left: percentOf(mark.at) }}></span>`)}
    </div>
    <div class="scale" aria-hidden="true"><span>0</span><span>${ms(scale / 2)}</span><span>${ms(scale)}</span></div>
    ${marks.length > 0 && html`<p class="marks">${marks.map((mark) => html`<span class="key promised">${mark.name} ${ms(mark.at)}</span>`)}</p>`}
    <ol class="phases">
      ${segments.map((one) => html`<li><i class=${`swatch ${one.phase}`} aria-hidden="true"></i>
        <span>${phaseOf(one)}</span>
        <span class="num">${ms(one.to_ms - one.from_ms)}</span><span class="num dim">from ${ms(one.from_ms)}</span></li>`)}
    </ol>
  </section>`;
}

function phaseOf({ phase, cause }) {
  if (phase !== "wait") return PHASES[phase] ?? phase;
  return cause === "transit" ? "in transit to the engine" : `waited for ${waitedFor(cause)}`;
}

function Promises({ record }) {
  const { objectives = {}, seen = {} } = record;
  // Of a rejected request the attainable value is shown: its forecast has no margin and would be a second number.
  const predicted = record.why?.refused?.attainable_ms != null ? {} : record.predicted;
  const rows = ["ttft", "tpot", "e2e"].map((name) => ({
    name,
    promised: objectives[`${name}_ms`],
    predicted: predicted?.[`${name}_ms`],
    seen: seen?.[`${name}_ms`],
  }));
  return html`<table class="promises">
    <caption>Objective, predicted, measured</caption>
    <thead><tr><th scope="col"></th><th scope="col">promised</th><th scope="col">predicted</th><th scope="col">seen</th></tr></thead>
    <tbody>${rows.map((row) => {
      const judged = row.promised != null && row.seen != null;
      const late = judged && row.seen > row.promised;
      return html`<tr><th scope="row">${capital(OBJECTIVES[row.name])}</th><td class="promised">${ms(row.promised)}</td><td>${ms(row.predicted)}</td>
        <td class=${judged ? (late ? "late" : "kept") : ""}>${judged && html`<i aria-hidden="true">${late ? "! " : "✓ "}</i>`}${msAgainst(row.seen, row.promised)}${judged && html`<span class="hidden">${late ? ", late" : ", in time"}</span>`}</td></tr>`;
    })}</tbody>
  </table>`;
}

function Waits({ waited }) {
  const waits = Object.entries(waited ?? {}).filter(([, spent]) => spent > 0).sort((a, b) => b[1] - a[1]);
  if (!waits.length) return null;
  const most = waits[0][1];
  return html`<section><h3>Waits</h3><ul class="waits">
    ${waits.map(([cause, spent]) => html`<li><span>${waitedFor(cause)}</span><span class="num">${ms(spent)}</span>
      <span class="track" aria-hidden="true"><span class="fill" style=${{ width: `${(100 * spent) / most}%` }}></span></span></li>`)}
  </ul></section>`;
}

function Facts({ record, why }) {
  const routing = record.routing;
  const drafts = Object.entries(why.drafts ?? {}).map(([name, { drafted, accepted }]) => `${name}: ${count(accepted)} of ${count(drafted)} accepted`).join(", ");
  const facts = [
    ["Prompt", `${count(record.prompt_tokens)} tokens${record.cached_tokens ? `, ${count(record.cached_tokens)} of them cached` : ""}`],
    ["Output", `${count(record.output_tokens)} tokens${record.choices > 1 ? `, ${record.choices} choices` : ""}${record.finish ? `, ended by ${record.finish}` : ""}`],
    ["Class", className(record.class)],
    ["API", record.api],
    ["Status", `${record.status ?? "–"}${record.stream ? ", streamed" : ""}`],
    ["Engine", record.engine],
    ["Routed", routing && [routing.reason, routing.retries && `${routing.retries} retries`, routing.placed_again && "placed again", routing.resumes && `${routing.resumes} resumes`].filter(Boolean).join(", ")],
    ["Preempted", why.preemptions ? `${count(why.preemptions)} times` : null],
    ["Steps", why.steps ? `${count(why.steps)}${why.sat_out ? `, sat out ${count(why.sat_out)}` : ""}` : null],
    ["Drafts", drafts || null],
    ["Prompt chunks", why.chunks || null],
    ["Model", record.model],
    ["Request id", record.request_id],
    ["Answer id", record.id],
  ];
  return html`<dl class="facts">
    ${facts.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>`;
}
