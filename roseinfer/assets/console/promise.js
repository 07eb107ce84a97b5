// Objectives as sliders, and measured latency as meters.
import { html, useEffect, useState } from "./vendor/htm-preact-3.1.1.js";
import { Chart } from "./chart.js";
import { conversation } from "./conversation.js";
import { NumberField } from "./field.js";
import { count, known, ms, msAgainst, rate } from "./format.js";
import { presetsOf, speed } from "./presets.js";
import { asked, isRunning, offer } from "./send.js";
import { useStore } from "./store.js";

// Sliders are logarithmic: as many steps from 1 to 10 ms as from 1 to 10 s.
const SLIDERS = [
  { name: "ttft_ms", label: "First token within", low: 1, high: 60_000, usual: 500 },
  { name: "tpot_ms", label: "Each further token within", low: 0.5, high: 1000, usual: 50 },
  { name: "e2e_ms", label: "Whole answer within", low: 10, high: 600_000, usual: 10_000 },
];
const STEPS = 300;
const NONE = { class: "", preset: "", ttft_ms: null, tpot_ms: null, e2e_ms: null };

const toStep = (value, { low, high }) => Math.round((STEPS * Math.log(value / low)) / Math.log(high / low));
const fromStep = (step, { low, high }) => Number((low * (high / low) ** (step / STEPS)).toPrecision(2));

export function Objectives({ settings, classes }) {
  const measured = useStore(speed);
  const { class: inClass, ...values } = asked(settings, classes);
  const none = !inClass && Object.values(values).every((value) => value === null);
  const change = (name, value) => conversation.set({ class: "", preset: "", ...values, [name]: value });
  return html`<fieldset class="objectives">
    <legend>Objectives</legend>
    <div class="chips" role="group" aria-label="Presets">
      <button type="button" class="chip" aria-pressed=${none} title="Best effort" onClick=${() => conversation.set(NONE)}>None</button>
      ${presetsOf(measured).map(
        ({ name, label, ttft_ms, tpot_ms }) => html`<button type="button" class="chip" aria-pressed=${!inClass && settings.preset === name}
          title=${`${ms(ttft_ms)}, ${ms(tpot_ms)} per token`} onClick=${() => conversation.set({ ...NONE, preset: name })}>${label}</button>`,
      )}
    </div>
    <p class="hint">${measured.measured
      ? `Presets fit this machine: alone, a token takes ${ms(measured.token_ms)} here.`
      : "The server has not measured its speed yet: presets are generous until it has."}</p>
    ${Object.keys(classes).length > 0 && html`<div class="chips of-classes" role="group" aria-label="Classes of this server"><span class="hint">Classes</span>
      ${Object.keys(classes).map(
        (name) => html`<button type="button" class="chip" aria-pressed=${inClass === name} title="A class of this server"
          onClick=${() => conversation.set({ ...NONE, class: name })}>${name}</button>`,
      )}
    </div>`}
    ${SLIDERS.map((slider) => html`<${Slider} key=${slider.name} slider=${slider} value=${values[slider.name] ?? null}
      onChange=${(value) => change(slider.name, value)} />`)}
  </fieldset>`;
}

function Slider({ slider, value, onChange }) {
  const { name, label, low, high, usual } = slider;
  const on = value !== null;
  const shown = on ? Math.min(STEPS, Math.max(0, toStep(value, slider))) : toStep(usual, slider);
  const take = (typed) => {
    if (Number(typed) > 0 && Number.isFinite(Number(typed))) onChange(Number(typed));
  };
  return html`<div class=${`slider ${on ? "" : "off"}`}>
    <label class="check"><input type="checkbox" checked=${on} name=${`${name}-on`}
      onChange=${() => onChange(on ? null : usual)} />${label}</label>
    <span class="unit"><${NumberField} name=${name} min="0.1" max=${high} step="any" disabled=${!on}
      value=${value} placeholder="–" aria-label=${`${label}, ms`} take=${take} /> ms</span>
    <input type="range" min="0" max=${STEPS} value=${shown} disabled=${!on} aria-label=${label} aria-valuetext=${ms(value)}
      onInput=${(event) => onChange(Math.max(low, fromStep(Number(event.target.value), slider)))} />
  </div>`;
}

// --- seen -------------------------------------------------------------------------------------------------------
// Redraws ten times a second while something runs.
function useClock(active) {
  const [, set] = useState(0);
  useEffect(() => {
    if (!active) return;
    const timer = setInterval(() => set((n) => n + 1), 100);
    return () => clearInterval(timer);
  }, [active]);
}

