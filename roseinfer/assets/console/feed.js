// The connection to /console/events: open while the page is visible, and reopened when lost.
import { ApiError, call, events } from "./api.js";
import { settings } from "./settings.js";

const TIMEOUT_MS = 15_000; // Events come four times a second; after so long without one the connection is dead.
const RETRY_MS = [500, 1000, 2000, 4000];
const LOADING_MS = 500; // Interval of retries while the server loads its model.
const HIDDEN_MS = 20_000; // A hidden page pauses after this time.

// `on(state)` gets {state: "connecting" | "loading" | "live" | "lost" | "locked" | "off" | "paused", why};
// `onEvent(name, data)` gets what the server says.
export function openFeed(on, onEvent) {
  let attempt = null;
  let failures = 0;
  let retry = 0;
  let waiting = false; // for the model to be loaded
  let hidden = 0;

  async function connect() {
    clearTimeout(retry);
    attempt?.abort();
    const mine = (attempt = new AbortController());
    if (!failures && !waiting) on({ state: "connecting", why: "" });
    waiting = false;
    let timer = setTimeout(() => mine.abort(), TIMEOUT_MS);
    let why = "The server ended the connection";
    try {
      const answer = await call("console/events", { signal: mine.signal });
      for await (const { event, data } of events(answer)) {
        clearTimeout(timer);
        timer = setTimeout(() => mine.abort(), TIMEOUT_MS);
        failures = 0;
        onEvent(event, JSON.parse(data));
        on({ state: "live", why: "" });
      }
    } catch (error) {
      if (attempt !== mine) return; // Another attempt has taken over.
      if (error instanceof ApiError && error.status === 401) return on({ state: "locked", why: error.message });
      if (error instanceof ApiError && error.status === 404) return on({ state: "off", why: error.message });
      if (error instanceof ApiError && error.fields.code === "loading") {
        waiting = true;
        on({ state: "loading", why: error.message });
        retry = setTimeout(connect, LOADING_MS);
        return;
      }
      why = error instanceof ApiError ? error.message : "No answer from the server";
    } finally {
      clearTimeout(timer);
    }
    if (attempt !== mine) return;
    const wait = RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)];
    on({ state: "lost", why });
    retry = setTimeout(connect, wait);
  }

  function pause() {
    clearTimeout(retry);
    const mine = attempt;
    attempt = null;
    mine?.abort();
    on({ state: "paused", why: "" });
  }

  document.addEventListener("visibilitychange", () => {
    clearTimeout(hidden);
    if (document.hidden) hidden = setTimeout(pause, HIDDEN_MS);
    else if (attempt === null) connect();
  });
  addEventListener("online", connect);
  let key = settings.get().key;
  settings.subscribe(() => {
    if (settings.get().key === key) return;
    key = settings.get().key;
    failures = 0;
    connect();
  });
  connect();
  return connect;
}
