// ---- All plans: step time against memory, those that are the fastest, and the
// ---- reason why the next one lost.

const OUTCOMES = ["does not fit", "bound", "predicted"];

const name_of = ({ layout, work }) => `${layout}; ${work}`;

// The options that ask for a plan, read from its name:
// "tp 2 x pp 2 x dp 8, SP, ZeRO-1; 16 x 2, 1f1b, recompute blocks".
function limits_of(name) {
  const found = (pattern, other) => pattern.exec(name)?.[1] ?? other;
  const limits = {
    "tp": found(/\btp (\d+)/, "1"), "pp": found(/\bpp (\d+)/, "1"),
    "cp": found(/\bcp (\d+)/, "1"), "ep": found(/\bEP (\d+)/, "1"),
    "zero-stage": found(/ZeRO-(\d)/, "0"),
    "micro-batch": found(/; \d+ x (\d+)/), "schedule":
        found(/, (1f1b|interleaved|zb-h1)/),
    "chunks": found(/interleaved (\d+)/, "1"),
    "recompute": found(/recompute (\w+)/, "never"),
    "sequence-parallel": /\bSP\b/.test(name) ? "1" : "0",
  };
  return Object.fromEntries(
      Object.entries(limits).filter(([, value]) => value));
}

// A link to the page that compares this plan; followed without loading it.
function compare_link(name, attributes, ...children) {
  return make("a", { href: address_of(name), onclick: (event) => {
    event.preventDefault();
    compare(name);
  }, ...attributes }, ...children);
}

// Of all plans the one that the pointer is near, or that the arrow keys choose.
function cloud_of(points) {
  const count = points.names.length;
  const drawing = make("svg", { "aria-hidden": "true" });
  const chosen = make("i", { hidden: "" });
  const made = make("div", {
    class: "cloud", role: "slider", tabindex: 0, "aria-label": say("points"),
    "aria-valuemin": 1, "aria-valuemax": count }, drawing, chosen);
  const x = new Float64Array(count), y = new Float64Array(count);
  let at = 0;

  function text_of(i) {
    const outcome = points.outcomes[i];
    return [points.names[i], filled(`point ${outcome}`, {
      step: seconds(points.time[i]), memory: bytes(points.memory[i]) })]
        .join("\n");
  }
  function describe_in(value) {
    made.setAttribute("aria-valuenow", value + 1);
    made.setAttribute("aria-valuetext", text_of(value));
  }
  function choose(i) {
    at = i;
    describe_in(i);
    chosen.hidden = false;
    chosen.style.left = `${x[i]}px`;
    chosen.style.top = `${y[i]}px`;
    tip.textContent = text_of(i);
    const box = made.getBoundingClientRect();
    const left = box.left + x[i] + 12;
    tip.style.left = `${Math.max(4, Math.min(
        left, innerWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${Math.max(4, box.top + y[i] - tip.offsetHeight - 12)}px`;
  }
  function hide() {
    chosen.hidden = true;
    tip.textContent = "";
  }
  function nearest(left, top) {
    let best = -1, least = 12 ** 2;
    for (let i = 0; i < count; ++i) {
      const distance = (x[i] - left) ** 2 + (y[i] - top) ** 2;
      if (distance < least) [best, least] = [i, distance];
    }
    return best;
  }
  const place = (event) => {
    const box = made.getBoundingClientRect();
    return nearest(event.clientX - box.left, event.clientY - box.top);
  };
  made.addEventListener("pointermove", (event) => {
    const i = place(event);
    if (i < 0) hide(); else choose(i);
  });
  made.addEventListener("pointerleave", hide);
  made.addEventListener("blur", hide);
  made.addEventListener("focus", () => choose(at));
  made.addEventListener("click", (event) => {
    const i = place(event);
    if (i >= 0) compare(points.names[i]);
  });
  made.addEventListener("keydown", (event) => {
    const next = { ArrowRight: at + 1, ArrowUp: at + 1, ArrowLeft: at - 1,
                   ArrowDown: at - 1, PageUp: at + 50, PageDown: at - 50,
                   Home: 0, End: count - 1 }[event.key];
    if (event.key === "Escape") hide();
    if (event.key === "Enter") compare(points.names[at]);
    if (next === undefined) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(next, count - 1)));
  });
  describe_in(0);

  // One path for each outcome, and one dot where plans are too near to be told
  // apart.
  function draw(across, up) {
    const { clientWidth: width, clientHeight: height } = made;
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const dots = OUTCOMES.map(() => new Set());
    for (let i = 0; i < count; ++i) {
      x[i] = width * across.at(points.memory[i]);
      y[i] = height * (1 - up.at(points.time[i]));
      dots[OUTCOMES.indexOf(points.outcomes[i])].add(
          `M${Math.round(x[i])} ${Math.round(y[i])}h0`);
    }
    drawing.replaceChildren(...dots.map((all, i) => make("path", {
      class: OUTCOMES[i].replace(/ /g, "-"), d: [...all].join("") })));
  }
  const ends = (values) => count === 0 ? [] : [
    values.reduce((a, b) => Math.min(a, b)),
    values.reduce((a, b) => Math.max(a, b))];
  return { made, memory: ends(points.memory), time: ends(points.time), draw };
}

// The figure is drawn when it stands in the page.
function points_of(points, plans, capacity) {
  const cloud = cloud_of(points);
  const named = plans.map(({ name, best }) => compare_link(name, {
    class: best.memory_bytes.total > capacity ? "point over" : "point",
    "data-memory": best.memory_bytes.total, "data-time": best.step_s,
    title: `${seconds(best.step_s)}, ${bytes(best.memory_bytes.total)}` },
    make("span", { text: best.layout })));
  const figure = make("figure", { class: "scatter" },
      make("figcaption", {}, make("b", { text: say("points") }),
           say("points_text"),
           legend(OUTCOMES.map((name) => [
             name.replace(/ /g, "-"), say(`outcome ${name}`)]).reverse())),
      make("button", { type: "button", hidden: "" }),
      make("div", { class: "plane" }, cloud.made,
           make("span", { class: "limit", "data-memory": capacity }),
           ...named));
  return { figure, draw: () => drawScatter(figure, cloud) };
}

// Why the next plan lost: what it needs more of, part by part.
function next_of({ explain, best }) {
  if (!explain.next) return [];
  const { more_s, most, ...next } = explain.next;
  const name = name_of(next);
  return [
    make("p", {}, `${filled("next", {
      plan: name, most: say(most), more: signed(more_s[most], seconds),
      step: seconds(more_s.step) })} `,
         ...(name === name_of(best[0]) ? []
             : [compare_link(name, { text: say("compare") })])),
    table("", ["part", "more"], Object.entries(more_s)
        .filter(([, more]) => more !== 0)
        .map(([part, more]) => [say(part), signed(more, seconds)]))];
}

function fastest_of({ best }) {
  return table(say("plans"), ["plan", "step", "slower", "memory"],
      best.map((plan, i) => [
        i === 0 ? name_of(plan) : compare_link(name_of(plan),
                                               { text: name_of(plan) }),
        seconds(plan.step_s), percent(plan.step_s / best[0].step_s - 1),
        bytes(plan.memory_bytes.total)]));
}

function lost_of(result) {
  const { plans, lost, illegal } = result;
  return [make("h2", { text: say("lost") }),
    paragraph(filled("lost_text", {
      plans: digits(plans, 9), fit: digits(lost.does_not_fit, 9),
      slow: digits(lost.slower_bound + lost.slower, 9) })),
    ...Object.values(illegal).map(({ count, example }) => paragraph(
        filled("illegal", { count: digits(count, 9), example })))];
}
