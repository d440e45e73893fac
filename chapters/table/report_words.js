// ---- The other language of the report: its text and titles are looked up,
// ---- except names, commands and what a script has written.

(() => {
  const root = document.documentElement;
  const kept = "code, h4, script, style, noscript, [data-say], body [lang], " +
               "a[href^='#run-']";
  const english = new Map();  // of texts and of elements' titles

  function follow() {
    if (root.lang === "en" && english.size === 0) return;
    const walker = document.createTreeWalker(
        root, NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_TEXT,
        (node) => node.matches?.(kept) ? NodeFilter.FILTER_REJECT
                                       : NodeFilter.FILTER_ACCEPT);
    const nodes = [];
    while (walker.nextNode()) {
      const node = walker.currentNode;
      if (node.nodeType === Node.TEXT_NODE) nodes.push(node);
      else for (const name of ["title", "aria-label"]) {
        if (node.hasAttribute(name)) nodes.push(node.getAttributeNode(name));
      }
    }
    for (const node of nodes) {
      if (!english.has(node)) english.set(node, node.nodeValue);
      const text = english.get(node), words = text.trim();
      const said = words && text.replace(words, () => say(words));
      if (words && node.nodeValue !== said) node.nodeValue = said;
    }
    // Pages of chapters have both languages
    for (const link of document.querySelectorAll(".source a")) {
      link.href = link.getAttribute("href").replace(
          /(\.zh-CN)?(\.\w+)$/, root.lang === "en" ? "$2" : ".zh-CN$2");
    }
  }

  new MutationObserver(follow).observe(root, { attributeFilter: ["lang"] });
  document.getElementById("language").addEventListener("click", () => {
    // An address with another language, or a page that may not store one
    if (languageAsked() !== root.lang) {
      history.replaceState(null, "", `#lang=${root.lang}`);
    }
  });
  speak(languageAsked());
})();
