"use strict";

const SITE_WORDS = JSON.parse(document.getElementById("words").textContent);

// ---- Pictures for dark pages follow the switch of page.js, too.

(() => {
  const root = document.documentElement;
  const sources = [...document.querySelectorAll("source[media]")]
                      .map((source) => [source, source.media]);
  const follow = () => {
    for (const [source, media] of sources) {
      source.media = root.dataset.theme
          ? (root.dataset.theme === "dark" ? "screen" : "not all") : media;
    }
  };
  new MutationObserver(follow).observe(root, { attributeFilter: ["data-theme"] });
  follow();
})();

// ---- A console's commands can be copied: what follows "$ ", or all of a block
// ---- that shows no answers.

function commands_of(text) {
  if (!/^\$ /m.test(text)) return text.trim();
  return [...text.matchAll(/^\$ ((?:.*\\\n)*.*)/gm)].map((found) => found[1])
      .join("\n");
}

for (const block of document.querySelectorAll(
    ".highlight-console, .highlight-none")) {
  const text = block.textContent;
  if (!/^(\$ |\.\/shardbook )/m.test(text)) continue;
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = SITE_WORDS.copy;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(commands_of(text));
      button.textContent = SITE_WORDS.copied;
    } catch {
      getSelection().selectAllChildren(block.querySelector("pre"));
      button.textContent = SITE_WORDS.select;
    }
  });
  block.prepend(button);
}

// ---- The other language, at the same heading: both have the same ones.

(() => {
  const headings = [...document.querySelectorAll("main :is(h1, h2, h3, h4)")];
  const place = /^#~(\d+)$/.exec(location.hash);
  if (place) headings[place[1]]?.scrollIntoView();
  const other = document.getElementById("other");
  const name_place = () => {
    const passed = headings.findLastIndex(
        (heading) => heading.getBoundingClientRect().top < innerHeight / 3);
    other.hash = passed > 0 ? `~${passed}` : "";
  };
  for (const kind of ["focus", "pointerdown", "click"]) {
    other?.addEventListener(kind, name_place);
  }
})();

// ---- What is wider than its place can be scrolled by keys.

(() => {
  const reach = () => {
    const wide = [...document.querySelectorAll(
        "main :is(pre, figure, .scroll, .output, .katex-display)")].filter(
        (each) => each.scrollWidth > each.clientWidth && !each.querySelector("a"));
    for (const each of wide) each.tabIndex = 0;
  };
  addEventListener("load", reach);
  addEventListener("resize", reach);
  addEventListener("toggle", reach, true);
})();

// ---- Paper shows what is folded.

addEventListener("beforeprint", () => {
  for (const folded of document.querySelectorAll("main details")) {
    folded.open = true;
  }
});

// ---- Contents show where the page is.

document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest" });
