"use strict";

// All sections that have every word of the question, those first that have it in
// their heading, in the order of the contents. Chinese has no spaces: a word is
// any part of the text.

(() => {
  const question = new URLSearchParams(location.search).get("q") ?? "";
  const { lang } = document.documentElement;
  document.querySelector("input[type=search]").value = question;
  const words = question.toLowerCase().split(/\s+/).filter(Boolean);
  const found = [];
  for (const [address, language, sections] of words.length ? PAGES : []) {
    for (const [anchor, title, text] of sections) {
      const heading = title.toLowerCase(), all = `${heading}\n${text.toLowerCase()}`;
      if (!words.every((word) => all.includes(word))) continue;
      const rank = words.filter((word) => heading.includes(word)).length
                   + (language === lang ? 0.5 : 0);
      found.push({ address, language, anchor, title, text, rank,
                   page: sections[0][1] });
    }
  }
  found.sort((a, b) => b.rank - a.rank);
  const list = document.getElementById("found");
  document.getElementById("count").textContent = !words.length ? ""
      : found.length ? SITE_WORDS.found.replace("{n}", found.length)
                     : SITE_WORDS.none;
  for (const { address, language, anchor, title, text, page } of
       found.slice(0, 50)) {
    const link = document.createElement("a");
    link.href = `${address}#${anchor}`;
    link.textContent = title === page ? page : `${page}: ${title}`;
    const at = Math.max(0, text.toLowerCase().indexOf(words[0]) - 60);
    const excerpt = document.createElement("p");
    // Without the commands of formulas
    excerpt.textContent = (at ? "… " : "")
        + text.slice(at, at + 200).replace(/\\[a-zA-Z]+ ?|[{}]/g, "")
        + (at + 200 < text.length ? " …" : "");
    const item = document.createElement("li");
    item.lang = language;
    item.append(link, excerpt);
    list.append(item);
  }
})();
