// ---- The data of a run: deflated columns of differences (pictures.cpp),
// ---- decoded when a picture first needs them.

const decoded = new Map();
function dataOf(run) {
  if (!decoded.has(run)) decoded.set(run, decode(run));
  return decoded.get(run);
}
async function decode(run) {
  const text = document.getElementById(`data-${run}`).textContent;
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(
      new DecompressionStream("deflate"))).json();
}

// ---- Numbers with units.

const short = (value) => value.toFixed(value >= 99.95 ? 0 :
                                       value >= 9.995 ? 1 : 2);
const scaled = (count, step, units, decimals) => {
  let i = 0;
  for (; count >= 999.5 && i + 1 < units.length; ++i) count /= step;
  return decimals(count, i) + " " + units[i];
};
const seconds = (ns) =>
    ns === 0 ? "0 s" : scaled(ns, 1000, ["ns", "us", "ms", "s"], short);
const flop = (count) => scaled(
    count, 1000, ["FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"], short);
const bytes = (count) => scaled(
    count, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"],
    (value, i) => value.toFixed(i === 0 || value >= 99.95 ? 0 : 1));

// ---- Spans: begin, end and a description.

const isWait = (span) =>
    ["bubble", "exposed", "wait", "idle"].includes(span.category);

function queueSpans(data, queue) {
  let end = 0;
  return Array.from(queue.op, (op, i) => {
    const [name, label, category] = data.ops[op];
    const begin = end + queue.gap[i];
    end = begin + queue.length[i];
    return { name, label, category, begin, end, queue: queue.name,
             sent: queue.sent?.[i] ?? 0, flops: queue.flops?.[i] ?? 0,
             peer: queue.peer?.[i] ?? -1, message: queue.message?.[i] ?? -1 };
  });
}

function sayEvent(span) {
  const { name, label, category, begin, end, sent, flops, peer } = span;
  const rate = flops / Math.max(end - begin, 1) * 1e9;
  const what = { bubble: "waits for a message that has not been sent",
                 exposed: "waits for a message on the wire",
                 wait: "waits for another queue" }[category];
  return [
    what ? say(what)
         : name + (label ? `, ${label}` : "") + ` (${say(category)})`,
    say(`from ${seconds(begin)} to ${seconds(end)}: ${seconds(end - begin)}`),
    sent ? say(`${bytes(sent)} ${category === "comm" ? "sent" : "moved"}`) : "",
    flops ? `${flop(flops)}, ${flop(rate)}/s` : "",
    peer >= 0 ? say(`${name === "recv" ? "from" : "to"} rank ${peer}`) : "",
  ].filter((line) => line).join("\n");
}

function memorySpans(data, group) {
  const [times, ...kinds] = group.memory.map((differences) => {
    let sum = 0;
    return differences.map((difference) => sum += difference);
  });
  return times.map((begin, i) => {
    const bytes = kinds.map((column) => column[i]);
    return { begin, end: times[i + 1] ?? data.length, kinds: bytes,
             sum: bytes.reduce((a, b) => a + b, 0) };
  });
}

function sayMemory(data, span) {
  const lines = span.kinds.map((count, k) => [data.kinds[k], count])
      .filter(([, count]) => count > 0)
      .map(([kind, count]) => `${say(kind.replace("_", " "))} ${bytes(count)}`);
  return [say(`from ${seconds(span.begin)}: ${bytes(span.sum)}`), ...lines]
      .join("\n");
}

// "3" of "weights of micro-batch 3, stage 5"; there are few labels for many spans.
const numbers = new Map();
function numberOf(label) {
  if (!numbers.has(label)) {
    numbers.set(label, /micro-batch (\d+)/.exec(label)?.[1]);
  }
  return numbers.get(label);
}

const classes = ["forward", "backward", "optimizer", "comm", "copy", "bubble",
                 "exposed"];
function classOf(span) {
  if (span.queue === "host") return "host";
  if (span.category === "backward" && span.label.startsWith("weights")) {
    return "weights";
  }
  return classes.includes(span.category) ? span.category : "other";
}

// The forward or the backward of one micro-batch is one box.
function boxesOf(spans) {
  const boxes = [];
  for (const span of spans) {
    const number = isWait(span) ? undefined : numberOf(span.label);
    if (number === undefined) continue;
    const last = boxes[boxes.length - 1];
    if (last && last.label === span.label && last.category === span.category) {
      last.end = span.end;
    } else {
      boxes.push({ number, label: span.label, category: span.category,
                   begin: span.begin, end: span.end });
    }
  }
  return boxes;
}
