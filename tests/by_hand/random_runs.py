#!/usr/bin/env python3
"""Runs the chapters' programs with random options and judges what they do.

    tests/by_hand/random_runs.py --runs 1000            all chapters, on threads,
                                                    processes and shapes
    tests/by_hand/random_runs.py --chapter 05 --seed 7
    tests/by_hand/random_runs.py --only 132             run 132 again

Run i of seed s always draws the same options, whatever else is run. Models
are small and steps few, so a run takes a fraction of a second. Some runs have a
second one behind them: it goes on from a checkpoint, or loads saved weights, on
another number of ranks; or the planner answers again without its bounds. A run
fails with

    crash        a signal ended it
    hang         it did not end within --limit seconds
    claim        a claim does not hold (exit status 1)
    unpredicted  a claim counts as passed although a count has no prediction
    contradicted a claim counts as passed although its numbers differ
    unmeasured   a claim that could be judged was not
    message      options were refused, but not by one sentence on stderr, with
                 nothing on stdout
    accepted     an impossible option was not refused
    status       another exit status than 0, 1 or 2
    output       no JSON came out
    file         a file that was asked for is missing, or not whole

Each failure is printed with its command. Exit status: 0 none, 1 some, 2 bad
input.
"""

import collections
import concurrent.futures
import json
import os
import pathlib
import random
import shlex
import signal
import subprocess
import sys
import tempfile

from book import CHAPTERS, ROOT, folder, parser, program
from draw import Draw
from draw_plan import judge_plan, judge_same_plans
from judge import judge_refusal, judge_report
from judge_files import judge_files

NAMES = {**CHAPTERS, "plan": "planner"}
Verdict = collections.namedtuple("Verdict", "index draw command state detail")


def kill_group(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def program_of(args, chapter):
    if chapter == "plan":
        return str(args.build / "chapters/planner/shardbook_plan")
    return program(args.build, NAMES[chapter])


def execute(command, folder, limit):
    """Status, stdout and stderr; after `limit` seconds the status is None."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, cwd=folder, start_new_session=True)
    status = None
    try:
        out, err = process.communicate(timeout=limit)
        status = process.returncode
    except subprocess.TimeoutExpired:
        kill_group(process)
        out, err = process.communicate()
    finally:
        kill_group(process)
    return (status, out.decode("utf-8", "replace"),
            err.decode("utf-8", "replace"))


def judge(draw, status, out, err, limit):
    """What is wrong with how a run ended and what it printed, or None."""
    if status is None:
        return ("hang", f"no end after {limit} s; {err[-200:]}")
    if status < 0 or status > 128:
        return ("crash", f"status {status}; {err[-300:]}")
    if status == 2:
        return judge_refusal(out, err, draw.impossible)
    if status == 3 and "--device-memory" in draw.words:
        # The ledger says what did not fit
        return None if "capacity" in err else ("status", err[-200:])
    if status not in (0, 1):
        return ("status", f"{status}; {err[-200:]}")
    if draw.impossible and status == 0:
        return ("accepted", " ".join(draw.words[-2:]))
    if draw.chapter == "plan":
        return judge_plan(draw, status, out)
    return judge_report(draw, status, out)


def judge_second(draw, command, out, folder, args):
    """Runs once more what a good run has left; what is wrong, or None."""
    if draw.then == "unpruned":
        again = [*command, "--no-prune"]
        status, unpruned, err = execute(again, folder, args.limit)
        return (judge(draw, status, unpruned, err, args.limit) or
                judge_same_plans(out, unpruned)), again
    if draw.then == "read config":
        again = [program_of(args, "15"), "--print-config", "--config",
                 "ds.json", "--world-size", str(draw.world_size),
                 "--model", draw.value_of("--model"), "--data", "random",
                 "--seq", str(json.loads(out)["seq"])]
        status, _, err = execute(again, folder, args.limit)
        return None if status == 0 else ("config", err[-300:]), again
    if "--resume" in draw.then:
        draw.steps_before = int(draw.value_of("--steps"))
    again = [*command, *draw.then]
    return judge_run(draw, again, folder, args)[1], again


def judge_run(draw, command, folder, args):
    """Runs a command: its status, what is wrong, and what it printed."""
    status, out, err = execute(command, folder, args.limit)
    wrong = judge(draw, status, out, err, args.limit)
    if status == 0 and not wrong:
        wrong = judge_files(command, folder)
    return status, wrong, out or err


def run_once(index, args):
    """Draws, runs and judges run `index`."""
    rng = random.Random(f"{args.seed}/{index}")
    chapter = rng.choice(sorted(NAMES))
    if args.chapter:
        chapter = args.chapter[index % len(args.chapter)]
    draw = Draw(rng, chapter, args.backends)
    command = [program_of(args, chapter), "--format", "json",
               *draw.words]
    shown = shlex.join(command)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for file, text in draw.files.items():
            (folder / file).write_text(text, encoding="utf-8")
        status, wrong, out = judge_run(draw, command, folder, args)
        if status == 0 and not wrong and draw.then:
            wrong, again = judge_second(draw, command, out, folder, args)
            shown += "\n  " + shlex.join(again)
    state, detail = "passed", ""
    if status in (2, 3):
        state, detail = "refused", out.strip()
    if wrong:
        state, detail = wrong
        shown += "".join(f"\n  {name}: {text}"
                         for name, text in draw.files.items())
    return Verdict(index, draw, shown, state, detail)


# --- All runs ----------------------------------------------------------------


def read_arguments():
    line = parser(__doc__)
    line.add_argument("--build", type=folder, default=ROOT / "build",
                        help="build folder")
    line.add_argument("--runs", type=int, default=100)
    line.add_argument("--seed", default="0")
    line.add_argument("--only", type=int, help="one run, by its number")
    line.add_argument("--chapter", action="append", choices=sorted(NAMES))
    line.add_argument("--backend", action="append", dest="backends",
                        choices=["threads", "gloo", "sim"])
    line.add_argument("--limit", type=float, default=120,
                        help="seconds that a run may take")
    line.add_argument("--jobs", type=int, default=1)
    line.add_argument("--show", action="store_true",
                        help="print the commands of all runs")
    args = line.parse_args()
    args.backends = args.backends or ["threads", "threads", "gloo", "sim"]
    for chapter in args.chapter or NAMES:
        if not os.path.exists(program_of(args, chapter)):
            line.error(f"--build {args.build}: has no "
                         f"chapters/{NAMES[chapter]}")
    return args


def main():
    args = read_arguments()
    indices = [args.only] if args.only is not None else range(args.runs)
    states = collections.defaultdict(collections.Counter)
    failures = 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for done in pool.map(lambda i: run_once(i, args), indices):
            states[done.draw.chapter][done.state] += 1
            good = done.state in ("passed", "refused")
            failures += not good
            if good and not args.show:
                continue
            print(f"run {done.index}: {done.state} {done.detail}\n"
                  f"  {done.command}", flush=True)
    for chapter in sorted(states):
        counts = ", ".join(f"{count} {state}" for state, count
                           in sorted(states[chapter].items()))
        print(f"{NAMES[chapter]:<18} {counts}")
    print(f"seed {args.seed}: {len(indices)} runs, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
