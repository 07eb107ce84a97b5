// The first tab: a conversation, or completions, with objectives and their outcome.
import { Component, html, useEffect, useRef, useState } from "./vendor/htm-preact-3.1.1.js";
import { begin, conversation, discard, earlier, exported, forget, importFile, reopen, titleOf } from "./conversation.js";
import { hello, samplingOf } from "./data.js";
import { NumberField } from "./field.js";
import { known, ms } from "./format.js";
import { Objectives, Seen } from "./promise.js";
import { speed } from "./presets.js";
import { asked, isRunning, loosen, offer, sendAgain, sendDraft, stop } from "./send.js";
import { useStore } from "./store.js";
import { Text } from "./text.js";
import { OBJECTIVES, whyRejected } from "./words.js";

const EXAMPLES = {
  chat: ["Write a function that reverses a string", "What does this print: print(sum(range(5)))", "Sort a list of words by length"],
  completion: ["def fibonacci(", "import os\n\n", "class Stack:\n    "],
};

export function Playground({ openRequest, askKey }) {
  const settings = useStore(conversation);
  const said = useStore(hello);
  const { models, classes } = said;
  const last = settings.turns[settings.turns.length - 1];
  const running = isRunning(last);
  const shown = settings.turns.findLast((turn) => turn.role === "assistant");
  return html`<div class="playground">
    <section class="talk" aria-label="Conversation">
      <${Thread} turns=${settings.turns} mode=${settings.mode} openRequest=${openRequest} askKey=${askKey} />
      <${Composer} settings=${settings} running=${running} />
    </section>
    <aside class="side" aria-label="Objectives and settings">
      <${Objectives} settings=${settings} classes=${classes ?? {}} />
      <section class="card" aria-labelledby="seen-title">
        <h2 id="seen-title">Objectives and measured latency</h2>
        <${Seen} turn=${shown} />
      </section>
      <${Sampling} settings=${settings} models=${models ?? []} suggested=${samplingOf(said, settings.model)} />
      <${Earlier} />
    </aside>
  </div>`;
}

// --- the thread -------------------------------------------------------------------------------------------------
function Thread({ turns, mode, openRequest, askKey }) {
  const box = useRef(null);
  const follows = useRef(true);
  useEffect(() => {
    if (follows.current) box.current.scrollTop = box.current.scrollHeight;
  }, [turns]);
  useEffect(() => {
    // What was just sent is looked at; on a phone the settings may have been in sight.
    follows.current = true;
    box.current.closest(".playground").scrollTop = 0;
    box.current.scrollTop = box.current.scrollHeight;
  }, [turns.length]);
  const onScroll = ({ currentTarget: at }) => (follows.current = at.scrollHeight - at.scrollTop - at.clientHeight < 40);
  return html`<div class="thread" ref=${box} onScroll=${onScroll} tabindex="0" role="log" aria-label="Messages">
    ${turns.length === 0 && html`<${Empty} mode=${mode} />`}
    ${turns.map((turn, i) => html`<${Turn} key=${turn.id} turn=${turn} last=${i === turns.length - 1} mode=${mode}
      openRequest=${openRequest} askKey=${askKey} />`)}
  </div>`;
}

function Empty({ mode }) {
  return html`<div class="empty">
    <h1>${mode === "chat" ? "Talk to the model" : "Complete a text"}</h1>
    <p>Choose objectives and send something. A request whose objectives are out of reach is rejected before its first token, with the cause.</p>
    <div class="examples">
      ${EXAMPLES[mode].map((text) => html`<button type="button" class="example" onClick=${() => {
        conversation.set({ draft: text });
        document.getElementById("draft").focus();
      }}>${text.trim()}</button>`)}
    </div>
  </div>`;
}

// Redrawn only when its own turn has changed, so that only the streaming turn costs time.
class Turn extends Component {
  shouldComponentUpdate(next) {
    return next.turn !== this.props.turn || next.last !== this.props.last || next.mode !== this.props.mode;
  }

  render({ turn, last, mode, openRequest, askKey }) {
    const plain = mode === "completion";
    if (turn.role === "user") {
      return html`<article class="turn user" aria-label="You"><div class=${`bubble ${plain ? "mono" : ""}`}>${turn.text}</div></article>`;
    }
    return html`<article class="turn assistant" aria-label="Model" aria-busy=${isRunning(turn)}>
      ${turn.reasoning && html`<details class="reasoning" open=${!turn.text}><summary>Reasoning</summary><div>${turn.reasoning}</div></details>`}
      ${turn.state === "waiting" && html`<p class="waiting"><span class="dots" aria-hidden="true"></span>Waiting for the first token</p>`}
      ${turn.text && html`<div class=${`answer ${plain ? "mono" : ""}`}>${plain ? turn.text : html`<${Text} text=${turn.text} />`}</div>`}
      ${(turn.tools ?? []).map((tool) => html`<div class="tool"><span class="tag">calls</span> <code>${tool.name}(${tool.arguments})</code></div>`)}
      ${turn.state === "refused" && html`<${Refused} turn=${turn} last=${last} />`}
      ${turn.state === "failed" && html`<${Failed} turn=${turn} askKey=${askKey} />`}
      <${Foot} turn=${turn} last=${last} openRequest=${openRequest} />
    </article>`;
  }
}

