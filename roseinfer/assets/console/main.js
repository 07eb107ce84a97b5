// The page: three tabs, state of the connection, keyboard shortcuts, and the address.
import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact-3.1.1.js";
import { connection, hello, slowdown, watch } from "./data.js";
import { Machine } from "./machine.js";
import { Playground } from "./playground.js";
import { Requests } from "./requests.js";
import { setKey, settings, switchTheme } from "./settings.js";
import { useStore } from "./store.js";
import { speedWords } from "./words.js";

const TABS = [
  { name: "playground", label: "Playground" },
  { name: "requests", label: "Requests" },
  { name: "machine", label: "Machine" },
];
const reconnect = watch();

// The address holds the tab and the open request: #requests/ID.
function readAddress() {
  const [tab, ...rest] = location.hash.slice(1).split("/");
  return TABS.some((one) => one.name === tab) ? { tab, open: decoded(rest.join("/")) } : { tab: "playground", open: "" };
}

// A pasted address may be cut within an encoded character.
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function go(tab, open = "") {
  const hash = `#${tab}${open ? `/${encodeURIComponent(open)}` : ""}`;
  if (location.hash !== hash) location.hash = hash;
}

const typing = (target) => target.closest?.("input:not([type=range]):not([type=checkbox]), textarea, select, dialog");

function onKey(event) {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  const { tab, open } = readAddress();
  if (event.key === "Escape" && tab === "requests") {
    if (event.target.id !== "filter" && open) go("requests");
    document.getElementById("rows")?.focus();
    return;
  }
  if (typing(event.target)) return;
  const number = Number(event.key);
  if (TABS[number - 1]) go(TABS[number - 1].name);
  else if (event.key === "/" && tab === "requests") document.getElementById("filter").focus();
  else if (event.key === "/" && tab === "playground") document.getElementById("draft").focus();
  else if (["j", "k"].includes(event.key) && tab === "requests" && event.target.id !== "rows") {
    const rows = document.getElementById("rows");
    rows.focus();
    rows.dispatchEvent(new KeyboardEvent("keydown", { key: event.key, bubbles: true, cancelable: true }));
  } else return;
  event.preventDefault();
}

function App() {
  const [at, setAt] = useState(readAddress());
  const keyDialog = useRef(null);
  const helpDialog = useRef(null);
  const link = useStore(connection);
  useEffect(() => {
    const moved = () => setAt(readAddress());
    const help = (event) => event.key === "?" && !typing(event.target) && helpDialog.current.showModal();
    addEventListener("hashchange", moved);
    addEventListener("keydown", onKey);
    addEventListener("keydown", help);
    return () => {
      removeEventListener("hashchange", moved);
      removeEventListener("keydown", onKey);
      removeEventListener("keydown", help);
    };
  }, []);
  const askKey = () => keyDialog.current.showModal();
  return html`
    <header class="top">
      <a class="brand" href="#playground"><img src="console/icon.svg" alt="" width="24" height="24" /><span>roseinfer</span></a>
      <${Tabs} tab=${at.tab} />
      <${Server} link=${link} />
      <button type="button" class="icon" title="API key" aria-label="API key" onClick=${askKey}><${Icon} name="key" /></button>
      <button type="button" class="icon help" title="Keyboard shortcuts" aria-label="Keyboard shortcuts" onClick=${() => helpDialog.current.showModal()}>?</button>
      <${Theme} />
    </header>
    <${Banner} link=${link} askKey=${askKey} />
    <main id="panel" role="tabpanel" aria-labelledby=${`tab-${at.tab}`}>
      ${at.tab === "playground" && html`<${Playground} openRequest=${(id) => go("requests", id)} askKey=${askKey} />`}
      ${at.tab === "requests" && html`<${Requests} open=${at.open} onOpen=${(id) => go("requests", id)} />`}
      ${at.tab === "machine" && html`<${Machine} />`}
    </main>
    <${KeyDialog} dialog=${keyDialog} />
    <${HelpDialog} dialog=${helpDialog} />`;
}

function Tabs({ tab }) {
  const onArrow = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = TABS[(TABS.findIndex((one) => one.name === tab) + step + TABS.length) % TABS.length];
    go(next.name);
    document.getElementById(`tab-${next.name}`).focus();
  };
  return html`<div class="tabs" role="tablist" aria-label="Views" onKeyDown=${onArrow}>
    ${TABS.map((one, i) => html`<button type="button" role="tab" id=${`tab-${one.name}`} aria-selected=${tab === one.name} aria-controls="panel"
      tabindex=${tab === one.name ? 0 : -1} aria-keyshortcuts=${i + 1} onClick=${() => go(one.name)}>${one.label}</button>`)}
  </div>`;
}

