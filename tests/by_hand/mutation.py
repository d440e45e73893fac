#!/usr/bin/env python3
"""Changes one line at a time and asks whether a test notices.

    tests/by_hand/mutation.py BUILD [--only TEXT]... [--from N] [--to N] [--list]
                          [--jobs N] [--resume FILE]

The changes are in mutants.py and mutants_*.py, each with the test program and
the filters that are expected to notice it: one filter after another, until a
test fails. The script runs by hand, not in CI.

A mutant changes neither the checkout nor the build folder. The changed source
is compiled alone, as a small library that the test program loads before all
others: its functions take the place of the ones in the chapter's library. A
changed header is compiled with the sources of its folder. The same is done
once with every source as it is, and its tests have to pass; they limit the
time of the mutants, because a mutant may wait for ever.

A mutant is
  killed          when a test fails or crashes;
  no end          when its time runs out: it waits for ever, or the machine is
                  busy; this does not count as killed;
  survived        when every test passes all the same;
  does not apply  when its line is not in the file, or not once;
  does not build  when the compiler or the loader refuses it.

--resume FILE keeps the results, and a mutant that was killed there is not
tried again.

Exit status: 0 when at least 95 % of the chosen mutants were killed, 1 when
fewer were, 2 when nothing could be run: programs that do not build, or a test
that fails, or runs nothing, without a change.
"""

import collections
import concurrent.futures
import importlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time

sys.dont_write_bytecode = True
from book import ROOT, folder, parser  # noqa: E402
from mutants import MUTANTS  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
for more in sorted(HERE.glob("mutants_*.py")):
    importlib.import_module(more.stem)  # adds to the list
ENOUGH = 0.95
# Of the command that compiles a source: all but its input and output
FLAGS = ("-I", "-D", "-f", "-m", "-O", "-pthread", "-std=")


class CannotRun(Exception):
    """Nothing could be run; the text says why."""


def one_line(text):
    return " ".join(text.split())


def key(mutant):
    return [mutant.file, mutant.line, mutant.becomes]


def call(command, **options):
    return subprocess.run(command, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True,
                          stdin=subprocess.DEVNULL, errors="replace",
                          **options)


class Build:
    """A build folder: its programs, and how it compiles a source."""

    def __init__(self, folder, programs):
        self.folder = folder
        listing = call(["ninja", "-C", str(folder), "-t", "targets", "all"])
        self.programs = {}
        for program in programs:
            found = re.search(rf"^(tests/\S*/(?:\d\d_)?{program}_test): ",
                              listing.stdout, re.MULTILINE)
            if not found:
                raise CannotRun(f"{folder} has no program {program}_test")
            self.programs[program] = found[1]
        result = call(["ninja", "-C", str(folder), *self.programs.values()])
        if result.returncode != 0:
            raise CannotRun(result.stdout + "\nthe programs do not build")
        # The source of a unity build includes the ones that it compiles.
        self.commands = {}
        entries = json.loads((folder / "compile_commands.json").read_text())
        for entry in entries:
            command = shlex.split(entry["command"])
            if "-fPIC" not in command:
                continue  # of a program, not of a library
            file = folder / entry["file"]
            included = re.findall(r"#include ?<(/.*)>", file.read_text("utf-8")
                                  ) if "-unity" in file.name else []
            for path in included or [file]:
                self.commands[os.path.realpath(path)] = command

    def compile(self, file, text, target):
        """Compiles ROOT/file as if `text` stood there; what went wrong."""
        overlay = target.with_suffix(".d")
        changed = overlay / file
        changed.parent.mkdir(parents=True)
        changed.write_text(text, "utf-8")
        sources = [changed]
        if changed.suffix == ".h":
            sources = [path for path in sorted((ROOT / file).parent.iterdir())
                       if str(path.resolve()) in self.commands
                       and "\nint main(" not in path.read_text("utf-8")]
        command = self.commands.get(os.path.realpath(
            ROOT / file if sources == [changed] else sources[0]))
        if command is None:
            return f"error: no library of {self.folder} has {file}"
        first = next(i for i, word in enumerate(command) if word[0] == "-")
        unit = target.with_suffix(".cpp")
        unit.write_text("".join(f'#include "{path}"\n' for path in sources))
        result = call([command[first - 1], f"-I{overlay}",
                       *(word for word in command if word.startswith(FLAGS)),
                       "-w", "-shared", str(unit), "-o", str(target)],
                      cwd=self.folder)
        return result.stdout if result.returncode != 0 else ""

    def run(self, library, program, pattern, limit_s=None):
        """(passed, what it printed, seconds)"""
        begin = time.monotonic()
        command = [str(self.folder / self.programs[program]),
                   f"--gtest_filter={pattern}", "--gtest_brief=1",
                   "--gtest_fail_fast"]
        # A folder of its own: what a killed test leaves goes with it.
        with tempfile.TemporaryDirectory(prefix="shardbook-mutant-") as folder:
            try:
                result = call(command, timeout=limit_s, cwd=folder,
                              env=dict(os.environ, TMPDIR=folder,
                                       LD_PRELOAD=str(library)))
            except subprocess.TimeoutExpired as late:
                return False, f"no end after {late.timeout:.0f} s", limit_s
        return (result.returncode == 0, result.stdout,
                time.monotonic() - begin)


