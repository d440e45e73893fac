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
// The planner refuses longer files; an address has room for less
const MOST_CONFIG = 8 << 20, MOST_IN_ADDRESS = 8 << 10;
// More than any device has: for a plan that does not fit
const ALL_MEMORY = "1000TB";
const CONFIG = "config.json";

const by_id = (id) => document.getElementById(id);
const form = by_id("job");
const fields = [...form.elements].filter((field) => field.name);
const file_field = form.elements.file;

// ---- What is asked: the form's fields, a config.json, a plan to compare with
// ---- the best one. All of it is in the address.

let config = null;    // its text
let compared = null;  // the plan's name
let shown = null;     // the answer to the form, and { given, other }

function values() {
  return Object.fromEntries(
      fields.filter((field) => field !== file_field &&
                               (field.value || field.name in FIRST))
          .map((field) => [field.name, field.value]));
}

function address_of(plan) {
  const given = new URLSearchParams(values());
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
  const text = await file.slice(0, MOST_CONFIG + 1).text();
  try {
    config = JSON.stringify(JSON.parse(text));
  } catch {
    config = text;
  }
  fill(form.elements.model, CONFIG);
}

const words_of = (given) => Object.entries(given).flatMap(
    ([name, value]) => value ? [`--${name}`, value] : []);
const files_of = (given) =>
    given.model === CONFIG && config !== null ? { [CONFIG]: config } : {};

// ---- The state of the search.

function busy(text) {
  by_id("answer").setAttribute("aria-busy", "true");
  by_id("said").textContent = text;
  by_id("stop").hidden = false;
  by_id("progress").hidden = false;
  by_id("progress").removeAttribute("value");
}

function idle(text) {
  by_id("answer").setAttribute("aria-busy", "false");
  by_id("said").textContent = text;
  by_id("stop").hidden = true;
  by_id("progress").hidden = true;
}

function progress([done, all]) {
  by_id("progress").max = all;
  by_id("progress").value = done;
  by_id("progress").textContent = percent(done / all);
}

// ---- The answer. Each part of the page is a task of its own, so that the page
// ---- never stands still; later answers end those before.

let turns = 0;
async function in_turn(...steps) {
  const mine = ++turns;
  for (const step of steps) {
    await new Promise((done) => setTimeout(done));
    if (mine !== turns) return false;
    step();
  }
  return true;
}

function put(id, ...nodes) { by_id(id).replaceChildren(...nodes); }

function plan_of({ result, lanes }) {
  const [best] = result.best;
  return { name: name_of(best), best, explain: result.explain, lanes };
}

function show_head(plans, result) {
  const [{ best }, other] = plans;
  const figures = (plan) => ({
    layout: plan.layout, work: plan.work, step: seconds(plan.step_s),
    memory: bytes(plan.memory_bytes.total),
    capacity: bytes(result.memory_bytes) });
  put("head", make("h2", { text: filled("headline", figures(best)) }),
      paragraph(filled("headline_more", {
        work: best.work, tokens: digits(best.tokens_per_s),
        mfu: percent(best.mfu), idle: percent(best.idle_share) })),
      measured(plans[0]),
      ...result.remarks.map((remark) => paragraph(`${remark}.`)));
  if (!other) return;
  by_id("head").append(
      make("p", {}, `${filled("compared_with", {
        ...figures(other.best), plan: other.name,
        more: signed(other.best.step_s - best.step_s, seconds) })} `,
           make("button", { type: "button", text: say("compare_no_more"),
                            onclick: () => compare(null) })));
  if (other.name !== compared) {
    by_id("head").append(paragraph(filled("compared_other",
                                          { plan: compared })));
  }
  if (other.best.memory_bytes.total > result.usable_memory_bytes) {
    by_id("head").append(paragraph(say("compared_does_not_fit")));
  }
}

// The parts that show two plans; the others are about the search.
function steps_of_plans() {
  const { result, points } = shown;
  const plans = [shown, shown.other].filter((each) => each).map(plan_of);
  return [
    () => show_head(plans, result),
    () => put("time", ...time_of(plans)),
    () => put("memory", ...memory_of(plans, result.memory_bytes)),
    () => put("timeline", ...timeline_of(plans)),
    () => by_id("timeline").querySelectorAll(".view").forEach(equip),
    () => {
      if (!points) return put("points");
      const { figure, draw } = points_of(points, plans, result.memory_bytes);
      put("points", figure);
      draw();
    },
    () => put("more", ...more_of(plans, result))];
}

function show_answer(given, answer) {
  const { result } = answer;
  for (const part of by_id("result").children) part.replaceChildren();
  if (!result) return in_turn();
  shown = { ...answer, given, other: null };
  const [best] = result.best;
  const question = words_of(given).map(
      (text) => /^[\w.,/-]+$/.test(text) ? text : `'${text}'`);
  const run = [
    make("h2", { text: say("run") }),
    source(say("question"),
           `./shardbook plan ${question.join(" ")} --explain`)];
  if (!best) {
    return in_turn(() => {
      put("head", make("h2", { text: say("none_fits") }));
      put("lost", ...lost_of(result));
      put("run", ...run);
    });
  }
  return in_turn(
      ...steps_of_plans(),
      () => put("fastest", ...next_of(result), fastest_of(result)),
      () => put("lost", ...lost_of(result)),
      () => put("run", ...run, source(say("command"), best.command),
                source(say("config"), answer.config),
                ...megatron_of(best, result, files_of(given)[CONFIG] &&
                                             JSON.parse(config))));
}

// The searches of a form that has changed again have no answer.
async function search() {
  const given = values();
  write_address();
  busy(say("waiting"));
  by_id("result").className = "old";
  function hear(heard) {
    if (heard.progress) return progress(heard.progress);
    by_id("result").className = "";
    by_id("said").textContent = say("first_answer");
    show_answer(given, heard);
  }
  const answer = await planner.ask(words_of(given), files_of(given), hear);
  if (!answer) return;
  by_id("result").className = "";
  if (!await show_answer(given, answer)) return;
  idle(answer.error ?? say("found"));
  if (compared && answer.result?.best.length) await compare(compared);
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
  const { given } = shown;
  const ask = (more) => planner.ask(
      words_of({ ...given, ...limits_of(plan), ...more }), files_of(given),
      (heard) => heard.progress && progress(heard.progress));
  busy(say("comparing"));
  let other = await ask({});
  if (other?.result && other.result.best.length === 0) {
    other = await ask({ "device-memory": ALL_MEMORY });
  }
  if (!other) return;
  shown.other = other.result?.best.length ? other : null;
  if (await in_turn(...steps_of_plans())) idle(other.error ?? say("found"));
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
  by_id("result").className = "";
  idle(say("stopped"));
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
    form.elements[name].add(new Option(value || say("any"), value));
  }
}
read_address();
search();
