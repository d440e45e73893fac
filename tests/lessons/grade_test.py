"""./shardbook exercise --file and grade: what a file that nobody has read may do.

  grade_test.py BUILD
"""

import csv
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(sys.argv.pop())
COURSE = ROOT / "chapters" / "course"
sys.path.insert(0, os.fspath(COURSE))
import limits  # noqa: E402
from grade import most_points  # noqa: E402
from texts import mistakes_of  # noqa: E402
from chapter_names import find_chapters  # noqa: E402

IMPORTS = """import ctypes, fcntl, os, resource, signal, termios
from _socket import socket
libc = ctypes.CDLL(None, use_errno=True)
TGKILL = 234 if os.uname().machine == "x86_64" else 131
"""
LESSON = (ROOT / "chapters" / "02_ddp" / "lesson.cpp").read_text("utf-8")
FIRST = "  for (const Tensor& parameter : model.parameters()) {\n"
FAKED = "\\n".join(f"{name:8} holds  well" for name in
                   ("numbers", "bytes", "sizes")) + "\\n"
# What each does first in its strategy, and the sentence about it
HOSTILE = {
    "loop": ("if (dp.rank() == 0) for (volatile int i = 0;;) i = i;",
             "stopped after "),
    "memory": ("std::vector<std::vector<double>> all;\n"
               "for (;;) all.emplace_back(1 << 24);",
               "asked for more than 2 GiB of memory"),
    "fork": ("if (fork() == 0) return;", "it tried to start a process"),
    "write": ('std::ofstream("OUTSIDE") << 1;', "to write or change a file"),
    # std::exit on several threads at once may also crash
    "exit": ("std::_Exit(0);",
             "the program ended with status 0 before it was judged"),
    "fake": (f'std::printf("{FAKED}"); std::fflush(stdout); std::_Exit(0);',
             "the program ended with status 0 before it was judged"),
}
INCLUDES = "".join(f"#include <{name}>\n" for name in (
    "csignal", "cstdio", "cstdlib", "fstream", "unistd.h", "vector"))


def answer(first=""):
    return INCLUDES + LESSON.replace(FIRST, first + "\n" + FIRST)


