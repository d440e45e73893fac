#!/usr/bin/env python3
"""Asks whether every source compiles alone, without those of its unity group and
without precompiled headers.

  tests/by_hand/compiles_alone.py BUILD [--jobs N] [PART OF A PATH...]

BUILD has been set up, with -Dunity=on or without. Compilers check the syntax
only: a second or two for each source.

Exit status: 0 all sources do, 1 one does not.
"""

import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

from book import ROOT, folder, parser



def sources_of(entry):
    """The sources of a command: its file, or what its unity group includes."""
    file = pathlib.Path(entry["directory"], entry["file"]).resolve()
    if re.search(r"-unity\d+\.cpp$", file.name):
        words = re.findall('#include *[<"](.+)[>"]', file.read_text("utf-8"))
        return [(file.parent / word).resolve() for word in words]
    return [file]


def syntax_check(command):
    """The compiler's arguments before the file's name."""
    words = iter(shlex.split(command))
    kept = []
    for word in words:
        if word in ("-include", "-o", "-MF", "-MQ"):
            next(words)
        elif word == "-c":
            break
        elif word not in ("ccache", "-MD", "-fpch-preprocess"):
            kept.append(word)
    return [*kept, "-fsyntax-only"]


def checks_of(build):
    """The command of each source; of those in several targets, the first."""
    checks = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        for source in sources_of(entry):
            if source.suffix == ".cpp" and build not in source.parents:
                checks.setdefault(source, syntax_check(entry["command"]))
    return checks


def main():
    line = parser(__doc__)
    line.add_argument("build", type=folder)
    line.add_argument("part", nargs="*")
    line.add_argument("--jobs", type=int,
                      default=len(os.sched_getaffinity(0)))
    args = line.parse_args()
    build = args.build

    def check(source, command):
        return source, subprocess.run([*command, str(source)], cwd=build,
                                      capture_output=True, text=True,
                                      check=False)

    failed = 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        runs = [pool.submit(check, source, command)
                for source, command in checks_of(build).items()
                if not args.part or any(part in str(source)
                                        for part in args.part)]
        for run in concurrent.futures.as_completed(runs):
            source, done = run.result()
            if done.returncode:
                failed += 1
                print(f"FAILED {source.relative_to(ROOT)}, status "
                      f"{done.returncode}\n{done.stderr}",
                      flush=True)
    print(f"{len(runs) - failed} sources compile alone, {failed} do not")
    return 1 if failed or not runs else 0


if __name__ == "__main__":
    sys.exit(main())
