// ---- The answer. Each part of the page is a task of its own, so that the page
// ---- never stands still; later answers end those before.

let shown = null;  // an answer, the job `given`, and the `other` plan's answer
let turns = 0;
async function in_turn(...steps) {
  const mine = ++turns;
  for (const step of steps) {
    await new Promise((done) => setTimeout(done));
    if (mine !== turns) return false;
    await step();
  }
  return mine === turns;
}

// A config.json may have Infinity, which the planner reads.
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

function put(id, ...nodes) { by_id(id).replaceChildren(...nodes); }

function plan_of({ result, lanes }) {
  const [best] = result.best;
  return { name: name_of(best), best, explain: result.explain, lanes };
}

const fits = ({ best, usable_memory_bytes }) =>
    best[0].memory_bytes.total <= usable_memory_bytes;

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
  if (!fits(shown.other.result)) {
    by_id("head").append(paragraph(say("compared_does_not_fit")));
  }
}

// The parts that show one plan or two; the others are about the search, and stay
// as they are if there was none (no points).
function steps_of_plans() {
  const { result, points } = shown;
  const plans = [shown, shown.other].filter((each) => each).map(plan_of);
  return [
    () => show_head(plans, result),
    () => put("time", ...time_of(plans)),
    () => put("memory", ...memory_of(plans, result.memory_bytes)),
    () => put("timeline", ...timeline_of(plans)),
    () => Promise.all(
        [...by_id("timeline").querySelectorAll(".view")].map(equip)),
    () => {
      if (!points) return;
      const { figure, draw } = points_of(points, plans, result.memory_bytes);
      put("points", figure);
      draw();
    },
    () => put("more", ...more_of(plans, result))];
}

function show_answer(given, answer) {
  const { result } = answer;
  const clear = () => [...by_id("result").children].forEach(
      (part) => part.replaceChildren());
  shown = result ? { other: null, ...answer, given } : null;
  if (!result) return in_turn(clear);
  const [best] = result.best;
  if (best && !answer.points) return in_turn(...steps_of_plans());
  const question = words_of(given).map(
      (text) => /^[\w.,/-]+$/.test(text) ? text : `'${text}'`);
  const run = [
    make("h2", { text: say("run") }),
    source(say("question"),
           `./shardbook plan ${question.join(" ")} --explain`)];
  if (!best) {
    return in_turn(clear, () => {
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
                ...megatron_of(best, result, parsed(files_of(given)[CONFIG]))));
}
