"""The module `schedules` answers in WebAssembly as the libraries do, and frames of
collectives are what the book's formulas say.

  schedules_test.py NODE BUILD NATIVE FRAMES    (SHARDBOOK_DRAWS: random questions; 120)
"""

import collections
import json
import os
import pathlib
import random
import subprocess
import sys
import unittest

FRAMES = sys.argv.pop()
NATIVE = sys.argv.pop()
BUILD = pathlib.Path(sys.argv.pop()).resolve()
NODE = sys.argv.pop()
DRAWS = int(os.environ.get("SHARDBOOK_DRAWS", "120"))
DRIVER = """
const { readFileSync } = require("fs");
const folder = process.argv[1];
const wasmBinary = readFileSync(`${folder}/schedules.wasm`);
require(`${folder}/schedules.js`)({ wasmBinary }).then((module) => {
  for (const line of readFileSync(0, "utf8").trimEnd().split("\\n")) {
    const answer = module.ccall("shardbook_schedules", "string", ["string"], [line]);
    process.stdout.write(answer + "\\n");
  }
});
"""
SIZE = """
const { readFileSync } = require("fs");
console.log(process.argv.slice(1).reduce((sum, path) =>
    sum + require("zlib").brotliCompressSync(readFileSync(path)).length, 0));
"""
LISTS = [["F0 F1 B0 B1", "F0 B0 F1 B1"], ["F0 B1 F1 B0", "F0 B0 F1 B1"],
         ["F0 B0 F1 B1", "F1 F0 B1 B0"], ["F0 I0 W0 F1 I1 W1"], ["F0 nonsense"], []]
# Of each kind of question, what its keys may be; most of it can be answered
KEYS = {
    "schedule": {
        "name": ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "dualpipe",
                 "zb-auto", "pipedream", "mine.json"],
        "ranks": [1, 2, 3, 4, 8, 65], "micro_batches": [1, 4, 8, 12, 16, 0.5],
        "chunks": [1, 2, 3], "forward": [1, 0.7, 3, 0], "backward_input": [1, 1.3],
        "backward_weight": [1, 0.9], "message": [0, 0.1, 2, -1],
        "text": ["", "", "", "{", *(json.dumps({"micro_batches": 2, "ranks": lists})
                                   for lists in LISTS)]},
    "zero": {
        "parameters": [124439808, 7.5e9, 1e12, 0], "ranks": [1, 3, 64, -1],
        "capacity": [16e9, 80e9], "dtype": ["bf16", "f32", "f64", "fp8"],
        "optimizer": ["sgd", "adam", "adamw", "lion"], "momentum": [0, 0.9]},
    "mask": {
        "layout": ["contiguous", "zigzag", "striped", "ulysses", "round"],
        "ranks": [1, 2, 3, 4, 8], "tokens": [8, 16, 24, 48, 7], "heads": [4, 8, 12],
        "causal": [True, True, False, 1]},
    "mesh": {
        "rows": [1, 2, 3, 4, 9], "columns": [1, 2, 3, 8],
        **{name: ["R", "S(0)", "S(1)", "P(sum)", "S(2)"] for name in (
            "from_rows", "from_columns", "to_rows", "to_columns")}},
}


def draw(rng):
    about = rng.choice(list(KEYS))
    question = {"about": about}
    for key, values in KEYS[about].items():
        # The last is wrong, or seldom right
        if rng.random() < 0.7:
            question[key] = rng.choice(values if rng.random() < 0.1 else values[:-1])
    if rng.random() < 0.03:
        question["unknown"] = 1
    return question


def lines_of(command, lines):
    return subprocess.run(command, input="\n".join(lines) + "\n", check=True,
                          stdout=subprocess.PIPE, text=True).stdout.splitlines()


def native(question):
    return json.loads(lines_of([NATIVE], [json.dumps(question)])[0])


