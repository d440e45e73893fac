"""What the filters of ./shardbook test choose."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
import run_tests

ROOMS = ["core", "comm", "docs"]


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

    def test_googletest_is_told_as_it_reads(self):
        self.assertIsNone(run_tests.gtest_filter(None, []))
        self.assertEqual(run_tests.gtest_filter("Ring", []), "*Ring*")
        self.assertEqual(run_tests.gtest_filter("Ring.*", []), "Ring.*")
        self.assertEqual(run_tests.gtest_filter(None, ["A*", "B.*"]),
                         "*-A*:B.*")
        self.assertEqual(run_tests.gtest_filter("Ring.*-*Slow", ["A*"]),
                         "Ring.*-*Slow:A*")


unittest.main()