function Refused({ turn, last }) {
  const { reason, cause } = turn.refusal;
  const instead = offer(turn);
  const said = turn.promised[`${reason}_ms`];
  return html`<div class="notice refused" role="alert">
    <h3><span aria-hidden="true">✕</span> Rejected: ${OBJECTIVES[reason] ?? reason} ${reason === "tpot" ? "of" : "within"} ${ms(said)} is out of reach</h3>
    <p>${whyRejected(cause)}</p>
    <dl class="pairs">
      <div><dt>Objective</dt><dd>${ms(said)}</dd></div>
      ${instead && known(instead.least) && html`<div><dt>Possible now, with a margin</dt><dd>${ms(instead.ms)}</dd></div>`}
    </dl>
    ${last && html`<div class="actions">
      ${instead && html`<button type="button" class="primary" onClick=${() => loosen(turn, instead)}>Ask for ${ms(instead.ms)} and send again</button>`}
      <button type="button" onClick=${sendAgain}>Try again unchanged</button>
    </div>`}
  </div>`;
}

function Failed({ turn, askKey }) {
  return html`<div class="notice failed" role="alert">
    <h3><span aria-hidden="true">✕</span> ${turn.status ? `Error ${turn.status}` : turn.text ? "The answer was interrupted" : "No answer"}</h3>
    <p>${turn.error}</p>
    ${turn.status === 401 && html`<div class="actions"><button type="button" class="primary" onClick=${askKey}>Enter the API key</button></div>`}
  </div>`;
}

const FINISH = { length: "ended at max tokens", timeout: "timed out", tool_calls: "ended with a tool call", abort: "ended by the server" };

// The server keeps no record of invalid or unauthorised requests.
const misunderstood = ({ status }) => status >= 400 && status < 500 && status !== 429;

function Foot({ turn, last, openRequest }) {
  if (isRunning(turn)) return null;
  const copy = () => navigator.clipboard?.writeText(turn.text);
  return html`<footer class="foot">
    <${Verdict} turn=${turn} />
    <${Times} turn=${turn} />
    ${turn.state === "stopped" && html`<span>stopped</span>`}
    ${FINISH[turn.finish] && html`<span>${FINISH[turn.finish]}</span>`}
    ${turn.requestId && !misunderstood(turn) && html`<button type="button" class="link" onClick=${() => openRequest(turn.requestId)}>See why</button>`}
    ${turn.text && html`<button type="button" class="link" onClick=${copy}>Copy</button>`}
    ${last && turn.state !== "refused" && html`<button type="button" class="link" onClick=${sendAgain}>Regenerate</button>`}
  </footer>`;
}

function Times({ turn }) {
  const { ttft_ms: ttft, tpot_ms: tpot } = turn.told ?? turn.seen ?? {};
  if (ttft == null) return null;
  return html`<span class="num">first ${ms(ttft)}${tpot > 0 && html`, then ${ms(tpot)} per token`}</span>`;
}

function Verdict({ turn }) {
  if (!turn.told || turn.told.met === null) return null;
  return turn.told.met
    ? html`<span class="badge kept"><i aria-hidden="true">✓</i>in time</span>`
    : html`<span class="badge late"><i aria-hidden="true">!</i>late</span>`;
}

// --- below and beside it ----------------------------------------------------------------------------------------
function Composer({ settings, running }) {
  const onKey = (event) => {
    // While an input method composes, Enter chooses a word.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    sendDraft();
  };
  const submit = (event) => {
    event.preventDefault();
    if (running) stop();
    else sendDraft();
  };
  const chat = settings.mode === "chat";
  const rows = Math.min(8, Math.max(2, settings.draft.split("\n").length));
  return html`<form class="composer" onSubmit=${submit}>
    <textarea id="draft" class=${chat ? "" : "mono"} rows=${rows} value=${settings.draft} autofocus
      aria-label=${chat ? "Message" : "Prompt"} placeholder=${chat ? "Message" : "Text to complete"}
      onInput=${(event) => conversation.set({ draft: event.target.value })} onKeyDown=${onKey}></textarea>
    <div class="composer-row">
      <div class="switch" role="group" aria-label="Kind of request">
        ${["chat", "completion"].map((mode) => html`<button type="button" aria-pressed=${settings.mode === mode}
          onClick=${() => conversation.set({ mode })}>${mode === "chat" ? "Chat" : "Completion"}</button>`)}
      </div>
      <${Promised} settings=${settings} />
      <button type="submit" class=${running ? "stop" : "primary"} disabled=${!running && !settings.draft.trim()}
        title=${running ? "" : "Enter; Shift+Enter begins a new line"}>${running ? "Stop" : "Send"}</button>
    </div>
  </form>`;
}

