// ---- What a step's time and a device's memory consist of: of the best plan,
// ---- and of one that is compared with it, on one scale.
//
// A shown plan has a name, its place in the planner's list (`best`), the
// answer's `explain`, and what timeline.js draws (`lanes`).

// A bar of parts, each as wide as its number; `limit` is marked.
function bar(plan, list, size_of, show, whole, limit) {
  const made = make("div", { class: "bar", role: "img", "aria-label":
      `${plan.name}: ${list.map((part) =>
          `${say(part.kind)} ${show(size_of(part))}`).join(", ")}` });
  for (const part of list) {
    const block = make("span", {
      class: part.kind.replace(/ /g, "-"), text: say(part.kind),
      title: `${say(part.kind)}: ${show(size_of(part))}` });
    block.style.width = `${100 * size_of(part) / whole}%`;
    made.append(block);
  }
  if (limit) {
    const mark = make("i", { title: `${say("capacity")}: ${show(limit)}` });
    mark.style.left = `${100 * limit / whole}%`;
    made.append(mark);
  }
  return made;
}

// Rows of a name, a number, its formula and the page that derives it.
function formulas(caption, rows) {
  const made = table(caption, ["part", "size", "formula", "page"],
      rows.map(([name, size, formula, page]) => [
        name, size, formula, page ? page_link(page) : ""]));
  made.classList.add("formulas");
  return made;
}

// Of two plans, the sums of each kind and what the second has more.
function differences(plans, list_of, size_of, show) {
  const sums = plans.map((plan) => {
    const sum = {};
    for (const part of list_of(plan)) {
      sum[part.kind] = (sum[part.kind] ?? 0) + size_of(part);
    }
    return sum;
  });
  const kinds = [...new Set(sums.flatMap(Object.keys))];
  return table("", ["part", "best", "compared", "more"], kinds.map((kind) => {
    const [here, there] = sums.map((sum) => sum[kind] ?? 0);
    return [say(kind), show(here), show(there), signed(there - here, show)];
  }));
}

function parts(caption, plans, list_of, size_of, show, whole, limit) {
  const made = make("figure", {}, make("h2", { text: caption }));
  for (const plan of plans) {
    if (plans.length > 1) made.append(paragraph(plan.name));
    made.append(bar(plan, list_of(plan), size_of, show, whole, limit));
  }
  if (plans.length > 1) {
    made.append(differences(plans, list_of, size_of, show));
  }
  made.append(...plans.map((plan) => formulas(
      plans.length > 1 ? plan.name : "", list_of(plan).map((part) => [
        say(part.kind), show(size_of(part)), part.formula, part.page]))));
  return made;
}

// How far published steps were from predictions of this kind.
const measured = ({ best }) => paragraph(best.measured
    ? filled("measured", { steps: best.measured.steps,
                           mean: best.measured.mean_error_percent,
                           most: best.measured.largest_error_percent })
    : say("no_measured"));

function time_of(plans) {
  const whole = Math.max(...plans.map((plan) => plan.best.step_s));
  return [parts(say("time"), plans, (plan) => plan.explain.time,
                (part) => part.seconds, seconds, whole),
          ...plans.slice(1).map(measured)];
}

function memory_of(plans, capacity) {
  const whole =
      Math.max(capacity, ...plans.map((plan) => plan.best.memory_bytes.total));
  return [parts(say("kept"), plans, (plan) => plan.explain.memory,
                (part) => part.bytes, bytes, whole, capacity),
          make("p", {}, `${say("memory_measured")} `,
               make("a", { href: "../../bench/validation.md#memory",
                           text: say("memory_page") }))];
}

// Of one stage, all that computes is among the parts; of several, the planner
// takes the mean.
function idle_formula(best, explain) {
  if (best.pp > 1 || best.offload) return say("idle_mean");
  const busy = explain.time.filter(
      ({ kind }) => kind === "compute" || kind === "optimizer");
  return `1 - (${busy.map((part) => seconds(part.seconds)).join(" + ")}) / ${
      seconds(best.step_s)}`;
}

// The numbers that are no sum of parts.
function more_of(plans, result) {
  const the_map = "chapters/README.md#the-map";
  const searched = "chapters/details.md#a-plan-part-by-part";
  const rows = plans.flatMap(({ name, best, explain }) => {
    const step = seconds(best.step_s);
    const all = [
      [say("tokens"), digits(best.tokens_per_s, 4),
       `${digits(result.batch, 9)} x ${digits(result.seq, 9)} / ${step}`,
       the_map],
      [say("mfu"), percent(best.mfu),
       `${seconds(best.mfu * best.step_s)} ${say("at_peak")} / ${step}`,
       the_map],
      [say("idle"), percent(best.idle_share), idle_formula(best, explain),
       searched],
      ...explain.sent.map((part) => [
        filled("sent", { link: say(part.kind) }), bytes(part.bytes),
        part.formula, part.page])];
    return plans.length > 1 ? [[name, "", "", ""], ...all] : all;
  });
  return [make("h2", { text: say("more_numbers") }),
          formulas("", rows)];
}
