"""./shardbook compare: its table is that of the page, and its numbers equal those
of the runs that it names.

  compare_runs_test.py BUILD
"""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = sys.argv.pop()
sys.dont_write_bytecode = True
sys.path[:0] = [str(ROOT / "tests" / "docs"), str(ROOT / "chapters" / "table")]

from chapter_names import find_chapters  # noqa: E402
from readme_tables import difference  # noqa: E402

# The program, with a build folder that keeps the runs apart
DRIVER = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import programs
programs.BUILD = sys.argv.pop(1)
import compare_runs
programs.main(compare_runs.print_targets, compare_runs.compare)
"""
PAGE = ROOT / "chapters" / "running.md"
SHOWN = re.compile(r"^```\n\$ ./shardbook compare ((?:.*\\\n)*.*)\n\n([^`]*)^```$",
                   re.MULTILINE)


class Compare(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.build = pathlib.Path(folder.name)
        (self.build / "chapters").symlink_to(BUILD + "/chapters")

    def compare(self, words):
        """What it prints, and the lines of rows.tsv."""
        ended = subprocess.run(
            [sys.executable, "-B", "-c", DRIVER, ROOT / "chapters" / "table",
             self.build, "run", "", *words], stdout=subprocess.PIPE, text=True,
            check=False, timeout=120, env={**os.environ, "LC_ALL": "C.UTF-8"})
        self.assertEqual(ended.returncode, 0, ended.stdout)
        rows = self.build / "runs" / "compare" / "rows.tsv"
        return ended.stdout, [row.split("\t")
                              for row in rows.read_text().splitlines()]

    def report_of(self, command):
        """What the program of a command reports by itself."""
        _, _, chapter, _, *options = shlex.split(command)
        folder = find_chapters([chapter])[0]
        report = self.build / "alone.json"
        subprocess.run([f"{BUILD}/chapters/{folder}/ch{folder}", *options,
                        "--report", report], check=True, timeout=120,
                       stdout=subprocess.DEVNULL)
        return self.read(report)

    def read(self, file):
        report = json.loads(file.read_text())
        del report["wall"], report["options"]["report"]
        return report

    def test_a_page_shows_it_and_its_numbers_are_those_of_single_runs(self):
        shown = SHOWN.search(PAGE.read_text("utf-8"))
        printed, rows = self.compare(
            shlex.split(shown[1].replace("\\\n", " ")))
        wrong = difference(shown[2], printed)
        self.assertFalse(wrong, f"{PAGE.name} is stale:\n{wrong}\n{printed}")
        self.assertEqual(len(rows), 4)
        for file, _, label, command in rows:
            kept = self.read(self.build / "runs" / "compare" / file)
            self.assertEqual(kept, self.report_of(command), label)
        page = self.build / "runs" / "compare" / "report.html"
        self.assertIn("zero --strategy fsdp", page.read_text("utf-8"))

    def test_runs_that_train_show_loss_and_claims(self):
        printed, rows = self.compare(
            ["ddp", "1f1b --micro-batches 4", "--", "--world-size", "2",
             "--steps", "2", "--cluster", "textbook"])
        self.assertEqual(len(rows), 3)
        lines = [line.split() for line in printed.splitlines()
                 if line.endswith(" ✓ 4/4")]
        self.assertEqual(len(lines), 3, printed)
        self.assertEqual(len({line[-3] for line in lines}), 1, "losses differ")


if __name__ == "__main__":
    unittest.main()
