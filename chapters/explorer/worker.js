// Below emscripten's own scripts: keeps an instance of each module of the planner
// that it was given, and answers questions: the words of a command line, and
// files to read.

const instances = {};

function instantiate(make, module) {
  return make({
    instantiateWasm(imports, done) {
      WebAssembly.instantiate(module, imports).then(done);
      return {};
    },
  });
}

onmessage = async ({ data: { modules, words, files } }) => {
  if (modules) {
    const makers = { "plan": plan, "plan-fibers": plan_fibers };
    for (const [name, module] of Object.entries(modules)) {
      instances[name] = instantiate(makers[name], module);
    }
    return;
  }
  let answer;
  for (const instance of Object.values(instances)) {
    const planner = await instance;
    for (const [name, text] of Object.entries(files)) {
      planner.FS.writeFile(name, text);
    }
    planner.ccall("shardbook_plan", null, ["string"], [JSON.stringify(words)]);
    answer = JSON.parse(planner.ccall("shardbook_answer", "string", [], []));
    const path = words[words.indexOf("--write-config") + 1];
    if (answer.status === 0) {
      answer.config = planner.FS.readFile(path, { encoding: "utf8" });
    }
    // 3: ranks would have to wait for each other
    if (answer.status !== 3) break;
  }
  postMessage(answer);
};
