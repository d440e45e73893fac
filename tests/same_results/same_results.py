#!/usr/bin/env python3
"""Whether a change left all results as they were, byte for byte.

By hand, on one machine, before and after a change that should change nothing:

    tests/same_results/same_results.py freeze build FILE
    tests/same_results/same_results.py compare build FILE

Every line of chapters/rows.txt is run as it stands if it is simulated, otherwise
on threads in f64. FILE keeps the reports (--format json) without what time and
the order of threads decide, and the SHA-256 of the trained weights. Pictures and notebooks keep their results in
git: the tests `figures` and `notebook --execute` compare those.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "chapters", "table"))

from chapter_names import PROGRAMS, all_chapters, program_of  # noqa: E402
from default_rows import default_rows  # noqa: E402

# What the clock of this machine decides
WALL = {"wall", "wall_s", "tokens_per_s"}
# What the order of threads decides: how many messages wait at a time
ORDER = {"communication", "total", "timeline", "bubble_s", "exposed_comm_s"}
WEIGHTS = "weights.safetensors"


def without(keys, value):
    """The same JSON without these keys."""
    if isinstance(value, dict):
        return {key: without(keys, each) for key, each in value.items()
                if key not in keys}
    if isinstance(value, list):
        return [without(keys, each) for each in value]
    return value


def on_threads(options):
    """The options of a run on threads in f64."""
    kept = []
    words = iter(options)
    for word in words:
        if word in ("--backend", "--dtype"):
            next(words)
        else:
            kept.append(word)
    is_cifar = "fp64" in options
    return kept + ["--backend", "threads"] + ["--dtype",
                                              "fp64" if is_cifar else "f64"]


def result_of(build, row, folder):
    """The report and the weights of one row."""
    options = row.options
    weights = os.path.join(folder, WEIGHTS)
    left_out = WALL
    if "sim" not in options:
        left_out = WALL | ORDER
        options = on_threads(options)
    words = [os.path.join(build, program_of(row.chapter)), *options, "--format", "json"]
    done = subprocess.run([*words, "--save", WEIGHTS], cwd=folder,
                          capture_output=True, check=False)
    if done.returncode == 2 and b"--save" in done.stderr:
        # Not every training can be saved
        done = subprocess.run(words, cwd=folder, capture_output=True,
                              check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(words)}: {done.stderr.decode()}")
    result = {"status": done.returncode,
              "report": without(left_out, json.loads(done.stdout))}
    if os.path.exists(weights):
        with open(weights, "rb") as file:
            result["weights"] = hashlib.sha256(file.read()).hexdigest()
        os.remove(weights)
    return result


def results(build):
    """Every row's result, by its line."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for row in default_rows([*all_chapters(), *PROGRAMS]):
            line = " ".join([row.chapter, *row.options])
            print(line, file=sys.stderr)
            found[line] = result_of(build, row, folder)
    return found


def main():
    """Freezes or compares."""
    if len(sys.argv) != 4 or sys.argv[1] not in ("freeze", "compare"):
        raise SystemExit(__doc__)
    _, verb, build, path = sys.argv
    now = results(os.path.abspath(build))
    if verb == "freeze":
        with open(path, "w", encoding="utf-8") as file:
            json.dump(now, file, indent=1, sort_keys=True)
        print(f"{len(now)} lines frozen in {path}")
        return
    with open(path, encoding="utf-8") as file:
        before = json.load(file)
    differ = [line for line in sorted(before.keys() | now.keys())
              if before.get(line) != now.get(line)]
    for line in differ:
        print(f"DIFFERS {line}")
    print(f"{len(now) - len(differ)} lines equal, {len(differ)} differ")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
