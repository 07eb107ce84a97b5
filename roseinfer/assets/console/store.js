// A value that components can watch: `set` replaces it, and those that watch are drawn again in the next frame.
import { useEffect, useReducer } from "./vendor/htm-preact-3.1.1.js";

export function createStore(initial) {
  let value = initial;
  const listeners = new Set();
  return {
    get: () => value,
    set(next) {
      value = typeof next === "function" ? next(value) : { ...value, ...next };
      for (const listener of listeners) listener();
    },
    subscribe(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
}

export function useStore(store) {
  const [, redraw] = useReducer((n) => n + 1, 0);
  useEffect(() => {
    let frame = 0;
    const stop = store.subscribe(() => {
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        redraw();
      });
    });
    redraw(); // What was set between the first drawing and this effect.
    return () => {
      stop();
      cancelAnimationFrame(frame);
    };
  }, [store]);
  return store.get();
}

// What is remembered in this browser only; a browser that forbids it forgets, and nothing else changes.
export function remember(key, value, storage = localStorage) {
  try {
    if (value === null) storage.removeItem(`roseinfer.${key}`);
    else storage.setItem(`roseinfer.${key}`, JSON.stringify(value));
  } catch {
    // Full or forbidden.
  }
}

export function recall(key, fallback, storage = localStorage) {
  try {
    const text = storage.getItem(`roseinfer.${key}`);
    return text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}
