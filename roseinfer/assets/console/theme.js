// Runs before the first paint, so that the theme does not change before one's eyes. Without a choice the system's counts.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("roseinfer.theme");
  } catch {
    // Storage may be forbidden; then the system's theme stays.
  }
  const root = document.documentElement.dataset;
  root.chosen = String(chosen === "dark" || chosen === "light");
  root.theme = root.chosen === "true" ? chosen : matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
})();