class Module(unittest.TestCase):
    def test_random_questions_are_answered_alike(self):
        rng = random.Random(66)
        questions = [draw(rng) for _ in range(DRAWS)]
        lines = [*map(json.dumps, questions), "nonsense", "[]", '{"about": "all"}']
        ours = lines_of([NATIVE], lines)
        theirs = lines_of([NODE, "-e", DRIVER, BUILD / "explorer/schedules"], lines)
        self.assertEqual(len(theirs), len(lines))
        kinds = collections.Counter()
        for line, mine, its in zip(lines, ours, theirs):
            self.assertEqual(its, mine, line)
        for question, mine in zip(questions, ours):
            kinds[question["about"], mine.startswith('{"error":')] += 1
        self.assertEqual(set(kinds), {(about, is_wrong) for about in KEYS
                                      for is_wrong in (False, True)})

    def test_it_is_small(self):
        files = [BUILD / "explorer/schedules" / name
                 for name in ("schedules.js", "schedules.wasm")]
        size = subprocess.run([NODE, "-e", SIZE, *files], check=True,
                              stdout=subprocess.PIPE).stdout
        self.assertLess(int(size), 150_000)

    def test_a_deadlock_is_named(self):
        text = json.dumps({"micro_batches": 2, "ranks": LISTS[2]})
        self.assertRegex(native({"text": text})["error"],
                         "deadlock: rank 0 .at B0. waits for B0 of rank 1, rank 1 "
                         ".at F1. waits for F1 of rank 0")

    def test_long_answers_are_refused(self):
        self.assertEqual(native({"ranks": 64, "micro_batches": 65})["error"],
                         "4160 forwards of all ranks; give ranks, micro_batches and "
                         "chunks for at most 4096")
        self.assertIn("text of 65537 characters",
                      native({"text": " " * 65537})["error"])

    def test_answers_are_the_pages_formulas(self):
        p, m = 4, 8
        times = {"forward": 1, "backward_input": 1.5, "backward_weight": 0.5}
        answer = native({"name": "gpipe", "ranks": p, "micro_batches": m,
                         "message": 0.25, **times})
        self.assertEqual(answer["makespan"], (m + p - 1) * 3 + 2 * (p - 1) * 0.25)
        answer = native({"name": "1f1b", "ranks": p, "micro_batches": m, **times})
        self.assertEqual(answer["makespan"], (m + p - 1) * 3)
        self.assertAlmostEqual(answer["idle_share"], (p - 1) / (m + p - 1))
        for stage, rank in enumerate(answer["ranks"]):
            self.assertEqual(rank["most"], min(p - stage, m))
            self.assertEqual(max(sets for _, sets in rank["alive"]), rank["most"])
        zero = native({"about": "zero", "parameters": 7.5e9, "ranks": 64})
        self.assertEqual([stage["total"] / 1e9 for stage in zero["stages"]],
                         [120, 31.40625, 16.640625, 1.875])
        self.assertEqual(zero["stages"][0]["most"], 80e9 / 16)
        for layout in ("contiguous", "zigzag", "striped", "ulysses"):
            mask = native({"about": "mask", "layout": layout, "heads": 4})
            pairs = [tuple(pair) for rank in mask["ranks"] for hop in rank["hops"]
                     for pair in hop["pairs"]]
            work = sum(hop["work"] for rank in mask["ranks"] for hop in rank["hops"])
            self.assertEqual(set(pairs), {(q, k) for q in range(16)
                                          for k in range(q + 1)})
            self.assertEqual(len(pairs), 136 * (4 if layout == "ulysses" else 1))
            self.assertEqual(work, 4 * 136)
            if layout != "ulysses":
                self.assertEqual([hop["source"] for hop in mask["ranks"][1]["hops"]],
                                 [1, 0, 3, 2])
        mesh = native({"about": "mesh", "from_rows": "P(sum)", "from_columns": "R"})
        self.assertEqual([move["collective"] for move in mesh["moves"]], ["all_reduce"])
        self.assertEqual(mesh["moves"][0]["sent"], [2 * 1 / 2 * 64 * 4] * 4)


class Frames(unittest.TestCase):
    def test_results_and_messages_are_those_of_the_collectives(self):
        frames = json.loads(subprocess.run([FRAMES], check=True,
                                           stdout=subprocess.PIPE).stdout)
        one = [[2 ** (4 * piece + rank) for piece in range(4)] for rank in range(4)]
        sums = [sum(column) for column in zip(*one)]
        def own(pieces):
            return [[piece if place == rank else 0 for place, piece
                     in enumerate(pieces[rank])] for rank in range(4)]
        # Results; steps; pieces that each rank sends
        expected = {
            "ring": ([sums] * 4, 6, [6] * 4),
            "halving-doubling": ([sums] * 4, 4, [6] * 4),
            "tree": ([sums] * 4, 4, [8, 4, 8, 4]),
            "reduce-scatter": (own([sums] * 4), 3, [3] * 4),
            "all-gather": ([[one[rank][rank] for rank in range(4)]] * 4, 3, [3] * 4),
            "all-to-all": ([list(column) for column in zip(*one)], 1, [3] * 4)}
        self.assertEqual(set(frames), set(expected))
        for name, (results, steps, sent) in expected.items():
            with self.subTest(name):
                self.assertEqual(frames[name][-1]["ranks"], results)
                self.assertEqual(len(frames[name]), steps + 1)
                counts = [0] * 4
                for frame in frames[name]:
                    for sender, _, _, count in frame["messages"]:
                        counts[sender] += count
                self.assertEqual(counts, sent)

    def test_what_is_sent_is_at_its_place_before(self):
        frames = json.loads(subprocess.run([FRAMES], check=True,
                                           stdout=subprocess.PIPE).stdout)
        # Rank 0's second message in a ring has its own piece 2 and rank 3's
        self.assertEqual(frames["reduce-scatter"][1]["messages"][0], [0, 1, 2, 1])
        self.assertEqual(frames["reduce-scatter"][1]["ranks"][0][2], (1 + 8) << 8)
        self.assertEqual(frames["ring"][1]["ranks"][0][2], (1 + 8) << 8)


if __name__ == "__main__":
    unittest.main()
