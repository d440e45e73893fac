#!/usr/bin/env python3
"""Kills and resumes runs, over and over, and checks that nothing is lost.

  tests/by_hand/soak.py BUILD [--cycles N] [--seed S] [--short]
                       [--without-processes]

A cycle starts a run with --resume, and ends it at a random moment of its first
second: SIGKILL to all of it or to one rank, SIGTERM, or SIGINT. Afterwards

  the folder has a whole checkpoint, not older than the one before;
  at most --checkpoint-every steps are lost, and none after SIGTERM or SIGINT;
  the log has every step once, with the loss of a run that never stopped: the
  same bits on the same ranks, and equal to 1e-9 in f64 on others.

Losses come from all weights, so a bit that is lost in a checkpoint shows in the
steps after it. Exit status: 0 when all went as it should.
"""

import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

from book import folder, parser, program

TINY = ["--model", "gpt-nano", "--data", "walk", "--seq", "8", "--batch", "8",
        "--cluster", "none", "--no-check", "--lr-schedule", "cosine",
        "--warmup", "20", "--steps", "100000"]
# Each line is one run. With several ways, each cycle takes another one.
THREADS = [
    [("00_single_device", ["--dropout", "0.1"])],
    [("01_data_parallel", ["--world-size", "2"])],
    [("03_zero_fsdp", ["--world-size", "2", "--strategy", "zero1"])],
    [("03_zero_fsdp", ["--world-size", "3", "--strategy", "fsdp2",
                       "--batch", "9"])],
    [("05_gpipe", ["--world-size", "3"])],
    [("06_1f1b", ["--world-size", "2", "--schedule", "zb-h1",
                  "--post-validation"])],
    [("07_tensor_parallel", ["--world-size", "2", "--rng", "megatron",
                             "--dropout", "0.1"])],
    [("11_dtensor", ["--world-size", "4", "--mesh", "2x2"])],
    [("02_ddp", ["--world-size", "2"]),
     ("02_ddp", ["--world-size", "4"]),
     ("03_zero_fsdp", ["--world-size", "2", "--strategy", "zero3"]),
     ("06_1f1b", ["--world-size", "2"]),
     ("08_tensor_parallel_2d", ["--world-size", "4"]),
     ("12_sequence_parallel", ["--world-size", "2"])],
]
PROCESSES = [
    [("02_ddp", ["--world-size", "2", "--backend", "gloo"])],
    [("03_zero_fsdp", ["--world-size", "3", "--batch", "9", "--strategy",
                       "zero2", "--backend", "gloo"])],
    [("06_1f1b", ["--world-size", "2", "--backend", "gloo"])],
]


def fail(text):
    print(f"soak: {text}", file=sys.stderr)
    sys.exit(1)


def hear_interrupts():
    """A background job of a shell ignores them, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def children(pid):
    """Processes that this one has started."""
    text = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(each) for each in text.split()]


def wait_for_lines(child, path, count):
    """The file's lines, once there are so many."""
    while True:
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        if len(lines) >= count:
            return lines
        if child.poll() is not None:
            fail(f"{path}: the run ended by itself: {child.returncode}")
        time.sleep(0.02)


