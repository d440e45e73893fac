#!/usr/bin/env python3
"""What goes wrong: each question has a command that shows its answer.

  what_goes_wrong.py BUILD

The page of all questions says what each command prints. A run is quoted with its
lines in the section of its question, where ./shardbook test docs repeats it; a
comparison runs here; a mistake breaks the claims of its mistakes.txt. One rank
shows nothing about several.
"""

import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path[:0] = [str(ROOT / "tests" / "table"), str(ROOT / "chapters" / "table")]

from chapter_names import find_chapters  # noqa: E402
from compare_runs import DEFAULTS  # noqa: E402
from compare_runs_test import BUILD, DRIVER  # noqa: E402

CHAPTERS = ROOT / "chapters"
ROW = re.compile(r"^\| \[.*?\]\((\S+?)#(\S+?)\) \| .* \| `(.*)` \| (.*) \|$",
                 re.MULTILINE)
FENCE = re.compile(r"^```console\n\$ ((?:.*\\\n)*.*)\n([^`]*)^```$", re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.-])\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.]*\w)")
TINY = 1e-3  # differences from one device are rounding


def rows():
    """(chapter's page, anchor, words of the command, what it prints)"""
    text = (CHAPTERS / "what_goes_wrong.md").read_text("utf-8")
    return [(CHAPTERS / page, anchor, shlex.split(command), prints)
            for page, anchor, command, prints in ROW.findall(text)]


def section(page, anchor):
    for part in re.split(r"^#+ ", page.read_text("utf-8"), flags=re.MULTILINE):
        title = part.split("\n", 1)[0].lower()
        if re.sub(r"[^\w -]", "", title).replace(" ", "-") == anchor:
            return part
    raise AssertionError(f"{page} has no section {anchor}")


def quoted_runs(text):
    """The words of each quoted run, without its pipe, and what it prints."""
    return [(shlex.split(command.replace("\\\n", " ").split(" | ")[0]), output)
            for command, output in FENCE.findall(text)]


def numbers(text):
    return [float(word) for word in NUMBER.findall(text)]


def is_among(number, others):
    """Units may be a thousand times larger or smaller."""
    return any(abs(number) < TINY > abs(other)
               or abs(number - other * unit) <= 2e-2 * abs(number)
               for other in others for unit in (1e-3, 1, 1e3))


def has_many_ranks(words, output):
    """Also a run that is refused, and a program that is about other devices."""
    if output.startswith("error: ") or words[2] in ("model_parallel",
                                                    "single_device"):
        return True
    if "--compare" in words:  # a table of all numbers of ranks
        return True
    at = words.index("--world-size") if "--world-size" in words else 0
    return at > 0 and int(words[at + 1]) > 1


def compare(groups):
    """The numbers in each run's line, by the options of all and the run."""
    found = {}
    for common, runs in groups.items():
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "chapters").symlink_to(BUILD + "/chapters")
            ended = subprocess.run(
                [sys.executable, "-B", "-c", DRIVER, CHAPTERS / "table", folder,
                 "run", "", *runs, "--", *common], stdout=subprocess.PIPE,
                text=True, check=True, timeout=300, encoding="utf-8",
                env={**os.environ, "LC_ALL": "C.UTF-8"})
        lines = ended.stdout.replace("\n" + 20 * " ", " ").splitlines()
        for run in runs:
            line = next(line for line in lines
                        if re.match(re.escape(run) + r" +\d", line))
            found[common, run] = numbers(line[len(run):])
    return found


class WhatGoesWrong(unittest.TestCase):
    def test_runs_are_quoted_with_several_ranks_and_these_numbers(self):
        checked = 0
        for page, anchor, words, prints in rows():
            if words[1] not in ("run", "toy", "plan"):
                continue
            checked += 1
            text = section(page, anchor)
            runs = quoted_runs(text)
            outputs = [output for command, output in runs if command == words]
            self.assertTrue(outputs, f"{page}#{anchor} does not quote {words}")
            if words[1] == "run":
                self.assertTrue(has_many_ranks(words, outputs[0]), words)
            printed = [number for command, output in runs
                       for number in numbers(output + " ".join(command))]
            for number in numbers(re.sub("`.*?`", "", prints)):
                self.assertTrue(is_among(number, printed),
                                f"{number} is not in {page}#{anchor}")
            if prints.startswith("error: "):
                self.assertIn(prints.removeprefix("error: "), outputs[0])
        self.assertGreater(checked, 25)

    def test_comparisons_print_these_numbers(self):
        groups, expected = {}, []
        for page, anchor, words, prints in rows():
            if words[1] != "compare":
                continue
            self.assertIn(shlex.join(words), section(page, anchor).replace(
                "\\\n    ", ""), f"{page}#{anchor}")
            end = words.index("--") if "--" in words else len(words)
            common, runs = tuple(words[end + 1:] or DEFAULTS), words[2:end]
            self.assertGreater(int(common[common.index("--world-size") + 1]), 1)
            known = groups.setdefault(common, [])
            known += [run for run in runs if run not in known]
            expected.append((common, runs, prints))
        self.assertGreater(len(expected), 5)
        found = compare(groups)
        for common, runs, prints in expected:
            printed = [number for run in runs for number in found[common, run]]
            for number in numbers(prints):
                self.assertTrue(is_among(number, printed),
                                f"{runs}: {number} is not in {printed}")

    def test_mistakes_break_these_claims(self):
        for _, _, words, prints in rows():
            if words[1] != "mistake":
                continue
            folder = CHAPTERS / find_chapters([words[2]])[0]
            claims = re.search(rf"^== {words[3]}: (.*)$",
                               (folder / "mistakes.txt").read_text(),
                               re.MULTILINE)[1]
            self.assertEqual(re.findall("`(.*?)`", prints), claims.split(),
                             words)

    def test_no_other_command_of_these_sections_runs_on_one_rank(self):
        for page in CHAPTERS.glob("[0-9][0-9]_*/details.md"):
            text = page.read_text("utf-8").split("\n## What goes wrong\n")[1]
            text = FENCE.sub("", text.split("\n## ")[0])
            for command in re.findall(r"`(./shardbook run [^`]*--[^`]*)`", text):
                self.assertTrue(has_many_ranks(shlex.split(command), ""),
                                f"{page}: {command}")


if __name__ == "__main__":
    unittest.main()
