// The second tab: the newest requests, their outcomes, and one of them in detail.
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/htm-preact-3.1.1.js";
import { askForRequest, connection, heldRequest, hello, loadRequests, requests } from "./data.js";
import { Detail } from "./detail.js";
import { clock, count, ms, msAgainst, percent } from "./format.js";
import { useStore } from "./store.js";
import { prompts } from "./prompts.js";
import { className, ICONS, judgedBy, outcomeOf, shortly } from "./words.js";

const KINDS = [
  { kind: "", label: "All" },
  { kind: "live", label: "Running" },
  { kind: "kept", label: "In time" },
  { kind: "late", label: "Late" },
  { kind: "refused", label: "Rejected" },
];
const SPARE_ROWS = 6; // Drawn beyond the window's edges, so that scrolling shows no gaps.
const narrow = matchMedia("(max-width: 760px)");

export function Requests({ open, onOpen }) {
  const held = useStore(requests);
  const said = useStore(prompts);
  const [kind, setKind] = useState("");
  const [filter, setFilter] = useState("");
  const [problem, setProblem] = useState("");
  const link = useStore(connection).state;
  useEffect(() => {
    // Again when a key was given, or the server has come back.
    if (link === "live") loadRequests().then(() => setProblem(""), (error) => setProblem(error.message));
  }, [link]);
  const rows = useMemo(() => chosen(held.sorted, kind, filter, said), [held.version, kind, filter, said]);
  return html`<div class=${`requests ${open ? "with-detail" : ""}`}>
    <section class="list" aria-label="Requests">
      <${Summary} records=${held.sorted} version=${held.version} />
      <div class="filters">
        <div class="chips" role="group" aria-label="Outcome">
          ${KINDS.map((one) => html`<button type="button" class="chip" aria-pressed=${kind === one.kind}
            onClick=${() => setKind(one.kind)}>${one.kind && html`<i class=${one.kind} aria-hidden="true">${ICONS[one.kind]}</i>`}${one.label}</button>`)}
        </div>
        <input id="filter" type="search" placeholder="Filter by prompt, class, cause, id" aria-label="Filter requests" aria-keyshortcuts="/"
          value=${filter} onInput=${(event) => setFilter(event.target.value)} />
      </div>
      <${List} rows=${rows} said=${said} all=${held.sorted.length} open=${open} onOpen=${onOpen} />
      ${held.dropped > 0 && html`<p class="hint">${count(held.dropped)} updates were skipped; the list may be out of date.</p>`}
      ${problem && html`<p class="hint">Older requests could not be read: ${problem}</p>`}
    </section>
    ${open && html`<${Opened} id=${open} version=${held.version} onClose=${() => onOpen("")} />`}
  </div>`;
}

const searched = new WeakMap();

function wordsOf(record) {
  let words = searched.get(record);
  if (!words) {
    const why = record.why ?? {};
    const parts = [record.id, record.request_id, record.class, record.api, record.model, outcomeOf(record).label, why.verdict, shortly(why.verdict), record.finish];
    searched.set(record, (words = parts.filter(Boolean).join(" ").toLowerCase()));
  }
  return words;
}

function chosen(sorted, kind, filter, said) {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  return sorted.filter(
    (record) => (!kind || outcomeOf(record).kind === kind) && words.every((word) => wordsOf(record).includes(word) || said.get(record.request_id)?.toLowerCase().includes(word)),
  );
}

// --- promises by class ------------------------------------------------------------------------------------------
function tally(records) {
  const classes = new Map();
  for (const record of records) {
    const { kind } = outcomeOf(record);
    const name = record.class || "none";
    const counted = classes.get(name) ?? { name, all: 0, kept: 0, late: 0, refused: 0, plain: 0, live: 0 };
    counted[kind] += 1;
    counted.all += 1;
    classes.set(name, counted);
  }
  return [...classes.values()].sort((a, b) => b.all - a.all).slice(0, 6);
}

