"use strict";

// ---- Light and dark: as the system is, until the reader chooses.

(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => root.dataset.theme
      ? root.dataset.theme === "dark" : system.matches;
  const name = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  // A page from a file may have no storage.
  const stored = (call) => { try { return call(localStorage); } catch { } };
  const chosen = stored((s) => s.getItem("shardbook-theme"));
  if (chosen === "dark" || chosen === "light") root.dataset.theme = chosen;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    stored((s) => s.setItem("shardbook-theme", root.dataset.theme));
    name();
  });
  system.addEventListener("change", name);
  name();
  button.hidden = false;
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) {
      details.open = true;
    }
  });
})();

