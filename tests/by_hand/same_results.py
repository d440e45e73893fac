#!/usr/bin/env python3
"""Asks whether two builds compute the same: for changes of structure alone.

    tests/by_hand/same_results.py OLD_BUILD NEW_BUILD [--only TEXT]

Runs the rows of chapters/rows.txt and the option sets below with the programs
of both builds, on the same data. The reports must be equal but for wall times:
losses, bytes, peaks of memory by kind and virtual times to the last digit; and
so must the weights that --save writes, bit for bit. Claims must not fail. The
data are a file that no change of a page changes. A build that is older than an
option's name, or than a key of the report, gets and gives the old one.

Exit status: 0 when all agree. By hand, not in CI: it needs two builds.
"""

import functools
import json
import pathlib
import shlex
import subprocess
import sys
import tempfile

from book import ROOT, folder, parser, program

SMALL = f"--data {ROOT}/LICENSE --batch 12 --seq 16 --steps 3"

# Chapter and options. {w} runs on world sizes 1, 2, 3, 4.
SETS = """
00_single_device --micro-batches 3 --recompute
00_single_device --dtype bf16 --master-weights
00_single_device --dtype f16 --master-weights --clip 0.5
00_single_device --model resnet18 --data random --batch 4 --image-size 32
01_data_parallel --world-size {w}
01_data_parallel --world-size {w} --dropout 0.1 --optimizer sgd
02_ddp --world-size {w} --micro-batches 3
02_ddp --world-size {w} --bucket-mb 0.05 --gradient-as-bucket-view
02_ddp --world-size {w} --comm-hook bf16 --find-unused-parameters
02_ddp --world-size {w} --clip 0.1 --dropout 0.1 --static-graph
03_zero_fsdp --world-size {w} --strategy zero1 --clip 0.1
03_zero_fsdp --world-size {w} --strategy zero2 --micro-batches 3
03_zero_fsdp --world-size {w} --strategy zero2 --cpu-offload
03_zero_fsdp --world-size {w} --strategy zero3 --persistence-threshold 0
03_zero_fsdp --world-size {w} --strategy zero3 --recompute
03_zero_fsdp --world-size {w} --strategy fsdp --micro-batches 3 --no-sync
03_zero_fsdp --world-size {w} --strategy fsdp --param-dtype bf16
03_zero_fsdp --world-size {w} --strategy fsdp2 --clip 0.1
04_model_parallel --model mlp --variant pipeline
04_model_parallel --model mlp --variant model_parallel --clip 0.1
04_model_parallel --variant single --data random --batch 4 --image-size 32
04_model_parallel --data random --batch 4 --image-size 32 --split-size 2
05_gpipe --world-size {w} --micro-batches 4
05_gpipe --world-size {w} --recompute always --clip 0.1
05_gpipe --world-size {w} --recompute never --no-early-recompute
05_gpipe --world-size {w} --long-skips
05_gpipe --world-size {w} --partition parameters --dropout 0.1
06_1f1b --world-size {w} --schedule 1f1b --clip 0.1
06_1f1b --world-size {w} --schedule gpipe --dropout 0.1
06_1f1b --world-size {w} --schedule zb-h1
06_1f1b --world-size {w} --schedule zb-h2 --micro-batches 12
06_1f1b --world-size {w} --schedule pipedream
06_1f1b --world-size {w} --schedule pipedream-2bw
06_1f1b --world-size {w} --schedule 1f1b --post-validation
06_1f1b --world-size 2 --schedule interleaved --micro-batches 4
06_1f1b --world-size 3 --schedule pipedream --replicas 2,1
06_1f1b --world-size 4 --schedule dualpipe --micro-batches 12
06_1f1b --world-size 2 --schedule pipedream --vertical-sync
"""
# Old names of options, by chapter.
RENAMED = {"02_ddp": {"--micro-batches": "--accumulate"},
           "03_zero_fsdp": {"--micro-batches": "--accumulate"},
           "05_gpipe": {"--recompute": "--checkpoint",
                        "--partition": "--balance"}}
RANKS_ARE_PROCESSES = ("02", "03", "05", "06")


