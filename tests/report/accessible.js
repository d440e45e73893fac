// What a page of this book must not have; for the report, the explorer and the site.

// `var`: a page may get these lines again.
var FOCUSABLE =
    "a[href], button, input, select, textarea, summary, [tabindex]";

// What axe-core calls serious: landmarks, the order of headings, names, roles.
function brokenRules(landmarks) {
  const all = (query) => [...document.querySelectorAll(query)];
  const rules = [];
  for (const query of landmarks) {
    if (all(query).length !== 1) rules.push(`${query}: not one`);
  }
  all("h1, h2, h3, h4, h5").reduce((level, heading) => {
    const next = Number(heading.tagName[1]);
    if (next > level + 1) rules.push(`h${next} after h${level}`);
    return next;
  }, 0);
  const start = (element) => element.outerHTML.slice(0, 80);
  for (const control of all(
      "button, a, input, select, summary, progress, [tabindex], [role=img]")) {
    if (!(control.textContent.trim() && control.tagName !== "SELECT" ||
          control.ariaLabel || control.closest("label") ||
          control.querySelector("img[alt]:not([alt=''])"))) {
      rules.push(`no name: ${start(control)}`);
    }
  }
  const roles = ["img", "status", "region", "slider", "search", "group", "alert"];
  for (const element of all("[role]")) {
    if (!roles.includes(element.role)) rules.push(`role: ${start(element)}`);
  }
  for (const slider of all("[role=slider]")) {
    const { ariaValueMin: least, ariaValueMax: most, ariaValueNow: now,
            ariaValueText: text } = slider;
    if (!(text && Number(least) <= now && now <= Number(most))) {
      rules.push(`no value: ${start(slider)}`);
    }
  }
  for (const label of all("label")) {
    if (!label.control) rules.push(`no control: ${start(label)}`);
  }
  for (const element of all("[tabindex]")) {
    if (element.tabIndex > 0) rules.push(`tabindex: ${start(element)}`);
  }
  for (const cell of all("th:not([scope])")) rules.push(cell.outerHTML);
  for (const cell of all("th")) {
    if (!cell.textContent.trim()) rules.push(`empty: ${cell.outerHTML}`);
  }
  // Keys scroll what has the focus
  for (const wide of all("body *")) {
    if (wide.scrollWidth > wide.clientWidth + 1 && wide.checkVisibility() &&
        /auto|scroll/.test(getComputedStyle(wide).overflowX) &&
        !wide.matches(FOCUSABLE) && !wide.querySelector(FOCUSABLE)) {
      rules.push(`no keys scroll ${start(wide)}`);
    }
  }
  const ids = all("[id]").map((each) => each.id);
  if (new Set(ids).size < ids.length) rules.push("an id appears twice");
  if (!document.documentElement.lang) rules.push("no language");
  return rules;
}

// Contrast as WCAG 2 defines it, against the nearest background.
function paleParts() {
  const rgb = (text) => text.match(/[\d.]+/g).map(Number);
  const light = (text) => {
    const [r, g, b] = rgb(text).map((c) => c / 255).map(
        (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const color = getComputedStyle(element).backgroundColor;
    return rgb(color)[3] === 0 && element.parentElement
        ? behind(element.parentElement) : color;
  };
  const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) /
                             (Math.min(light(a), light(b)) + 0.05);
  const pale = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some(
        (node) => node.nodeType === 3 && node.data.trim());
    if (!own || element.closest("script, svg, #tip")) continue;
    // The name of a point lies on the plane, not on the point.
    const ratio = contrast(getComputedStyle(element).color,
                           behind(element.closest(".plane") ?? element));
    if (ratio < 4.5) pale.push(`${element.className}: ${ratio}`);
  }
  for (const block of document.querySelectorAll(
      "svg.lane path, svg.memory path, svg.bar rect")) {
    const ratio = contrast(getComputedStyle(block).fill, behind(block));
    if (ratio < 3) pale.push(`${block.getAttribute("class")}: ${ratio}`);
  }
  for (const dots of document.querySelectorAll(".plane path")) {
    const ratio = contrast(getComputedStyle(dots).stroke,
                           behind(dots.closest(".plane")));
    if (ratio < 3) pale.push(`${dots.getAttribute("class")}: ${ratio}`);
  }
  return pale;
}

// Watches where Tab leads: `reached` gets the place in the page's order of what has
// the focus, and whether it shows. Returns how many places there are.
var reached = [];
function watchFocus() {
  const order = [...document.querySelectorAll(FOCUSABLE)].filter(
      (each) => each.checkVisibility() && each.tabIndex >= 0);
  reached = [];
  document.addEventListener("focusin", ({ target }) => {
    const { outlineStyle, outlineWidth } = getComputedStyle(target);
    reached.push([order.indexOf(target), outlineStyle !== "none" &&
                                         outlineWidth !== "0px"]);
  });
  document.body.focus();
  return order.length;
}
