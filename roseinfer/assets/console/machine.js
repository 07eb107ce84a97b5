// The third tab: state and steps of the engines.
import { html, useEffect, useMemo, useState } from "./vendor/htm-preact-3.1.1.js";
import { Chart } from "./chart.js";
import { hello, loadRequests, machine, requests } from "./data.js";
import { bytes, count, counted, decimal, known, ms, percent, quantile, rate } from "./format.js";
import { useStore } from "./store.js";
import { speedWords } from "./words.js";

const WINDOW_S = 30;
const GAP_S = 0.25; // A longer time between steps is drawn as a gap.
const SPARK = { width: 120, height: 28, most: 120, least: 24 };
// Of a row of `steps`, see the events of the console.
const [END, DURATION, BUDGET, ROWS, PROMPT] = [1, 2, 3, 4, 5];

export function Machine() {
  const held = useStore(machine);
  const said = useStore(hello);
  const [chosen, setChosen] = useState(null);
  const engines = held.engines;
  const engine = engines.some((one) => one.engine === chosen) ? chosen : (engines[0]?.engine ?? 0);
  const columns = useMemo(() => columnsOf(held.steps.get(engine) ?? [], held.at), [held.version, engine]);
  return html`<div class="machine">
    <${Tiles} held=${held} said=${said} />
    <section class="card charts" aria-labelledby="steps-title">
      <header class="chart-head"><h2 id="steps-title">Steps</h2>
        ${engines.length > 1 && html`<div class="chips" role="group" aria-label="Engine">${engines.map((one) => html`<button type="button" class="chip"
          aria-pressed=${one.engine === engine} onClick=${() => setChosen(one.engine)}>${one.model ? `${one.model}, ` : ""}engine ${one.engine}</button>`)}</div>`}
        <p class="now">${lastStep(columns)}</p>
      </header>
      ${columns.durations[0].length === 0 && html`<p class="no-steps">No steps in the last ${WINDOW_S} s</p>`}
      <figure><figcaption>Duration of each step <span class="key ink">duration</span> <span class="key promised">budget</span> <span class="key late">over budget</span></figcaption>
        <${Chart} label="Duration of the steps of the last 30 seconds against their budget, in milliseconds" build=${durations} data=${columns.durations} height=${200} /></figure>
      <figure><figcaption>Rows of each step <span class="key ink">rows</span> <span class="key second">prompt tokens, right</span></figcaption>
        <${Chart} label="Rows and prompt tokens of the steps of the last 30 seconds" build=${loads} data=${columns.loads} height=${160} /></figure>
    </section>
    <${Latency} steps=${columns.durations[1]} />
    <${Engines} engines=${engines} />
    <${Speculation} engines=${engines} />
    ${held.router && html`<${Router} router=${held.router} />`}
  </div>`;
}

// --- charts -----------------------------------------------------------------------------------------------------
// The last seconds as uPlot's columns; x is seconds before now, and a null breaks the line where no step ran.
function columnsOf(steps, now) {
  const x = [];
  const cells = { duration: [], budget: [], over: [], rows: [], prompt: [] };
  let first = steps.length;
  while (first > 0 && steps[first - 1][END] > now - WINDOW_S) first -= 1;
  const push = (at, duration, budget, rows, prompt) => {
    x.push(at - now);
    cells.duration.push(duration);
    cells.budget.push(budget > 0 ? budget : null); // none, or one that is used up: neither is on the scale
    cells.over.push(known(budget) && duration > budget ? duration : null);
    cells.rows.push(rows);
    cells.prompt.push(prompt);
  };
  for (let i = first; i < steps.length; i++) {
    const step = steps[i];
    const idle = i > first ? step[END] - step[DURATION] / 1000 - steps[i - 1][END] : 0;
    if (idle > GAP_S) push(steps[i - 1][END] + 1e-3, null, null, null, null);
    push(step[END], step[DURATION], step[BUDGET], step[ROWS], step[PROMPT]);
  }
  return {
    last: steps[steps.length - 1],
    durations: [x, cells.duration, cells.budget, cells.over],
    loads: [x, cells.rows, cells.prompt],
  };
}