// Objectives of the next request beside the button: on a phone the sliders may be out of sight.
function Promised({ settings }) {
  useStore(speed);
  const { class: inClass, ttft_ms: ttft, tpot_ms: tpot, e2e_ms: e2e } = asked(settings, useStore(hello).classes ?? {});
  const said = [ttft !== null && `first ${ms(ttft)}`, tpot !== null && `per token ${ms(tpot)}`, e2e !== null && `all ${ms(e2e)}`].filter(Boolean);
  const text = inClass ? `class ${inClass}` : said.join(" · ") || "no objectives";
  const show = () => document.querySelector(".objectives").scrollIntoView({ block: "start" });
  return html`<button type="button" class="link promised-line" title="Objectives" onClick=${show}>${text}</button>`;
}

function Sampling({ settings, models, suggested }) {
  const set = (name) => (event) => conversation.set({ [name]: event.target.value });
  const number = (name, low, high) => (typed) => {
    const value = Number(typed);
    if (typed !== "" && value >= low && value <= high) conversation.set({ [name]: value });
  };
  // An empty field leaves the choice to the server, whose value it shows.
  const optional = (name, low, high) => (typed) => {
    if (typed === "") conversation.set({ [name]: null });
    else number(name, low, high)(typed);
  };
  return html`<section class="card settings" aria-labelledby="settings-title">
    <h2 id="settings-title">Settings</h2>
    ${models.length > 1 && html`<label>Model<select value=${settings.model} onChange=${set("model")}>
      ${models.map((name) => html`<option value=${name}>${name}</option>`)}
    </select></label>`}
    ${settings.mode === "chat" && html`<label>System prompt<textarea rows="2" value=${settings.system} onInput=${set("system")}></textarea></label>`}
    <div class="fields">
      <label>Temperature<${NumberField} min="0" max="2" step="0.1" value=${settings.temperature}
        placeholder=${suggested.temperature ?? 1} take=${optional("temperature", 0, 2)} /></label>
      <label>Top p<${NumberField} min="0.01" max="1" step="any" value=${settings.topP}
        placeholder=${suggested.top_p ?? 1} take=${optional("topP", 0.01, 1)} /></label>
      <label>Max tokens<${NumberField} min="1" step="1" value=${settings.maxTokens} take=${number("maxTokens", 1, 1e6)} /></label>
    </div>
    <${Files} empty=${settings.turns.length === 0} />
    <p class="hint">Conversations are stored in this browser only.</p>
  </section>`;
}

// A hidden answer that still runs would block sending.
const leaving = (change) => () => {
  stop();
  change();
};

function Earlier() {
  const { list } = useStore(earlier);
  if (!list.length) return null;
  return html`<section class="card earlier" aria-labelledby="earlier-title">
    <h2 id="earlier-title">Earlier conversations</h2>
    <ul>${list.map((one) => html`<li key=${one.id}>
      <button type="button" class="link" onClick=${leaving(() => reopen(one.id))}>${titleOf(one)}</button>
      <button type="button" class="close" aria-label=${`Delete ${titleOf(one)}`} onClick=${() => forget([one.id])}>✕</button>
    </li>`)}</ul>
    <div class="actions"><button type="button" onClick=${() => forget(list.map((one) => one.id))}>Delete all</button></div>
  </section>`;
}

function Files({ empty }) {
  const [problem, setProblem] = useState("");
  const chooser = useRef(null);
  const take = async (event) => {
    const [file] = event.target.files;
    event.target.value = "";
    if (file) await importFile(file).then(() => setProblem(""), (error) => setProblem(error.message));
  };
  return html`<div class="actions">
    <button type="button" disabled=${empty} onClick=${leaving(begin)}>New</button>
    <button type="button" disabled=${empty} onClick=${leaving(discard)}>Delete</button>
    <button type="button" disabled=${empty} onClick=${save}>Export</button>
    <button type="button" onClick=${() => chooser.current.click()}>Import</button>
    <input ref=${chooser} type="file" accept="application/json,.json" hidden aria-label="File of a conversation" onChange=${take} />
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
  </div>`;
}

function save() {
  const url = URL.createObjectURL(new Blob([exported()], { type: "application/json" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = `conversation-${new Date().toISOString().slice(0, 16).replace(":", "")}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
