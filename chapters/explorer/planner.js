// ---- The planner, in a worker. A new question ends the one before; another
// ---- worker stands ready for it.

const planner = (() => {
  // The module: packed, then as a worker has compiled it
  let code = document.getElementById("plan-wasm").textContent;
  const url = URL.createObjectURL(
      new Blob([document.getElementById("worker").textContent],
               { type: "text/javascript" }));
  let worker = null, ready = null, asked = null;

  function started() {
    const made = new Worker(url);
    made.onmessage = ({ data }) => {
      if (data.module) {
        code = data.module;
      } else if (data.progress) {
        asked?.hear(data.progress);
      } else {
        end(data);
      }
    };
    made.onerror = (event) => {
      if (made === worker) stop({ status: 3, error: event.message });
    };
    made.postMessage({ code });
    return made;
  }
  function end(answer) {
    asked?.end(answer);
    asked = null;
    ready ??= started();
  }
  // The question under way has the answer null, unless another is given.
  function stop(answer = null) {
    if (!asked) return;
    worker.terminate();
    worker = ready ?? started();
    ready = null;
    end(answer);
  }
  function ask(words, files, hear) {
    stop();
    return new Promise((end) => {
      asked = { end, hear };
      worker.postMessage({ words, files });
    });
  }
  worker = started();
  return { ask, stop };
})();