function lastStep({ last }) {
  if (!last) return "No step yet.";
  const budget = known(last[BUDGET]) ? ` of ${ms(last[BUDGET])}` : ", no budget";
  return `Newest: ${ms(last[DURATION])}${budget}, ${counted(last[ROWS], "row")}, ${counted(last[PROMPT], "prompt token")}`;
}

const seconds = (_, ticks) => ticks.map((at) => (at === 0 ? "now" : `${decimal(at, 0)} s`));
// As far back as there are steps, in fives.
const time = { time: false, range: (plot) => [Math.min(-5, Math.max(-WINDOW_S, 5 * Math.floor((plot.data[0][0] ?? 0) / 5))), 0] };
// Of the columns by number, what is above zero: from the power of ten below it, a decade at least.
const decades = (columns) => (plot) => {
  let low = Infinity;
  let high = 0;
  for (const column of columns) {
    for (const value of plot.data[column]) {
      if (!(value > 0)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (!high) return [1, 100];
  const floor = 10 ** Math.floor(Math.log10(low));
  return [floor, Math.max(high * 1.3, floor * 12)];
};
const fromZero = (_, low, high) => [0, Math.max(high || 0, 1) * 1.1];

// Logarithmic: budgets are often a hundred times what steps take, and a stall a hundred times either.
function durations(theme) {
  const named = (_, ticks) => ticks.map(ms);
  const splits = (_, axis, low, high) => [0.01, 0.1, 1, 10, 100, 1000, 10_000, 100_000].filter((value) => value >= low && value <= high);
  return {
    legend: { show: false },
    padding: [6, 58, 0, 0], // as wide as the axis at the right of the chart below,
    scales: { x: time, y: { distr: 3, range: decades([1, 2]) } },
    axes: [theme.axis({ values: seconds, gap: 8 }), theme.axis({ size: 60, values: named, splits, filter: (_, ticks) => ticks })],
    series: [
      {},
      { stroke: theme.ink, width: 1.25, points: { show: false } },
      { stroke: theme.promised, width: 1.5, points: { show: false }, paths: uPlot.paths.stepped({ align: -1 }) },
      { stroke: theme.late, width: 0, paths: () => null, points: { show: true, size: 5, stroke: theme.late, fill: theme.late } },
    ],
  };
}

function loads(theme) {
  return {
    legend: { show: false },
    scales: { x: time, y: { range: fromZero }, tokens: { range: fromZero } },
    axes: [theme.axis({ values: seconds, gap: 8 }), theme.axis({ size: 60 }), theme.axis({ scale: "tokens", side: 1, size: 48, grid: { show: false } })],
    series: [
      {},
      { stroke: theme.ink, width: 1.25, points: { show: false } },
      { stroke: theme.second, width: 1.25, scale: "tokens", points: { show: false } },
    ],
  };
}

// --- tiles ------------------------------------------------------------------------------------------------------
function Tiles({ held, said }) {
  const { engines, samples } = held;
  const now = samples[samples.length - 1];
  if (!now) return html`<p class="hint">Waiting for data.</p>`;
  const total = (name) => engines.reduce((sum, engine) => sum + (engine[name] ?? 0), 0);
  const queries = total("prefix_queries");
  // Over the last seconds: four samples a second are too few for a figure that can be read.
  const smooth = (name) => {
    const values = samples.slice(-8).map((sample) => sample[name]).filter(known);
    return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
  };
  const tiles = [
    { label: "Running", value: count(now.running), note: `${said.max_num_seqs ? `of ${count(said.max_num_seqs * engines.length)} seats, ` : ""}${count(now.waiting)} waiting`, line: "running" },
    { label: "Tokens/s", value: rate(smooth("tokensPerS")), note: `prompts ${rate(smooth("promptsPerS"))}/s`, line: "tokensPerS" },
    { label: "KV cache", value: percent(now.kv), note: `${count(total("kv_blocks_used"))} of ${count(total("kv_blocks"))} blocks`, line: "kv", full: 1 },
    { label: "Promised", value: percent(now.utilisation), note: "of the machine, by objectives", line: "utilisation", full: 1 },
    { label: "Prefix cache", value: percent(queries ? total("prefix_hits") / queries : null), note: `of ${count(queries)} prompt tokens` },
    { label: "Preempted", value: count(total("preemptions")), note: "sequences" },
  ];
  const host = total("host_blocks");
  if (host) {
    const used = total("host_blocks_used");
    tiles.push({ label: "Host memory", value: percent(used / host), note: `${count(used)} of ${count(host)} blocks` });
    tiles.push({ label: "From host memory", value: count(total("host_hits")), note: `prompt tokens; ${bytes(total("host_loaded_bytes"))} loaded, ${bytes(total("host_stored_bytes"))} stored` });
  }
  const drafted = total("drafted_tokens");
  if (drafted) tiles.push({ label: "Speculation", value: percent(total("accepted_tokens") / drafted), note: `of ${count(drafted)} drafted tokens accepted` });
  return html`<ul class="tiles" aria-label="The machine now">
    ${tiles.map((tile) => html`<li key=${tile.label}><span class="tile-label">${tile.label}</span><strong>${tile.value}</strong>
      <span class="tile-note">${tile.note}</span>${tile.line && html`<${Spark} samples=${samples} name=${tile.line} full=${tile.full} />`}</li>`)}
  </ul>`;
}

function Spark({ samples, name, full }) {
  const { width, height } = SPARK;
  const shown = samples.slice(-SPARK.most).map((sample) => sample[name] ?? 0);
  const gap = width / (Math.max(shown.length, SPARK.least) - 1);
  const high = full ?? Math.max(...shown, 1);
  const points = shown.map((value, i) => {
    const x = width - (shown.length - 1 - i) * gap;
    return `${x.toFixed(1)},${(height - 1 - (Math.min(value, high) / high) * (height - 2)).toFixed(1)}`;
  });
  return html`<svg class="spark" viewBox=${`0 0 ${width} ${height}`} preserveAspectRatio="none" aria-hidden="true"><polyline points=${points.join(" ")} /></svg>`;
}

// --- latency ----------------------------------------------------------------------------------------------------
const LATENCIES = [["First token", "ttft_ms"], ["Time per token", "tpot_ms"], ["Whole answer", "e2e_ms"]];

// Half of the values are at most p50, and 95 of 100 at most p95.
function Latency({ steps }) {
  const held = useStore(requests);
  useEffect(() => {
    loadRequests().catch(() => {}); // What the feed brings is shown anyway.
  }, []);
  const ended = useMemo(() => held.sorted.filter((record) => record.state === "ended"), [held.version]);
  const rows = useMemo(() => LATENCIES.map(([name, field]) => row(name, ended.map((record) => record.seen?.[field]))), [ended]);
  const all = [...rows, row(`Step, last ${WINDOW_S} s`, steps)];
  return html`<section class="card" aria-labelledby="latency-title"><h2 id="latency-title">Latency</h2>
    <div class="scroll-x"><table class="plain numbers"><thead><tr>${["", "p50", "p95", "Values"].map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
      <tbody>${all.map(({ name, values }) => html`<tr key=${name}><th scope="row">${name}</th><td>${ms(quantile(values, 0.5))}</td><td>${ms(quantile(values, 0.95))}</td><td>${count(values.length)}</td></tr>`)}</tbody>
    </table></div>
    <p class="hint">Of the newest ${counted(ended.length, "ended request")} in the list.</p></section>`;
}

const row = (name, values) => ({ name, values: values.filter((value) => known(value) && value > 0).sort((a, b) => a - b) });

// --- engines and router -----------------------------------------------------------------------------------------
const COLUMNS = [
  ["Engine", (one) => (one.model ? `${one.engine} (${one.model})` : one.engine)],
  ["State", (one) => html`<span class=${`state ${one.state}`}>${one.state}</span>`],
  ["Running", (one) => count(one.running)],
  ["Waiting", (one) => count(one.waiting)],
  ["KV cache", (one) => percent(one.kv_blocks ? one.kv_blocks_used / one.kv_blocks : null)],
  ["Promised", (one) => percent(one.utilisation)],
  ["Speed", (one) => (known(one.slowdown) ? speedWords(one.slowdown) : "not calibrated"), "A step of one request now, compared with the cost model of `roseinfer calibrate`"],
  ["Margin", (one) => percent(one.margin), "Safety margin on token deadlines"],
  ["Demoted", (one) => count(one.demoted), "Requests served with spare capacity because their objective is already missed"],
  ["Restarts", (one) => count(one.restarts)],
  ["Heartbeat", (one) => (known(one.heartbeat_age_s) ? `${ms(one.heartbeat_age_s * 1000)} ago` : decimal(null))],
];

function Engines({ engines }) {
  if (!engines.length) return null;
  return html`<section class="card"><h2>${engines.length > 1 ? "Engines" : "Engine"}</h2>
    <div class="scroll-x" tabindex="0" role="region" aria-label="Engines"><table class="plain"><thead><tr>
      ${COLUMNS.map(([name, , hint]) => html`<th scope="col" title=${hint}>${name}</th>`)}</tr></thead>
      <tbody>${engines.map((one) => html`<tr key=${one.engine}>${COLUMNS.map(([, cell]) => html`<td>${cell(one)}</td>`)}</tr>`)}</tbody>
    </table></div></section>`;
}

// What became of the drafts of all engines since the start, by proposer; only where there were any.
function Speculation({ engines }) {
  const proposers = new Map();
  for (const { proposer, steps, drafted, accepted } of engines.flatMap((one) => one.drafts ?? [])) {
    const sum = proposers.get(proposer) ?? { steps: 0, drafted: [], accepted: [] };
    sum.steps += steps;
    drafted.forEach((n, at) => (sum.drafted[at] = (sum.drafted[at] ?? 0) + n));
    accepted.forEach((n, at) => (sum.accepted[at] = (sum.accepted[at] ?? 0) + n));
    proposers.set(proposer, sum);
  }
  if (!proposers.size) return null;
  const positions = Math.max(...[...proposers.values()].map((sum) => sum.drafted.length));
  const heads = ["Proposer", "Drafted", "Accepted", "Tokens per step", ...Array.from({ length: positions }, (_, at) => `Draft ${at + 1}`)];
  const all = (counts) => counts.reduce((a, b) => a + b, 0);
  return html`<section class="card" aria-labelledby="speculation-title"><h2 id="speculation-title">Speculation</h2>
    <div class="scroll-x" tabindex="0" role="region" aria-label="Drafts by proposer"><table class="plain numbers"><thead><tr>${heads.map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
      <tbody>${[...proposers].map(([name, { steps, drafted, accepted }]) => html`<tr key=${name}><th scope="row">${name}</th><td>${count(all(drafted))}</td><td>${count(all(accepted))}</td>
        <td>${decimal(steps ? (steps + all(accepted)) / steps : null, 2)}</td>${heads.slice(4).map((_, at) => html`<td>${percent(drafted[at] ? accepted[at] / drafted[at] : null)}</td>`)}</tr>`)}</tbody>
    </table></div><p class="hint">Of each position in a row, the share of its drafts that became output.</p></section>`;
}

// Counts since the start: placements, their reasons, retries and resumes.
function Router({ router }) {
  const listed = (counts, name = (key) => key.replaceAll("_", " ")) =>
    Object.entries(counts ?? {}).filter(([, n]) => n > 0).map(([key, n]) => `${name(key)}: ${count(n)}`).join(", ") || "none";
  const engine = (number) => `engine ${number}`;
  const rows = [
    ["Placed on", listed(router.placements, engine)],
    ["Reasons", listed(router.reasons)],
    ["Retried", count(router.retries)],
    ["Placed again", listed(router.placed_again)],
    ["Resumed elsewhere", listed(router.resumes)],
    ["Breaker open", (router.breakers ?? []).map(engine).join(", ") || "none"],
  ];
  return html`<section class="card" aria-labelledby="router-title"><h2 id="router-title">Router</h2><dl class="facts columns">
    ${rows.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl></section>`;
}
