// A field for a number: what is being typed stays as typed until the field is left, whatever is drawn meanwhile.
import { html, useState } from "./vendor/htm-preact-3.1.1.js";

export function NumberField({ value, take, ...attributes }) {
  const [typed, setTyped] = useState(null);
  return html`<input type="number" ...${attributes} value=${typed ?? value ?? ""}
    onInput=${(event) => setTyped(event.target.value)}
    onChange=${(event) => take(event.target.value)}
    onBlur=${() => setTyped(null)} />`;
}
