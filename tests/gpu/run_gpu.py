"""Serves ./shardbook test gpu.

  run_gpu.py targets BUILD [PACK]   prints what Ninja has to build
  run_gpu.py run BUILD [PACK]       runs the suite, or writes the folder PACK

The suite is suite.sh, for a build and for a pack alike.
"""

import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "chapters", "table"))
sys.path.insert(0, os.path.join(ROOT, "tests", "gpu"))

import pack  # noqa: E402
import programs  # noqa: E402

BENCHMARK = "bench/gpu/gpu_bench"


def suite():
    """The programs of programs.txt."""
    path = os.path.join(ROOT, "tests", "gpu", "programs.txt")
    with open(path, encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    return [line for line in lines if line and not line.startswith("#")]


def known_targets(build):
    listing = subprocess.run(["ninja", "-C", build, "-t", "targets", "all"],
                             stdout=subprocess.PIPE, text=True, check=False)
    return [line.partition(": ")[0] for line in listing.stdout.splitlines()]


def chapters(known):
    return [name for name in known
            if re.fullmatch(r"chapters/[0-9][^/]*/ch[^/.]*", name)]


def libraries(known):
    """Those that are loaded when the first GPU is used, and never linked."""
    return [name for name in known
            if re.fullmatch(r"(core|comm)/.*libshardbook_[a-z]*\.so", name)]


def wanted(build, for_pack):
    known = known_targets(build)
    names = [*suite(), *chapters(known), *libraries(known),
             "bench/gpu/gpus"]
    return names + [BENCHMARK] if for_pack else names


def print_targets(build, *folder):
    print(*wanted(build, bool(folder)), sep="\n")


def run(build, *folder):
    if folder:
        return pack.write(build, wanted(build, True), folder[0])
    return programs.run([os.path.join(ROOT, "tests", "gpu", "suite.sh"), build])


if __name__ == "__main__":
    programs.main(print_targets, run)
