"use strict";

// ---- The page's words: a table for each language, where the page has them.

const translated =
    JSON.parse(document.getElementById("page-words")?.textContent ?? "{}");
const say = (text) => translated[document.documentElement.lang]?.[text] ?? text;

// What the reader has chosen. A page from a file may have no storage.
const stored = (call) => { try { return call(localStorage); } catch { } };

// ---- Light and dark: as the system is, until the reader chooses.

(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => root.dataset.theme
      ? root.dataset.theme === "dark" : system.matches;
  const name = () => {
    const { light = say("Light"), dark = say("Dark") } = button.dataset;
    button.textContent = isDark() ? light : dark;
  };
  const chosen = stored((s) => s.getItem("shardbook-theme"));
  if (chosen === "dark" || chosen === "light") root.dataset.theme = chosen;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    stored((s) => s.setItem("shardbook-theme", root.dataset.theme));
  });
  new MutationObserver(name).observe(
      root, { attributeFilter: ["data-theme", "lang"] });
  system.addEventListener("change", name);
  name();
  button.hidden = false;
})();

// ---- A button beside each command copies it, or selects it where a page may
// ---- not write to the clipboard.

function addCopy(code, place = code) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = say("Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = say("Copied");
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = say("Selected: press Ctrl+C");
    }
  });
  place.after(" ", button);
}
document.querySelectorAll(".source code").forEach((code) => addCopy(code));

// ---- Paper shows the table of proofs, and the runs that are open.

(() => {
  const proof = document.querySelector("#proof details");
  if (!proof) return;
  let wasOpen = proof.open;
  addEventListener("beforeprint", () => {
    wasOpen = proof.open;
    proof.open = true;
  });
  addEventListener("afterprint", () => { proof.open = wasOpen; });
})();
