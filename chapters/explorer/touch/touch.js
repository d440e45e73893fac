// What all things to touch share: the module, words, fields, steps, pictures. A
// thing is a function of its figure's content; its numbers are the module's.

const THINGS = {};
// In the language of the page around them; English where they lack it
const filled = (key, values = {}) => {
  const words = DATA.words[document.documentElement.lang] ?? DATA.words.en;
  return (words[key] ?? key).replace(/\{(\w+)\}/g, (_, name) => values[name]);
};
const listed = (texts, between = "comma") => texts.join(filled(between));
const digits = (value) => Number(value.toPrecision(4)).toLocaleString("en", {
  maximumFractionDigits: 6 });
let ask;  // an object to the module, and its answer

function html(name, attributes = {}, ...children) {
  const made = Object.assign(document.createElement(name), attributes);
  made.append(...children);
  return made;
}

// A picture of so many pixels, with its description.
function picture(width, height, label) {
  return draw(null, "svg", { width, height, role: "img", "aria-label": label });
}
function draw(parent, name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent?.append(made);
  return made;
}
const box = (svg, kind, x, y, width, height) =>
    draw(svg, "rect", { class: kind, x, y, width, height });
const rankKind = (rank) => `r${rank % 8}`;

// Fields by name: {value, min, max, step}, {values} or {rows}. `changed` gets their
// values at once and after each change.
function form(place, fields, changed) {
  const made = html("form", { autocomplete: "off", onsubmit: () => false });
  const inputs = {};
  for (const [name, field] of Object.entries(fields)) {
    const input = field.values
        ? html("select", {}, ...field.values.map(
            (value) => new Option(filled(value), value)))
        : html(field.rows ? "textarea" : "input", field.rows
            ? { rows: field.rows } : { type: "number", step: 1, ...field });
    input.name = name;
    if (field.value !== undefined) input.value = field.value;
    inputs[name] = input;
    made.append(html("label", { className: field.rows ? "wide" : "" },
                     filled(`field_${name}`), input));
  }
  const read = () => changed(Object.fromEntries(Object.entries(inputs).map(
      ([name, input]) => [name, input.type === "number" ? input.valueAsNumber
                                                        : input.value])), inputs);
  made.addEventListener("input", read);
  place.append(made);
  return read;
}

// Buttons and a slider over the steps 0 to last; `show` draws one. Returns a
// function that sets how many there are, and goes to one.
function steps(place, label, show) {
  let timer = null;
  const slider = html("input", { type: "range", min: 0, value: 0 });
  slider.setAttribute("aria-label", label);
  const state = html("span");
  const go = (step) => {
    slider.value = step;
    const values = { label, step: slider.value, last: slider.max };
    state.textContent = filled("of", values);
    slider.setAttribute("aria-valuetext", state.textContent);
    show(Number(slider.value));
  };
  const pause = () => {
    clearInterval(timer);
    timer = null;
    play.textContent = filled("play");
  };
  const button = (key, onclick) =>
      html("button", { type: "button", textContent: filled(key), onclick });
  const play = button("play", () => {
    if (timer) return pause();
    if (slider.value === slider.max) go(0);
    play.textContent = filled("pause");
    // At most 20 seconds in all
    timer = setInterval(() => {
      go(Number(slider.value) + 1);
      if (slider.value === slider.max) pause();
    }, Math.min(700, 20000 / slider.max));
  });
  const by = (change) => () => { pause(); go(Number(slider.value) + change); };
  slider.addEventListener("input", () => { pause(); go(slider.value); });
  place.append(html("div", { className: "steps" }, button("back", by(-1)), play,
                    button("next", by(1)), slider, state));
  return (count, first) => {
    pause();
    slider.max = count - 1;
    go(first);
  };
}

// Fields, and the steps of what they ask for: `answerOf` the fields' values (and
// inputs, and the answer before) gives an object that has the `count` of its steps
// and perhaps the `first`, or null; `show` draws one. Returns what draws it again.
function stepped(parts, label, fields, answerOf, show) {
  let answer = null, now = 0;
  const read = form(parts.controls, fields, (values, inputs) => {
    const next = answerOf(values, inputs, answer);
    if (!next) return;
    answer = next;
    restart(answer.count, answer.first ?? 0);
  });
  const restart = steps(parts.controls, filled(label), (step) => {
    now = step;
    show(answer, step);
  });
  read();
  return () => answer && show(answer, now);
}

// Puts each thing into the place of its figure's picture, which stays where there
// is no WebAssembly.
async function start() {
  const figures = [...document.querySelectorAll("figure[data-touch]")];
  if (!figures.length || !globalThis.WebAssembly) return;
  const data = await fetch(`data:application/gzip;base64,${DATA.wasm}`);
  const code = data.body.pipeThrough(new DecompressionStream("gzip"));
  const module = await schedules({
    wasmBinary: await new Response(code).arrayBuffer() });
  ask = (question) => JSON.parse(module.ccall(
      "shardbook_schedules", "string", ["string"], [JSON.stringify(question)]));
  document.head.append(html("style", { textContent: DATA.style }));
  for (const figure of figures) {
    const place = html("div");
    const caption = figure.querySelector("figcaption");
    figure.replaceChildren(place, ...(caption ? [caption] : []));
    const parts = {
      controls: html("div"), wrong: html("p", { className: "wrong" }),
      picture: html("div", { className: "picture", tabIndex: 0 }),
      now: html("p"), about: html("p") };
    parts.picture.setAttribute("role", "group");
    parts.picture.setAttribute("aria-label", filled(figure.dataset.touch));
    parts.wrong.setAttribute("role", "alert");
    parts.now.setAttribute("aria-live", "polite");
    place.append(...Object.values(parts));
    // The answer, or the sentence of a question without one
    const answerTo = (question) => {
      const answer = ask({ about: figure.dataset.touch, ...question });
      parts.wrong.textContent = answer.error ?? "";
      return answer.error === undefined ? answer : null;
    };
    const redraw = THINGS[figure.dataset.touch](parts, answerTo);
    let width = place.clientWidth;
    new ResizeObserver(() => {
      if (place.clientWidth === width) return;
      width = place.clientWidth;
      redraw();
    }).observe(place);
  }
}
