// The page around the planner: reads the form, asks the worker, shows the answer.
// All words are in words.json; all numbers and sentences about plans come from
// the planner.

const WORDS = JSON.parse(document.getElementById("words").textContent);
const word = (key) => WORDS[key] ?? key;
const filled = (key, values) =>
    word(key).replace(/\{(\w+)\}/g, (_, name) => values[name]);

const CHOICES = {
  model: ["llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "llama-3.2-1b",
          "qwen3-30b-a3b", "mixtral-8x7b", "mistral-7b", "gpt2-xl", "gpt-1.3b",
          "gpt-13b", "gpt-70b", "gpt-175b"],
  cluster: ["dgx-h100", "dgx-h200", "dgx-a100", "selene", "a100-40gb-cloud",
            "dgx-v100", "kaggle-t4x2"],
  dtype: ["bf16", "f16", "f32"],
  "zero-stage": ["", "0", "1", "2", "3"],
  schedule: ["", "1f1b", "interleaved", "zb-h1"],
  recompute: ["", "never", "attention", "blocks"],
};
const FIRST = { model: "llama-3.1-70b", cluster: "dgx-h100", nodes: "8",
                batch: "512", seq: "8192", dtype: "bf16" };

const form = document.getElementById("job");
const fields = [...form.elements].filter((field) => field.name);
const byName = Object.fromEntries(fields.map((field) => [field.name, field]));

// ---- The planner, in a worker: a new question ends the one before.

const planner = (() => {
  function compiled(id) {
    const text = document.getElementById(id).textContent;
    return WebAssembly.compile(
        Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0)));
  }
  const modules = compiled("plan-wasm").then(async (plan) => (
      { plan, "plan-fibers": await compiled("plan-fibers-wasm") }));
  const source = document.getElementById("worker").textContent;
  const url = URL.createObjectURL(
      new Blob([source], { type: "text/javascript" }));
  let worker = null, isBusy = false, last = 0;

  async function ask(words, files) {
    const number = ++last;
    const all = await modules;
    if (number !== last) return null;
    if (isBusy) {
      worker.terminate();
      worker = null;
    }
    if (!worker) {
      worker = new Worker(url);
      worker.postMessage({ modules: all });
    }
    isBusy = true;
    const asked = worker;
    return new Promise((answer) => {
      asked.onmessage = ({ data }) => {
        isBusy = false;
        answer(data);
      };
      asked.onerror = (event) => {
        asked.terminate();
        if (asked === worker) worker = null, isBusy = false;
        answer({ status: 3, error: event.message });
      };
      asked.postMessage({ words, files });
    });
  }
  return { ask };
})();

// ---- The form is the address, and the address is the form.

let dropped = null;  // the text of a config.json

function fill() {
  for (const [name, values] of Object.entries(CHOICES)) {
    for (const value of values) {
      byName[name].add(new Option(value || word("any"), value));
    }
  }
  const given = new URLSearchParams(location.hash.slice(1));
  for (const field of fields) {
    const value = given.get(field.name) ?? FIRST[field.name];
    if (value !== undefined && field.type !== "file") field.value = value;
  }
}

function values() {
  const pairs = fields.filter((field) => field.type !== "file" && field.value)
                    .map((field) => [field.name, field.value]);
  return Object.fromEntries(pairs);
}

async function read_file() {
  const file = byName.file.files[0];
  dropped = file ? await file.text() : null;
}

function words_of(given) {
  return Object.entries(given).flatMap(([name, value]) => [
    `--${name}`, name === "model" && dropped ? "config.json" : value]);
}

// ---- Numbers and elements.

function digits(value, count = 3) {
  return Number(value.toPrecision(count)).toLocaleString("en", {
    maximumFractionDigits: 6 });
}
const bytes = (value) =>
    value >= 1e12 ? `${digits(value / 1e12)} TB`
    : value >= 1e9 ? `${digits(value / 1e9)} GB`
                   : `${digits(value / 1e6)} MB`;
const seconds = (value) =>
    value >= 1 ? `${digits(value)} s` : `${digits(value * 1e3)} ms`;
const percent = (value) => `${digits(100 * value)} %`;

function element(tag, text, ...children) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

function table(caption, heads, rows) {
  const made = element("table");
  if (caption) made.append(element("caption", caption));
  made.append(element("thead", "", element("tr", "",
      ...heads.map((head) => element("th", word(head))))));
  made.append(element("tbody", "", ...rows.map((cells) =>
      element("tr", "", ...cells.map((cell) =>
          typeof cell === "string" ? element("td", cell)
                                   : element("td", "", cell))))));
  return element("div", "", made);
}

