// Renders formulas by KaTeX: a line of JSON in, a line of JSON out.
const katex = require("katex");

// The micro sign has no metrics here: it gets a letter's
console.warn = () => {};

require("readline").createInterface({ input: process.stdin }).on("line", (line) => {
  const { tex, displayMode } = JSON.parse(line);
  let answer;
  try {
    const strict = (kind) => kind === "unknownSymbol" ? "ignore" : "error";
    // Without the source, which nothing shows
    answer = { html: katex.renderToString(tex, { displayMode, strict }).replace(
        /<annotation.*?<\/annotation>/s, "") };
  } catch (error) {
    answer = { error: error.message };
  }
  process.stdout.write(JSON.stringify(answer) + "\n");
});
