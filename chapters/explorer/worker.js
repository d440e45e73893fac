// Below emscripten's own script: keeps an instance of the planner's module, and
// answers questions: the words of a command line, and files to read. It tells the
// page
//
//   { module }                 compiled, so that the next worker need not
//   { progress: [done, all] }  the planner's own, during a search
//   { status, ... }            the answer: error, or result, points, lanes

let arrive;
const instance = new Promise((done) => { arrive = done; });

async function compiled(packed) {
  const data = await fetch(`data:application/gzip;base64,${packed}`);
  const code = data.body.pipeThrough(new DecompressionStream("gzip"));
  return WebAssembly.compile(await new Response(code).arrayBuffer());
}

// `code` is packed the first time.
async function instance_of(code) {
  const module = typeof code === "string" ? await compiled(code) : code;
  postMessage({ module });
  return plan({
    instantiateWasm(imports, done) {
      WebAssembly.instantiate(module, imports).then(done);
      return {};
    },
  });
}

// What the command line would print and write; the page shows it.
async function answer_of(words, files) {
  const planner = await instance;
  for (const [path, text] of Object.entries(files)) {
    planner.FS.writeFile(path, text);
  }
  const all = [...words, "--format", "json", "--explain", "--top", "8",
               "--points", "--write-config", "/plan.json"];
  planner.ccall("shardbook_plan", null, ["string"], [JSON.stringify(all)]);
  const answer =
      JSON.parse(planner.ccall("shardbook_answer", "string", [], []));
  if (answer.text === undefined) return answer;
  const { points, ...result } = JSON.parse(answer.text);
  const timeline = result.explain?.timeline;
  delete result.explain?.timeline;
  return {
    status: answer.status, result, points: points && columns_of(points),
    lanes: timeline && drawn_lanes(timeline),
    config: answer.status === 0
        ? planner.FS.readFile("/plan.json", { encoding: "utf8" }) : "",
  };
}

// All plans, the fastest first.
function columns_of({ columns, rows }) {
  const [layout, work, time, memory, outcome] =
      ["layout", "work", "step_s", "memory_bytes", "outcome"].map(
          (name) => columns.indexOf(name));
  rows.sort((a, b) => a[time] - b[time]);
  return {
    names: rows.map((row) => `${row[layout]}; ${row[work]}`),
    time: Float64Array.from(rows, (row) => row[time]),
    memory: Float64Array.from(rows, (row) => row[memory]),
    outcomes: rows.map((row) => row[outcome]),
  };
}

// As report.html has them (sim/timeline_json.h): of each stage a queue of
// operations, and differences of times in whole nanoseconds.
function drawn_lanes({ seconds, micro_batches, lanes, after }) {
  const ns = (time) => Math.round(1e9 * time);
  const ops = [], known = new Map();
  const number_of = (op) => {
    const key = op.join();
    if (!known.has(key)) known.set(key, ops.push(op) - 1);
    return known.get(key);
  };
  const op_of = (kind, micro_batch, chunk) => number_of([
    kind + chunk, `${kind === "W" ? "weights of " : ""}micro-batch ${
        micro_batch}`, kind === "F" ? "forward" : "backward"]);
  const later = after.map(([kind, begin, end]) => [
    number_of(["", kind, kind === "optimizer" ? kind : "comm"]), begin, end]);
  const groups = lanes.map(({ stage, actions, kept }) => {
    const events = [...actions.map(([kind, micro_batch, chunk, begin, end]) => [
      op_of(kind, micro_batch, chunk), begin, end]), ...later];
    const queue = { name: "compute", op: [], gap: [], length: [] };
    let last = 0, busy = 0;
    for (const [op, begin, end] of events) {
      queue.op.push(op);
      queue.gap.push(ns(begin) - last);
      queue.length.push(ns(end) - ns(begin));
      last = ns(end);
      if (ops[op][2] !== "comm") busy += end - begin;
    }
    let time = 0, bytes = 0, most = 0;
    const memory = [[], []];
    for (const [at, sum] of kept) {
      memory[0].push(ns(at) - time);
      memory[1].push(sum - bytes);
      [time, bytes, most] = [ns(at), sum, Math.max(most, sum)];
    }
    return { stage, queues: [queue], memory, most, busy: busy / seconds };
  });
  return { length: ns(seconds), micro_batches, ops, kinds: ["activation"],
           groups };
}

async function answer(words, files) {
  const whole = await answer_of(words, files);
  if (whole.status !== 3 || words.includes("--cp")) return whole;
  const without = await answer_of([...words, "--cp", "1"], files);
  return { ...without, has_no_rings: true };
}

onmessage = async ({ data: { code, words, files } }) => {
  if (code) {
    arrive(instance_of(code));
    return;
  }
  try {
    postMessage(await answer(words, files));
  } catch (error) {
    postMessage({ status: 3, error: error.message });
  }
};
