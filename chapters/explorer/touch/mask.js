// Attention over ranks: who computes which part of the mask in which step.

THINGS.mask = (parts, answerTo) => {
  const sum = (values) => values.reduce((a, b) => a + b, 0);

  function table(answer, step) {
    const works = answer.ranks.map((rank) => rank.hops.map((hop) => hop.work));
    const rows = html("table");
    rows.append(html("tr", {}, html("td"), ...works[0].map((_, hop) => html(
        "th", { scope: "col", textContent: filled("mask_step", { step: hop }) })),
        html("th", { scope: "col", textContent: filled("sum") })));
    works.forEach((work, rank) => rows.append(html("tr", {},
        html("th", { scope: "row", textContent: filled("rank", { rank }) }),
        ...work.map((count, hop) => html(
            "td", { textContent: count, className: hop === step ? "now" : "" })),
        html("td", { textContent: sum(work) }))));
    return rows;
  }

  function show(answer, step) {
    const tokens = answer.tokens, left = 20;
    const cell = Math.min(18, (parts.picture.clientWidth - left) / tokens);
    const svg = picture(left + cell * tokens, left + cell * tokens, about(answer));
    draw(svg, "text", { x: left, y: 13 }, filled("mask_columns"));
    draw(svg, "text", { transform: `translate(13 ${left + 50}) rotate(-90)` },
         filled("mask_rows"));
    const gap = cell > 5 ? 1 : 0;
    box(svg, "empty", left, left, cell * tokens, cell * tokens);
    answer.ranks.forEach((rank, r) => rank.hops.forEach((hop, h) => {
      // Under Ulysses all ranks compute the same pairs
      if (h > step || (answer.isUlysses && r > 0)) return;
      const kind = answer.isUlysses ? "ink" : rankKind(r);
      for (const [query, key] of hop.pairs) {
        box(svg, kind + (h < step ? " pale" : ""), left + cell * key,
            left + cell * query, cell - gap, cell - gap);
      }
    }));
    parts.picture.replaceChildren(svg, table(answer, step));
    const hops = answer.ranks.map((rank) => rank.hops[step]);
    parts.now.textContent = filled(answer.isUlysses ? "every_rank" : "mask_now", {
      sources: listed(hops.map((hop) => hop.source)),
      slowest: digits(Math.max(...hops.map((hop) => hop.work))) });
    parts.about.textContent = about(answer);
  }
  function about(answer) {
    const hops = answer.ranks[0].hops.map((_, hop) => answer.ranks.map(
        (rank) => rank.hops[hop].work));
    return filled("mask_about", {
      slowest: digits(sum(hops.map((works) => Math.max(...works)))),
      mean: digits(sum(hops.flat()) / answer.ranks.length) });
  }

  return stepped(parts, "mask_label", {
    layout: { values: ["contiguous", "zigzag", "striped", "ulysses"] },
    ranks: { value: 4, min: 1, max: 16 }, tokens: { value: 16, min: 1, max: 64 },
    heads: { value: 4, min: 1 },
  }, (values) => {
    const answer = answerTo(values);
    return answer && { ...answer, tokens: values.tokens,
                       isUlysses: values.layout === "ulysses",
                       count: answer.ranks[0].hops.length };
  }, show);
};