class Run:
    """One training, and what is known about it."""

    def __init__(self, build, folder, ways):
        self.build, self.ways, self.folder = build, ways, folder
        self.is_mixed = len(ways) > 1
        self.every = random.choice([1, 2, 3, 5, 10])
        self.checkpoints = folder / "checkpoints"
        self.log = folder / "log"
        self.newest = 0
        self.cycles = 0
        self.repeated = 0

    def command(self, way, more):
        chapter, options = way
        dtype = ["--dtype", "f64"] if self.is_mixed else []
        return [program(self.build, chapter), *TINY, *options, *dtype, *more]

    def steps(self):
        names = [each.name for each in self.checkpoints.glob("step-*")]
        return sorted(int(name[5:]) for name in names)

    def logged(self):
        """Whole lines of the log."""
        if not self.log.exists():
            return []
        lines = self.log.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def cycle(self, how=None, after=0):
        """Starts the run and ends it: at random, or after so many steps."""
        way = random.choice(self.ways)
        what = " ".join([way[0], *way[1]])
        child = subprocess.Popen(
            self.command(way, ["--checkpoint", str(self.checkpoints),
                               "--checkpoint-every", str(self.every),
                               "--resume", "--log", str(self.log)]),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True, preexec_fn=hear_interrupts)
        if after:
            wait_for_lines(child, self.log, after)
        else:
            time.sleep(random.random() ** 2)
        how = how or random.choice(["kill", "kill", "kill a rank", "term",
                                    "int"])
        try:
            ranks = children(child.pid)
        except OSError:
            ranks = []
        if how == "kill a rank" and ranks:
            os.kill(random.choice(ranks), signal.SIGKILL)
        elif how in ("kill", "kill a rank"):
            # Copies die with the process that the user started
            child.kill()
        else:
            child.send_signal(signal.SIGTERM if how == "term" else
                              signal.SIGINT)
        try:
            text, _ = child.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            fail(f"{what}: did not end after {how}")
        self.cycles += 1
        self.check(f"{what}, {how}", how, child.returncode, text)

    def check(self, what, how, status, text):
        expected = {"term": [143, -15], "int": [130, -2], "kill": [-9],
                    "kill a rank": [-9, 3]}[how]
        if status not in expected:
            fail(f"{what}: exit status {status}\n{text}")
        steps = self.steps()
        newest = steps[-1] if steps else 0
        if newest < self.newest:
            fail(f"{what}: step {newest} after step {self.newest}")
        if len(steps) > 3:
            fail(f"{what}: {steps} are kept")
        done = len(self.logged())
        # A step is logged before it is kept
        if done - newest > self.every:
            fail(f"{what}: {done} steps done, the newest checkpoint has "
                 f"{newest}, --checkpoint-every {self.every}")
        match = re.search(r"interrupted after (\d+) of", text)
        if match and int(match[1]) != newest:
            fail(f"{what}: step {newest} is kept\n{text}")
        self.repeated += max(done - newest, 0)
        self.newest = newest

    def finish(self):
        """Compares with a run that never stopped."""
        # Steps after the last checkpoint: their losses come from its weights
        self.cycle("term", after=self.newest + 3)
        found = self.logged()[:self.newest]
        way = self.ways[0]
        whole = self.folder / "whole.log"
        child = subprocess.Popen(self.command(way, ["--log", str(whole)]),
                                 stdout=subprocess.DEVNULL,
                                 stderr=subprocess.DEVNULL)
        lines = wait_for_lines(child, whole, len(found))
        child.kill()
        child.wait()
        for number, (text, b) in enumerate(zip(lines, found)):
            a = json.loads(text)
            allowed = 1e-9 * abs(a["loss"]) if self.is_mixed else 0
            if (b["step"] != number or a["lr"] != b["lr"] or
                    abs(a["loss"] - b["loss"]) > allowed):
                fail(f"{way}: line {number} is {b}, without stops {a}")


def main():
    line = parser(__doc__)
    line.add_argument("build", type=folder)
    line.add_argument("--cycles", type=int, default=1000)
    line.add_argument("--seed", type=int, default=None)
    line.add_argument("--short", action="store_true")
    line.add_argument("--without-processes", action="store_true")
    args = line.parse_args()
    seed = args.seed if args.seed is not None else random.randrange(1 << 30)
    random.seed(seed)
    ways = THREADS + ([] if args.without_processes else PROCESSES)
    if args.short:
        ways = random.sample(ways, 3)
        args.cycles = 12
    print(f"soak: seed {seed}, {args.cycles} cycles")
    with tempfile.TemporaryDirectory(prefix="shardbook-soak-") as scratch:
        runs = []
        for i, each in enumerate(ways):
            place = pathlib.Path(scratch) / str(i)
            place.mkdir()
            runs.append(Run(args.build, place, each))
        for i in range(args.cycles):
            random.choice(runs).cycle()
            if sys.stderr.isatty():
                print(f"\r  {i + 1}/{args.cycles}", end="", file=sys.stderr)
        for run in runs:
            run.finish()
        for run in runs:
            names = ", ".join(way[0] for way in run.ways)
            print(f"  {names}: {run.cycles} cycles, {run.newest} steps kept, "
                  f"{run.repeated} done twice, every {run.every}")
    print(f"soak: {args.cycles} cycles, nothing lost")


if __name__ == "__main__":
    main()