// ---- The answer.

// A bar of parts, each as wide as its number, and the table of them.
function parts(caption, list, size_of, show, whole) {
  const bar = element("div");
  bar.className = "bar";
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", `${caption}: ` + list.map((part) =>
      `${word(part.kind)} ${show(size_of(part))}`).join(", "));
  for (const part of list) {
    const block = element("span", word(part.kind));
    block.className = part.kind.replace(/ /g, "-");
    block.style.flexGrow = size_of(part) / whole;
    block.title = `${word(part.kind)}: ${show(size_of(part))}`;
    bar.append(block);
  }
  const made = element("figure", "", element("h2", caption), bar);
  made.append(table("", ["part", "size", "formula", "page"],
      list.filter((part) => part.formula).map((part) => [
        word(part.kind), show(size_of(part)), part.formula,
        page_link(part.page)])));
  return made;
}

function page_link(page) {
  const [file, place] = page.split("#");
  const link = element("a", `${file.split("/")[1]}, ${
      place.replace(/-/g, " ")}`);
  link.href = `../../${page}`;
  return link;
}

function source(caption, text) {
  const code = element("code", text);
  return element("div", "", element("h3", caption), element("pre", "", code));
}

function show_plan(answer) {
  const result = JSON.parse(answer.text);
  const [best] = result.best, lost = result.lost;
  const shown = [];
  if (!best) {
    shown.push(element("p", word("none_fits")));
  } else {
    const total = best.memory_bytes.total;
    shown.push(element("h2", filled("headline", {
      layout: best.layout, step: seconds(best.step_s), memory: bytes(total),
      capacity: bytes(result.memory_bytes) })));
    shown.push(element("p", filled("headline_more", {
      tokens: digits(best.tokens_per_s), mfu: percent(best.mfu),
      idle: percent(best.idle_share) })));
    shown.push(element("p", best.measured
        ? filled("measured", { steps: best.measured.steps,
                               mean: best.measured.mean_error_percent,
                               most: best.measured.largest_error_percent })
        : word("no_measured")));
    shown.push(parts(word("time"), result.explain.time,
                     (part) => part.seconds, seconds, best.step_s));
    const free = { kind: "free", bytes: Math.max(0,
        result.usable_memory_bytes - total) };
    shown.push(parts(word("memory"), [...result.explain.memory, free],
                     (part) => part.bytes, bytes, result.memory_bytes));
    shown.push(table(word("links"), ["part", "size"],
        Object.entries(best.sent_bytes).map(([link, sent]) => [
          word(link), bytes(sent)])));
    shown.push(table(word("plans"), ["plan", "step", "slower", "memory"],
        result.best.map((plan) => [
          `${plan.layout}, ${plan.work}`, seconds(plan.step_s),
          percent(plan.step_s / best.step_s - 1),
          bytes(plan.memory_bytes.total)])));
  }
  shown.push(element("h2", word("lost")));
  shown.push(element("p", filled("lost_text", {
    plans: digits(result.plans, 9), fit: digits(lost.does_not_fit, 9),
    slow: digits(lost.slower_bound + lost.slower, 9) })));
  for (const reason of Object.values(result.illegal)) {
    shown.push(element("p", filled("illegal", {
      count: digits(reason.count, 9), example: reason.example })));
  }
  if (best) {
    shown.push(element("h2", word("run")));
    shown.push(source(word("command"), best.command));
    shown.push(source(word("config"), answer.config));
  }
  return shown;
}

async function show() {
  const given = values(), state = document.getElementById("state");
  const section = document.getElementById("answer");
  history.replaceState(null, "", `#${new URLSearchParams(given)}`);
  section.setAttribute("aria-busy", "true");
  state.textContent = word("waiting");
  const words = words_of(given);
  const answer = await planner.ask(
      [...words, "--format", "json", "--explain", "--top", "8",
       "--write-config", "/plan.json"],
      dropped ? { "config.json": dropped } : {});
  if (!answer) return;
  section.setAttribute("aria-busy", "false");
  state.textContent = answer.error ?? "";
  const shown = answer.error ? [] : show_plan(answer);
  if (!answer.error) {
    const typed = words.map((text) => /^[\w.,/-]+$/.test(text) ? text
                                                               : `'${text}'`);
    shown.push(source(word("question"),
                      `./shardbook plan ${typed.join(" ")} --explain`));
  }
  document.getElementById("result").replaceChildren(...shown);
}

let waits;
form.addEventListener("input", () => {
  clearTimeout(waits);
  waits = setTimeout(async () => {
    await read_file();
    show();
  }, 150);
});
addEventListener("hashchange", () => location.reload());
fill();
show();
