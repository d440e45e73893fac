// ---- The timelines of plans on one axis: of each stage its micro-batches, and
// ---- the memory that it keeps meanwhile. timeline.js and zoom.js draw them.

// More stages would be too many to see: these are left out in the middle.
const MOST_LANES = 16;

const KINDS = [["forward", "forward"], ["backward", "backward"],
               ["weights", "weights"], ["comm", "sums and gathers"],
               ["optimizer", "optimizer"], ["idle", "idle"],
               ["kind-activation", "activations"]];

function describe(span, is_lane) {
  const from = seconds(span.begin / 1e9), to = seconds(span.end / 1e9);
  if (!is_lane) return filled("kept_at", { from, bytes: bytes(span.sum) });
  const kind = KINDS.find(([name]) => name === classOf(span));
  const micro_batch = numberOf(span.label);
  const chunk = Number(span.name.slice(1));
  return [say(kind[1]) + (micro_batch === undefined ? ""
              : filled("of_micro_batch", { micro_batch }) +
                (chunk > 0 ? filled("of_chunk", { chunk }) : "")),
          `${from} \u2013 ${to}: ${seconds((span.end - span.begin) / 1e9)}`]
      .join("\n");
}

function tools() {
  const button = (action, text, name) => make("button", {
    type: "button", "data-do": action, text, title: name, "aria-label": name });
  return make("div", { class: "tools", hidden: "" },
      button("in", "+", say("zoom_in")),
      button("out", "\u2212", say("zoom_out")),
      button("left", "\u2190", say("earlier")),
      button("right", "\u2192", say("later")),
      button("all", say("all"), say("all")),
      make("span", { text: say("tools") }));
}

function lane(plan, run, g, full) {
  const { stage, busy, most } = plan.lanes.groups[g];
  const of = { stage, plan: plan.name, busy: percent(busy),
               bytes: bytes(most) };
  const drawing = (name, label, more) => make("svg", {
    class: name, role: "img", tabindex: 0, "aria-label": label,
    "data-run": run, "data-group": g, ...more });
  return [
    make("span", { class: "label", text: filled("stage", of) }),
    drawing("lane compute", filled("lane_label", of), { "data-queues": "0" }),
    make("span", { class: "number", text: of.busy }),
    make("span", { class: "label" }),
    drawing("memory", filled("kept_label", of), { "data-most": full }),
    make("span", { class: "number", text: of.bytes })];
}

function timeline_of(plans) {
  const drawn = plans.filter((plan) => plan.lanes);
  if (drawn.length === 0) return [];
  const full = Math.max(...drawn.flatMap(
      (plan) => plan.lanes.groups.map(({ most }) => most)));
  const axis = make("div", { class: "axis", "aria-hidden": "true" });
  const tracks = drawn.map((plan, i) => {
    const run = `plan-${i}`, all = plan.lanes.groups.map((_, g) => g);
    plan.lanes.say = describe;
    decoded.set(run, Promise.resolve(plan.lanes));
    const { micro_batches } = plan.lanes;
    const shown = all.length <= MOST_LANES ? all
        : [...all.slice(0, MOST_LANES / 2), ...all.slice(-MOST_LANES / 2)];
    return make("div", { class: "track" },
        make("b", { text: plan.name }),
        make("span", { class: "shares", text: seconds(plan.best.step_s) }),
        make("div", { class: "lanes" },
             ...shown.flatMap((g) => lane(plan, run, g, full))),
        ...(shown.length < all.length ? [paragraph(filled(
            "hidden_stages", { count: all.length - shown.length }))] : []),
        ...(micro_batches < plan.best.micro_batches ? [paragraph(filled(
            "fewer_micro_batches", { shown: micro_batches,
                                     all: plan.best.micro_batches }))] : []));
  });
  const used = new Set(drawn.flatMap((plan) => plan.lanes.ops.map(
      ([, label, category]) => classOf({ label, category }))));
  const view = make("div", { class: "view" }, make("figure", {},
      make("h2", { text: say("timeline") }),
      paragraph(filled("timeline_text", { bytes: bytes(full) })),
      legend(KINDS.filter(([name]) => used.has(name) || name === "idle" ||
                                      name === "kind-activation")
                 .map(([name, text]) => [name, say(text)])),
      tools(), make("div", { class: "tracks" }, ...tracks,
                    make("div", { class: "lanes" }, axis))));
  return [view];
}
