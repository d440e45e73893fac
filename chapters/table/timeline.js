// ---- Timelines and memory: drawn when their run is opened, as wide as the
// ---- page allows, and again at every zoom.

(() => {
  const timelines = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const waits = ["bubble", "exposed", "wait", "idle"];
  const mostArrows = 600;

  const short = (value) => value.toFixed(value >= 99.95 ? 0 :
                                         value >= 9.995 ? 1 : 2);
  const seconds = (ns) => ns === 0 ? "0 s" : ns < 999.5 ? `${short(ns)} ns`
      : ns < 999.5e3 ? `${short(ns / 1e3)} us`
      : ns < 999.5e6 ? `${short(ns / 1e6)} ms` : `${short(ns / 1e9)} s`;
  const scaled = (count, step, units, decimals) => {
    let i = 0;
    for (; count >= 999.5 && i + 1 < units.length; ++i) count /= step;
    return decimals(count, i) + " " + units[i];
  };
  const flop = (count) => scaled(
      count, 1000, ["FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"],
      short);
  const bytes = (count) => scaled(
      count, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"],
      (value, i) => value.toFixed(i === 0 || value >= 99.95 ? 0 : 1));

  function element(parent, name, attributes, text) {
    const made = document.createElementNS(parent.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) {
      made.setAttribute(key, value);
    }
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  }

  // ---- Spans: begin, end and a description.

  const isWait = (span) => waits.includes(span.category);

  function laneSpans(run, group, queue) {
    return group.queues[queue].events.map(
        ([op, begin, end, sent = 0, flops = 0, peer = -1, message = -1]) => {
          const [name, label, category] = run.ops[op];
          return { name, label, category, begin, end, sent, flops, peer,
                   message };
        }).sort((a, b) => a.begin - b.begin);
  }

  function sayEvent(span) {
    const { name, label, category, begin, end, sent, flops, peer } = span;
    const rate = flops / Math.max(end - begin, 1) * 1e9;
    const what = { bubble: "waits for a message that has not been sent",
                   exposed: "waits for a message on the wire",
                   wait: "waits for another queue" }[category];
    return [
      what ?? name + (label ? `, ${label}` : "") + ` (${category})`,
      `${seconds(begin)} to ${seconds(end)}: ${seconds(end - begin)}`,
      sent ? `${bytes(sent)} ${category === "comm" ? "sent" : "moved"}` : "",
      flops ? `${flop(flops)}, ${flop(rate)}/s` : "",
      peer >= 0 ? `${name === "recv" ? "from" : "to"} rank ${peer}` : "",
    ].filter((line) => line).join("\n");
  }

  function memorySpans(run, group) {
    return group.memory.map(([begin, ...kinds], i, all) => ({
      begin, kinds,
      end: i + 1 < all.length ? all[i + 1][0] : run.step_s * 1e9,
      sum: kinds.reduce((a, b) => a + b, 0),
    }));
  }

  function sayMemory(run, span) {
    const lines = span.kinds.map((count, k) => [run.kinds[k], count])
        .filter(([, count]) => count > 0)
        .map(([kind, count]) => `${kind.replace("_", " ")} ${bytes(count)}`);
    return [`from ${seconds(span.begin)}: ${bytes(span.sum)}`, ...lines]
        .join("\n");
  }

  // "3" of "weights of micro-batch 3, stage 5".
  const numberOf = (label) => /micro-batch (\d+)/.exec(label)?.[1];

  function classOf(span, queueName) {
    if (queueName === "host") return "host";
    if (span.category === "backward" && span.label.startsWith("weights")) {
      return "weights";
    }
    const known = ["forward", "backward", "optimizer", "comm", "copy", "host",
                   "bubble", "exposed"];
    return known.includes(span.category) ? span.category : "other";
  }

  // The forward or the backward of one micro-batch is one box.
  function boxesOf(spans) {
    const boxes = [];
    for (const span of spans) {
      const number = isWait(span) ? undefined : numberOf(span.label);
      if (number === undefined) continue;
      const last = boxes[boxes.length - 1];
      if (last && last.label === span.label &&
          last.category === span.category) {
        last.end = span.end;
      } else {
        boxes.push({ number, label: span.label, category: span.category,
                     begin: span.begin, end: span.end });
      }
    }
    return boxes;
  }

  // ---- One figure: lanes or memory, an axis, and a window on time.

  function equip(figure) {
    const run = timelines[figure.dataset.run];
    const length = run.step_s * 1e9;
    const drawings = [...figure.querySelectorAll("svg[data-group]")].map(
        (svg) => {
          const group = run.groups[svg.dataset.group];
          const isLane = svg.classList.contains("lane");
          const spans = isLane ? laneSpans(run, group, svg.dataset.queue)
                               : memorySpans(run, group);
          const queue = isLane ? group.queues[svg.dataset.queue].name : "";
          return { svg, group, isLane, spans, queue, at: -1,
                   boxes: queue === "compute" ? boxesOf(spans) : [] };
        });
    let begin = 0, end = length;

    function draw() {
      for (const drawing of drawings) {
        if (drawing.isLane) drawLane(drawing); else drawMemory(drawing);
      }
      for (const axis of figure.querySelectorAll(".axis")) drawAxis(axis);
      drawArrows();
      figure.classList.toggle("zoomed", begin > 0 || end < length);
    }

    // Pixels from the left edge of a drawing.
    const scale = (svg) => {
      const { width, height } = svg.getBoundingClientRect();
      return { width, height,
               x: (time) => (time - begin) / (end - begin) * width };
    };

    function drawLane({ svg, spans, queue, boxes }) {
      const { width, height, x } = scale(svg);
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.replaceChildren();
      const rows = new Map();
      for (const span of spans) {
        if (span.end < begin || span.begin > end) continue;
        if (["wait", "idle"].includes(span.category)) continue;
        const from = Math.max(x(span.begin), 0);
        const to = Math.min(x(span.end), width);
        const name = classOf(span, queue);
        if (!rows.has(name)) rows.set(name, []);
        const row = rows.get(name);
        const last = row[row.length - 1];
        // Neighbours too near to be told apart are one block.
        if (last && from >= last.from && from - last.to < 0.4 &&
            !(numberOf(span.label) !== last.number &&
              last.to - last.from > 3)) {
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
    }

    function drawMemory({ svg, spans }) {
      const { width, height, x } = scale(svg);
      const most = Number(svg.dataset.most);
      const y = (sum) => (height * (1 - sum / most)).toFixed(1);
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.replaceChildren();
      const seen = spans.filter((span) => span.end >= begin &&
                                          span.begin <= end);
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
      for (let k = run.kinds.length - 1; k >= 0; --k) {
        if (!seen.some((span) => span.kinds[k] > 0)) continue;
        let path = `M0 ${height}`;
        const below = (span) =>
            y(span.kinds.slice(0, k + 1).reduce((a, b) => a + b, 0));
        for (const { from, span, after } of kept) {
          path += `H${from.toFixed(1)}V${below(span)}`;
          if (after !== span) path += `h0.5V${below(after)}`;
        }
        element(svg, "path", { class: `kind-${run.kinds[k]}`,
                               d: `${path}H${width}V${height}z` });
      }
    }

    // Round times, as many as have room.
    function drawAxis(axis) {
      const width = axis.clientWidth;
      const least = (end - begin) / Math.max(1, Math.floor(width / 76));
      const power = 10 ** Math.floor(Math.log10(least));
      const distance = power * [1, 2, 5, 10].find((f) => f * power >= least);
      axis.replaceChildren();
      for (let i = Math.ceil(begin / distance); i * distance <= end; ++i) {
        const left = (i * distance - begin) / (end - begin) * width;
        const mark = document.createElement("span");
        mark.style.left = `${left}px`;
        mark.textContent = i === 0 ? "0" : seconds(i * distance);
        // Near the end, the text stands before its mark, if it has room there.
        const apart = distance / (end - begin) * width;
        if (left > width - 60) {
          mark.className = "late";
          if (apart < 120 && i * distance > begin + distance) {
            mark.textContent = "";
          }
        }
        axis.append(mark);
      }
    }

    // From where a message leaves to where it arrives.
    function drawArrows() {
      const overlay = figure.querySelector("svg.arrows");
      if (!overlay) return;
      overlay.replaceChildren();
      const box = overlay.getBoundingClientRect();
      overlay.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
      if (!figure.querySelector("input.messages").checked) return;
      const lanes = new Map();  // of computing, by rank
      const arrivals = new Map();
      for (const { svg, group, isLane, spans, queue } of drawings) {
        if (!isLane) continue;
        const rank = group.ranks[0][0];
        if (queue === "compute") lanes.set(rank, svg.getBoundingClientRect());
        for (const span of spans) {
          if (span.name === "recv" && span.message >= 0) {
            arrivals.set(`${span.peer} ${rank} ${span.message}`, span);
          }
        }
      }
      const arrows = [];
      for (const { svg, group, isLane, spans } of drawings) {
        if (!isLane) continue;
        const rank = group.ranks[0][0];
        for (const span of spans) {
          if (span.name !== "send" || span.message < 0) continue;
          const arrival =
              arrivals.get(`${rank} ${span.peer} ${span.message}`);
          const from = lanes.get(rank), to = lanes.get(span.peer);
          if (!arrival || !from || !to) continue;
          if (arrival.end < begin || span.begin > end) continue;
          const { x } = scale(svg);
          const down = to.top > from.top;
          arrows.push([
            from.left - box.left + x(span.begin),
            (down ? from.bottom : from.top) - box.top,
            to.left - box.left + x(arrival.end),
            (down ? to.top : to.bottom) - box.top]);
        }
      }
      if (arrows.length > mostArrows) return;
      const path = arrows.filter(
          ([x0, , x1]) => x0 >= 0 && x1 <= box.width).map(
          ([x0, y0, x1, y1]) => {
            const tip = y1 > y0 ? -4 : 4;
            return `M${x0.toFixed(1)} ${y0}L${x1.toFixed(1)} ${y1}` +
                   `m-2.5 ${tip}L${x1.toFixed(1)} ${y1}l2.5 ${tip}`;
          }).join("");
      if (path) element(overlay, "path", { d: path });
    }

    // ---- Zoom and pan.

    function show(from, to) {
      const span = Math.min(Math.max(to - from, length * 1e-5), length);
      begin = Math.min(Math.max(from, 0), length - span);
      end = begin + span;
      hide();
      draw();
    }
    function zoom(factor, at = (begin + end) / 2) {
      show(at - (at - begin) * factor, at + (end - at) * factor);
    }
    const actions = {
      in: () => zoom(0.5), out: () => zoom(2), all: () => show(0, length),
      left: () => show(begin - (end - begin) / 3, end - (end - begin) / 3),
      right: () => show(begin + (end - begin) / 3, end + (end - begin) / 3),
    };
    for (const button of figure.querySelectorAll("button[data-do]")) {
      button.addEventListener("click", actions[button.dataset.do]);
    }
    figure.querySelector("input.messages")?.addEventListener("change", draw);

    // ---- The span under the pointer, or chosen by the arrow keys.

    let pointer;
    function hide() {
      tip.textContent = "";
      pointer?.remove();
      pointer = undefined;
      for (const drawing of drawings) drawing.at = -1;
    }

    function point(drawing, i) {
      if (i === drawing.at) return;
      hide();
      drawing.at = i;
      const { svg, spans, isLane } = drawing;
      const { x, height } = scale(svg);
      const span = spans[i];
      pointer = element(svg, "rect", {
        class: "pointer", x: x(span.begin), height,
        width: Math.max(x(span.end) - x(span.begin), 1) });
      tip.textContent = isLane ? sayEvent(span) : sayMemory(run, span);

      // Below the drawing, or above where there is no room; never outside.
      const box = svg.getBoundingClientRect();
      const left = box.left + Math.max(x(span.begin), 0);
      const below = box.bottom + 8 + tip.offsetHeight < innerHeight;
      tip.style.left =
          `${Math.max(4, Math.min(left, innerWidth - tip.offsetWidth - 4))}px`;
      tip.style.top = `${below ? box.bottom + 8
                               : Math.max(4, box.top - tip.offsetHeight - 8)}px`;
    }

    // The span at a time, or the nearest one: short ones must be in reach.
    function nearest(spans, time) {
      let best = -1, least = Infinity;
      for (let i = 0; i < spans.length && spans[i].begin - time < least; ++i) {
        const distance =
            Math.max(spans[i].begin - time, time - spans[i].end, 0);
        if (distance <= least) {
          best = i;
          least = distance;
        }
      }
      return { best, distance: least };
    }

    for (const drawing of drawings) {
      const { svg, spans } = drawing;
      const timeAt = (event) => {
        const box = svg.getBoundingClientRect();
        return begin + (event.clientX - box.left) / box.width * (end - begin);
      };
      let held;  // the time under the pointer when it went down
      svg.addEventListener("pointerdown", (event) => {
        held = timeAt(event);
      });
      svg.addEventListener("pointermove", (event) => {
        const time = timeAt(event);
        if (held !== undefined && event.buttons === 1 && end - begin < length) {
          show(begin + held - time, end + held - time);
          return;
        }
        const { best, distance } = nearest(spans, time);
        // A span within four pixels is close enough.
        const near = 4 / svg.clientWidth * (end - begin);
        if (distance <= near) point(drawing, best); else hide();
      });
      addEventListener("pointerup", () => { held = undefined; });
      svg.addEventListener("pointerleave", hide);
      svg.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey) return;  // the page scrolls
        event.preventDefault();
        zoom(event.deltaY < 0 ? 0.8 : 1.25, timeAt(event));
      }, { passive: false });
      svg.addEventListener("dblclick", (event) => zoom(0.4, timeAt(event)));
      svg.addEventListener("keydown", (event) => {
        const keys = { "+": "in", "-": "out", "0": "all", "<": "left",
                       ">": "right" };
        if (event.key === "Escape") hide();
        if (keys[event.key]) actions[keys[event.key]]();
        const last = spans.length - 1;
        const next = {
          ArrowRight: Math.min(drawing.at + 1, last),
          ArrowLeft: Math.max(drawing.at - 1, 0), Home: 0, End: last,
        }[event.key];
        if (next === undefined || last < 0) return;
        event.preventDefault();
        // Follow the operation where it lies outside of the window.
        const { begin: from, end: to } = spans[next];
        if (to < begin || from > end) {
          const half = (end - begin) / 2;
          show(from - half, from + half);
        }
        point(drawing, next);
      });
      svg.addEventListener("blur", hide);
    }

    let width = 0;
    new ResizeObserver(() => {
      if (figure.clientWidth === width) return;
      width = figure.clientWidth;
      if (width > 0) draw();
    }).observe(figure);
    for (const tools of figure.querySelectorAll(".tools")) tools.hidden = false;
    return draw;
  }

  // A run that is closed costs nothing until it is opened.
  const draws = new Map();
  function drawInside(details) {
    for (const figure of details.querySelectorAll("figure[data-run]")) {
      if (!draws.has(figure)) draws.set(figure, equip(figure));
      draws.get(figure)();
    }
  }
  const runs = [...document.querySelectorAll("details.run")];
  for (const details of runs) {
    details.addEventListener("toggle", () => {
      if (details.open) drawInside(details);
    });
    if (details.open) drawInside(details);
  }
  // A link to a run opens it.
  function openTarget() {
    const target = document.getElementById(location.hash.slice(1));
    if (target?.matches("details.run")) target.open = true;
  }
  addEventListener("hashchange", openTarget);
  openTarget();
  addEventListener("beforeprint", () => runs.forEach(drawInside));
})();
