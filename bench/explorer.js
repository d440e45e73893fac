// The explorer's modules: how large they are, and how long they take beside the
// program, in one run. ./shardbook bench explorer
//
//   node explorer.js BUILD
//
// first      loads the module and predicts the plan that a first visit shows
// changed    20 jobs that differ from the first in one field, each asked once: the
//            last plan, which is shown at once, and all plans
// program    the same question to the module (a second time: compiled to the end)
//            and to shardbook_plan, by seconds of a process

const { execFileSync } = require("child_process");
const { readFileSync } = require("fs");
const { brotliCompressSync, constants } = require("zlib");

const build = process.argv[2], folder = `${build}/explorer`;
const FIRST = { model: "llama-3.1-70b", cluster: "dgx-h100", nodes: 8,
                batch: 512, seq: 8192, dtype: "bf16" };
// The best of FIRST
const PLAN = { tp: 4, pp: 1, cp: 1, ep: 1, "zero-stage": 3, "micro-batch": 1,
               recompute: "never" };
const CHANGED = [
  ...[1, 2, 4, 6, 12, 16].map((nodes) => ({ nodes })),
  ...[64, 128, 256, 1024].map((batch) => ({ batch })),
  ...[2048, 4096, 16384].map((seq) => ({ seq })),
  { tp: 8 }, { pp: 4 }, { "zero-stage": 1 }, { schedule: "zb-h1" },
  { recompute: "blocks" }, { "micro-batch": 1 }, { "device-memory": "40GB" },
];
const SEARCHES = {
  "gpt-13b on 64 A100s, all plans predicted": {
    model: "gpt-13b", cluster: "dgx-a100", nodes: 8, batch: 512, prune: false },
  "70B on 64 H100s": FIRST,
  "70B on 64 H100s, cp 16": { ...FIRST, cp: 16 },
  "70B on 512 H100s": { ...FIRST, nodes: 64 },
};

const words_of = (job) => [
  ...Object.entries(job).flatMap(([name, value]) =>
      value === false ? [`--no-${name}`] : [`--${name}`, `${value}`]),
  "--format", "json", "--explain", "--points", "--top", "8"];

async function load() {
  const make = require(`${folder}/plan.js`);
  return make({ wasmBinary: readFileSync(`${folder}/plan.wasm`) });
}

function answer(planner, job) {
  const begin = performance.now();
  planner.ccall("shardbook_plan", null, ["string"],
                [JSON.stringify(words_of(job))]);
  planner.ccall("shardbook_answer", "string", [], []);
  return performance.now() - begin;
}

function line(...cells) {
  console.log(`${cells[0].padEnd(44)}${cells.slice(1).map(
      (cell) => cell.padStart(12)).join("")}`);
}
const ms = (time) => `${Math.round(time)} ms`;

(async () => {
  line("module", "bytes", "brotli");
  for (const name of ["plan", "schedules/schedules"]) {
    const files = ["js", "wasm"].map((end) =>
        readFileSync(`${folder}/${name}.${end}`));
    const sizes = [(file) => file.length, (file) => brotliCompressSync(file, {
      params: { [constants.BROTLI_PARAM_LGWIN]: 24 } }).length].map((size) =>
        files.reduce((sum, file) => sum + size(file), 0) / 1e6);
    line(name.split("/").pop(), ...sizes.map((size) => `${size.toFixed(2)} MB`));
  }

  const begin = performance.now();
  const planner = await load();
  answer(planner, { ...FIRST, ...PLAN });
  line("\nfirst", ms(performance.now() - begin));
  for (const [name, plan] of [["the last plan", PLAN], ["all plans", {}]]) {
    const times = CHANGED.map((change) => answer(
        planner, { ...FIRST, ...plan, ...change })).sort((a, b) => a - b);
    line(`changed, ${name}: median, worst`, ms(times[times.length / 2]),
         ms(times.at(-1)));
  }

  line("\nprogram", "cold", "module", "program", "ratio");
  for (const [name, job] of Object.entries(SEARCHES)) {
    const fresh = await load();
    const cold = answer(fresh, job), again = await load();
    const warm = answer(again, job), started = performance.now();
    execFileSync(`${build}/chapters/planner/shardbook_plan`, words_of(job),
                 { maxBuffer: 1e9 });
    const program = performance.now() - started;
    line(name, ...[cold, warm, program].map(ms), (warm / program).toFixed(1));
  }
  for (let i = 0; i < 100; ++i) {
    answer(planner, { ...FIRST, ...CHANGED[i % 20], batch: 64 + i });
  }
  line("\nheap after 100 searches", `${planner.HEAP8.length / 1e6} MB`);
})();