const STATES = { connecting: "connecting", loading: "loading", live: "live", lost: "lost", locked: "needs a key", off: "no live data", paused: "paused" };

function Server({ link }) {
  const { models, policy, version } = useStore(hello);
  const said = [models?.[0] && (models.length > 1 ? `${models[0]} +${models.length - 1}` : models[0]), policy?.name].filter(Boolean).join(" · ");
  return html`<p class="server" title=${version && `roseinfer ${version}`}>
    <span class="server-name">${said}</span>
    <span class=${`link-state ${link.state}`} role="status"><i aria-hidden="true"></i>${STATES[link.state]}</span>
  </p>`;
}

function Banner({ link, askKey }) {
  if (link.state === "locked") {
    return html`<div class="banner" role="alert"><p>This server needs an API key.</p><button type="button" class="primary" onClick=${askKey}>Enter the key</button></div>`;
  }
  if (link.state === "loading") return html`<div class="banner loading" role="status"><p>The server is loading its model. This page continues automatically.</p></div>`;
  if (link.state === "live") return html`<${Slow} />`;
  if (link.state !== "lost") return null;
  return html`<div class="banner lost" role="alert"><p><strong>No connection.</strong> ${link.why || "Connecting again"}. The data is out of date; reconnecting automatically.</p>
    <button type="button" onClick=${reconnect}>Try now</button></div>`;
}

function Slow() {
  const { factor } = useStore(slowdown);
  if (factor === null) return null;
  return html`<div class="banner slow" role="note"><p><strong>The machine is ${speedWords(factor)}.</strong> Fewer objectives can be met.</p></div>`;
}

function Theme() {
  const { theme } = useStore(settings);
  return html`<button type="button" class="icon" title="Dark or light" aria-label=${theme === "dark" ? "Light theme" : "Dark theme"} onClick=${switchTheme}>
    <${Icon} name=${theme === "dark" ? "sun" : "moon"} /></button>`;
}

const PATHS = {
  sun: "M12 8a4 4 0 1 1 0 8 4 4 0 0 1 0-8ZM12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6 19 19M5 19l1.4-1.4M17.6 6.4 19 5",
  moon: "M20 14.5A8 8 0 0 1 9.5 4 8 8 0 1 0 20 14.5Z",
  key: "M14.5 4a5.5 5.5 0 1 1-3.9 9.4L4 20v-3h3v-3h3M16 8h.01",
};

function Icon({ name }) {
  return html`<svg viewBox="0 0 24 24" width="18" height="18" fill="none" stroke="currentColor" stroke-width="1.8" stroke-linecap="round" stroke-linejoin="round" aria-hidden="true"><path d=${PATHS[name]} /></svg>`;
}

function KeyDialog({ dialog }) {
  const save = (event) => {
    setKey(event.target.elements.key.value.trim());
    reconnect();
  };
  return html`<dialog ref=${dialog} aria-labelledby="key-title"><form method="dialog" onSubmit=${save}>
    <h2 id="key-title">API key</h2>
    <p class="hint">Sent to this server only, and deleted when this tab is closed.</p>
    <input type="password" name="key" autocomplete="off" aria-label="API key" value=${settings.get().key} />
    <div class="actions"><button type="submit" class="primary">Save</button><button type="button" onClick=${() => dialog.current.close()}>Cancel</button></div>
  </form></dialog>`;
}

const KEYS = [
  ["1 2 3", "the tabs"],
  ["Enter", "send the message, or open the request"],
  ["Shift Enter", "a new line"],
  ["/", "filter or message"],
  ["j k", "down and up the list"],
  ["Esc", "close the request"],
  ["?", "this list"],
];

function HelpDialog({ dialog }) {
  return html`<dialog ref=${dialog} aria-labelledby="help-title"><form method="dialog">
    <h2 id="help-title">Keyboard shortcuts</h2>
    <dl class="keys">${KEYS.map(([keys, what]) => html`<div><dt>${keys.split(" ").map((key) => html`<kbd>${key}</kbd> `)}</dt><dd>${what}</dd></div>`)}</dl>
    <div class="actions"><button type="submit" class="primary">Close</button></div>
  </form></dialog>`;
}

render(html`<${App} />`, document.getElementById("app"));
