// The theme and the API key. The key lives as long as this tab: it is sent to this server and stored nowhere else.
import { createStore, recall, remember } from "./store.js";

const page = document.documentElement.dataset; // theme.js has set both of its values

export const settings = createStore({
  theme: page.theme,
  key: recall("key", "", sessionStorage),
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (system) => {
  if (page.chosen === "false") show(system.matches ? "dark" : "light");
});

function show(theme) {
  page.theme = theme;
  settings.set({ theme });
}

export function switchTheme() {
  const theme = settings.get().theme === "dark" ? "light" : "dark";
  page.chosen = "true";
  try {
    localStorage.setItem("roseinfer.theme", theme);
  } catch {
    // It holds until the page is closed.
  }
  show(theme);
}

export function setKey(key) {
  remember("key", key || null, sessionStorage);
  settings.set({ key });
}
