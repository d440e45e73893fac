// An 8 x 8 tensor on a mesh: what each rank holds, and the moves to another layout.

THINGS.mesh = (parts, answerTo) => {
  const range = (values) => {
    const least = Math.min(...values), most = Math.max(...values);
    return digits(least) + (most > least ? ` - ${digits(most)}` : "");
  };
  const bytes = (moves) => range(moves[0]?.sent.map((_, rank) => moves.reduce(
      (sum, move) => sum + move.sent[rank], 0)) ?? [0]);

  function show(answer, step) {
    const { placements, blocks } = answer.layouts[step];
    const { rows, columns } = answer.mesh, gap = 12;
    const side = Math.max(40, Math.min(120, parts.picture.clientWidth / columns - gap));
    const cell = side / 8, tall = side + 20;
    const move = answer.moves[step];
    const next = move ? filled("mesh_next", {
      ...move, axis: filled(`axis_${move.axis}`), sent: bytes([move]),
      collective: move.collective || filled("no_collective") }) : "";
    const svg = picture((side + gap) * columns, tall * rows, `${placements}. ${next}`);
    blocks.forEach(([row, column, height, width], rank) => {
      const x = (side + gap) * (rank % columns), y = tall * Math.floor(rank / columns);
      draw(svg, "text", { x, y: y + 13 }, filled("rank", { rank }));
      box(svg, "empty", x, y + 18, side, side);
      const isTerm = placements.includes("P(");
      const made = box(svg, rankKind(rank) + (isTerm ? " pale" : ""), x + cell * column,
                       y + 18 + cell * row, cell * width, cell * height);
      draw(made, "title", {}, `[${row}:${row + height}, ${column}:${column + width}]`);
      if (isTerm && width && height) {
        draw(svg, "text", { class: "middle", x: x + cell * (column + width / 2),
                            y: y + 22 + cell * (row + height / 2) }, filled("term"));
      }
    });
    parts.picture.replaceChildren(svg);
    parts.now.textContent = filled("mesh_now", { placements }) + " " + next;
    parts.about.textContent = filled("mesh_all", { sent: bytes(answer.moves) });
  }

  const placement = (value) => ({ values: ["R", "S(0)", "S(1)", "P(sum)"], value });
  return stepped(parts, "mesh_label", {
    rows: { value: 2, min: 1, max: 8 }, columns: { value: 2, min: 1, max: 8 },
    from_rows: placement("S(0)"), from_columns: placement("S(1)"),
    to_rows: placement("S(0)"), to_columns: placement("R"),
  }, (values) => {
    const answer = answerTo(values);
    return answer && { ...answer, mesh: values, count: answer.layouts.length };
  }, show);
};