def rows():
    """Chapter and options of each row of the two tables."""
    group = ""
    for line in (ROOT / "chapters" / "rows.txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            group = line.partition("]")[2]
            # The book changes with its pages
            if "--backend sim" not in group:
                group += f" --data {ROOT}/LICENSE"
        elif line[:1].isdecimal():
            chapter, _, options = (line + "||").split("|")[:3]
            yield chapter.strip(), f"{group} {options.strip()}"


def sets():
    for line in SETS.strip().splitlines():
        chapter, options = line.split(" ", 1)
        for w in (1, 2, 3, 4) if "{w}" in options else (0,):
            here = options.format(w=w)
            yield chapter, f"{SMALL} {here} --deterministic"
            yield chapter, f"{SMALL} {here} --backend sim"
            if w in (2, 3) and chapter.startswith(RANKS_ARE_PROCESSES):
                yield chapter, f"{SMALL} {here} --deterministic --backend gloo"


def counted_alone(report):
    """What was counted. Builds before "held_memory" predict the peaks; later
    ones predict what is held, and the time on the cluster "textbook"."""
    report.pop("held_memory", None)
    report["claims"] = {name: verdict
                        for name, verdict in report["claims"].items()
                        if name in ("numbers", "bytes") or verdict == "failed"}
    for rank in report["peak_memory"]:
        for kind, pair in rank.items():
            rank[kind] = pair["counted"]
    if report["virtual"] is not None:
        report["virtual"]["step_s"] = report["virtual"]["step_s"]["counted"]


def without_wall_times(report, names):
    report.pop("wall", None)
    counted_alone(report)
    options = report.get("options", {})
    options.pop("save", None)
    for new, old in names.items():
        if old[2:] in options:
            options[new[2:].replace("-", "_")] = options.pop(old[2:])
    return report


@functools.lru_cache(maxsize=None)
def old_names(build, chapter):
    """New to old names of the options that the program knows by the old one."""
    renamed = RENAMED.get(chapter, {})
    text = renamed and subprocess.run([program(build, chapter), "--help"], text=True,
                                      stdout=subprocess.PIPE,
                                      check=True).stdout
    return {new: old for new, old in renamed.items()
            if f"{old} " in text and f"{new} " not in text}


def outcome(build, chapter, options):
    names = old_names(build, chapter)
    with tempfile.TemporaryDirectory(prefix="shardbook-") as place:
        saved = pathlib.Path(place) / "weights.safetensors"
        command = [program(build, chapter),
                   *(names.get(word, word) for word in shlex.split(options)),
                   "--format", "json"]
        if "--backend sim" not in options:
            command += ["--save", str(saved)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              timeout=600, check=False)
        try:
            report = without_wall_times(json.loads(done.stdout), names)
        except ValueError:
            report = done.stderr.strip().replace(place, "")
        return (done.returncode, report,
                saved.read_bytes() if saved.exists() else b"")


def differences(old, new, where=""):
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from differences(old.get(key), new.get(key),
                                   f"{where}/{key}")
    elif isinstance(old, list) and isinstance(new, list) and \
            len(old) == len(new):
        for i, (a, b) in enumerate(zip(old, new)):
            yield from differences(a, b, f"{where}/{i}")
    elif old != new:
        yield f"{where}: {str(old)[:200]} became {str(new)[:200]}"


def main():
    line = parser(__doc__)
    line.add_argument("old", type=folder)
    line.add_argument("new", type=folder)
    line.add_argument("--only", default="", metavar="TEXT",
                        help="runs with this text in chapter or options")
    args = line.parse_args()
    count, failed, refused = 0, 0, 0
    for chapter, options in [*rows(), *sets()]:
        if args.only not in f"{chapter} {options}":
            continue
        count += 1
        old = outcome(args.old, chapter, options)
        new = outcome(args.new, chapter, options)
        refused += old[0] == 2
        found = list(differences(old[1], new[1]))
        if old[0] != new[0]:
            found.append(f"status {old[0]} became {new[0]}")
        if old[2] != new[2]:
            found.append("the weights differ")
        if found:
            failed += 1
            print(f"DIFFERENT {chapter} {options}", *found[:6],
                  sep="\n    ", flush=True)
    print(f"{count} runs: {count - failed} the same ({refused} of them refused "
          f"by both), {failed} different")
    return 1 if failed or not count else 0


if __name__ == "__main__":
    sys.exit(main())
