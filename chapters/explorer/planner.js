// ---- The planner, in a worker. A new question ends the one before.

const planner = (() => {
  // The module: packed, then as a worker has compiled it
  let code = document.getElementById("plan-wasm").textContent;
  const url = URL.createObjectURL(
      new Blob([document.getElementById("worker").textContent],
               { type: "text/javascript" }));
  let worker, asked = null;

  function end(answer) {
    asked?.end(answer);
    asked = null;
  }
  function start() {
    worker = new Worker(url);
    worker.onmessage = ({ data }) => {
      if (data.module) {
        code = data.module;
      } else if (data.progress) {
        asked?.hear(data.progress);
      } else {
        end(data);
      }
    };
    worker.onerror = (event) => stop({ status: 3, error: event.message });
    worker.postMessage({ code });
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
