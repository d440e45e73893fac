"""./shardbook exercise and mistake, of DDP: what a reader's file may do wrong.

  commands_test.py BUILD
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = sys.argv.pop()
AVERAGE = """    scale_into(gradient, gradient, 1.0 / dp.size());
    dp.all_reduce(gradient, ReduceOp::kSum, "gradient").wait();
"""
# The program, with another build folder and a folder of its own for its texts
DRIVER = """
import sys
sys.path[:0] = [sys.argv.pop(1), sys.argv.pop(1)]
import programs
programs.BUILD = sys.argv.pop(1)
import texts
texts.OUT = sys.argv.pop(1)
import lessons
programs.main(lessons.print_targets, lessons.run)
"""


class Commands(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.out = folder.name

    def setUp(self):
        self.path = pathlib.Path(self.out, "exercises", "ddp.cpp")
        self.path.unlink(missing_ok=True)

    def run_command(self, *words, action="run"):
        """The exit status, and what it prints."""
        ended = subprocess.run(
            [sys.executable, "-B", "-c", DRIVER, ROOT / "chapters" / "table",
             ROOT / "chapters" / "course", BUILD, self.out, action, *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False, timeout=120)
        return ended.returncode, ended.stdout

    def judge(self, average, before="", include=""):
        """The answer to an exercise that averages gradients in this way."""
        self.path.unlink(missing_ok=True)
        self.run_command("exercise", "ddp")
        body = r"( *// Divide.*\n)?  lesson::write_this.*\n"
        text = re.sub(body, lambda _: f"""
  for (const Tensor& parameter : model.parameters()) {{
    const Tensor gradient = parameter.grad();
{before}{average}  }}
""", self.path.read_text("utf-8"))
        self.path.write_text(include + text, "utf-8")
        return self.run_command("exercise", "ddp")

    def test_an_exercise_begins_with_a_file_and_says_what_is_missing(self):
        status, said = self.run_command("exercise", "02")
        self.assertEqual(status, 0, said)
        self.assertRegex(said, r"exercises/ddp\.cpp: write what is missing")
        status, said = self.run_command("exercise", "ddp", "--solution")
        self.assertIn("+" + AVERAGE.splitlines()[0], said)
        status, said = self.run_command("exercise", "ddp")
        self.assertEqual(status, 1, said)
        self.assertRegex(said, "ends +FAILS.*average_gradients is empty: ")
        self.assertRegex(said, r"bytes +later +the bill is 3646200 each")
        status, said = self.run_command("exercise", "ddp", "--format=json")
        self.assertEqual(status, 1, said)
        answer = json.loads(said)
        self.assertEqual((answer["points"], answer["of"]), (0, 3))
        self.assertEqual([claim["name"] for claim in answer["claims"]],
                         ["ends", "numbers", "bytes"])
        _, said = self.run_command("exercise", "ddp", "--format=json")
        self.assertEqual(json.loads(said)["tries"], answer["tries"] + 1)

    def test_nothing_is_built_that_is_not_needed(self):
        for target, *words in (
                ("build.ninja", "exercise", "ddp"),
                ("build.ninja", "exercise", "ddp", "--solution"),
                ("build.ninja", "mistake", "ddp"),
                ("lesson_libs_02_ddp", "mistake", "ddp", "forgot-to-divide"),
                ("chapters/lesson_02_ddp", "lesson", "ddp")):
            said = self.run_command(*words, action="targets")
            self.assertEqual(said, (0, target + "\n"))
        self.run_command("exercise", "ddp")
        self.assertEqual(self.run_command("exercise", "ddp", action="targets"),
                         (0, "lesson_libs_02_ddp\n"))

    def test_the_solution_passes(self):
        status, said = self.judge(AVERAGE)
        self.assertEqual(status, 0, said)
        self.assertIn("All claims hold", said)
        self.assertRegex(said, "numbers +holds")

    def test_a_wrong_answer_hears_which_claim_fails(self):
        status, said = self.judge("    scale_into(gradient, gradient, 0.25);\n")
        self.assertEqual(status, 1, said)
        self.assertRegex(said, "numbers +FAILS.*weights differ by .*, most in ")
        self.assertRegex(said, r"bytes +FAILS  sent 120 each; the bill is 364")

    def test_a_known_mistake_is_named(self):
        status, said = self.judge(AVERAGE.split("\n", 1)[1])
        self.assertEqual(status, 1, said)
        self.assertRegex(said, r"\nyour loss is that of forgot-to-divide: see "
                               r"\./shardbook mistake ddp forgot-to-divide\n")
        kept = pathlib.Path(self.out, "mistakes", "ddp", "all.txt")
        text = kept.read_text("utf-8")
        self.addCleanup(kept.write_text, text, "utf-8")
        # Numbers are kept: those of another mistake, and of none
        kept.write_text(text.replace("== divided-twice", "== kept").replace(
            "== forgot-to-divide", "== divided-twice"), "utf-8")
        _, said = self.run_command("exercise", "ddp")
        self.assertIn("\nyour loss is that of divided-twice: ", said)
        status, said = self.judge(AVERAGE.replace("1.0", "1.1"))
        self.assertEqual(status, 1, said)
        self.assertNotIn("./shardbook mistake", said)

    def test_a_rank_that_has_typed_its_size_is_caught(self):
        status, said = self.judge(AVERAGE.replace("1.0 / dp.size()", "0.25"))
        self.assertEqual(status, 1, said)
        self.assertRegex(said, "numbers +holds")
        self.assertRegex(said, "sizes +FAILS  on 2 ranks, .*on one device")
        self.assertIn("your program does the same as that of typed-the-ranks",
                      said)

    def test_a_syntax_error_is_shown_with_its_line(self):
        status, said = self.judge(AVERAGE.replace("grad", "gard", 1))
        self.assertEqual(status, 1, said)
        self.assertRegex(said, r"exercises/ddp\.cpp does not compile:\n"
                               r".*exercises/ddp\.cpp:24:16: error: .*gardient")
        self.assertLess(said.count("\n"), 15)

    def test_a_line_of_pytorch_hears_what_to_write(self):
        status, said = self.judge("    scale(gradient, 1.0 / dp.size());\n"
                                  "    gradient.div_(dp.size());\n")
        self.assertEqual(status, 1, said)
        self.assertIn("scale_into(x, x, factor) changes x\n", said)
        self.assertIn("to divide by n, the factor is 1.0 / n\n", said)

    def test_a_call_of_the_chapter_s_library_is_named(self):
        status, said = self.judge(
            "    ddp::check_same_everywhere(dp);\n" + AVERAGE,
            include="""