class Session:
    """Tries the mutants of one source after another."""

    def __init__(self, build, scratch, tell):
        self.build, self.scratch, self.tell = build, scratch, tell

    def try_source(self, mutants):
        """Tells (number, mutant, state, detail, seconds) of one source."""
        number, first = mutants[0]
        tests = ":".join(sorted({mutant.tests for _, mutant in mutants}))
        usual_s = self.unchanged_s(number, first.file, first.program, tests)
        for number, mutant in mutants:
            begin = time.monotonic()
            result = self.try_mutant(number, mutant, usual_s)
            self.tell(number, mutant, *result, time.monotonic() - begin)

    def unchanged_s(self, number, file, program, pattern):
        """The seconds of tests on a source that is compiled as it is."""
        if not (ROOT / file).is_file():
            return 0
        library = self.scratch / f"unchanged-{number}.so"
        if errors := self.build.compile(
                file, (ROOT / file).read_text("utf-8"), library):
            raise CannotRun(f"{errors}\n{file} does not build unchanged")
        passed, output, seconds = self.build.run(library, program, pattern)
        if not passed:
            raise CannotRun(f"{output}\n{program} {pattern} fails without a "
                            "change")
        if " 0 tests" in output or "[==========]" not in output:
            raise CannotRun(f"{program} {pattern} matches no test")
        return seconds

    def try_mutant(self, number, mutant, usual_s):
        """(state, detail)"""
        path = ROOT / mutant.file
        text = path.read_text("utf-8") if path.is_file() else ""
        if text.count(mutant.line) != 1:
            return "does not apply", f"found {text.count(mutant.line)} times"
        library = self.scratch / f"mutant-{number}.so"
        errors = self.build.compile(
            mutant.file, text.replace(mutant.line, mutant.becomes), library)
        if errors:
            return "does not build", "\n".join(
                line for line in errors.splitlines() if "error" in line)[:500]
        for pattern in mutant.tests.split(":"):
            passed, output, _ = self.build.run(
                library, mutant.program, pattern, 30 + 3 * usual_s)
            if not passed:
                break
        else:
            return "survived", mutant.reason
        if output.startswith("no end"):
            return "no end", output
        if "symbol lookup error" in output:
            return "does not build", output
        failures = [line for line in output.splitlines()
                    if line.startswith("[  FAILED  ]") and "(" in line]
        return "killed", (failures or output.splitlines()[-1:] or [""])[0]


def keep(file, mutant, state, detail):
    with file.open("a", encoding="utf-8") as results:
        results.write(json.dumps({"mutant": key(mutant), "state": state,
                                  "detail": detail}) + "\n")


def table(chosen, states):
    """How many were killed in each folder, as README.md shows it."""
    rows = {}
    for number, mutant in chosen:
        parts = mutant.file.split("/")
        name = parts[1] if parts[0] == "chapters" else parts[0]
        row = rows.setdefault(name, collections.Counter())
        row["mutants"] += 1
        row[states.get(number)] += 1
    return ["| sources | mutants | killed |", "|---|---|---|"] + [
        f"| {name} | {row['mutants']} | {row['killed']} |"
        for name, row in sorted(rows.items())]


def parse():
    line = parser(__doc__)
    line.add_argument("build", type=folder, metavar="BUILD",
                        help="a build folder of this checkout")
    line.add_argument("--only", action="append", metavar="TEXT",
                        help="those with this text in file, line or tests")
    line.add_argument("--from", dest="first", type=int, default=1,
                        metavar="N", help="from mutant N on")
    line.add_argument("--to", dest="last", type=int, default=len(MUTANTS),
                        metavar="N", help="up to mutant N")
    line.add_argument("--list", action="store_true", help="run nothing")
    line.add_argument("--jobs", type=int, default=1, metavar="N",
                        help="mutants at a time (default 1)")
    line.add_argument("--resume", type=pathlib.Path, metavar="FILE",
                        help="keep results here, and go on from them")
    return line.parse_args()


def main():
    args = parse()
    chosen = [(number, mutant) for number, mutant in enumerate(MUTANTS, 1)
              if args.first <= number <= args.last and
              any(wanted in text for wanted in args.only or [""] for text in
                  (mutant.file, mutant.line, mutant.tests, mutant.program))]
    if not chosen:
        raise CannotRun("no mutant matches --only, --from and --to")
    if args.list:
        for number, mutant in chosen:
            print(f"{number:3} {mutant.file}: {one_line(mutant.line)}  ->  "
                  f"{one_line(mutant.becomes) or 'nothing'}  "
                  f"[{mutant.program} {mutant.tests}]")
        return 0

    known = []
    if args.resume and args.resume.is_file():
        known = [json.loads(line)
                 for line in args.resume.read_text("utf-8").splitlines()]
    killed = [each["mutant"] for each in known if each["state"] == "killed"]
    todo = [each for each in chosen if key(each[1]) not in killed]
    states = {number: "killed" for number, mutant in chosen
              if key(mutant) in killed}
    build = todo and Build(args.build, {m.program for _, m in todo})
    lock = threading.Lock()

    def tell(number, mutant, state, detail, seconds):
        with lock:
            states[number] = state
            print(f"{number:3} {state} after {seconds:.0f} s, {mutant.file}: "
                  f"{one_line(mutant.line)}\n    {detail}", flush=True)
            if args.resume:
                keep(args.resume, mutant, state, detail)

    with tempfile.TemporaryDirectory(prefix="shardbook-mutants-") as scratch, \
            concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        session = Session(build, pathlib.Path(scratch), tell)
        sources = {}
        for number, mutant in todo:
            sources.setdefault((mutant.file, mutant.program), []).append(
                (number, mutant))
        futures = [pool.submit(session.try_source, each)
                   for each in sources.values()]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    print("\n".join(table(chosen, states)))
    count = collections.Counter(states.values())
    print(f"{len(chosen)} mutants: " + ", ".join(
        f"{n} {state}" for state, n in sorted(count.items())))
    return 0 if count["killed"] >= ENOUGH * len(chosen) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CannotRun as reason:
        print(f"mutation: {reason}", file=sys.stderr)
        sys.exit(2)
