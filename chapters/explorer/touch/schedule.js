// A schedule: what each rank runs, and the activations that it keeps.

THINGS.schedule = (parts, answerTo) => {
  const aliveAt = (rank, time) => rank.alive.findLast(([from]) => from <= time)[1];
  const runningAt = (rank, time) => rank.actions.filter(
      ([, , , begin, end]) => begin <= time && time < end);
  // The middle one of the events with the most ranks at work and, of those, with
  // the most sets
  function fullest({ ranks }, times) {
    const sum = (of) => ranks.reduce((all, rank) => all + of(rank), 0);
    const fullness = times.map((time) => 1e6 * sum(
        (rank) => runningAt(rank, time).length > 0) + sum(
        (rank) => aliveAt(rank, time)));
    const most = Math.max(...fullness);
    const all = [...times.keys()].filter((event) => fullness[event] === most);
    return all[Math.floor(all.length / 2)];
  }
  const name = ([kind, micro_batch, chunk]) =>
      `${kind}${micro_batch}${chunk ? "." + chunk : ""}`;

  function show(answer, step) {
    const time = answer.times[step], left = 50, right = 60, lane = 22, graph = 16, row = 48;
    const shortest = Math.min(...answer.ranks.flatMap(
        (rank) => rank.actions.map((action) => action[4] - action[3]))
        .filter((duration) => duration > 0));
    const width = Math.max(parts.picture.clientWidth, left + right + Math.min(
        6000, 7 * answer.makespan / shortest));
    const x = (t) => left + (width - left - right) * t / answer.makespan;
    const most = Math.max(...answer.ranks.map((rank) => rank.most));
    const height = row * answer.ranks.length + 4;
    const svg = picture(width, height, about(answer));
    answer.ranks.forEach((rank, r) => {
      const top = row * r, labels = [];
      draw(svg, "text", { x: 0, y: top + 15 }, filled("rank", { rank: r }));
      box(svg, "empty", left, top, width - left - right, lane);
      rank.actions.forEach((action, i) => {
        const [kind, micro_batch, , begin, end] = action, wide = x(end) - x(begin);
        const isLater = begin > time ? " later" : "";
        // A pair that overlaps shares the lane, the forward above
        const [before, after] = [rank.actions[i - 1], rank.actions[i + 1]].map(
            (other) => other?.[3] === begin && other[4] === end ? other : null);
        const label = before ? "" : after ? `${micro_batch}&${after[1]}` : micro_batch;
        const made = box(svg, kind + isLater, x(begin), before ? top + lane / 2 : top,
                         Math.max(wide - 1, 1), before || after ? lane / 2 : lane);
        draw(made, "title", {}, `${name(action)}: ${filled(kind)}, ${begin} - ${end}`);
        labels.push([isLater, x(begin) + wide / 2, wide, String(label)]);
      });
      for (const [isLater, middle, wide, label] of labels) {
        if (wide < 5 + 7 * label.length) continue;
        draw(svg, "text", { class: isLater ? "middle" : "on-block middle", x: middle,
                            y: top + 15 }, label);
      }
      rank.alive.forEach(([from, sets], i) => {
        const end = rank.alive[i + 1]?.[0] ?? answer.makespan;
        const tall = graph * sets / most;
        box(svg, "alive" + (from > time ? " later" : ""), x(from),
            top + lane + 2 + graph - tall, x(end) - x(from), tall);
      });
      draw(svg, "text", { x: width - right + 6, y: top + lane + 15 },
           filled("sets", { now: aliveAt(rank, time), most: rank.most }));
      draw(svg.lastChild, "title", {}, filled("sets_name"));
    });
    draw(svg, "path", { class: "line", d: `M${x(time)} 0V${height}` });
    parts.picture.replaceChildren(svg);
    const running = answer.ranks.map((rank) =>
        runningAt(rank, time).map(name).join("&") || filled("nothing"));
    parts.now.textContent = filled("schedule_now", {
      time: digits(time), running: listed(running),
      sets: listed(answer.ranks.map((rank) => aliveAt(rank, time))) });
    parts.about.textContent = about(answer);
  }
  const about = (answer) => filled("schedule_about", {
    makespan: digits(answer.makespan), idle: digits(100 * answer.idle_share),
    most: listed(answer.ranks.map((rank) => rank.most)) });

  const text = ({ text, micro_batches }) => text.trim().startsWith("{") ? text
      : JSON.stringify({ micro_batches, ranks: text.trim().split("\n") });
  return stepped(parts, "schedule_label", {
    name: { values: ["gpipe", "1f1b", "interleaved", "zb-h1", "dualpipe", "yours"],
            value: "1f1b" },
    ranks: { value: 4, min: 1, max: 64 }, micro_batches: { value: 8, min: 1, max: 256 },
    chunks: { value: 2, min: 1, max: 16 },
    forward: { value: 1, min: 0.1, step: 0.1 },
    backward_input: { value: 1, min: 0.1, step: 0.1 },
    backward_weight: { value: 1, min: 0.1, step: 0.1 },
    message: { value: 0, min: 0, step: 0.1 }, text: { rows: 4 },
  }, (values, inputs, before) => {
    const isOwn = values.name === "yours";
    inputs.text.parentElement.hidden = !isOwn;
    inputs.chunks.parentElement.hidden = values.name !== "interleaved";
    inputs.ranks.parentElement.hidden = isOwn;
    // A reader begins with the schedule that was shown: its lists, or all of it
    // where stages are not in the order of ranks
    if (isOwn && !values.text && before) {
      const { ranks, routes } = JSON.parse(before.text);
      inputs.text.value = values.text = routes ? before.text : ranks.join("\n");
    }
    const { name: named, ...question } = values;
    const answer = answerTo(isOwn ? { ...question, text: text(values) }
                                  : { ...question, text: "", name: named });
    if (!answer) return null;
    const times = [...new Set(answer.ranks.flatMap((rank) => rank.actions.flatMap(
        ([, , , begin, end]) => [begin, end])))].sort((a, b) => a - b);
    return { ...answer, times, count: times.length, first: fullest(answer, times) };
  }, show);
};
