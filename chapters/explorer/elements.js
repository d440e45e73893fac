// ---- Words, numbers and elements. All words of the page are in words.json.

const filled = (key, values) =>
    say(key).replace(/\{(\w+)\}/g, (_, name) => values[name]);

const format = new Intl.NumberFormat("en", { maximumFractionDigits: 6 });
const digits = (value, count = 3) =>
    format.format(Number(value.toPrecision(count)));
function bytes(value) {
  const units = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];
  const [size, name] =
      units.find(([least]) => Math.abs(value) >= least) ?? [1, "B"];
  return `${digits(value / size)} ${name}`;
}
const seconds = (value) =>
    Math.abs(value) >= 1 ? `${digits(value)} s` : `${digits(value * 1e3)} ms`;
const percent = (value) => `${digits(100 * value)} %`;
// "+68.5 ms", "−48.9 ms"
const signed = (value, show) =>
    `${value < 0 ? "\u2212" : "+"}${show(Math.abs(value))}`;

// An element; `attributes` may have a text and listeners, too.
function make(tag, attributes = {}, ...children) {
  const made = ["svg", "path", "rect"].includes(tag)
      ? document.createElementNS("http://www.w3.org/2000/svg", tag)
      : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}
const paragraph = (text) => make("p", { text });

// The first cell of a row names it.
function table(caption, heads, rows) {
  const cell = (tag, attributes, content) => typeof content === "string"
      ? make(tag, { ...attributes, text: content })
      : make(tag, attributes, content);
  const made = make("table", {},
      make("thead", {}, make("tr", {}, ...heads.map((head) =>
          make("th", { scope: "col", text: say(head) })))),
      make("tbody", {}, ...rows.map(([name, ...cells]) => make("tr", {},
          cell("th", { scope: "row" }, name),
          ...cells.map((content) => cell("td", {}, content))))));
  if (caption) made.prepend(make("caption", { text: caption }));
  return make("div", { class: "scroll" }, made);
}

function page_link(page) {
  const [file, place] = page.split("#");
  const folder = file.split("/").slice(1).join("/").replace(/\/?\w+\.md$/, "");
  return make("a", { href: `../../${page}`, text:
      `${folder || say("chapters")}, ${place.replace(/-/g, " ")}` });
}

function source(caption, text) {
  const code = make("code", { text });
  const heading = make("h3", { text: caption });
  const made = make("div", { class: "source" }, heading,
                    make("pre", { tabindex: 0, role: "region",
                                  "aria-label": caption }, code));
  addCopy(code, heading);
  return made;
}

// Names of colours: pairs of a class and a text.
function legend(pairs) {
  return make("ul", { class: "legend" }, ...pairs.map(([name, text]) =>
      make("li", {}, make("svg", { class: "swatch", viewBox: "0 0 10 10",
                                   "aria-hidden": "true" },
                          make("rect", { class: name, width: 10, height: 10 })),
           text)));
}
