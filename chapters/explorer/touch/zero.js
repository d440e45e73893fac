// ZeRO: bytes of a device by kind, for each stage.

THINGS.zero = (parts, answerTo) => {
  const read = form(parts.controls, {
    parameters: { value: 7.5, min: 0.001, step: 0.1 },
    ranks: { value: 64, min: 1 }, capacity: { value: 80, min: 1 },
    dtype: { values: ["bf16", "f16", "f32", "f64"] },
    optimizer: { values: ["adamw", "adam", "sgd"] },
  }, (values) => {
    const capacity = 1e9 * values.capacity;
    const answer = answerTo(
        { ...values, capacity, parameters: 1e9 * values.parameters });
    if (!answer) return;
    const width = parts.picture.clientWidth, left = 60, row = 44;
    const most = Math.max(capacity, ...answer.stages.map((stage) => stage.total));
    const x = (bytes) => left + (width - left - 2) * bytes / most;
    const lines = answer.stages.map((stage, i) => filled(`stage_${i}`) + ": " +
        filled("zero_bar", { total: digits(stage.total / 1e9),
                             most: digits(stage.most / 1e9) }));
    const svg = picture(width, row * 4, lines.join(". "));
    answer.stages.forEach((stage, i) => {
      let end = 0;
      draw(svg, "text", { x: 0, y: row * i + 15 }, filled(`stage_${i}`));
      for (const kind of ["parameters", "gradients", "optimizer"]) {
        const made = box(svg, kind, x(end), row * i, x(stage[kind]) - left, 20);
        draw(made, "title", {}, `${filled(kind)}: ${digits(stage[kind] / 1e9)} GB`);
        end += stage[kind];
      }
      draw(svg, "text", { x: left, y: row * i + 34 }, lines[i].replace(/^.*?: /, ""));
    });
    draw(svg, "path", { class: "line", "stroke-dasharray": "5 4",
                        d: `M${x(capacity)} 0V${row * 4}` });
    const legend = html("p");
    for (const kind of ["parameters", "gradients", "optimizer"]) {
      const swatch = draw(null, "svg", { width: 12, height: 12, "aria-hidden": true,
                                         style: "display: inline" });
      box(swatch, kind, 0, 0, 12, 12);
      legend.append(swatch, ` ${filled(kind)}  `);
    }
    parts.picture.replaceChildren(svg, legend);
    const [parameter, gradient, optimizer] = answer.bytes;
    parts.about.textContent = filled("zero_about", { parameter, gradient, optimizer });
  });
  read();
  return read;
};
