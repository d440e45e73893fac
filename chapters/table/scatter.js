// ---- Step time against memory: linear, or logarithmic.

(() => {
  for (const figure of document.querySelectorAll("figure.scatter")) {
    const points = [...figure.querySelectorAll(".point")];
    const plane = figure.querySelector(".plane");
    const limit = figure.querySelector(".limit");
    const button = figure.querySelector("button");
    const numbers = (key) => points.map((point) => Number(point.dataset[key]));
    const memory = numbers("memory"), time = numbers("time");
    const capacity = limit ? Number(limit.dataset.memory) : 0;
    const spread = (values) => Math.max(...values) / Math.min(...values);
    let isLog = spread(capacity ? [...memory, capacity] : memory) > 3 ||
                spread(time) > 3;

    // From 0 to 1 between the ends of an axis.
    function axis(values) {
      const most = Math.max(...values) * (isLog ? 1.3 : 1.08);
      const least = isLog ? Math.min(...values) / 1.3 : 0;
      const place = isLog ? Math.log : (value) => value;
      return {
        most, least,
        at: (value) => (place(value) - place(least)) /
                       (place(most) - place(least)) || 0,
      };
    }

    // Round values along an axis; few, so that they have room.
    function marks({ least, most }) {
      if (!isLog) {
        const power = 10 ** Math.floor(Math.log10(most / 3));
        const step = power * [1, 2, 5, 10].find((f) => f * power >= most / 4);
        return Array.from({ length: Math.floor(most / step) },
                          (_, i) => (i + 1) * step);
      }
      const all = [];
      for (let power = 10 ** Math.floor(Math.log10(least)); power <= most;
           power *= 10) {
        all.push(...[1, 2, 5].map((f) => f * power));
      }
      const inside = all.filter((value) => value >= least && value <= most);
      return inside.length > 5
          ? inside.filter((value) => /^1/.test(value.toPrecision(1)))
          : inside;
    }

    const gigabytes = (value) => `${Number((value / 1e9).toPrecision(2))} GB`;
    const seconds = (value) => value >= 0.9995
        ? `${Number(value.toPrecision(2))} s`
        : `${Number((value * 1e3).toPrecision(2))} ms`;

    function draw() {
      const across = axis(capacity ? [...memory, capacity] : memory);
      const up = axis(time);
      for (const old of plane.querySelectorAll(".mark")) old.remove();
      const add = (name, text, edge, share) => {
        const mark = document.createElement("span");
        mark.className = `mark ${name}`;
        mark.textContent = text;
        mark.style[edge] = `${100 * share}%`;
        plane.append(mark);
      };
      for (const value of marks(across)) {
        add("x", gigabytes(value), "left", across.at(value));
      }
      for (const value of marks(up)) {
        add("y", seconds(value), "bottom", up.at(value));
      }
      points.forEach((point, i) => {
        point.style.left = `${100 * across.at(memory[i])}%`;
        point.style.bottom = `${100 * up.at(time[i])}%`;
      });
      if (limit) limit.style.left = `${100 * across.at(capacity)}%`;
      button.textContent = isLog ? "Linear axes" : "Logarithmic axes";
      button.setAttribute("aria-pressed", String(isLog));
    }
    button.addEventListener("click", () => {
      isLog = !isLog;
      draw();
    });
    button.hidden = false;
    draw();
  }
})();
