"use strict";

// ---- The page's words: a table for each language, where the page has them. {}
// ---- in a text stands for anything, which is said in turn where {0}, {1} are.

const translated =
    JSON.parse(document.getElementById("page-words")?.textContent ?? "{}");
const patterns = Object.fromEntries(Object.entries(translated).map(
    ([language, words]) => [language, Object.entries(words)
        .filter(([text]) => text.includes("{}"))
        .map(([text, said]) => [new RegExp("^" + text
            .replace(/[.*+?^$()|[\]\\]/g, "\\$&")
            .replaceAll("{}", "(.*?)") + "$"), said])]));
function say(text) {
  const language = document.documentElement.lang;
  const exact = translated[language]?.[text];
  if (exact !== undefined) return exact;
  for (const [pattern, said] of patterns[language] ?? []) {
    const found = pattern.exec(text);
    if (!found) continue;
    return said.replace(/\{(\d)\}/g, (_, i) => say(found[Number(i) + 1]));
  }
  return text;
}

// A text of an element, which follows the language.
function write(element, text) {
  element.dataset.say = text;
  element.textContent = say(text);
}

// What the reader has chosen. A page from a file may have no storage.
const stored = (call) => { try { return call(localStorage); } catch { } };

// ---- The language: the address's, or the one that was chosen last.

const languageAsked = () =>
    new URLSearchParams(location.hash.slice(1)).get("lang") ??
    stored((s) => s.getItem("shardbook-language"));

function speak(language) {
  const root = document.documentElement;
  root.lang = Object.hasOwn(translated, language) ? language : "en";
  for (const each of document.querySelectorAll("[data-say]")) {
    write(each, each.dataset.say);
  }
  document.getElementById("language").lang =
      root.lang === "en" ? "zh-CN" : "en";
}

document.getElementById("language")?.addEventListener("click", (event) => {
  const { lang } = event.currentTarget;
  stored((s) => s.setItem("shardbook-language", lang));
  speak(lang);
});

// ---- Light and dark: as the system is, until the reader chooses.

(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => root.dataset.theme
      ? root.dataset.theme === "dark" : system.matches;
  const name = () => {
    const { light = "Light", dark = "Dark" } = button.dataset;
    write(button, isDark() ? light : dark);
  };
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
})();

// ---- A button beside each command copies it, or selects it where a page may
// ---- not write to the clipboard.

function addCopy(code, place = code) {
  const button = document.createElement("button");
  button.type = "button";
  write(button, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      write(button, "Copied");
    } catch {
      getSelection().selectAllChildren(code);
      write(button, "Selected: press Ctrl+C");
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
