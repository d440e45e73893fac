// ---- The planner, in a worker. A new question ends the one before.

const planner = (() => {
  const compiled = {};  // modules, by a worker
  const url = URL.createObjectURL(
      new Blob([document.getElementById("worker").textContent],
               { type: "text/javascript" }));
  let worker, asked = null;

  function end(answer) {
    asked?.end(answer);
    asked = null;
  }
  function send(name) {
    const code = compiled[name] ??
        document.getElementById(`${name}-wasm`).textContent;
    worker.postMessage({ name, code });
  }
  function start() {
    worker = new Worker(url);
    worker.onmessage = ({ data }) => {
      if (data.module) {
        compiled[data.name] = data.module;
        // Sooner, the larger one would keep it waiting
        if (data.name === "plan") send("plan-fibers");
      } else if (data.progress || data.isFirst) {
        asked?.hear(data);
      } else {
        end(data);
      }
    };
    worker.onerror = (event) => stop({ status: 3, error: event.message });
    send("plan");
  }
  // The question under way has the answer null, unless another is given.
  function stop(answer = null) {
    if (!asked) return;
    worker.terminate();
    start();
    end(answer);
  }
  function ask(words, files, hear) {
    stop();
    return new Promise((end) => {
      asked = { end, hear };
      worker.postMessage({ words, files });
    });
  }
  start();
  return { ask, stop };
})();
