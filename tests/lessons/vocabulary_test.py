"""The calls that exercises begin with, and what PyTorch's calls are answered.

  vocabulary_test.py BUILD
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = os.path.abspath(sys.argv.pop())
sys.path[:0] = [str(ROOT / "chapters" / room) for room in ("table", "course")]

import programs  # noqa: E402

programs.BUILD = BUILD

import judge  # noqa: E402
import texts  # noqa: E402
from chapter_names import find_chapters  # noqa: E402
from meant import meant  # noqa: E402

# A line that a reader may type, and words of the answer; none: it compiles
TYPED = {
    "g.div_(dp.size());": r"scale_into\(x, x, factor\).*1\.0 / n",
    "g.mul_(0.5);": r"scale_into\(x, x, factor\)",
    "g /= 4;": r"scale_into\(x, x, factor\)",
    "g.add_(x);": r"add_into\(x, z\)",
    "g += x;": r"add_into\(x, z\)",
    "g.zero_();": r"x\.zero\(\)",
    "g = g * x;": r"mul\(x, z\)",
    "g = g + x;": r"add\(x, z\)",
    "g = g * 0.25;": r"scale\(x, factor\)",
    "g = x[0];": r"slice\(x, dim, begin, end\)",
    "scale(g, 0.25);": r"scale_into\(x, x, factor\) changes x",
    "add(g, x);": r"add_into\(x, z\) changes x",
    "matmul(g, x);": "matmul returns a tensor",
    "dp.all_reduce(g);": r"all_reduce has only begun.*\.wait\(\)",
    "dp.all_reduce(g, ReduceOp::kAvg).wait();": "there is no average",
    "dp.all_reduce(g, ReduceOp::AVG).wait();": "there is no average",
    "dp.all_reduce(g, ReduceOp::SUM).wait();": "ReduceOp::kSum",
    "dp.all_reduce(g, kSum).wait();": "ReduceOp::kSum",
    "dist.all_reduce(g);": r"dp\.all_reduce",
    "all_reduce(g);": r"dp\.all_reduce",
    "dp.isend(g, 1).wait();": "send itself returns at once",
    "scale_into(g, g, 1.0 / dp.size);": r"size is a function: write size\(\)",
    "scale_into(w.grad, w.grad, 0.25);": r"grad is a function: write grad\(\)",
    "w.grad.zero();": r"grad is a function: write grad\(\)",
    "g = x.shape[0];": "shape is a function",
    "g = x.matmul(g);": r"matmul is a function: write matmul\(x, \.\.\.\)",
    "g = torch.matmul(x, g);": "without a prefix",
    "g = Tensor::zeros(2, 3);": r"Tensor::zeros\(\{2, 3\}\)",
    "g = x.view({4, 9});": "reshape",
    "g = x.T;": "transpose",
    "g = x.to(DType::kF64);": "to_dtype",
    "x.requires_grad = true;": "set_requires_grad",
    "model.zero_grad();": "clear_grad",
    "const int r = dp.get_rank();": r"dp\.rank\(\)",
    "g = w.garden();": "",
    "const double value = g.item();": None,
    "scale_into(w.grad(), w.grad(), 1.0 / dp.size());": None,
}


# Calls of strategies that a header has as well, and that are not the book's
CPLUSPLUS = {"Tensor", "double", "join", "SB_CHECK"}


class Meant(unittest.TestCase):
    def test_each_line_is_answered(self):
        lesson = judge.command_of("chapters/lesson_02_ddp")
        compiler = judge.command_of(
            next(word for word in lesson if word.endswith("lesson.cpp.o")))
        with tempfile.NamedTemporaryFile("w", suffix=".cpp") as file:
            lines = ['#include "chapters/common/lesson.h"',
                     "using namespace shardbook;",
                     "void typed(Tensor g, const Tensor& x, const Tensor& w, "
                     "ProcessGroup& dp, Module& model) {", *TYPED, "}\n"]
            file.write("\n".join(lines))
            file.flush()
            compiler[-1] = file.name
            said = subprocess.run(
                [*compiler, "-fsyntax-only", "-fdiagnostics-color=never",
                 "-Werror=unused-result"], cwd=BUILD, stderr=subprocess.PIPE,
                text=True, check=False).stderr
        for number, (line, answer) in enumerate(TYPED.items(), 4):
            errors = "".join(re.findall(rf"cpp:{number}:\d+:( error: .*\n.*\n)",
                                        said))
            with self.subTest(line):
                self.assertEqual(errors == "", answer is None, errors)
                self.assertRegex("\n".join(meant(errors)), answer or "^$")


class Stubs(unittest.TestCase):
    def test_each_begins_with_the_calls_of_its_solution(self):
        headers = [ROOT / "chapters/common/lesson.h", *(
            path for room in ("core", "comm")
            for path in (ROOT / room).glob("*.h"))]
        declared = set(re.findall(
            r"(\w+)\(", "".join(map(pathlib.Path.read_text, headers))))
        for chapter in find_chapters([]):
            lesson = texts.lesson_of(chapter)
            comment = texts.exercise_of(chapter).split(texts.BEGIN)[0][
                lesson.index(texts.BEGIN):]
            strategy = re.sub(r"//.*|\bstd::\w+", "", lesson.split(
                texts.BEGIN)[1].split(texts.END)[0])
            own = re.findall(r"^inline .*?(\w+)\(|const auto (\w+) =", strategy,
                             re.M)
            called = set(re.findall(r"(\w+)\(", strategy)) & declared
            called -= {name for pair in own for name in pair} | CPLUSPLUS
            listed = set(re.findall(r"(\w+)\(|$", comment))
            self.assertEqual(called - listed, set(), chapter)


if __name__ == "__main__":
    unittest.main()
