// Below emscripten's own scripts: keeps an instance of each module of the
// planner, and answers questions: the words of a command line, and files to
// read. It tells the page
//
//   { name, module }           compiled, so that the next worker need not
//   { progress: [done, all] }  the planner's own, during a search
//   { isFirst: true, ... }     an answer before the whole one
//   { status, ... }            the answer: error, or result, points, lanes

const arrive = {};
const instances = Object.fromEntries(["plan", "plan-fibers"].map((name) => [
  name, new Promise((done) => { arrive[name] = done; })]));

// `code` is base64 the first time.
async function instance_of(name, code) {
  const module = typeof code === "string"
      ? await WebAssembly.compile(await (await fetch(
            `data:application/wasm;base64,${code}`)).arrayBuffer())
      : code;
  postMessage({ name, module });
  const make = { "plan": plan, "plan-fibers": plan_fibers }[name];
  return make({
    instantiateWasm(imports, done) {
      WebAssembly.instantiate(module, imports).then(done);
      return {};
    },
  });
}

// What the command line would print and write; the page shows it.
async function answer_of(name, words, files) {
  const planner = await instances[name];
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
  const first = await answer_of("plan", words, files);
  // 3: ranks would have to wait for each other
  if (first.status !== 3) return first;
  if (!words.includes("--cp")) {
    const without = await answer_of("plan", [...words, "--cp", "1"], files);
    if (without.status === 0) postMessage({ ...without, isFirst: true });
  }
  return answer_of("plan-fibers", words, files);
}

onmessage = async ({ data: { name, code, words, files } }) => {
  if (name) {
    arrive[name](instance_of(name, code));
    return;
  }
  try {
    postMessage(await answer(words, files));
  } catch (error) {
    postMessage({ status: 3, error: error.message });
  }
};
