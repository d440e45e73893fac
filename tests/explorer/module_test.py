"""The planner's module of WebAssembly answers as the program does.

  module_test.py NODE BUILD      (SHARDBOOK_DRAWS: how many random jobs; 200)
"""

import concurrent.futures
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import unittest

BUILD = pathlib.Path(sys.argv.pop()).resolve()
NODE = sys.argv.pop()
DRAWS = int(os.environ.get("SHARDBOOK_DRAWS", "200"))
# Reads a list of lines of words, writes a list of answers; argv: the folder, and
# files to write first
DRIVER = """
const { readFileSync } = require("fs");
const [folder, files] = process.argv.slice(1);
const lines = JSON.parse(readFileSync(0, "utf8"));
const load = async (name) => {
  const wasmBinary = readFileSync(`${folder}/${name}.wasm`);
  const planner = await require(`${folder}/${name}.js`)({ wasmBinary });
  for (const [path, text] of Object.entries(JSON.parse(files))) {
    planner.FS.mkdirTree(path.replace(/\\/[^/]*$/, ""));
    planner.FS.writeFile(path, text);
  }
  return (words) => {
    planner.ccall("shardbook_plan", null, ["string"], [JSON.stringify(words)]);
    return JSON.parse(planner.ccall("shardbook_answer", "string", [], []));
  };
};
(async () => {
  const answers = lines.map(await load("plan"));
  process.stdout.write(JSON.stringify(answers));
})();
"""
CONFIGS = [
    {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,
     "num_hidden_layers": 22, "num_attention_heads": 32,
     "num_key_value_heads": 4, "vocab_size": 32000, "rms_norm_eps": 1e-5,
     "max_position_embeddings": 2048},
    {"model_type": "gemma2"},
    {"model_type": "mamba"},
    {"model_type": "llama", "hidden_size": 10**9},
    ["no", "config"],
]
# Of each option, what a job may have; None leaves it out, and so do most draws
OPTIONS = {
    "--seq": [512, 1024, 2048, 4096, 0],
    "--dtype": ["bf16", "f16", "f32", "fp8"],
    "--dropout": [0, 0.1, 1],
    "--device-memory": ["16GB", "40GiB", "1MB", "much"],
    "--top": [1, 3, 0],
    "--ep": [1, 2, 4],
    "--cp": [1, 2],
    "--zero-stage": [0, 1, 2, 3, 4],
    "--micro-batch": [1, 2, 4, 1000],
    "--schedule": ["1f1b", "interleaved", "zb-h1", "gpipe"],
    "--recompute": ["never", "attention", "blocks"],
}
# Rings over nodes, whose ranks run one after the other
RING = ("--model llama-3.2-1b --cluster dgx-h100 --nodes 2 --tp 1 --cp 16 "
        "--batch 8 --seq 8192 --recompute never").split()
# In these, ranks wait for each other: the module refuses them
AT_ONCE = [
    "--model gpt2 --world-size 4 --pp 4 --batch 8 --confirm --format json".split(),
    "--model gpt2 --cluster dgx-v100 --world-size 4 --cp 4 --batch 8 "
    "--dtype f16".split()]
FLAGS = ["--offload", "--explain", "--by-strategy", "--no-prune"]
MODELS = ["gpt2", "gpt2-xl", "gpt-1.3b", "llama-3.2-1b", "llama-3.1-8b",
          "qwen3-30b-a3b", "mixtral-8x7b", "smollm2-135m", "resnet50"]
CLUSTERS = ["dgx-a100", "dgx-h100", "selene", "kaggle-t4x2", "dgx-v100",
            "textbook", "nowhere"]


def draw(rng):
    """A job whose degrees are given, so that few plans are searched."""
    model = (json.dumps(rng.choice(CONFIGS)) if rng.random() < 0.2
             else rng.choice(MODELS))
    size = rng.choice([1, 2, 4, 8, 16])
    words = ["--model", model, "--cluster", rng.choice(CLUSTERS),
             "--world-size", str(size), "--batch", str(rng.choice([8, 32, 48])),
             "--tp", str(rng.choice([1, 2, 4, 3])),
             "--pp", str(rng.choice([1, 2]))]
    for name, values in OPTIONS.items():
        if rng.random() < 0.3:
            words += [name, str(rng.choice(values))]
    words += [flag for flag in FLAGS if rng.random() < 0.1]
    if rng.random() < 0.5:
        words += ["--format", "json"]
    return words


def answers_of_program(words):
    ended = subprocess.run(
        [BUILD / "chapters/planner/shardbook_plan", *words], check=False,
        capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if ended.stderr:
        error = ended.stderr.removeprefix("error: ").removesuffix("\n")
        return {"status": ended.returncode, "error": error}
    return {"status": ended.returncode, "text": ended.stdout}


def answers_of_module(lines, files=None):
    ended = subprocess.run(
        [NODE, "-e", DRIVER, BUILD / "explorer", json.dumps(files or {})],
        check=True, input=json.dumps(lines), stdout=subprocess.PIPE, text=True)
    return json.loads(ended.stdout)


class Module(unittest.TestCase):
    def test_random_jobs_are_answered_alike(self):
        rng = random.Random(65)
        lines = [RING, *AT_ONCE, *(draw(rng) for _ in range(DRAWS))]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            theirs = pool.submit(answers_of_module, lines)
            ours = list(pool.map(answers_of_program, lines))
        kinds = set()
        for words, mine, its in zip(lines, ours, theirs.result()):
            kinds.add(its["status"])
            if its["status"] != 3:
                self.assertEqual(its, mine, " ".join(words))
                continue
            self.assertIn("several ranks", its["error"])
            self.assertTrue("--confirm" in words or "dgx-v100" in words, words)
        self.assertEqual(kinds, {0, 1, 2, 3})

    def test_a_file_is_read_where_the_page_has_written_it(self):
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(CONFIGS[0], file)
            file.flush()
            words = ["--model", file.name, "--format", "json"]
            mine = answers_of_program(words)
        self.assertEqual(mine["status"], 0)
        self.assertEqual(
            answers_of_module([words], {file.name: json.dumps(CONFIGS[0])}),
            [mine])


if __name__ == "__main__":
    unittest.main()
