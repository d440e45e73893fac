"""What the filters of ./shardbook test choose."""

import concurrent.futures
import pathlib
import re
import shlex
import subprocess
import sys
import unittest
from fnmatch import fnmatchcase

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
import run_tests
from test_sources import may_match

BUILD = pathlib.Path(sys.argv.pop())
CI = pathlib.Path(__file__).parents[2] / ".ci/run"
ROOMS = ["core", "comm", "docs"]


def names_of(command):
    if not run_tests.is_googletest(command):
        return []
    listing = subprocess.run([*command, "--gtest_list_tests"], check=True,
                             capture_output=True, text=True)
    suite, names = "", []
    for line in listing.stdout.splitlines():
        word = line.partition("#")[0].strip()
        if line.startswith("  "):
            names.append(suite + word)
        elif word.endswith("."):
            suite = word
    return names


def built_names():
    """The tests of each room whose program is built."""
    tests = run_tests.read_json(BUILD, "intro-tests.json")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        lists = pool.map(names_of, [test["cmd"] for test in tests])
    return {test["name"]: names for test, names in zip(tests, lists)}


class Filters(unittest.TestCase):
    def test_rooms_and_patterns(self):
        self.assertEqual(run_tests.select(ROOMS, []), [(ROOMS, None)])
        self.assertEqual(run_tests.select(ROOMS, ["docs", "Ring"]),
                         [(["docs"], None), (ROOMS, "Ring")])
        self.assertEqual(run_tests.select(ROOMS, ["comm:Ring"]),
                         [(["comm"], "Ring")])

    def test_a_room_is_left_out(self):
        self.assertEqual(run_tests.select(ROOMS, ["!docs"]),
                         [(["core", "comm"], None)])
        with self.assertRaisesRegex(SystemExit, "!dogs: there is no such room"):
            run_tests.select(ROOMS, ["!dogs"])

    def test_tests_are_left_out_of_all_rooms(self):
        filters = ["!docs", "!*Textbook*", "!Sweep.*"]
        self.assertEqual(run_tests.select(ROOMS, filters),
                         [(["core", "comm"], None)])
        self.assertEqual(run_tests.left_out_patterns(filters),
                         ["*Textbook*", "Sweep.*"])

    def test_what_no_test_can_match_is_refused(self):
        for filters in (["nosuch"], ["core:NoSuchTest"], ["core", "Rinng"],
                        ["!*NoSuch*"], ["NoSuch.*:*nosuch*"]):
            with self.assertRaises(run_tests.Refusal, msg=filters):
                run_tests.refuse_unknown(ROOMS, filters)

    def test_no_test_that_was_built_is_refused(self):
        tests = run_tests.read_json(BUILD, "intro-tests.json")
        sources = run_tests.sources_by_room(BUILD, tests)
        for room, every in built_names().items():
            # Of those that differ in a number only, one
            names = {re.sub(r"\d+", "", name): name for name in every}.values()
            # From the middle of a word to the middle of another
            middles = {f"*{name[3:-2]}*" for name in names if "/" in name}
            self.assertEqual([name for name in middles.union(names)
                              if not may_match(name, sources[room])], [], room)
        run_tests.refuse_unknown(
            ROOMS, ["Ring", "Tex?book", "Ddp*.*Bit*", "*-*Slow", "-Ring",
                    "Nothing:Ring", "!*Textbook*", "docs"])

    def test_ci_leaves_out_what_exists(self):
        rooms = built_names()
        if not (rooms["core"] and rooms["planner"] and rooms["hybrid"]):
            self.skipTest("not all rooms are built")
        text = CI.read_text().replace("\\\n", " ")
        for line in re.findall(r"^run test (.+)", text, re.M):
            for filter in shlex.split(line):
                pattern = filter.removeprefix("!")
                if filter != pattern and pattern not in rooms:
                    self.assertTrue(any(fnmatchcase(name, pattern)
                                        for names in rooms.values()
                                        for name in names), filter)

    def test_googletest_is_told_as_it_reads(self):
        self.assertIsNone(run_tests.gtest_filter(None, []))
        self.assertEqual(run_tests.gtest_filter("Ring", []), "*Ring*")
        self.assertEqual(run_tests.gtest_filter("Ring.*", []), "Ring.*")
        self.assertEqual(run_tests.gtest_filter(None, ["A*", "B.*"]),
                         "*-A*:B.*")
        self.assertEqual(run_tests.gtest_filter("Ring.*-*Slow", ["A*"]),
                         "Ring.*-*Slow:A*")


unittest.main()