function Summary({ records, version }) {
  const classes = useMemo(() => tally(records), [version]);
  const promised = useStore(hello).classes ?? {};
  if (!classes.length) return null;
  return html`<ul class="classes" aria-label="Objectives by class, of the requests listed">
    ${classes.map((one) => {
      const judged = one.name !== "none" && one.kept + one.late + one.refused;
      const { ttft_ms: ttft, tpot_ms: tpot } = promised[one.name] ?? {};
      const terms = [ttft && `first ${ms(ttft)}`, tpot && `per token ${ms(tpot)}`].filter(Boolean).join(" · ");
      return html`<li key=${one.name}>
        <span class="class-name">${className(one.name)}</span>
        <strong>${judged ? percent(one.kept / judged) : count(one.plain || one.live)}</strong><span class="class-kept">${judged ? "in time" : one.plain || !one.live ? "served" : "running"}</span>
        <span class="stack" aria-hidden="true">${["kept", "late", "refused"].map((kind) => one[kind] > 0 && html`<span class=${kind} style=${{ flexGrow: one[kind] }}></span>`)}</span>
        <span class="class-counts">${judged ? `${count(one.kept)} in time, ${count(one.late)} late, ${count(one.refused)} rejected` : one.name === "none" ? `best effort${one.refused ? `, ${count(one.refused)} rejected` : ""}` : ""}${terms && html`<br />${terms}`}</span>
      </li>`;
    })}
  </ul>`;
}

// --- the list ---------------------------------------------------------------------------------------------------
function useNarrow() {
  const [is, set] = useState(narrow.matches);
  useEffect(() => {
    const changed = () => set(narrow.matches);
    narrow.addEventListener("change", changed);
    return () => narrow.removeEventListener("change", changed);
  }, []);
  return is;
}

// Only visible rows are in the document. The selected row is stored by its request, since new rows move it down.
function List({ rows, said, all, open, onOpen }) {
  const height = useNarrow() ? 58 : 38;
  const box = useRef(null);
  const [view, setView] = useState({ top: 0, height: 800 });
  const [at, setAt] = useState("");
  useLayoutEffect(() => {
    const measured = new ResizeObserver(([entry]) => setView((seen) => ({ ...seen, height: entry.contentRect.height })));
    measured.observe(box.current);
    return () => measured.disconnect();
  }, []);
  useSteady(box, rows, height);
  const index = rows.findIndex((record) => record.key === at);
  const move = (to) => {
    const next = Math.max(0, Math.min(rows.length - 1, to));
    if (!rows[next]) return;
    setAt(rows[next].key);
    reveal(box.current, next * height, height);
    if (open) onOpen(rows[next].key);
  };
  const keys = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1, PageDown: 10, PageUp: -10 };
  const onKey = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in keys) move(index < 0 ? 0 : index + keys[event.key]);
    else if (event.key === "Home") move(0);
    else if (event.key === "End") move(rows.length - 1);
    else if (event.key === "Enter" && index >= 0) onOpen(rows[index].key);
    else return;
    event.preventDefault();
  };
  const from = Math.max(0, Math.floor(view.top / height) - SPARE_ROWS);
  const to = Math.min(rows.length, Math.ceil((view.top + view.height) / height) + SPARE_ROWS);
  return html`<div class="rows" id="rows" role="grid" tabindex="0" aria-label=${`${rows.length} requests, the newest first`} aria-rowcount=${rows.length + 1}
    aria-activedescendant=${index >= from && index < to ? `row-${at}` : undefined} aria-keyshortcuts="j k Enter" ref=${box} onKeyDown=${onKey}
    onScroll=${(event) => {
      const { scrollTop: top } = event.currentTarget; // Before a later frame asks.
      setView((seen) => ({ ...seen, top }));
    }}>
    <div class="row head" role="row" aria-rowindex="1">
      ${["Outcome", "Arrived", "Class", "Request", "Tokens", "First token", "Per token", "Total", "Why"].map((name) => html`<span role="columnheader">${name}</span>`)}
    </div>
    ${rows.length === 0 && html`<p class="none">${all ? "No request matches the filter." : "No requests yet. Send one in the playground."}</p>`}
    <div class="window" role="presentation" style=${{ height: `${rows.length * height}px` }}>
      ${rows.slice(from, to).map((record, i) => html`<${Row} key=${record.key} record=${record} prompt=${said.get(record.request_id)} index=${from + i} top=${(from + i) * height}
        at=${record.key === at} open=${open !== "" && (record.request_id === open || record.id === open)}
        onClick=${() => {
          setAt(record.key);
          onOpen(record.key);
        }} />`)}
    </div>
  </div>`;
}

