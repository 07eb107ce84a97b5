// A text of the model as elements: fenced code apart from the rest, nothing else of Markdown. Text nodes only.
import { html } from "./vendor/htm-preact-3.1.1.js";

const FENCE = /^```[^\S\n]*([\w+#.-]*)[^\n]*$/;

export function Text({ text }) {
  return split(text).map(({ code, language, body }) =>
    code
      ? html`<pre class="code" tabindex="0" aria-label=${language ? `Code, ${language}` : "Code"}><code>${body}</code></pre>`
      : body.trim() && html`<p>${body.trim()}</p>`,
  );
}

// An open fence at the end is code that is still being written.
function split(text) {
  const parts = [{ code: false, language: "", lines: [] }];
  for (const line of text.split("\n")) {
    const fence = FENCE.exec(line);
    const inside = parts[parts.length - 1].code;
    if (fence && (!inside || !fence[1])) parts.push({ code: !inside, language: fence[1], lines: [] });
    else parts[parts.length - 1].lines.push(line);
  }
  return parts.map(({ code, language, lines }) => ({ code, language, body: lines.join("\n") }));
}