namespace shardbook { class ProcessGroup; }
namespace shardbook::ddp { void check_same_everywhere(ProcessGroup& dp); }
""")
        self.assertEqual(status, 1, said)
        self.assertRegex(said, "links only core, comm and chapters/common; it "
                               "has no shardbook::ddp::check_same_everywhere")

    def test_an_endless_loop_is_stopped(self):
        status, said = self.judge(
            AVERAGE, before="    while (dp.rank() == 0) {}\n")
        self.assertEqual(status, 1, said)
        self.assertIn("stopped after 5 s", said)

    def test_a_rank_that_throws_is_quoted(self):
        status, said = self.judge(
            AVERAGE, before='    if (dp.rank() == 2) SB_FAIL("no luck");\n')
        self.assertEqual(status, 1, said)
        self.assertRegex(said, "ends +FAILS.*no luck")

    def test_a_crash_is_named(self):
        status, said = self.judge(AVERAGE, before="    __builtin_trap();\n")
        self.assertEqual(status, 1, said)
        self.assertRegex(said, "ended by signal (4|5)")

    def test_a_missing_message_names_who_waits(self):
        wait = "    dp.recv(gradient, (dp.rank() + 1) % 4).wait();\n"
        status, said = self.judge(AVERAGE, before=wait)
        self.assertEqual(status, 1, said)
        self.assertRegex(said, "ends +FAILS.*rank . waits for rank .")

    def test_mistakes_are_listed_and_planted(self):
        status, said = self.run_command("mistake", "ddp")
        self.assertEqual(status, 0, said)
        self.assertIn("forgot-to-divide (breaks: numbers)", said)
        status, said = self.run_command("mistake", "ddp", "forgot-to-divide")
        self.assertEqual(status, 0, said)
        self.assertIn("-" + AVERAGE.splitlines()[0], said)
        self.assertRegex(said, "numbers +FAILS")
        self.assertRegex(said, "bytes +holds")
        status, said = self.run_command("mistake", "ddp", "forgot")
        self.assertEqual(status, 2, said)
        self.assertIn("there are forgot-to-divide, divided-twice", said)


if __name__ == "__main__":
    unittest.main()
