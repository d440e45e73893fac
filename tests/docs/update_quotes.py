#!/usr/bin/env python3
"""Writes what the programs print now into the pages that quote them.

    python3 tests/docs/update_quotes.py build chapters/05_gpipe/README.md ...

A quotation is a fence that begins with a command:

    ```console
    $ ./shardbook run gpipe -- --steps 5
    ...
    ```

Without pages, all chapters. A page's translation has the same fences: its are
written, too, and each command runs once for both. Look at the difference before you keep it: a claim
that has failed is written down as well.
"""

import functools
import os
import pathlib
import re
import subprocess
import sys

FENCE = re.compile(r"^```console\n\$ (?P<command>(.*\\\n)*.*)\n"
                   r"(?P<output>[^`]*)^```$", re.MULTILINE)


def program(build, command):
    """The command line of the program that a quoted command starts."""
    command = re.sub(r"\\\n *", "", command)
    words = re.match(r"\./shardbook run (\S+) --(.*)", command)
    if words:
        own = build / "chapters" / words[1]
        if own.is_file():
            return f"'{own}'{words[2]}"
        folder = next(f for f in (build / "chapters").iterdir()
                      if re.fullmatch(r"\d\d_" + words[1], f.name))
        return f"'{folder}/ch{folder.name}'{words[2]}"
    words = re.match(r"\./shardbook (toy|lesson) (.*)", command)
    if words:
        return f"'{build}'/chapters/{words[1]}_??_{words[2]}"
    if command.startswith("./shardbook plan"):
        planner = build / "chapters" / "planner"
        return f"'{planner}/shardbook_plan'{command[len('./shardbook plan'):]}"
    name = command.split()[0]
    return f"'{build}/chapters/{name[2:]}'/{command}"


def keep_wall_times(quoted, printed):
    """Wall times say something about one machine only: the old ones stay."""
    times = [line for line in quoted.splitlines() if line.startswith("time ")]
    lines = printed.splitlines(keepends=True)
    return "".join(times.pop(0) + "\n" if line.startswith("time ") and times
                   else line for line in lines)


@functools.cache
def output_of(build, command):
    line = "{ " + program(build, command) + "; } 2>&1 </dev/null"
    return subprocess.run(line, shell=True, text=True,
                          stdout=subprocess.PIPE, check=False,
                          env={**os.environ, "LC_ALL": "C.UTF-8"}).stdout


def update(build, page):
    def run(fence):
        printed = keep_wall_times(fence["output"],
                                  output_of(build, fence["command"]))
        return f"```console\n$ {fence['command']}\n{printed}```"

    text = page.read_text(encoding="utf-8")
    page.write_text(FENCE.sub(run, text), encoding="utf-8")


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    build = pathlib.Path(sys.argv[1]).resolve()
    root = pathlib.Path(__file__).resolve().parents[2]
    pages = [pathlib.Path(p) for p in sys.argv[2:]]
    chapters = root / "chapters"
    for page in pages or [chapters / "README.md", chapters / "details.md",
                          chapters / "before.md", chapters / "comparing.md",
                          *sorted(chapters.glob("[0-9]*/*.md"))]:
        for path in {page, page.with_suffix(".zh-CN.md")}:
            if path.exists():
                update(build, path)


if __name__ == "__main__":
    main()
