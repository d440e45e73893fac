// ---- Drawings: lanes, memory, axes and arrows in the part of time that a view
// ---- shows, as wide as the page allows.

function element(parent, name, attributes, text) {
  const made = document.createElementNS(parent.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) {
    made.setAttribute(key, value);
  }
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

// What one <svg> shows: a lane of queues, or memory.
function drawingOf(svg, data) {
  const group = data.groups[svg.dataset.group];
  const isLane = svg.classList.contains("lane");
  const spans = isLane
      ? svg.dataset.queues.split(" ")
          .flatMap((queue) => queueSpans(data, group.queues[queue]))
          .sort((a, b) => a.begin - b.begin)
      : memorySpans(data, group);
  const boxes = svg.classList.contains("compute") ? boxesOf(spans) : [];
  return { svg, data, group, isLane, spans, boxes, at: -1 };
}

// Pixels from the left edge of a drawing.
function scale(svg, view) {
  const { width, height } = svg.getBoundingClientRect();
  return { width, height,
           x: (time) => (time - view.begin) / (view.end - view.begin) * width };
}

function clear(svg, width, height) {
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");  // paper is narrower
  svg.replaceChildren();
}

function drawLane({ svg, data, spans, boxes }, view, { width, height, x }) {
  clear(svg, width, height);
  const rows = new Map();
  for (const span of spans) {
    if (span.end < view.begin || span.begin > view.end) continue;
    if (["wait", "idle"].includes(span.category)) continue;
    const from = Math.max(x(span.begin), 0);
    const to = Math.min(x(span.end), width);
    const name = classOf(span);
    if (!rows.has(name)) rows.set(name, []);
    const row = rows.get(name);
    const last = row[row.length - 1];
    // Neighbours too near to be told apart are one block.
    if (last && from >= last.from && from - last.to < 0.4 &&
        !(numberOf(span.label) !== last.number && last.to - last.from > 3)) {
      last.to = Math.max(last.to, to);
    } else {
      row.push({ from, to, number: numberOf(span.label) });
    }
  }
  for (const [name, row] of rows) {
    // Waiting is thin: nothing runs.
    const thin = name === "bubble" || name === "exposed";
    const top = thin ? height * 0.38 : 0;
    const tall = height - 2 * top;
    const path = row.map(({ from, to, number }) => {
      // Boxes with numbers that touch have a seam.
      const seam = number !== undefined && to - from > 3 ? 0.7 : 0;
      const wide = Math.max(to - from - seam, 0.6);
      return `M${from.toFixed(2)} ${top}h${wide.toFixed(2)}v${tall}` +
             `h${(-wide).toFixed(2)}z`;
    }).join("");
    element(svg, "path", { class: name, d: path });
  }
  for (const { number, begin: from, end: to } of boxes) {
    const left = Math.max(x(from), 0), right = Math.min(x(to), width);
    if (right - left < 5 + 7 * number.length) continue;
    element(svg, "text", { x: (left + right) / 2, y: height / 2 }, number);
  }
  // A run that ends before others is not idle behind its end.
  const end = x(data.length);
  if (end < width) {
    element(svg, "rect", { class: "after", x: Math.max(end, 0), height,
                           width: width - Math.max(end, 0) });
  }
}

function drawMemory({ svg, data, spans }, view, { width, height, x }) {
  const most = Number(svg.dataset.most);
  const y = (sum) => (height * (1 - sum / most)).toFixed(1);
  clear(svg, width, height);
  const seen = spans.filter((span) => span.end >= view.begin &&
                                      span.begin <= view.end);
  // Within half a pixel, the fullest and the last.
  const kept = [];
  for (const span of seen) {
    const last = kept[kept.length - 1];
    if (last && x(span.begin) - last.from < 0.5) {
      if (span.sum > last.span.sum) last.span = span;
      last.after = span;
    } else {
      kept.push({ from: Math.max(x(span.begin), 0), span, after: span });
    }
  }
  // From the top down: each area covers the lower part of those before.
  for (let k = data.kinds.length - 1; k >= 0; --k) {
    if (!seen.some((span) => span.kinds[k] > 0)) continue;
    let path = `M0 ${height}`;
    const below = (span) =>
        y(span.kinds.slice(0, k + 1).reduce((a, b) => a + b, 0));
    for (const { from, span, after } of kept) {
      path += `H${from.toFixed(1)}V${below(span)}`;
      if (after !== span) path += `h0.5V${below(after)}`;
    }
    element(svg, "path", { class: `kind-${data.kinds[k]}`,
                           d: `${path}H${width}V${height}z` });
  }
}

// Round times, as many as have room.
function drawAxis(axis, { begin, end }) {
  const width = axis.clientWidth;
  const least = (end - begin) / Math.max(1, Math.floor(width / 76));
  const power = 10 ** Math.floor(Math.log10(least));
  const distance = power * [1, 2, 5, 10].find((f) => f * power >= least);
  axis.replaceChildren();
  for (let i = Math.ceil(begin / distance); i * distance <= end; ++i) {
    const share = (i * distance - begin) / (end - begin);
    const mark = document.createElement("span");
    mark.style.left = `${100 * share}%`;
    mark.textContent = i === 0 ? "0" : seconds(i * distance);
    // Near the end, the text stands before its mark, if it has room there.
    const apart = distance / (end - begin) * width;
    if (share * width > width - 60) {
      mark.className = "late";
      if (apart < 120 && i * distance > begin + distance) mark.textContent = "";
    }
    axis.append(mark);
  }
}

const mostArrows = 600;

// From where a message leaves to where it arrives.
function drawArrows(view) {
  const overlay = view.element.querySelector("svg.arrows");
  if (!overlay) return;
  overlay.replaceChildren();
  const box = overlay.getBoundingClientRect();
  overlay.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
  overlay.setAttribute("preserveAspectRatio", "none");
  if (!view.element.querySelector("input.messages").checked) return;
  const lanes = new Map();  // of computing, by rank
  const arrivals = new Map();
  const drawings = view.drawings.filter((drawing) => drawing.isLane);
  for (const { svg, group, spans } of drawings) {
    if (svg.classList.contains("compute")) {
      lanes.set(group.rank, svg.getBoundingClientRect());
    }
    for (const span of spans) {
      if (span.name === "recv" && span.message >= 0) {
        arrivals.set(`${span.peer} ${group.rank} ${span.message}`, span);
      }
    }
  }
  const arrows = [];
  for (const { svg, group, spans } of drawings) {
    for (const span of spans) {
      if (span.name !== "send" || span.message < 0) continue;
      const arrival =
          arrivals.get(`${group.rank} ${span.peer} ${span.message}`);
      const from = lanes.get(group.rank), to = lanes.get(span.peer);
      if (!arrival || !from || !to) continue;
      if (arrival.end < view.begin || span.begin > view.end) continue;
      const { x } = scale(svg, view);
      const down = to.top > from.top;
      arrows.push([from.left - box.left + x(span.begin),
                   (down ? from.bottom : from.top) - box.top,
                   to.left - box.left + x(arrival.end),
                   (down ? to.top : to.bottom) - box.top]);
    }
  }
  if (arrows.length > mostArrows) return;
  const path = arrows.filter(([x0, , x1]) => x0 >= 0 && x1 <= box.width).map(
      ([x0, y0, x1, y1]) => {
        const tip = y1 > y0 ? -4 : 4;
        return `M${x0.toFixed(1)} ${y0}L${x1.toFixed(1)} ${y1}` +
               `m-2.5 ${tip}L${x1.toFixed(1)} ${y1}l2.5 ${tip}`;
      }).join("");
  if (path) element(overlay, "path", { d: path });
}

function draw(view) {
  // All sizes first: after each drawing, the browser would lay out anew.
  const scales = view.drawings.map(({ svg }) => scale(svg, view));
  view.drawings.forEach((drawing, i) => (
      drawing.isLane ? drawLane : drawMemory)(drawing, view, scales[i]));
  for (const axis of view.element.querySelectorAll(".axis")) {
    drawAxis(axis, view);
  }
  drawArrows(view);
}
