"""Every toy ends with status 0, and prints what its original printed.

  toys_test.py BUILD

originals/CHAPTER.txt has lines of the original; tests/pytorch/toys.py wrote it.
"""

import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
ORIGINALS = pathlib.Path(__file__).resolve().parent / "originals"
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?")
RELATIVE, ABSOLUTE = 1e-5, 2e-6  # f32, and the last digit that is printed


def same(line, other):
    """The same words; numbers with a point may differ by rounding."""
    pairs = zip(map(float, NUMBER.findall(line)),
                map(float, NUMBER.findall(other)))
    return (NUMBER.sub("#", line).split() == NUMBER.sub("#", other).split()
            and all(abs(x - y) <= ABSOLUTE + RELATIVE * abs(y)
                    for x, y in pairs))


def first_missing(original, printed):
    """The first line of the original that is not printed, in its order."""
    rest = iter(printed.splitlines())
    return next((line for line in original.splitlines()
                 if not line.startswith("#")
                 and not any(same(each, line) for each in rest)), None)


def run_toy(build, chapter):
    """The exit status, and what the toy prints."""
    ended = subprocess.run([pathlib.Path(build, f"chapters/toy_{chapter}")],
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                           text=True, check=False)
    return ended.returncode, ended.stdout


class Toys(unittest.TestCase):
    def test_all_print_what_their_originals_print(self):
        toys = sorted(ROOT.glob("chapters/[0-9]*/toy.cpp"))
        self.assertGreater(len(toys), 0)
        for toy in toys:
            chapter = toy.parent.name
            with self.subTest(chapter):
                self.assertLessEqual(len(toy.read_text("utf-8").splitlines()),
                                     130)
                status, printed = run_toy(BUILD, chapter)
                self.assertEqual(status, 0, printed)
                original = (ORIGINALS / f"{chapter}.txt").read_text("utf-8")
                self.assertIsNone(first_missing(original, printed), printed)

    def test_other_numbers_words_and_orders_are_missing(self):
        printed = "a 1.500000\nb [2, 3]\n"
        self.assertIsNone(first_missing("# x\na 1.500001\nb  [2, 3]", printed))
        for wrong in ("a 1.500100", "a 2", "b [2, 4]", "b [2, 3]\na 1.500000"):
            self.assertIsNotNone(first_missing(wrong, printed), wrong)


if __name__ == "__main__":
    BUILD = sys.argv.pop()
    unittest.main()
