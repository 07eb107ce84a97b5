// Requests to the server, relative to this page, so that a path prefix in front of it does no harm.
import { settings } from "./settings.js";

// An answer other than success: `fields` is the body's error object.
export class ApiError extends Error {
  constructor(status, fields, requestId) {
    super(fields.message || `The server answered ${status}`);
    this.status = status;
    this.fields = fields;
    this.requestId = requestId;
  }
}

export const urlOf = (path) => new URL(path, document.baseURI);

export async function call(path, { body, signal } = {}) {
  const { key } = settings.get();
  // The browser sends none of these, and what it says then sounds like a lost connection.
  if (/[^\x21-\x7e]/.test(key)) throw new ApiError(401, { message: "The key has characters that cannot be sent" });
  const answer = await fetch(urlOf(path), {
    method: body === undefined ? "GET" : "POST",
    headers: {
      ...(key && { Authorization: `Bearer ${key}` }),
      ...(body !== undefined && { "Content-Type": "application/json" }),
    },
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
    signal,
  });
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({}));
  throw new ApiError(answer.status, said.error ?? {}, answer.headers.get("x-request-id"));
}

export const getJson = async (path, options) => (await call(path, options)).json();

// Yields {event, data} for each event of a stream; `data` is still text. Comments keep a connection alive: left out.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const event = parse(block);
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(block) {
  let event = "message";
  const data = [];
  for (const line of block.split(/\r?\n/)) {
    if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
    else if (line.startsWith("event:")) event = line.slice(6).trim();
  }
  return { event, data: data.join("\n") };
}
