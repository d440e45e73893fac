// ---- Step time against memory: linear, or logarithmic.

// `cloud`: points without an element, which a function draws; `memory` and
// `time` are their least and most.
function drawScatter(figure, cloud = { memory: [], time: [], draw() {} }) {
  const points = [...figure.querySelectorAll(".point")];
  const plane = figure.querySelector(".plane");
  const limit = figure.querySelector(".limit");
  const button = figure.querySelector("button");
  const numbers = (key) => points.map((point) => Number(point.dataset[key]));
  const memory = numbers("memory"), time = numbers("time");
  const capacity = limit ? Number(limit.dataset.memory) : 0;
  const spread = (values) => Math.max(...values) / Math.min(...values);
  const allMemory = [...memory, ...cloud.memory, ...(limit ? [capacity] : [])];
  const allTime = [...time, ...cloud.time];
  let isLog = spread(allMemory) > 3 || spread(allTime) > 3;

  // From 0 to 1 between the ends of an axis.
  function axis(values) {
    const margin = Math.max(spread(values) ** 0.15, 1.05);
    const most = Math.max(...values) * (isLog ? margin : 1.08);
    const least = isLog ? Math.min(...values) / margin : 0;
    const place = isLog ? Math.log : (value) => value;
    return {
      most, least,
      at: (value) => (place(value) - place(least)) /
                     (place(most) - place(least)) || 0,
    };
  }

  // A few round values along an axis, whose labels have room
  function marks({ least, most }) {
    const inside = (values) =>
        values.filter((value) => value >= least && value <= most);
    if (isLog) {
      const powers = [];
      for (let power = 10 ** Math.floor(Math.log10(least)); power <= most;
           power *= 10) {
        powers.push(power);
      }
      const all = inside(powers.flatMap((p) => [p, 2 * p, 5 * p]));
      if (all.length > 5) return inside(powers);
      if (all.length > 1) return all;
    }
    const power = 10 ** Math.floor(Math.log10((most - least) / 3));
    const step = power *
        [1, 2, 5, 10].find((f) => f * power >= (most - least) / 4);
    const first = Math.max(Math.ceil(least / step), 1);
    return inside(Array.from({ length: 6 }, (_, i) => (first + i) * step));
  }

  const gigabytes = (value) => `${Number((value / 1e9).toPrecision(2))} GB`;
  const seconds = (value) => value >= 0.9995
      ? `${Number(value.toPrecision(2))} s`
      : `${Number((value * 1e3).toPrecision(2))} ms`;

  // Beside each point its name, where it covers no point and no other name:
  // right, left, above or below. Names that find no room stay hidden.
  function placeNames() {
    if (points.length === 0) return;
    const { width, height } = plane.getBoundingClientRect();
    const radius = points[0].offsetWidth / 2 + 1;
    const centers = points.map((point) => ({
      x: parseFloat(point.style.left) / 100 * width,
      y: height - parseFloat(point.style.bottom) / 100 * height }));
    const taken = centers.map(({ x, y }) => [x - radius, y - radius,
                                             x + radius, y + radius]);
    const meets = ([a, b, c, d]) => ([e, f, g, h]) =>
        a < g && e < c && b < h && f < d;
    const names = points.map((point) => point.querySelector("span"));
    const sizes = names.map((name) => [name.offsetWidth, name.offsetHeight]);
    centers.forEach(({ x, y }, i) => {
      const [w, h] = sizes[i];
      const places = {
        right: [x + radius, y - h / 2], left: [x - radius - w, y - h / 2],
        above: [x - w / 2, y - radius - h], below: [x - w / 2, y + radius] };
      const place = Object.keys(places).find((key) => {
        const [left, top] = places[key];
        const box = [left, top, left + w, top + h];
        return left >= 0 && left + w <= width && top >= 0 &&
               top + h <= height && !taken.some(meets(box));
      });
      names[i].className = place ?? "no-room";
      if (!place) return;
      const [left, top] = places[place];
      taken.push([left, top, left + w, top + h]);
    });
  }

  function draw() {
    const across = axis(allMemory), up = axis(allTime);
    for (const old of plane.querySelectorAll(".mark")) old.remove();
    const add = (name, text, edge, share) => {
      const mark = document.createElement("span");
      mark.className = `mark ${name}`;
      mark.textContent = text;
      mark.style[edge] = `${100 * share}%`;
      plane.append(mark);
    };
    let free = 0;
    for (const value of marks(across)) {
      // Those that touch another or leave the page are left out.
      const x = across.at(value) * plane.clientWidth;
      if (x < free || x > plane.clientWidth - 20) continue;
      free = x + 55;
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
    write(button, isLog ? "Linear axes" : "Logarithmic axes");
    cloud.draw(across, up);
    placeNames();
  }
  button.addEventListener("click", () => {
    isLog = !isLog;
    draw();
  });
  button.hidden = false;
  draw();
  new ResizeObserver(draw).observe(plane);
}
document.querySelectorAll("figure.scatter").forEach((figure) =>
    drawScatter(figure));
