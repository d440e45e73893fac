"""Says on stderr how a build went, as Ninja's log has it: ./shardbook.

  build_log.py failed LOG              the first failure and what follows
  build_log.py succeeded LOG SECONDS   one line, if there was something to do
"""

import os
import re
import sys

from programs import ROOT, say

MAX_LINES = 30
MAX_BYTES = 160  # of a line

STEP = re.compile(rb"\[(\d+)/")
COMPILER = re.compile(rb"(ccache )?[^ ]*(c\+\+|g\+\+|clang\+\+) ")


def lines_of(log):
    with open(log, "rb") as file:
        return file.read().splitlines()


def failed(log):
    """Without commands, and steps that went well."""
    lines = lines_of(log)
    first = next((i for i, line in enumerate(lines)
                  if line.startswith((b"FAILED", b"ninja: error"))), len(lines))
    shown = [line[:MAX_BYTES] for line in lines[first:]
             if not STEP.match(line) and not COMPILER.match(line)]
    for line in shown[:MAX_LINES]:
        say(os.fsdecode(line))


def succeeded(log, seconds):
    lines = lines_of(log)
    steps = [match[1].decode() for line in lines if (match := STEP.match(line))]
    if not steps:
        return
    name = os.path.relpath(log, ROOT)
    warnings = sum(b"warning: " in line for line in lines)
    say(f"built {os.path.dirname(name)}/: {steps[-1]} steps, {seconds} s"
        + (f" ({warnings} warnings in {name})" if warnings else ""))


if __name__ == "__main__":
    {"failed": failed, "succeeded": succeeded}[sys.argv[1]](*sys.argv[2:])
