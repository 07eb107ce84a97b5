// A text of the model as elements. Markdown becomes elements and text nodes only: tags in the text stay text, and a link
// has an address of http or https.
import { html } from "./vendor/htm-preact-3.1.1.js";

const MAX_MARKDOWN_CHARS = 200_000; // A longer text is shown plainly.
const MAX_INLINE_CHARS = 20_000; // of a paragraph
const MAX_DEPTH = 4; // of lists, quotes, and marks within marks

// None of these takes more than linear time on a line, whatever it holds.
const FENCE = /^ {0,3}(```+|~~~+)([^`]*)$/;
const LANGUAGE = /^\s*([\w+#.-]{1,40})/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(\S.*)$/;
const RULE = /^ {0,3}(?:-\s*){3,}$|^ {0,3}(?:\*\s*){3,}$|^ {0,3}(?:_\s*){3,}$/;
const ITEM = /^( {0,12})(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_LINE = /^ {0,3}\|?(?:\s*:?-+:?\s*\|)+(?:\s*:?-+:?\s*)?$/;

export function Text({ text }) {
  if (text.length > MAX_MARKDOWN_CHARS) return html`<p>${text}</p>`;
  return blocks(text.split("\n"), 0);
}

// --- blocks -----------------------------------------------------------------------------------------------------
function blocks(lines, depth) {
  const found = [];
  let paragraph = [];
  const flush = () => {
    const text = paragraph.join("\n").trim();
    if (text) found.push(html`<p>${inline(text)}</p>`);
    paragraph = [];
  };
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    const block = blockAt(lines, at, depth, paragraph.length > 0);
    if (block) {
      flush();
      if (block.element) found.push(block.element);
      at = block.next;
    } else {
      if (line.trim()) paragraph.push(line);
      else flush();
      at += 1;
    }
  }
  flush();
  return found;
}

function blockAt(lines, at, depth, inParagraph) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return fenced(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return { element: html`<p class=${`heading h${heading[1].length}`} role="heading" aria-level=${heading[1].length + 1}>${inline(titleOf(heading[2]))}</p>`, next: at + 1 };
  if (RULE.test(line) && !inParagraph) return { element: html`<hr />`, next: at + 1 };
  if (depth < MAX_DEPTH && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, at, depth);
  if (line.includes("|") && TABLE_LINE.test(lines[at + 1] ?? "")) return table(lines, at);
  return null;
}

// A heading may be closed by further hashes.
function titleOf(text) {
  const said = text.trimEnd();
  let end = said.length;
  while (said[end - 1] === "#") end -= 1;
  return end < said.length && /\s/.test(said[end - 1]) ? said.slice(0, end).trimEnd() : said;
}

// An open fence at the end is code that is still being written.
function fenced(lines, at, [, mark, info]) {
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(mark) && !lines[end].trim().replaceAll(mark[0], ""))) end += 1;
  const body = lines.slice(at + 1, end).join("\n");
  const language = LANGUAGE.exec(info)?.[1];
  const label = language ? `Code, ${language}` : "Code";
  return { element: html`<pre class="code" tabindex="0" aria-label=${label}><code>${body}</code></pre>`, next: end + 1 };
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  return { element: html`<blockquote>${blocks(lines.slice(at, end).map((line) => QUOTE.exec(line)[1]), depth + 1)}</blockquote>`, next: end };
}