// Keep the visible rows in place when new ones arrive above.
function useSteady(box, rows, height) {
  const topmost = useRef({ key: "", index: 0 });
  useLayoutEffect(() => {
    const { key, index } = topmost.current;
    const element = box.current;
    const now = element.scrollTop > 0 && key !== "" ? rows.findIndex((record) => record.key === key) : -1;
    if (now > index) element.scrollTop += (now - index) * height;
    const first = Math.floor(element.scrollTop / height);
    topmost.current = { key: rows[first]?.key ?? "", index: first };
  });
}

function reveal(box, top, height) {
  const head = box.firstElementChild.offsetHeight;
  if (top < box.scrollTop) box.scrollTop = top;
  else if (top + height + head > box.scrollTop + box.clientHeight) box.scrollTop = top + height + head - box.clientHeight;
}

function Row({ record, prompt, index, top, at, open, onClick }) {
  const { kind, label } = outcomeOf(record);
  const { objectives = {}, seen = {}, why } = record;
  return html`<div class=${`row by-${judgedBy(record)} ${prompt ? "with-prompt" : ""} ${at ? "at" : ""} ${open ? "open" : ""}`} id=${`row-${record.key}`} role="row" aria-rowindex=${index + 2}
    aria-selected=${open} style=${{ transform: `translateY(${top}px)` }} onClick=${onClick}>
    <span role="gridcell" class="c-outcome"><span class=${`badge ${kind}`}><i aria-hidden="true">${ICONS[kind]}</i>${label}</span></span>
    <span role="gridcell" class="c-time">${clock(record.created)}</span>
    <span role="gridcell" class=${`c-class ${["none", "custom"].includes(record.class) ? "dim" : ""}`}>${className(record.class)}</span>
    <span role="gridcell" class=${`c-request ${prompt ? "" : "dim"}`} title=${prompt}>${prompt ?? record.api}</span>
    <span role="gridcell" class="c-tokens">${count(record.prompt_tokens)} → ${count(record.output_tokens)}</span>
    <${Against} name="c-ttft" value=${seen.ttft_ms} promise=${objectives.ttft_ms} />
    <${Against} name="c-tpot" value=${seen.tpot_ms || null} promise=${objectives.tpot_ms} />
    <${Against} name="c-total" value=${seen.e2e_ms} promise=${objectives.e2e_ms} />
    <span role="gridcell" class="c-why">${shortly(why?.refused?.cause ?? why?.verdict)}</span>
  </div>`;
}

function Against({ name, value, promise }) {
  const late = promise != null && value != null && value > promise;
  return html`<span role="gridcell" class=${`against ${name} ${late ? "late" : ""}`}>
    <b>${msAgainst(value, promise)}</b>${promise != null && html`<span class="of">${late ? "> " : "/ "}${ms(promise)}</span>`}
  </span>`;
}

function Opened({ id, version, onClose }) {
  const link = useStore(connection).state;
  const here = useMemo(() => heldRequest(id), [id, version]);
  const [asked, setAsked] = useState({ id: "" });
  useEffect(() => {
    if (here) return;
    let current = true;
    askForRequest(id).then((answer) => current && setAsked({ id, ...answer }));
    return () => (current = false);
  }, [id, !here, link]);
  const { record, problem } = here ? { record: here } : asked.id === id ? asked : {};
  return html`<${Detail} record=${record} problem=${problem} id=${id} onClose=${onClose} />`;
}
