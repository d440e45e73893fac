// Added to a copy of report.html: uses the page as a reader would, measures it,
// and writes what it found into the page as JSON (report_test.cpp).
addEventListener("load", async () => {
  const all = (query) => [...document.querySelectorAll(query)];
  const tip = document.getElementById("tip");
  const said = [];
  // Runs are closed until the reader opens them; a run is drawn when opened.
  const undrawn = all(".run .view[data-drawn]").length;
  for (const details of all("details.run")) details.open = true;
  const isDone = (view) => "drawn" in view.dataset ||
                           view.querySelector(":scope > .note");
  for (let i = 0; i < 400 && !all(".view").every(isDone); ++i) {
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
  for (const svg of all("svg.lane, svg.memory")) {
    const box = svg.getBoundingClientRect();
    for (const at of [0.1, 0.5, 0.9]) {
      svg.dispatchEvent(new PointerEvent("pointermove", {
        clientX: box.left + at * box.width, clientY: box.top + 2 }));
      if (tip.textContent) said.push(tip.textContent);
    }
    svg.dispatchEvent(new PointerEvent("pointerleave"));
    svg.dispatchEvent(new KeyboardEvent("keydown", { key: "End" }));
    if (tip.textContent) said.push(tip.textContent);
    svg.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
    if (tip.textContent) errors.push("Escape leaves the words");
  }

  // What the lanes of computing show, in shares of their width, beside what is
  // written about them.
  const widthOf = (svg, names) => [...svg.querySelectorAll("path")]
      .filter((path) => names.includes(path.getAttribute("class")))
      .flatMap((path) => [...path.getAttribute("d").matchAll(/h([\d.]+)v/g)])
      .reduce((sum, [, width]) => sum + Number(width), 0) /
          svg.viewBox.baseVal.width;
  const work = ["forward", "backward", "weights", "optimizer", "copy", "other"];
  const shares = all(".run svg.lane.compute").map((svg) => ({
    drawn: { busy: widthOf(svg, work), bubble: widthOf(svg, ["bubble"]),
             exposed: widthOf(svg, ["exposed"]) },
    said: svg.closest(".track").querySelector(".shares").textContent,
  }));

  // Zoomed in, a lane shows less in more detail; All shows the step again.
  const view = document.querySelector(".run .view[data-drawn]");
  const lane = view?.querySelector("svg.lane");
  const drawing = () => lane.innerHTML;
  const does = (action, undo) => {
    const before = drawing();
    action();
    const changed = drawing() !== before;
    undo();
    return { changed, back: drawing() === before };
  };
  const click = (name) => () => view.querySelector(`[data-do=${name}]`).click();
  // A drag from one share of the width to another.
  const drag = (from, to, more) => {
    const { left, top, width } = lane.getBoundingClientRect();
    const send = (type, at) => lane.dispatchEvent(new PointerEvent(type, {
      clientX: left + at * width, clientY: top + 2, buttons: 1, ...more }));
    send("pointerdown", from);
    send("pointermove", to);
    const marked = view.querySelectorAll(".marked").length;
    send("pointerup", to);
    return marked;
  };
  const uses = {};
  if (view) {
    uses.zoom = does(click("in"), click("all"));
    click("in")();
    uses.pan = does(click("left"), click("right"));
    uses.shiftDrag = does(() => drag(0.5, 0.75, { shiftKey: true }),
                          () => drag(0.75, 0.5, { shiftKey: true }));
    click("all")();
    const memory = view.querySelector("svg.memory");
    const whole = memory.innerHTML;
    uses.drag = does(() => {
      uses.marked = drag(0.25, 0.5);
      uses.linked = memory.innerHTML !== whole;
      uses.zoomed = view.classList.contains("zoomed");
      uses.axis = view.querySelector(".axis span").textContent;
    }, () => lane.dispatchEvent(new MouseEvent("dblclick")));
  }

  // A command is copied, or selected where the page may not copy.
  const copying = [];
  for (const clipboard of [{ writeText: async (text) => copying.push(text) },
                           undefined]) {
    Object.defineProperty(navigator, "clipboard",
                          { value: clipboard, configurable: true });
    const copy = document.querySelector(".source button");
    copy.click();
    await new Promise((resolve) => setTimeout(resolve, 0));
    copying.push(copy.textContent);
  }
  copying.push(String(getSelection()));
  getSelection().removeAllRanges();

  // Paper has the table of proofs.
  const proof = document.querySelector("#proof details");
  const wasOpen = proof.open;
  proof.open = false;
  dispatchEvent(new Event("beforeprint"));
  const onPaper = proof.open;
  dispatchEvent(new Event("afterprint"));
  const paper = { onPaper, after: proof.open };
  proof.open = wasOpen;

  // The axes of the scatter are linear or logarithmic.
  const scatter = document.querySelector("figure.scatter");
  const places = () => [...scatter.querySelectorAll(".point")].map(
      (point) => point.style.left + point.style.bottom).join();
  const axes = scatter.querySelector("button");
  const before = places(), name = axes.textContent;
  axes.click();
  const changed = axes.textContent !== name && places() !== before;
  axes.click();
  const scales = { changed, back: places() === before };
  // Names beside the points touch nothing.
  const overlaps = all(".point span:not(.no-room)").filter((name) => {
    const a = name.getBoundingClientRect();
    return all(".point, .point span:not(.no-room)").some((other) => {
      if (other.contains(name) || name.closest(".plane") !==
                                  other.closest(".plane")) return false;
      const b = other.getBoundingClientRect();
      return a.left < b.right - 1 && b.left < a.right - 1 &&
             a.top < b.bottom - 1 && b.top < a.bottom - 1;
    });
  }).length;

  const rules = brokenRules(["h1", "main", "header", "nav[aria-label]"]);
  for (const link of all("a[href^='#']")) {
    if (!document.getElementById(link.hash.slice(1))) rules.push(link.hash);
  }

  // Kinds of work are told apart by colour.
  const fills = {};
  for (const path of all("svg.lane path")) {
    fills[path.getAttribute("class")] = getComputedStyle(path).fill;
  }

  // Labels of one axis must not touch.
  const touching = all(".axis").filter((axis) => {
    const boxes = [...axis.children].map((mark) => mark.getBoundingClientRect())
        .sort((a, b) => a.left - b.left);
    return boxes.some((box, i) => i > 0 && box.left < boxes[i - 1].right - 1);
  }).length;
  const arrows = all("svg.arrows path").map(
      (path) => path.getAttribute("d").split("M").length - 1);

  const pale = paleParts();

  // The button changes the page, and its own name.
  const page = () => getComputedStyle(document.body).backgroundColor;
  const button = document.getElementById("theme");
  const themes = [[button.textContent, page()]];
  button.click();
  themes.push([button.textContent, page()]);
  button.click();

  // The other language, and back. What has words and is still English there is
  // a name, or was forgotten.
  const names = "code, h4, script, style, noscript, p[lang], a[href^='#run-']";
  const texts = () => {
    const walker = document.createTreeWalker(
        document.documentElement, NodeFilter.SHOW_ALL,
        (node) => node.matches?.(names) ? NodeFilter.FILTER_REJECT
                                        : NodeFilter.FILTER_ACCEPT);
    const found = [];
    while (walker.nextNode()) {
      const { data, title, ariaLabel } = walker.currentNode;
      found.push(...[data, title, ariaLabel].filter((text) => text?.trim?.()));
    }
    return found;
  };
  const english = texts();
  const language = document.getElementById("language");
  const begin = document.documentElement.lang;
  language.click();
  await new Promise((resolve) => setTimeout(resolve, 0));
  const chinese = texts();
  const languages = {
    begin, lang: document.documentElement.lang, button: language.textContent,
    kept: localStorage.getItem("shardbook-language"),
    same: [...new Set(chinese.filter((text, i) => /[a-z]{3}/i.test(text) &&
        (text === english[i] || /[a-z]{2} [a-z]+ [a-z]{2}/.test(text)))
        .map((text) => text.trim().replace(/[\d.]+/g, "#")))].sort(),
    headings: all("h2").map((h) => h.textContent),
    links: all(".source a").map((link) => link.getAttribute("href")),
  };
  for (const svg of [lane, view?.querySelector("svg.memory")]) {
    svg?.dispatchEvent(new KeyboardEvent("keydown", { key: "End" }));
    languages.tips = [...languages.tips ?? [], tip.textContent];
  }
  lane?.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
  language.click();
  await new Promise((resolve) => setTimeout(resolve, 0));
  languages.back = JSON.stringify(texts()) === JSON.stringify(english);

  const audit = document.createElement("pre");
  audit.id = "audit";
  audit.textContent = JSON.stringify({
    errors, pale, said, themes, languages,
    undrawn, shares, uses, scales, fills, touching, overlaps, arrows, rules,
    copying, paper, notes: all(".view > .note").map((note) => note.textContent),
    numbers: all("svg.lane text").map((text) => text.textContent),
    headings: all("h2, h4").map((h) => h.textContent),
    points: all(".point").length,
    drawings: all("svg").length,
    lanes: all(".run svg.lane").length,
    first: all("#first svg.lane").length,
    blocks: all("svg.lane path").length,
    curves: all("svg.memory").length,
    claims: all(".claim").length,
    empty: all("svg:not(.arrows)").filter((svg) => {
      const box = svg.getBoundingClientRect();
      return !(box.width >= 5 && box.height >= 5);
    }).length,
    unnamed: all("svg").filter((svg) => !svg.getAttribute("aria-label") &&
        svg.getAttribute("aria-hidden") !== "true").length,
    overhanging: all(".axis span").filter((mark) =>
        mark.getBoundingClientRect().right >
        mark.parentElement.getBoundingClientRect().right + 1).length,
    outside: document.documentElement.scrollWidth - innerWidth,
    page: getComputedStyle(document.body).backgroundColor,
    elements: all("b b, i").length,
    requests: performance.getEntriesByType("resource")
        .filter((entry) => !entry.name.startsWith("data:")).length,
  });
  document.body.append(audit);
});
