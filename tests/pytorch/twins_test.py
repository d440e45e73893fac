"""The lessons in PyTorch: they equal one device, and their judge sees mistakes.

  twins_test.py BUILD
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import torch_python

torch_python.require_torch()

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "lessons"),
                str(ROOT / "chapters" / "course")]
import commands_test  # takes BUILD
import pytorch  # finds table/
import torch_counted
import torch_lesson

import programs

os.environ["SHARDBOOK_YARDSTICK"] = os.path.join(commands_test.BUILD,
                                                 pytorch.YARDSTICK)
CHAPTERS = {"ddp": "02_ddp", "gpipe": "05_gpipe",
            "tensor_parallel": "07_tensor_parallel"}
DIVIDE = "        parameter.grad.div_(dist.get_world_size())\n"
WAIT = "            work.wait()\n"
# By title: what is changed, the claim that fails, and what the judge says
MISTAKES = {
    "ddp": [
        ("forgot to divide", [(DIVIDE, "")], "numbers", "most in "),
        ("typed the ranks", [("dist.get_world_size())\n", "4)\n")], "numbers",
         "most in "),
        ("never waited", [(WAIT, "            pass\n")], "ends",
         r"rank \d: all_reduce was begun, and nobody calls wait"),
        ("waited too late", [("        ddp.wait()\n", ""),
                             ("        optimizer.step()\n",
                              "        optimizer.step()\n        ddp.wait()\n")],
         "numbers", "most in "),
        ("sent twice", [("        work =", "        dist.all_reduce(torch.zeros("
                         "1))\n        work =")], "bytes",
         "; the bill is 1365200 each"),
        ("two gradients of one rank", [(DIVIDE, DIVIDE + """\
        if dist.get_rank() == 0 and parameter.grad.dim() == 2:
            raise ValueError("no luck")
