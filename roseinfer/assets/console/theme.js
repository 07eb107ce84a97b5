// Runs before the first paint, so that a chosen theme does not flash. Without a choice the system's counts.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("roseinfer.theme");
  } catch {
    // Storage may be forbidden; then the system's theme stays.
  }
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
})();
