"""./shardbook exercise and mistake, of DDP and ZeRO: what a reader's file may do
wrong; its steps, hints, and a watch over it.

  commands_test.py BUILD
"""

import contextlib
import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import unittest
import unittest.mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = sys.argv.pop()
PATHS = [str(ROOT / "chapters" / room) for room in ("table", "course")]
sys.path[:0] = PATHS

import hints  # noqa: E402
import lessons  # noqa: E402
import steps  # noqa: E402
import texts  # noqa: E402
from chapter_names import find_chapters  # noqa: E402

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
texts.WORK = texts.OUT + "/exercises"
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
        for path in (self.path, self.path.with_name(".ddp.hints")):
            path.unlink(missing_ok=True)

    def start(self, *words, action="run"):
        return subprocess.Popen(
            [sys.executable, "-B", "-c", DRIVER, *PATHS, BUILD, self.out, action,
             *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run_command(self, *words, action="run"):
        """The exit status, and what it prints."""
        with self.start(*words, action=action) as started:
            return self.ended(started)

    def ended(self, started):
        """The exit status, and what is left of what it prints."""
        timer = threading.Timer(120, started.kill)
        timer.start()
        said, _ = started.communicate()
        timer.cancel()
        return started.returncode, said

    def write(self, average, before="", include=""):
        """A file that averages gradients in this way."""
        self.path.unlink(missing_ok=True)
        self.run_command("exercise", "ddp")
        body = r"( *// Divide.*\n)?  lesson::write_this.*\n"
        text = re.sub(body, lambda _: f"""
  for (const Tensor& parameter : model.parameters()) {{
    const Tensor gradient = parameter.grad();
{before}{average}  }}
""", self.path.read_text("utf-8"))
        self.path.write_text(include + text, "utf-8")

    def judge(self, average, before="", include=""):
        """The answer to an exercise that averages gradients in this way."""
        self.write(average, before, include)
        return self.run_command("exercise", "ddp")

    def test_an_exercise_begins_with_a_file_and_says_what_is_missing(self):
        status, said = self.run_command("exercise", "02")
        self.assertEqual(status, 0, said)
        self.assertRegex(said, r"exercises/ddp\.cpp: write what is missing")
        status, said = self.run_command("exercise", "ddp", "--solution")
        self.assertIn("+" + AVERAGE.splitlines()[0], said)
        # A file that nobody has touched is no try
        status, said = self.run_command("exercise", "ddp")
        self.assertEqual(status, 0, said)
        self.assertIn("write what is missing", said)
        self.path.write_text(self.path.read_text("utf-8") + "// Mine\n", "utf-8")
        status, said = self.run_command("exercise", "ddp")
        self.assertEqual(status, 1, said)
        self.assertRegex(said, "ends +FAILS.*average_gradients is empty: ")
        self.assertRegex(said, r"bytes +later +the bill is 3,646,200 each")
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

    def test_a_run_builds_what_lessons_need(self):
        said = subprocess.run(
            [sys.executable, "-B", ROOT / "chapters/table/run_chapters.py",
             "targets", "", "", "ddp"], capture_output=True, text=True, check=True)
        self.assertIn("lesson_needs", said.stdout.split())

    def test_the_solution_passes(self):
        status, said = self.judge(AVERAGE)
        self.assertEqual(status, 0, said)
        self.assertIn("All claims hold", said)
        self.assertRegex(said, "numbers +holds")

    def test_a_wrong_answer_hears_which_claim_fails(self):
        status, said = self.judge("    scale_into(gradient, gradient, 0.25);\n")
        self.assertEqual(status, 1, said)
        self.assertRegex(said, "numbers +FAILS.*weights differ by .*, most in ")
        self.assertRegex(said, r"bytes +FAILS  sent 120 each; the bill is 3,64")

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
                               r".*exercises/ddp\.cpp:27:16: error: .*gardient")
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

    def test_hints_come_one_by_one(self):
        self.run_command("exercise", "ddp")
        for number in (1, 2, 3):
            status, said = self.run_command("exercise", "ddp", "--hint")
            self.assertEqual(status, 1, said)
            self.assertRegex(said, "step 1 of 1  average_gradients  empty\n"
                             f"average_gradients, hint {number} of 3:\n")
        _, said = self.run_command("exercise", "ddp", "--hint")
        self.assertIn("no hint is left; ./shardbook exercise ddp --solution "
                      "--step 1 shows", said)

    def test_a_watch_ends_when_all_claims_hold(self):
        self.write(AVERAGE.split("\n", 1)[1])
        with self.start("exercise", "ddp", "--watch") as started:
            for line in started.stdout:
                if "FAILS" in line:
                    break
            self.write(AVERAGE)
            status, said = self.ended(started)
        self.assertEqual(status, 0, said)
        self.assertRegex(said, r"--- \d\d:\d\d:\d\d  .*ddp\.cpp, judged at "
                               "every save; Ctrl-C ends\n")
        self.assertIn("All claims hold", said)

    def test_control_c_ends_a_watch(self):
        with self.start("exercise", "ddp", "--watch") as started:
            for line in started.stdout:
                if line.startswith("---"):
                    started.send_signal(signal.SIGINT)
            self.assertEqual(started.wait(), -signal.SIGINT)
        self.assertEqual(line, "shardbook: stopped by SIGINT\n")

    # ---- Steps, of ZeRO

    def write_zero(self, change=lambda text: text, empty=()):
        """ZeRO's lesson with a change, some of whose functions are empty."""
        lesson = texts.lesson_of("03_zero_fsdp")
        exercise = texts.exercise_of("03_zero_fsdp")
        text = change(lesson)
        for name in empty:
            text = text.replace(steps.function_text(text, name),
                                steps.function_text(exercise, name))
        path = pathlib.Path(self.out, "exercises", "zero_fsdp.cpp")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")

    def test_steps_are_judged_apart(self):
        self.write_zero(lambda text: text.replace(
            "    scale_into(gradient, gradient, 1.0 / dp.size());\n", ""),
            empty=["forward_backward"])
        status, said = self.run_command("exercise", "zero")
        self.assertEqual(status, 1, said)
        self.assertRegex(
            said, "^step 1 of 3  gather             holds\n"
            "step 2 of 3  scatter_gradients  FAILS  numbers: loss .*\n"
            "step 3 of 3  forward_backward   empty\n"
            "your loss is that of forgot-to-divide: ")
        status, said = self.run_command("exercise", "zero", "--step=1")
        self.assertEqual((status, said),
                         (0, "step 1 of 3  gather  holds\nStep 1 holds.\n"))

    def test_memory_says_what_is_allowed(self):
        self.write_zero(lambda text: text.replace("    const NoGrad no_graph;\n",
                                                  ""))
        status, said = self.run_command("exercise", "zero", "--step=3")
        self.assertEqual(status, 1, said)
        self.assertRegex(
            said, r"step 3 of 3  forward_backward  FAILS  memory: [\d,]+ bytes at "
            r"the peak of a rank; at most 391,868: 1\.05 times the lesson's "
            "373,208\n")

    def test_a_step_that_does_not_compile_leaves_the_others(self):
        self.write_zero(lambda text: text.replace(
            "Tensor sum = mine", "Tensor sum = mien"), ["forward_backward"])
        status, said = self.run_command("exercise", "zero")
        self.assertEqual(status, 1, said)
        self.assertRegex(
            said, "^step 1 of 3  gather             holds\n"
            "step 2 of 3  scatter_gradients  FAILS  .*zero_fsdp.cpp does not "
            r"compile:\n +.*/exercises/zero_fsdp\.cpp:36:18: error: .*mien")

    def test_the_solution_of_a_step_is_its_function(self):
        self.write_zero(empty=["gather", "forward_backward"])
        _, said = self.run_command("exercise", "zero", "--solution", "--step=1")
        self.assertIn('+    dp.all_gather(whole, mine, "gather").wait();', said)
        self.assertNotIn("pop_back", said)
        _, said = self.run_command("exercise", "zero", "--solution", "--step=2")
        self.assertRegex(said, "scatter_gradients is the lesson's")

    def test_without_a_brace_all_is_compiled(self):
        self.write_zero(lambda text: text.replace("  return layer;\n}", "", 1))
        status, said = self.run_command("exercise", "zero", "--step=1")
        self.assertEqual(status, 1, said)
        self.assertRegex(said, "its steps cannot be told apart, for want of a "
                               "mark or a brace; all of it is judged\n"
                               r".*does not compile:\n.*zero_fsdp\.cpp:\d+")

    def test_a_wrong_wish_is_refused(self):
        for words, answer in (
                (["--step=4"], "--step 4: give a step: 1 gather, 2 scatter"),
                (["--hint", "--watch"], "--hint --watch: give one of them"),
                (["--hints"], "--hints: only --step N, --hint, --watch, ")):
            status, said = self.run_command("exercise", "zero", *words)
            self.assertEqual(status, 2)
            self.assertIn(f"shardbook: exercise zero {answer}", said)


class Steps(unittest.TestCase):
    lesson = texts.lesson_of("03_zero_fsdp")

    def why(self, old, new):
        self.assertIn(old, self.lesson)
        return [step.why for step in steps.steps_of(
            "03_zero_fsdp", self.lesson.replace(old, new))]

    def test_a_function_is_found_by_its_name_and_types(self):
        header = "inline void scatter_gradients(Module& layer,"
        for same in (
                "void scatter_gradients(Module & it,",
                "void scatter_gradients(\n    Module& layer,",
                "void scatter_gradients(Module& layer,  // gathered, whole\n",
                "void scatter_gradients(Module& layer = *Layers{}[0],",
                # A declaration
                "void scatter_gradients(Module&, const Parts&, ProcessGroup&);\n"
                + header):
            self.assertEqual(self.why(header, same), ["", "", ""], same)
        for brace in ("'{'", 'R"(" {)"', '"{"', "1; // {", "1; /* { */"):
            self.assertEqual(self.why("  const NoGrad no_grad;", "  auto brace = "
                                      + brace + ";"), ["", "", ""], brace)
        why = self.why(header, "void scatter_gradients(const Module& layer,")
        self.assertRegex(why[1], "^has other types than the lesson, which calls\n"
                         + re.escape(header))
        why = self.why("scatter_gradients(Module&", "scatter(Module&")
        self.assertRegex(why[1], "^is gone; the lesson has\n" + re.escape(header))
        self.assertEqual([why[0], why[2]], ["", ""])
        # The compiler says what is wrong with braces
        self.assertEqual(self.why("  return layer;\n}", "  return layer;\n"), [])
        self.assertEqual(self.why(texts.END, ""), [])

    def test_a_step_has_one_function_of_the_reader(self):
        text = "#include <deque>\n" + self.lesson.replace(
            "layers.make(i, lesson::no_values())", "mine_1").replace(
            "Tensor sum = mine", "Tensor sum = mine_2").replace(
            "inline Tensor forward_b", "static int helper();\ninline Tensor "
            "forward_b").replace("kept.pop_back()", "mine_3").replace(
            "optimizer->step()", "mine_4")
        for step in steps.steps_of("03_zero_fsdp", text):
            source = steps.with_one("03_zero_fsdp", text, step, "mine.cpp")
            self.assertEqual(re.findall(r"mine_\d", source),
                             [f"mine_{step.number}"])
            self.assertIn("static int helper();", source)
            # Its lines are those of the reader's file
            line = 0
            for each in source.splitlines():
                found = re.match(r'#line (\d+) "mine', each)
                if "mine_" in each:
                    self.assertIn("mine_", text.splitlines()[line - 1])
                line = int(found[1]) if found else line + 1

    def test_every_exercise_has_its_steps(self):
        for chapter in find_chapters([]):
            lesson = texts.lesson_of(chapter)
            for text, why in (lesson, ""), (texts.exercise_of(chapter), "empty"):
                found = steps.steps_of(chapter, text)
                self.assertTrue(found, chapter)
                self.assertEqual({step.why for step in found}, {why}, chapter)

    def test_every_function_has_hints(self):
        for chapter in find_chapters([]):
            lesson = texts.lesson_of(chapter)
            found = hints.hints_of(chapter)
            self.assertEqual(list(found), texts.functions_of(lesson), chapter)
            for name, several in found.items():
                self.assertIn(len(several), (2, 3, 4), (chapter, name))
                lines = [" ".join(line.split()) for line in
                         steps.function_text(lesson, name).splitlines()[1:]
                         if len(line.strip()) > 12]
                for text in several[:-1]:
                    text = " ".join(text.split())
                    self.assertEqual([line for line in lines if line in text],
                                     [], (chapter, name))


class Watch(unittest.TestCase):
    def test_every_save_is_judged_and_no_answer_is_late(self):
        with tempfile.TemporaryDirectory() as folder:
            path, judged = pathlib.Path(folder, "ddp.cpp"), []
            path.write_text("right", "utf-8")

            def save(text):  # as editors do
                path.with_suffix(".new").write_text(text, "utf-8")
                os.replace(path.with_suffix(".new"), path)

            def judge_it():
                judged.append(path.read_text("utf-8"))
                if judged == ["right"]:
                    save("wrong")
                elif judged[-1] == "wrong":
                    path.unlink()
                    path.read_text("utf-8")  # as the judge reads it, too late
                return 0 if judged[-1] == "right" else 1

            def pause(_):
                self.assertEqual(judged, ["right", "wrong"])
                save("right")

            with unittest.mock.patch("programs.pause", pause), \
                    contextlib.redirect_stdout(io.StringIO()) as said:
                self.assertEqual(lessons.watch(str(path), "ddp.cpp", judge_it), 0)
            self.assertEqual(judged, ["right", "wrong", "right"])
            self.assertEqual(said.getvalue().count("\n---"), 2)


if __name__ == "__main__":
    unittest.main()
