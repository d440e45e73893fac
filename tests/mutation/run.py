#!/usr/bin/env python3
"""Changes one line at a time and asks whether a test notices.

    tests/mutation/run.py [--only TEXT]... [--from N] [--to N] [--list]
                          [--scratch FOLDER] [--setup OPTION]...

The changes are in mutants.py and mutants_sharded.py, each with the test program
and the filter that are expected to notice it. All of them are made in a private copy of the
checkout, with a build folder of its own: by hand, not in CI.

A mutant is
  killed          when a test fails, crashes or runs out of time;
  survived        when every test passes all the same;
  does not apply  when its line is not in the file, or not once;
  does not build  when the compiler refuses it.

Exit status: 0 when at least 95 % of the chosen mutants were killed, 1 when
fewer were, 2 when nothing could be run: a test that fails or runs nothing
before any change, or a copy that does not build.

The first build takes long: everything that the chosen programs need. Later
calls reuse the scratch folder and build what has changed. The build does not
optimise, since a mutant is compiled once and run briefly; --setup gives other
options to Meson in place of these (--setup=-Doptimization=2).
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
import mutants_sharded  # noqa: E402,F401  (adds to the list)
from mutants import MUTANTS  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = {
    "single_device": "tests/chapters/single_device_test",
    "data_parallel": "tests/chapters/data_parallel_test",
    "zero_fsdp": "tests/chapters/zero_fsdp_test",
    "claims": "tests/chapters/claims_test",
    "pipelines": "tests/chapters/pipelines_test",
    "cli": "tests/cli/cli_test",
    "tensor_parallel": "tests/chapters/tensor_parallel_test",
    "tensor_parallel_2d": "tests/chapters/08_tensor_parallel_2d_test",
    "tensor_parallel_2p5d": "tests/chapters/09_tensor_parallel_2p5d_test",
    "tensor_parallel_3d": "tests/chapters/10_tensor_parallel_3d_test",
    "dtensor": "tests/chapters/dtensor_test",
    "sequence_parallel": "tests/chapters/sequence_parallel_test",
}
BUILD = "build"  # in the copy, where a checkout has its own
FAST_TO_BUILD = ["-Doptimization=0", "-Ddebug=false"]
# A mutant may wait for ever; the tests chosen here take seconds.
TEST_TIMEOUT_S = 300
ENOUGH = 0.95


def one_line(text):
    return " ".join(text.split())


def call(command, **options):
    return subprocess.run(command, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True,
                          stdin=subprocess.DEVNULL, errors="replace",
                          **options)


def update_copy(tree):
    """Makes `tree` equal to the checkout; equal files keep their times."""
    listing = call(["git", "-C", str(ROOT), "ls-files", "-z", "--cached",
                    "--others", "--exclude-standard"])
    names = {name for name in listing.stdout.split("\0")
             if name and (ROOT / name).is_file()}
    for name in names:
        source, target = ROOT / name, tree / name
        if target.is_file() and target.read_bytes() == source.read_bytes():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    for path in list(tree.rglob("*")):
        place = path.relative_to(tree)
        if place.parts[0] == BUILD or path.is_dir():
            continue
        if str(place) not in names:
            path.unlink()


def configure(tree, build, options):
    if (build / "build.ninja").exists():
        return
    result = call(["meson", "setup", str(build), str(tree), *options])
    if result.returncode != 0:
        sys.exit(fail(result.stdout, "meson setup does not succeed"))


def fail(output, sentence):
    print(output, f"mutation: {sentence}", sep="\n", file=sys.stderr)
    return 2


def build_program(build, program):
    return call(["ninja", "-C", str(build), PROGRAMS[program]])


def run_tests(build, program, pattern):
    """(passed, what it printed)"""
    command = [str(build / PROGRAMS[program]), f"--gtest_filter={pattern}",
               "--gtest_brief=1"]
    try:
        # A folder of its own: what a killed test leaves goes with it
        with tempfile.TemporaryDirectory(prefix="shardbook-mutant-") as folder:
            result = call(command, timeout=TEST_TIMEOUT_S, cwd=folder,
                          env=dict(os.environ, TMPDIR=folder))
    except subprocess.TimeoutExpired as late:
        return False, f"no end after {late.timeout:.0f} s"
    return result.returncode == 0, result.stdout


def check_unchanged(build, mutants):
    """Every test must pass before the first change, and there must be one."""
    for program, pattern in sorted({(m.program, m.tests) for m in mutants}):
        passed, output = run_tests(build, program, pattern)
        if not passed:
            return fail(output, f"{program} {pattern} fails without a change")
        if " 0 tests" in output or "[==========]" not in output:
            return fail(output, f"{program} {pattern} matches no test")
    return 0


def try_mutant(tree, build, mutant):
    path = tree / mutant.file
    text = path.read_text("utf-8") if path.is_file() else ""
    if text.count(mutant.line) != 1:
        return "does not apply", f"found {text.count(mutant.line)} times"
    try:
        path.write_text(text.replace(mutant.line, mutant.becomes), "utf-8")
        result = build_program(build, mutant.program)
        if result.returncode != 0:
            return "does not build", "\n".join(
                line for line in result.stdout.splitlines()
                if "error" in line)[:500]
        passed, output = run_tests(build, mutant.program, mutant.tests)
        if passed:
            return "survived", mutant.reason
        failures = [line for line in output.splitlines()
                    if line.startswith("[  FAILED  ]") and "(" in line]
        return "killed", (failures or output.splitlines()[-1:] or [""])[0]
    finally:
        path.write_text(text, "utf-8")


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", action="append", metavar="TEXT",
                        help="those with this text in file, line or tests")
    parser.add_argument("--from", dest="first", type=int, default=1,
                        metavar="N", help="from mutant N on")
    parser.add_argument("--to", dest="last", type=int, default=len(MUTANTS),
                        metavar="N", help="up to mutant N")
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--scratch", type=pathlib.Path,
                        default=pathlib.Path(tempfile.gettempdir()) /
                        f"shardbook-mutation-{os.getuid()}",
                        help="folder of the copy and its build")
    parser.add_argument("--setup", action="append", default=[],
                        metavar="OPTION", help="for meson setup")
    return parser.parse_args()


def main():
    args = parse()
    chosen = [(number, mutant) for number, mutant in enumerate(MUTANTS, 1)
              if args.first <= number <= args.last and
              any(wanted in text for wanted in args.only or [""] for text in
                  (mutant.file, mutant.line, mutant.tests, mutant.program))]
    if not chosen:
        return fail("", "no mutant matches --only, --from and --to")
    if args.list:
        for number, mutant in chosen:
            print(f"{number:3} {mutant.file}: {one_line(mutant.line)}  ->  "
                  f"{one_line(mutant.becomes) or 'nothing'}  "
                  f"[{mutant.program} {mutant.tests}]")
        return 0

    scratch = args.scratch.resolve()
    if ROOT == scratch or ROOT in scratch.parents:
        return fail("", f"--scratch {scratch}: lies inside the checkout")
    tree, build = scratch, scratch / BUILD
    tree.mkdir(parents=True, exist_ok=True)
    update_copy(tree)
    configure(tree, build, args.setup or FAST_TO_BUILD)
    for program in sorted({mutant.program for _, mutant in chosen}):
        result = build_program(build, program)
        if result.returncode != 0:
            return fail(result.stdout, f"{program} does not build")
    if status := check_unchanged(build, [mutant for _, mutant in chosen]):
        return status

    count = {}
    for number, mutant in chosen:
        begin = time.monotonic()
        state, detail = try_mutant(tree, build, mutant)
        count[state] = count.get(state, 0) + 1
        print(f"{number:3} {state:14} {mutant.file}: "
              f"{one_line(mutant.line)}\n"
              f"    {detail}  ({time.monotonic() - begin:.0f} s)", flush=True)
    print(f"{len(chosen)} mutants: " + ", ".join(
        f"{n} {state}" for state, n in sorted(count.items())))
    return 0 if count.get("killed", 0) >= ENOUGH * len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