// Lines that are indented deeper than the item's mark, and lines that continue its text, belong to the item.
function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const indent = first[1].length;
  const ordered = first[3] !== undefined;
  const items = [];
  let end = at;
  for (; end < lines.length; end++) {
    const line = lines[end];
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent) {
      if (item[1].length < indent || (item[3] !== undefined) !== ordered) break;
      items.push([item[4]]);
    } else if (!line.trim()) {
      const next = lines[end + 1] ?? "";
      if (!/^\s{2,}\S/.test(next) && !ITEM.test(next)) break;
      items.at(-1).push("");
    } else if (/^\s/.test(line)) items.at(-1).push(line.slice(Math.min(indent + 2, line.search(/\S/))));
    else if (!blockAt(lines, end, MAX_DEPTH, true) && lines[end - 1].trim()) items.at(-1).push(line);
    else break;
  }
  const entries = items.map((item) => html`<li>${tight(blocks(item, depth + 1))}</li>`);
  return { element: ordered ? html`<ol start=${Number(first[3])}>${entries}</ol>` : html`<ul>${entries}</ul>`, next: end };
}

// The text of a short item needs no paragraph of its own.
const tight = (found) => (found.length && found[0].type === "p" && !found[0].props.class ? [found[0].props.children, ...found.slice(1)] : found);

const cells = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|").map((cell) => cell.trim());

function table(lines, at) {
  const head = cells(lines[at]);
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && lines[end].trim()) end += 1;
  const rows = lines.slice(at + 2, end).map((line) => cells(line).slice(0, head.length));
  return {
    element: html`<div class="scroll-x" tabindex="0" role="region" aria-label="Table"><table class="plain"><thead><tr>${head.map((cell) => html`<th scope="col">${inline(cell)}</th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`<tr>${row.map((cell) => html`<td>${inline(cell)}</td>`)}</tr>`)}</tbody></table></div>`,
    next: end,
  };
}

// --- marks within a paragraph -----------------------------------------------------------------------------------
// Two underscores mean nothing: models write bold with stars, and names like __init__ outside of code.
const MARKS = [
  [/(?<!`)(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)/, ([, , code]) => html`<code>${code.trim() || code}</code>`],
  [/\[([^[\]\n]{1,500})\]\(([^()\s]{1,2000})\)/, ([, label, address], depth) => link(address, inline(label, depth))],
  [/\*\*(?=\S)([^\n]{0,2000}?\S)\*\*/, ([, text], depth) => html`<strong>${inline(text, depth)}</strong>`],
  [/\*(?=[^\s*])([^*\n]{0,2000}?[^\s*])\*(?!\*)/, ([, text], depth) => html`<em>${inline(text, depth)}</em>`],
  [/(?<!\w)_(?=[^\s_])([^_\n]{0,2000}?[^\s_])_(?!\w)/, ([, text], depth) => html`<em>${inline(text, depth)}</em>`],
  [/~~(?=\S)([^~\n]{1,2000})~~/, ([, text], depth) => html`<del>${inline(text, depth)}</del>`],
  [/\bhttps?:\/\/[^\s<>"'`()[\]]{1,2000}[^\s<>"'`()[\].,;:!?*]/, ([address]) => link(address, address)],
];

function inline(text, depth = 0) {
  if (depth >= MAX_DEPTH || text.length > MAX_INLINE_CHARS) return text;
  // Each pattern is searched again only after it has been passed: a long text costs one search per pattern and match.
  const found = MARKS.map(() => undefined);
  const parts = [];
  let at = 0;
  while (at < text.length) {
    let best = null;
    MARKS.forEach(([pattern], i) => {
      if (found[i] === undefined || (found[i] && found[i].index < at)) found[i] = search(pattern, text, at);
      if (found[i] && (!best || found[i].index < best.match.index)) best = { match: found[i], make: MARKS[i][1] };
    });
    if (!best) break;
    const { match, make } = best;
    if (match.index > at) parts.push(text.slice(at, match.index));
    parts.push(make(match, depth + 1) ?? match[0]);
    at = match.index + match[0].length;
  }
  if (at < text.length) parts.push(text.slice(at));
  return parts;
}

function search(pattern, text, at) {
  const sticky = new RegExp(pattern.source, "g");
  sticky.lastIndex = at;
  return sticky.exec(text);
}

function link(address, label) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") return null;
  return html`<a href=${url.href} target="_blank" rel="noopener noreferrer nofollow">${label}</a>`;
}