def run(program, *words, action="run"):
    """The exit status, what is printed, and what is said."""
    ended = subprocess.run(
        [sys.executable, "-S", "-B", COURSE / program, action, *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False,
        timeout=120)
    return ended.returncode, ended.stdout, ended.stderr


class Limits(unittest.TestCase):
    def status(self, code, is_alone=True):
        """How a Python program ends within the limits, and what it prints."""
        with tempfile.TemporaryDirectory() as folder:
            log = os.path.join(folder, "log")
            status = subprocess.run(limits.command(
                log, [sys.executable, "-S", "-B", "-c", IMPORTS + code],
                is_alone), check=False,
                env={**os.environ, "SECRET": "1"}).returncode
            return (128 - status if status < 0 else status,
                    pathlib.Path(log).read_text("utf-8"))

    @unittest.skipUnless(limits.can_filter(), "this kernel has no filters")
    def test_refused_calls_end_the_program(self):
        with tempfile.TemporaryDirectory() as folder:
            kept = os.path.join(folder, "kept")
            pathlib.Path(kept).write_text("kept", "utf-8")
            for code in ("os.fork()", "os.system('true')",
                         "os.kill(os.getppid(), 0)", "os.setsid()",
                         "socket(2, 1, 0)", "os.unlink(kept)",
                         "os.rename(kept, kept + '2')", "os.mkdir(kept + '2')",
                         "os.link(kept, kept + '2')", "os.chmod(kept, 0)",
                         "os.symlink(kept, kept + '2')", "os.truncate(kept, 0)",
                         "os.utime(kept)", "os.setxattr(kept, 'user.a', b'')",
                         "open(kept, 'a')", "open(kept, 'r+')",
                         "os.open(kept + '2', os.O_CREAT)",
                         "libc.syscall(TGKILL, os.getppid(), os.getppid(), 0)",
                         "fcntl.ioctl(0, termios.TIOCSTI, b'x')",
                         "libc.shmget(0, 4096, 0o1600)",
                         "resource.prlimit(os.getppid(), 0, (9, 9))"):
                with self.subTest(code):
                    self.assertEqual(
                        self.status(f"kept = {kept!r}\n{code}\nprint('went on')"),
                        (159, ""))
            self.assertEqual(os.listdir(folder), ["kept"])
            self.assertEqual(pathlib.Path(kept).read_text("utf-8"), "kept")
        self.assertIn("start a process", limits.reason(159))

    def test_what_a_strategy_needs_is_allowed(self):
        self.assertEqual(self.status(
            "import threading\n"
            "thread = threading.Thread(target=print, args=('thread',))\n"
            "thread.start(); thread.join()\n"
            "print(len(open('/etc/passwd').read()) > 0)\n"
            "print(libc.syscall(463, -1, 0, 0, 0, 0, 0), ctypes.get_errno())\n"
            "print(resource.getrlimit(resource.RLIMIT_CORE))\n"
            "print('PATH' in os.environ, 'SECRET' in os.environ)"),
            (0, "thread\nTrue\n-1 38\n(0, 0)\nTrue False\n"))
        self.assertEqual(self.status("os.abort()")[0], 134)

    def test_output_and_memory_end(self):
        status, printed = self.status(
            "signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n"
            "while True: print('more')")
        self.assertEqual((status, len(printed)), (153, 1 << 20))
        self.assertIn("printed more than 1 MiB", limits.reason(153))
        self.assertIn("MemoryError", self.status("bytearray(2 << 30)")[1])

    def test_a_compiler_has_more(self):
        self.assertEqual(self.status(
            "size = len(bytearray(2 << 30)); pid = os.fork()\n"
            "if pid: os.waitpid(pid, 0); print(size >> 30, os.environ['SECRET'])",
            is_alone=False), (0, "2 1\n"))
        self.assertIn("MemoryError", self.status("bytearray(4 << 30)",
                                                 is_alone=False)[1])


class Page(unittest.TestCase):
    def test_weeks_have_the_points_and_mistakes_that_there_are(self):
        page = (ROOT / "chapters" / "teaching.md").read_text("utf-8")
        weeks = re.findall(r"\| `./shardbook mistake (\w+) ([a-z-]+)` "
                           r"\| `(\w+)` \| (\d) \|", page)
        self.assertEqual(len(weeks), 11)
        for ran, mistake, title, points in weeks:
            chapter, = find_chapters([title])
            self.assertEqual(ran, title)
            self.assertIn(mistake, mistakes_of(chapter))
            self.assertEqual(int(points), most_points(chapter), title)
        for limit in (f"{limits.RUN_SECONDS} s of computing and "
                      f"{limits.WAIT_SECONDS} s in all",
                      f"{limits.RUN_BYTES >> 30} GiB of memory, "
                      f"{limits.OPEN_FILES} open files, "
                      f"{limits.OUTPUT_BYTES >> 20} MiB of output",
                      f"{limits.COMPILE_SECONDS} s, "
                      f"{limits.COMPILE_BYTES >> 30} GiB and files of at most "
                      f"{limits.OBJECT_BYTES >> 20} MiB"):
            self.assertIn(limit, page)


@unittest.skipUnless(BUILD.resolve() == (ROOT / "build").resolve(),
                     "the commands use build/")
class Grade(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name, "class")
        self.folder.mkdir()

    def hand_in(self, student, text, name="ddp.cpp"):
        path = self.folder / student / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def test_a_hostile_file_has_no_points_and_a_sentence(self):
        outside = self.folder / "outside"
        outside.write_text("kept", "utf-8")
        for student, (first, _) in HOSTILE.items():
            self.hand_in(student, answer(
                first.replace("OUTSIDE", os.fspath(outside))))
        status, printed, said = run("grade.py", os.fspath(self.folder),
                                    "--format=json")
        self.assertEqual(status, 0, said)
        rows = {row["student"]: row for row in json.loads(printed)}
        self.assertEqual({*rows}, {*HOSTILE})
        for student, (_, sentence) in HOSTILE.items():
            with self.subTest(student):
                self.assertIn(sentence, rows[student]["error"])
                self.assertEqual((rows[student]["points"], rows[student]["of"],
                                  rows[student]["holds"]), (0, 3, ""))
        self.assertEqual(outside.read_text("utf-8"), "kept")

    def test_a_class_has_a_table(self):
        self.hand_in("ada", answer())
        half = answer().replace("1.0 / dp.size()", "0.25")
        self.hand_in("bob", half)
        self.hand_in("bob", "3\n", "ddp.tries")
        self.hand_in("cyd", answer("no_such_call();"))
        self.hand_in("cyd", "text", "notes.txt")
        self.hand_in("cyd", answer(), "dpp.cpp")
        self.hand_in("=dan", b"\xff\n")
        self.hand_in("eve", "int main() { return 0; }\n")
        (self.folder / "fay").mkdir()
        table = self.folder / "points.csv"
        status, printed, said = run("grade.py", os.fspath(self.folder),
                                    f"--csv={table}")
        self.assertEqual(status, 1, said)
        self.assertIn("[4/4] eve ddp.cpp\n", said)
        for line in ("student  02   points", "=dan     -    0",
                     "ada      3/3  3", "bob      2/3  2", "cyd      0/3  0",
                     "eve      0/3  0", "fay      -    0",
                     "=dan, ddp.cpp: is no text in UTF-8",
                     "cyd, dpp.cpp: names no exercise (did you mean ddp or dp?)",
                     "cyd, notes.txt: names no exercise",
                     "fay: no file to be read"):
            self.assertIn(line + "\n", printed)
        self.assertRegex(printed, r"\nbob, ddp: sizes: on 2 ranks, .*\n"
                                  r"cyd, ddp: .*cyd/ddp.cpp does not compile:\n")
        self.assertRegex(printed, "eve, ddp: .* has no line // --- end\n")
        with open(table, encoding="utf-8", newline="") as file:
            rows = {(row["student"], row["exercise"]): row
                    for row in csv.DictReader(file)}
        self.assertEqual(rows["ada", "ddp"]["holds"], "numbers bytes sizes")
        self.assertEqual(rows["bob", "ddp"]["tries"], "3")
        self.assertIn("typed-the-ranks", rows["bob", "ddp"]["hint"])
        self.assertIn("error: ‘no_such_call’", rows["cyd", "ddp"]["error"])
        self.assertIn(("'=dan", "ddp.cpp"), rows)

    def test_a_file_is_judged_by_the_lesson_s_end(self):
        # A bill of its own, and a main that judges nothing
        begin, _, end = answer().partition("// --- end\n")
        bad = begin.replace("1.0 /", "2.0 /") + (
            "// --- end\n" + end.replace("{4, 2}, train, bill", "{1}, train, bill")
            .replace("return compare(", "return 0; compare("))
        path = self.hand_in("ada", bad)
        status, printed, said = run("lessons.py", "exercise", "ddp",
                                    f"--file={path}", "--format=json")
        self.assertEqual((status, said), (1, ""), printed)
        found = json.loads(printed)
        self.assertEqual(
            {claim["name"]: claim["holds"] for claim in found["claims"]},
            {"numbers": False, "bytes": True})
        self.assertEqual(
            [found[key] for key in ("chapter", "file", "points", "of", "tries",
                                    "error", "not_limited")],
            ["ddp", os.fspath(path), 1, 3, None, None, []])
        path.write_text(answer(), "utf-8")
        status, printed, said = run("lessons.py", "exercise", "ddp",
                                    f"--file={path}")
        self.assertEqual((status, said), (0, ""), printed)
        self.assertIn("All claims hold", printed)
        self.assertEqual(run("lessons.py", "exercise", "ddp", f"--file={path}",
                             action="targets")[1], "lesson_libs_02_ddp\n")

    def test_a_mistake_in_the_command_has_status_2(self):
        path = self.hand_in("ada", answer())
        for words, sentence in (
                (("lessons.py", "exercise", "ddp", "--file=none.cpp"),
                 "exercise ddp --file none.cpp: no such file"),
                (("lessons.py", "exercise", "ddp", f"--file={self.folder}"),
                 "is no file"),
                (("lessons.py", "exercise", "ddp", f"--file={path}",
                  "--format=xml"), "exercise ddp --format xml: only json"),
                (("lessons.py", "exercise", "ddp", "--solution",
                  f"--file={path}"), "--solution --file: give one of them"),
                (("grade.py",), "grade: give one folder"),
                (("grade.py", os.fspath(path)), "ddp.cpp: no such folder"),
                (("grade.py", os.fspath(path.parent)), "no folder of a student"),
                (("grade.py", os.fspath(self.folder), "--solution"),
                 "grade --solution: only --csv FILE and --format json may")):
            with self.subTest(words):
                status, printed, said = run(*words, action="targets")
                self.assertEqual((status, printed), (2, ""))
                self.assertIn(sentence, said)
        self.hand_in("bob", answer(), "moe.cpp")
        self.assertEqual(
            run("grade.py", os.fspath(self.folder), action="targets")[1],
            "lesson_libs_02_ddp lesson_libs_13_moe\n")


if __name__ == "__main__":
    unittest.main()
