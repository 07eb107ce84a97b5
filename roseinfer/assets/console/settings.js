// The theme and the API key. The key lives as long as this tab: it is sent to this server and stored nowhere else.
import { createStore, recall, remember } from "./store.js";

const system = matchMedia("(prefers-color-scheme: dark)");
const systemTheme = () => (system.matches ? "dark" : "light");

export const settings = createStore({
  theme: document.documentElement.dataset.theme ?? systemTheme(),
  key: recall("key", "", sessionStorage),
});

system.addEventListener("change", () => {
  if (!document.documentElement.dataset.theme) settings.set({ theme: systemTheme() });
});

export function switchTheme() {
  const theme = settings.get().theme === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("roseinfer.theme", theme);
  } catch {
    // It holds until the page is closed.
  }
  settings.set({ theme });
}

export function setKey(key) {
  remember("key", key || null, sessionStorage);
  settings.set({ key });
}