export function Seen({ turn }) {
  const running = isRunning(turn);
  useClock(running);
  if (!turn) return html`<p class="hint">Send something to compare its objectives with measured latency.</p>`;
  if (turn.state === "refused") return html`<${Turned} turn=${turn} />`;
  const { promised, seen, told } = turn;
  const passed = running ? performance.now() - turn.began : seen.e2e_ms;
  const ttft = told?.ttft_ms ?? seen.ttft_ms ?? (running ? passed : null);
  const started = seen.ttft_ms !== null;
  const pace = told?.tpot_ms ?? seen.tpot_ms;
  return html`<div class="seen">
    <${Meter} label="First token" value=${ttft} promise=${promised.ttft_ms} settled=${started} />
    <${Meter} label="Per token" value=${pace} promise=${promised.tpot_ms} settled=${turn.state === "done"} />
    ${promised.e2e_ms !== null && html`<${Meter} label="Whole answer" value=${passed} promise=${promised.e2e_ms} settled=${turn.state === "done"} />`}
    <dl class="figures">
      <div><dt>Tokens</dt><dd>${count(seen.tokens)}</dd></div>
      <div><dt>Tokens/s</dt><dd>${rate(pace > 0 ? 1000 / pace : null)}</dd></div>
      <div><dt>Total</dt><dd>${ms(passed)}</dd></div>
    </dl>
    <${Race} turn=${turn} />
    <p class="hint">${told ? "First token and pace measured by the server." : "Measured in this browser, network included."}</p>
  </div>`;
}

// A rejected request: its objectives, and what could be promised instead of the one that was out of reach.
const NAMES = [["ttft", "First token"], ["tpot", "Per token"], ["e2e", "Whole answer"]];

function Turned({ turn }) {
  const { promised, refusal } = turn;
  const instead = offer(turn);
  const possible = (name) => (refusal.reason === name && instead && known(instead.least) ? instead.ms : null);
  return html`<div class="seen">
    ${NAMES.filter(([name]) => promised[`${name}_ms`] !== null).map(([name, label]) => html`<${Meter} label=${possible(name) === null ? label : `${label}, possible now`}
      value=${possible(name)} promise=${promised[`${name}_ms`]} refused=${refusal.reason === name} />`)}
    <p class="hint">Rejected before its first token: nothing was computed.</p>
  </div>`;
}

export function Meter({ label, value, promise, settled, refused }) {
  const has = promise !== null && promise !== undefined;
  const late = has && known(value) && value > promise;
  const state = refused ? "refused" : !has ? "plain" : late ? "late" : settled && known(value) ? "kept" : "open";
  const scale = has ? Math.max(promise * 1.35, value ?? 0) : value || 1;
  const words = {
    plain: "no objective",
    open: `objective ${ms(promise)}`,
    refused: `✕ rejected: objective ${ms(promise)}`,
    kept: `✓ in time: objective ${ms(promise)}`,
    late: `! late: objective ${ms(promise)}`,
  };
  return html`<div class=${`meter ${state}`}>
    <span class="meter-label">${label}</span>
    <strong>${known(value) ? msAgainst(value, promise) : "–"}</strong>
    <span class="meter-state">${words[state]}</span>
    ${has && html`<span class="track" role="meter" aria-label=${`${label}: measured and objective`} aria-valuemin="0" aria-valuemax=${promise}
      aria-valuenow=${Math.min(value ?? 0, promise)} aria-valuetext=${`${ms(value)} of ${ms(promise)}`}>
      <span class="fill" style=${{ width: `${(100 * Math.min(value ?? 0, scale)) / scale}%` }}></span>
      <span class="mark" style=${{ left: `${(100 * promise) / scale}%` }}></span>
    </span>`}
  </div>`;
}

// Tokens over time, and the slowest course within the objectives.
function Race({ turn }) {
  const { points, promised } = turn;
  if (points.length < 2) return null;
  const times = points.map(([at]) => at / 1000);
  const due = times.map((at) => dueTokens(at * 1000, promised));
  const build = (theme) => ({
    legend: { show: false },
    scales: { x: { time: false }, y: { range: (_, low, high) => [0, Math.max(high, 4) * 1.05] } },
    axes: [theme.axis({ values: (_, ticks) => ticks.map((at) => at === 0 ? "0" : ms(at * 1000)) }), theme.axis({ size: 34 })],
    series: [
      {},
      { label: "objective", stroke: theme.promised, width: 2, dash: [5, 4], points: { show: false } },
      { label: "measured", stroke: theme.ink, width: 2, points: { show: false } },
    ],
  });
  return html`<figure class="race">
    <figcaption>Tokens over time${promised.tpot_ms !== null && html` <span class="key promised">objective</span>`} <span class="key ink">measured</span></figcaption>
    <${Chart} label="Tokens over time, measured and objective" build=${build} data=${[times, due, points.map(([, tokens]) => tokens)]} height=${120} />
  </figure>`;
}

function dueTokens(at, { ttft_ms: ttft, tpot_ms: tpot }) {
  if (tpot === null || at < (ttft ?? 0)) return null;
  return 1 + (at - (ttft ?? 0)) / tpot;
}
