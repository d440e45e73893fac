"""./shardbook notebook --execute: what it says of notebooks, good and bad.

  execute_test.py BUILD
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

import skipping

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "notebooks"))

from notebook_files import same_text  # noqa: E402

BUILD = pathlib.Path(sys.argv[1]).resolve()


def code(source, outputs=(), tags=()):
    return {"cell_type": "code", "execution_count": None, "id": "",
            "metadata": {"tags": list(tags)} if tags else {},
            "outputs": list(outputs), "source": source}


def stdout(text):
    return {"name": "stdout", "output_type": "stream", "text": text}


class ExecuteTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="execute-test-")
        self.addCleanup(self.folder.cleanup)

    def write(self, name, cells):
        cells = [code("#include <iostream>")] + cells
        for index, cell in enumerate(cells):
            cell["id"] = f"cell-{index}"
        path = pathlib.Path(self.folder.name) / (name + ".ipynb")
        path.write_text(json.dumps({"cells": cells, "metadata": {},
                                    "nbformat": 4, "nbformat_minor": 5}))
        return path

    def execute(self, *words):
        ran = subprocess.run(
            [sys.executable, "-B", ROOT / "notebooks" / "run_notebooks.py",
             "execute", BUILD, "--folder", self.folder.name, *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            stdin=subprocess.DEVNULL, check=False, timeout=200)
        return ran.returncode, ran.stdout

    def test_outputs_are_compared(self):
        print_three = "std::cout << 1 + 2 << std::endl << 4;"
        self.write("01_same", [code(print_three, [stdout("3\n4")])])
        # Where a stream is cut into messages does not matter.
        self.write("02_cut", [code(print_three, [stdout("3"), stdout("\n4")])])
        self.write("03_other", [code(print_three, [stdout("3\n5")])])
        self.write("04_measured", [code(print_three, [stdout("9")],
                                        ["measured"])])
        status, text = self.execute()
        self.assertEqual(status, 1, text)
        self.assertRegex(text, r"(?m)^ok     01_same +2 cells +[\d.]+ s$")
        self.assertRegex(text, r"(?m)^ok     02_cut ")
        self.assertRegex(text, r"(?m)^FAILED 03_other ")
        self.assertIn("    cell 2 prints something else than the file has "
                      "(--update stores it):\n    --- in the file\n"
                      "    +++ executed\n    @@ -1,2 +1,2 @@\n     3\n"
                      "    -5\n    +4\n", text)
        self.assertRegex(text, r"(?m)^ok     04_measured ")
        self.assertTrue(text.endswith("\n3 passed, 1 failed\n"), text)

    def test_the_last_of_many_digits_may_be_another(self):
        was = "loss 4.6915, -0.00001\nin 3.25 ms\n"
        for now in ("loss 4.6916, -0.00001\nin 3.25 ms\n",
                    "loss 4.6915, -0.00002\nin 3.25 ms\n"):
            self.assertTrue(same_text(was, now), now)
        for now in ("loss 4.6917, -0.00001\nin 3.25 ms\n",
                    "loss 4.69151, -0.00001\nin 3.25 ms\n",
                    "loss 4.6915, 0.00001\nin 3.25 ms\n",
                    "loss 4.6915, -0.00001\nin 3.26 ms\n"):
            self.assertFalse(same_text(was, now), now)

    def test_updated_files_are_stable_and_pass(self):
        path = self.write("05_new", [code("std::cout << 1;"),
                                     code('std::cerr << "e";')])
        self.assertEqual(self.execute("--update", "5")[0], 0)
        first = path.read_bytes()
        notebook = json.loads(first)
        self.assertEqual(notebook["cells"][1]["outputs"],
                         [{"name": "stdout", "output_type": "stream",
                           "text": ["1"]}])
        self.assertEqual(notebook["metadata"]["kernelspec"]["name"], "xcpp17")
        self.assertEqual(self.execute("--update", "new")[0], 0)
        self.assertEqual(path.read_bytes(), first)
        self.assertEqual(self.execute("05_new")[0], 0)

    def test_notebooks_that_fail_name_the_cell(self):
        self.write("06_broken", [code("int a = b;"), code("int c = 1;")])
        self.write("07_killed", [code("std::abort();"),
                                 code("int c = 1;")])
        self.write("08_ended", [code("#include <csignal>"),
                                code("raise(SIGKILL);")])
        self.write("09_expected", [code("int a = b;",
                                        tags=["raises-exception", "measured"]),
                                   code("int c = 1;")])
        self.write("12_print", [
            code("#include <thread>"),
            code("namespace rank { void say() { std::cout << 1; } }"),
            code("std::thread(rank::say).join();")])
        self.write("10_good", [code("int c = 1;", tags=["raises-exception"])])
        status, text = self.execute()
        self.assertEqual(status, 1, text)
        self.assertIn("    cell 2 failed\n    CompileError: cell 2:1:9: "
                      "error: use of undeclared identifier 'b'", text)
        self.assertIn("    cell 2 failed\n    Crash: a cell has crashed "
                      "(Aborted)", text)
        self.assertIn("    cell 3 ended the kernel", text)
        self.assertRegex(text, r"(?m)^ok     09_expected ")
        self.assertIn("    cell 2 was expected to fail", text)
        self.assertIn("    cell 4 failed\n    PrintError: a thread of this "
                      "cell, such as a rank, printed \"1\"", text)
        self.assertTrue(text.endswith("\n1 passed, 5 failed\n"), text)

    def write_exercise(self, name, place, check, wrong_answers):
        answer = code(place)
        answer["metadata"]["wrong_answers"] = wrong_answers
        text = {"cell_type": "markdown", "id": "", "metadata": {},
                "source": "<details><summary>Solution</summary>\n\n`a = 2;`"}
        self.write(name, [
            code("double a = 0;"), answer, text,
            code(f'std::cout << "exercise: " << ({check} ? "right" : '
                 '"not yet") << std::endl;',
                 [stdout("exercise: not yet\n")])])

    def test_exercises_refuse_wrong_answers(self):
        place = "a = 0;  // write it here"
        self.write_exercise("01_good", place, "a == 2", ["a = 4;"])
        self.write_exercise("02_solution", place, "a == 3", ["a = 4;"])
        self.write_exercise("03_wrong", place, "a == 2 || a == 4", ["a = 4;"])
        self.write_exercise("04_near", place, "int(a) == 2", ["a = 4;"])
        self.write_exercise("05_crash", place, "8 % int(4 - a) == 0 && a == 2",
                            ["a = 3;", "a = 4;"])
        self.write_exercise("06_none", place, "a == 2", [])
        self.write_exercise("07_no_place", "a = 0;", "a == 2", ["a = 4;"])
        status, text = self.execute()
        self.assertEqual(status, 1, text)
        self.assertRegex(text, r"(?m)^ok     01_good ")
        for problem in ['"not yet" instead of "right":\n    a = 2;\n',
                        '"right" instead of "not yet":\n    a = 4;\n',
                        '"right" instead of "not yet":\n'
                        '    a = 2; a *= 1.001;\n']:
            self.assertIn("    exercise 1: the last cell calls this answer "
                          + problem, text)
        self.assertIn("    the last cell has no verdict on each exercise after"
                      "\n    a = 4;\n    but prints\n    Crash: ", text)
        self.assertIn("    exercise 1 has no wrong_answers in the metadata",
                      text)
        self.assertIn("    there are 0 places for answers, and 1 solutions\n",
                      text)
        self.assertTrue(text.endswith("\n1 passed, 6 failed\n"), text)

    def test_names_that_mean_nothing(self):
        self.write("01_one", [])
        status, text = self.execute("two")
        self.assertEqual((status, text), (
            2, "shardbook: notebook two: there is no such notebook; there are "
               "01_one\n"))


if __name__ == "__main__":
    sys.exit(skipping.main(sys.argv.pop(1), lambda: None, ["nbclient"]))