""")], "ends", "rank 0, line 31: ValueError: no luck"),
    ],
    "gpipe": [
        ("a crash", [("    kept = []\n", "    kept = []\n    if s == 0: exit(0)"
                      "\n")], "ends", "^rank 0 ended with status 0$"),
        ("an endless loop", [("    kept = []\n", "    kept = []\n"
                              "    while s == 0: pass\n")], "ends",
         "rank 1, line 23: recv from rank 0 waited 1 s, while rank 0 went on"),
        ("forgot to divide", [("targets[b]) / MICRO_BATCHES", "targets[b])")],
         "numbers", "most in "),
        ("tied gradient forgotten",
         [("    dist.all_reduce(embedding.grad, group=ends)\n", "")], "numbers",
         "most in wte.weight"),
        # Both send, and no buffer helps
        ("sent at once", [("        if s != last:  #",
                           "        dist.send(kept[b].double(), 1 - s)\n"
                           "        if s != last:  #")],
         "ends", "waited 1 s; here, as with large messages, no send ends before"),
    ],
    "tensor_parallel": [
        ("forgot f", [("CopyTo.apply(x) @", "x @")], "numbers", "most in "),
        ("summed in both directions",
         [("        return gradient\n", "        return summed(gradient)\n")],
         "numbers", "most in "),
        ("bias inside the sum",
         [("ReduceFrom.apply(x @ weight) + bias",
           "ReduceFrom.apply(x @ weight + bias)")], "numbers", "most in "),
    ],
}
RIGHT = {
    "ddp": [
        ("in the foreground", [
            ("(parameter.grad, async_op=True)", "(parameter.grad)"),
            ("        self.works.append(work)\n", "")]),
        ("the average of shards", [
            ("        work = dist.all_reduce(parameter.grad, async_op=True)\n", """\
        n = dist.get_world_size()
        whole = parameter.grad.flatten()
        short = torch.zeros(-len(whole) % n, dtype=torch.float64)
        whole = torch.cat([whole, short])
        shard = whole.new_empty(len(whole) // n)
        dist.reduce_scatter_tensor(shard, whole)
        work = dist.all_gather_into_tensor(whole, shard, async_op=True)
        work.wait()
        parameter.grad.copy_(whole[:parameter.numel()].view_as(parameter))
""")]),
    ],
    "gpipe": [
        ("in the background", [
            ("            dist.send(x.grad, s - 1)\n",
             "            dist.isend(x.grad, s - 1).wait()\n"),
            ("    dist.recv(x, rank)\n",
             "    op = dist.P2POp(dist.irecv, x, rank)\n"
             "    dist.batch_isend_irecv([op])[0].wait()\n")]),
    ],
}


class Lessons(unittest.TestCase):
    def judge(self, title, task, changes=(), ranks=None):
        """The claims of a changed lesson: whether each holds, and its text."""
        path = pytorch.lesson_path(CHAPTERS[title])
        text = pathlib.Path(path).read_text("utf-8")
        for old, new in changes:
            self.assertEqual(text.count(old), 1, old)
            text = text.replace(old, new)
        with mock.patch.object(torch_lesson, "compare") as compare, \
                mock.patch.object(sys, "argv", [path]):
            exec(compile(text, path, "exec"), {"__name__": "__main__"})
            train, bill = compare.call_args.args
            wishes = compare.call_args.kwargs
            with tempfile.TemporaryDirectory() as folder:
                claims = torch_lesson.judge_task(
                    torch_lesson.Task(torch_lesson.TASKS[task],
                                      wishes.get("model", "gpt"), folder),
                    train, bill, ranks or wishes["ranks"][0],
                    wishes.get("cut", {}))
        return {name: (holds, text) for name, holds, text in claims}

    def test_each_equals_the_lesson_in_cxx_and_other_sizes(self):
        for title, chapter in CHAPTERS.items():
            lesson = pathlib.Path(commands_test.BUILD, "chapters",
                                  "lesson_" + chapter)
            ours = subprocess.run([lesson], stdout=subprocess.PIPE, text=True,
                                  check=True).stdout
            loss = re.search("loss ([0-9.]+)", ours)[1]
            sent = re.search("sent (.*), as billed", ours)[1]
            for task, ranks in ((0, None), (1, 3)):
                with self.subTest(title, task=task, ranks=ranks):
                    claims = self.judge(title, task, ranks=ranks)
                    self.assertTrue(claims["numbers"][0], claims)
                    self.assertTrue(claims["bytes"][0], claims)
                    if (task, ranks) == (0, None):
                        self.assertIn(f"loss {loss}, {loss} ",
                                      claims["numbers"][1])
                        self.assertIn(f"sent {sent}, ", claims["bytes"][1])

    def test_other_right_ways_pass(self):
        for title, ways in RIGHT.items():
            for name, changes in ways:
                with self.subTest(f"{title}: {name}"):
                    claims = self.judge(title, 1, changes, ranks=2)
                    self.assertTrue(all(holds for holds, _ in claims.values()),
                                    claims)

    def test_mistakes_fail(self):
        for title, mistakes in MISTAKES.items():
            for name, changes, claim, said in mistakes:
                with self.subTest(f"{title}: {name}"), mock.patch.object(
                        torch_counted, "WAIT_SECONDS", 1):
                    claims = self.judge(title, 1, changes, ranks=2)
                    self.assertIs(claims[claim][0], False, claims)
                    self.assertRegex(claims[claim][1], said)


class Commands(unittest.TestCase):
    def run_command(self, *words, action="run"):
        ended = subprocess.run(
            [sys.executable, "-B", "-c", commands_test.DRIVER,
             ROOT / "chapters" / "table", ROOT / "chapters" / "course",
             commands_test.BUILD, self.out, action, *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False, timeout=120,
            env={**os.environ, "SHARDBOOK_PYTHON": sys.executable})
        return ended.returncode, ended.stdout

    def test_an_exercise_from_the_empty_file_to_the_solution(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.out = folder.name
        exercise = ["exercise", "tensor_parallel", "--pytorch"]
        self.assertEqual(self.run_command(*exercise, action="targets"),
                         (0, "build.ninja\n"))
        status, said = self.run_command(*exercise)
        self.assertEqual(status, 0, said)
        self.assertIn("exercises/tensor_parallel.py: write what is missing",
                      said)
        self.assertEqual(self.run_command(*exercise, action="targets"),
                         (0, pytorch.YARDSTICK + "\n"))
        status, said = self.run_command(*exercise)
        self.assertEqual(status, 1, said)
        self.assertRegex(said, r"ends +FAILS  rank \d, line \d+: column_linear is "
                               "empty: write it")
        self.assertRegex(said, r"bytes +later +the bill is 1658880 each")
        status, said = self.run_command(*exercise, "--solution")
        self.assertEqual(status, 0, said)
        self.assertIn("+    return CopyTo.apply(x) @ weight + bias\n", said)
        path = pathlib.Path(self.out, "exercises", "tensor_parallel.py")
        lesson = pytorch.read(pytorch.lesson_path("07_tensor_parallel"))
        path.write_text(lesson, "utf-8")
        status, said = self.run_command(*exercise)
        self.assertEqual(status, 0, said)
        self.assertIn("All claims hold", said)
        # Four ranks hide this mistake, two show it
        path.write_text(lesson.replace(
            "return gradient\n",
            "return gradient * 4 / dist.get_world_size()\n"), "utf-8")
        status, said = self.run_command(*exercise)
        self.assertEqual(status, 1, said)
        self.assertRegex(said, "numbers +holds")
        self.assertRegex(said, "sizes +FAILS  on 2 ranks, .*most in ")

    def says_and_ends_with_2(self, run, *words):
        with mock.patch.object(programs, "say") as say, \
                self.assertRaises(SystemExit) as ended:
            run(*words)
        self.assertEqual(ended.exception.code, 2)
        return say.call_args.args[0]

    def test_words_that_no_command_has_and_no_torch(self):
        for said, *words in (
                ("this lesson is in C++ alone; in PyTorch there are ddp, gpipe, "
                 "tensor_parallel", "exercise", "moe", "--pytorch"),
                ("goes with lesson and exercise only", "toy", "ddp",
                 "--pytorch"),
                ("give a chapter, as in", "lesson", "ddp", "--solution",
                 "--pytorch"),
                ("give a chapter, as in", "exercise", "--pytorch")):
            self.assertIn(said, self.says_and_ends_with_2(
                pytorch.read_words, words[0], words[1:]))
        with mock.patch.object(torch_python, "candidates",
                               return_value=["/bin/false"]):
            said = self.says_and_ends_with_2(pytorch.python_with_torch)
        self.assertRegex(said, "no Python with torch; tried /bin/false; .*"
                         "SHARDBOOK_PYTHON")


if __name__ == "__main__":
    unittest.main()
