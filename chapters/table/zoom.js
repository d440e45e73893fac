// ---- Views: pictures that show the same part of time. A drag, keys and
// ---- buttons choose the part; the pointer and the arrow keys choose a span,
// ---- which a tip describes.

const tip = document.getElementById("tip");

async function equip(container) {
  const svgs = [...container.querySelectorAll("svg[data-run]")];
  const data = await Promise.all(svgs.map((svg) => dataOf(svg.dataset.run)));
  const length = Math.max(...data.map((each) => each.length));
  const view = { element: container, begin: 0, end: length, drawings: [] };
  for (const [i, svg] of svgs.entries()) {
    view.drawings.push(drawingOf(svg, data[i]));
    await new Promise((done) => setTimeout(done));  // the page does not wait
  }

  function show(from, to) {
    const span = Math.min(Math.max(to - from, length * 1e-5), length);
    view.begin = Math.min(Math.max(from, 0), length - span);
    view.end = view.begin + span;
    container.classList.toggle("zoomed", span < length);
    hide();
    draw(view);
  }
  function zoom(factor, at = (view.begin + view.end) / 2) {
    show(at - (at - view.begin) * factor, at + (view.end - at) * factor);
  }
  function move(time) { show(view.begin + time, view.end + time); }
  const actions = {
    in: () => zoom(0.5), out: () => zoom(2), all: () => show(0, length),
    left: () => move((view.begin - view.end) / 3),
    right: () => move((view.end - view.begin) / 3),
  };
  for (const button of container.querySelectorAll("button[data-do]")) {
    button.addEventListener("click", actions[button.dataset.do]);
  }
  container.querySelector("input.messages")
      ?.addEventListener("change", () => draw(view));

  // ---- The span under the pointer, or chosen by the arrow keys.

  function cover({ svg }, name, from, to, least = 0) {
    const { x, height } = scale(svg, view);
    return element(svg, "rect", { class: name, height, x: x(from),
                                  width: Math.max(x(to) - x(from), least) });
  }

  let pointer;
  function hide() {
    tip.textContent = "";
    pointer?.remove();
    pointer = undefined;
    for (const drawing of view.drawings) drawing.at = -1;
  }

  function point(drawing, i) {
    if (i === drawing.at) return;
    hide();
    drawing.at = i;
    const { svg, spans, isLane } = drawing;
    const span = spans[i];
    pointer = cover(drawing, "pointer", span.begin, span.end, 1);
    tip.textContent = drawing.data.say?.(span, isLane) ??
        (isLane ? sayEvent(span) : sayMemory(drawing.data, span));

    // Below the drawing, or above where there is no room; never outside.
    const box = svg.getBoundingClientRect();
    const left = box.left + Math.max(scale(svg, view).x(span.begin), 0);
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
      const distance = Math.max(spans[i].begin - time, time - spans[i].end, 0);
      if (distance <= least) {
        best = i;
        least = distance;
      }
    }
    return { best, distance: least };
  }

  // ---- A drag: the time where it began, and the part of time that it marks.

  let held;
  let marked = [];
  function mark(from, to) {
    for (const each of marked) each.remove();
    marked = from === to ? [] : view.drawings.map((drawing) => cover(
        drawing, "marked", Math.min(from, to), Math.max(from, to)));
  }

  function listen(drawing) {
    const { svg, spans } = drawing;
    const timeAt = (event) => {
      const box = svg.getBoundingClientRect();
      const share = (event.clientX - box.left) / box.width;
      return view.begin + Math.min(Math.max(share, 0), 1) *
                          (view.end - view.begin);
    };
    const pixel = () => (view.end - view.begin) / svg.clientWidth;
    svg.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      held = timeAt(event);
      if (event.isTrusted) svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => {
      const time = timeAt(event);
      if (held !== undefined && event.shiftKey) {
        move(held - time);
      } else if (held !== undefined) {
        hide();
        mark(held, time);
      } else {
        const { best, distance } = nearest(spans, time);
        // A span within four pixels is close enough.
        if (distance <= 4 * pixel()) point(drawing, best); else hide();
      }
    });
    const release = () => {
      held = undefined;
      mark(0, 0);
    };
    svg.addEventListener("pointerup", (event) => {
      const from = held, to = timeAt(event);
      release();
      if (from === undefined || event.shiftKey) return;
      if (Math.abs(to - from) > 4 * pixel()) {
        show(Math.min(from, to), Math.max(from, to));
      }
    });
    svg.addEventListener("pointercancel", release);
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;  // the page scrolls
      event.preventDefault();
      zoom(event.deltaY < 0 ? 0.8 : 1.25, timeAt(event));
    }, { passive: false });
    svg.addEventListener("dblclick", actions.all);
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
      // Follow the operation where it lies outside of the view.
      const { begin, end } = spans[next];
      if (end < view.begin || begin > view.end) {
        const half = (view.end - view.begin) / 2;
        show(begin - half, begin + half);
      }
      point(drawing, next);
    });
    svg.addEventListener("blur", hide);
  }
  view.drawings.forEach(listen);

  let width = container.clientWidth;  // drawn below
  new ResizeObserver(() => {
    if (container.clientWidth === width) return;
    width = container.clientWidth;
    if (width > 0) draw(view);
  }).observe(container);
  for (const tools of container.querySelectorAll(".tools")) {
    tools.hidden = false;
  }
  draw(view);
  container.dataset.drawn = "";
}

// ---- A run that is closed costs nothing until it is opened.

(() => {
  const equipped = new Set();
  async function drawInside(parent) {
    for (const container of parent.querySelectorAll(".view")) {
      if (equipped.has(container)) continue;
      equipped.add(container);
      try {
        await equip(container);
      } catch (error) {
        const note = document.createElement("p");
        note.className = "note";
        write(note, typeof DecompressionStream === "undefined"
            ? "This browser cannot draw timelines: it has no " +
              "DecompressionStream, which browsers have had since 2023."
            : `The data of this timeline cannot be read: ${error.message}`);
        container.prepend(note);
      }
    }
  }
  for (const details of document.querySelectorAll("details.run")) {
    details.addEventListener("toggle", () => {
      if (details.open) drawInside(details);
    });
    if (details.open) drawInside(details);
  }
  const first = document.getElementById("first");
  if (first) drawInside(first);
  // A link to a run opens it.
  function openTarget() {
    const target = document.getElementById(location.hash.slice(1));
    if (target?.matches("details.run")) target.open = true;
  }
  addEventListener("hashchange", openTarget);
  openTarget();
})();
