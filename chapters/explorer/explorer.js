// ---- The page around the planner: reads the form, asks, shows the answer. All
// ---- numbers and sentences about plans come from the planner.

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
const FIRST_PLAN = "tp 4 x dp 16, SP, ZeRO-3; 32 x 1";  // the best of FIRST
// The planner refuses longer files; an address has room for less
const MOST_CONFIG = 8 << 20, MOST_IN_ADDRESS = 8 << 10;
// More than any device has: for a plan that does not fit
const ALL_MEMORY = "1000TB";
const CONFIG = "config.json";

const root = document.documentElement;
const by_id = (id) => document.getElementById(id);
const form = by_id("job");
const fields = [...form.elements].filter((field) => field.name);
const file_field = form.elements.file;

// ---- The page's language. What the planner says is English.

function follow_language() {
  by_id("progress").ariaLabel = say("progress");
}

by_id("language").addEventListener("click", () => {
  follow_language();
  write_address();
  if (is_busy()) search();
  else if (shown) show_answer(shown.given, shown);
});

// ---- What is asked: the form's fields, a config.json, a plan to compare with
// ---- the best one. All of it is in the address.

let config = null;    // its text
let compared = null;  // the plan's name

function values() {
  return Object.fromEntries(
      fields.filter((field) => field !== file_field &&
                               (field.value || field.name in FIRST))
          .map((field) => [field.name, field.value]));
}

function address_of(plan) {
  const given = new URLSearchParams({ lang: root.lang, ...values() });
  if (config !== null && config.length <= MOST_IN_ADDRESS) {
    given.set("config", config);
  }
  if (plan) given.set("with", plan);
  return `#${given}`;
}

function write_address() {
  history.replaceState(null, "", address_of(compared));
}

function fill(field, value) {
  // An unknown name is for the planner to refuse
  if (field.options && value &&
      ![...field.options].some((option) => option.value === value)) {
    field.add(new Option(value, value));
  }
  field.value = value;
}

function read_address() {
  const given = new URLSearchParams(location.hash.slice(1));
  speak(languageAsked());
  follow_language();
  config = given.get("config");
  compared = given.get("with");
  for (const field of fields) {
    if (field === file_field) continue;
    fill(field, given.get(field.name) ?? FIRST[field.name] ?? "");
    if (field.value && field.closest("details")) by_id("limits").open = true;
  }
}

async function read_file(file) {
  // Of a longer file, what is enough for the planner to see that
  config = await file.slice(0, MOST_CONFIG + 1).text();
  fill(form.elements.model, CONFIG);
}

const words_of = (given) => Object.entries(given).flatMap(
    ([name, value]) => value ? [`--${name}`, value] : []);
const files_of = (given) =>
    given.model === CONFIG && config !== null ? { [CONFIG]: config } : {};

// ---- The state of the search.

const is_busy = () => by_id("answer").getAttribute("aria-busy") === "true";

// A word of the page's, or a sentence of the planner's
function tell(text, is_error) {
  write(by_id("said"), text);
  by_id("said").className = is_error ? "over" : "";
}

function state(is_busy, text, is_error) {
  by_id("answer").setAttribute("aria-busy", is_busy);
  tell(text, is_error);
  by_id("stop").hidden = by_id("progress").hidden = !is_busy;
}

function busy(text) {
  ++turns;  // ends what is being shown
  state(true, text);
  by_id("progress").removeAttribute("value");
}

const idle = (text, is_error) => state(false, text, is_error);

function found({ error, has_no_rings }) {
  const is_long = files_of(shown?.given ?? {})[CONFIG]?.length >
                  MOST_IN_ADDRESS;
  idle(error ?? (has_no_rings ? "no_rings" : is_long ? "found_long" : "found"),
       error);
}

function progress([done, all]) {
  Object.assign(by_id("progress"),
                { max: all, value: done, textContent: percent(done / all) });
}

// ---- Questions. Those of a form that has changed again have no answer.

let last = location.hash ? null : FIRST_PLAN;  // the best plan of a search
// For a job that the last plan does not suit
const USUAL = { "tp": "8", "cp": "1", "zero-stage": "1", "micro-batch": "1" };

const ask = (given, limits) => planner.ask(
    words_of({ ...given, ...limits }), files_of(given), progress);

// What a plan with these limits needs, even if no device has so much memory.
async function predicted(given, limits) {
  const answer = await ask(given, limits);
  if (answer?.result?.best.length !== 0) return answer;
  const larger =
      await ask(given, { ...limits, "device-memory": ALL_MEMORY });
  const { memory_bytes, usable_memory_bytes } = answer.result;
  return larger && { ...larger, result: {
    ...larger.result, memory_bytes, usable_memory_bytes } };
}

// A plan that needs no search, and what the page says of it.
async function plan_at_once(given) {
  const beside = (limits) => Object.fromEntries(
      Object.entries(limits).filter(([name]) => !given[name]));
  if (last) {
    const same = await predicted(given, beside(limits_of(last)));
    if (!same) return [null];
    if (same.result?.best.length) {
      return [same, fits(same.result) ? "same" : "same_does_not_fit"];
    }
  }
  return [await ask(given, beside(USUAL)), "usual"];
}

// Searches; until that ends, the page shows a plan that is known at once.
async function search() {
  const given = values();
  write_address();
  busy("waiting");
  const result = by_id("result");
  result.inert = true;  // of another job
  result.className = "";
  const [early, text] = await plan_at_once(given);
  if (!early) return;
  if (early.result?.best.length) {
    result.className = "early";
    show_answer(given, { ...early, points: null });
    tell(text);
  }
  const answer = await ask(given, {});
  if (!answer) return;
  result.inert = false;
  result.className = "";
  if (!await show_answer(given, answer)) return;
  found(answer);
  if (!answer.result?.best.length) return;
  last = name_of(answer.result.best[0]);
  if (compared) await compare(compared);
}

// Asks for one more plan, and shows it beside the best one; null shows none.
async function compare(plan) {
  compared = plan;
  write_address();
  if (!plan) {
    shown.other = null;
    in_turn(...steps_of_plans());
    return;
  }
  busy("comparing");
  const other = await predicted(shown.given, limits_of(plan));
  if (!other) return;
  shown.other = other.result?.best.length ? other : null;
  if (await in_turn(...steps_of_plans())) found(other);
}

// ---- What the reader does.

let waits;
form.addEventListener("input", async ({ target }) => {
  if (target === file_field) {
    if (!file_field.files[0]) return;
    await read_file(file_field.files[0]);
  }
  if (target === form.elements.model) file_field.value = "";
  compared = null;
  clearTimeout(waits);
  waits = setTimeout(search, 50);
});
form.addEventListener("submit", (event) => event.preventDefault());
by_id("stop").addEventListener("click", () => {
  planner.stop();
  by_id("result").inert = false;
  idle("stopped");
});
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", async (event) => {
  event.preventDefault();
  const [file] = event.dataTransfer.files;
  if (!file) return;
  await read_file(file);
  search();
});
addEventListener("hashchange", () => {
  read_address();
  search();
});
for (const [name, choices] of Object.entries(CHOICES)) {
  for (const value of choices) {
    const option = new Option(value, value);
    if (!value) option.dataset.say = "any";
    form.elements[name].add(option);
  }
}
read_address();
search();
