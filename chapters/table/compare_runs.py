"""Runs several chapters on one training, beside one device: ./shardbook compare.

  compare_runs.py targets NAME RUN... [-- COMMON]   prints what to build
  compare_runs.py run NAME RUN... [-- COMMON]       runs what was built

A RUN is one word: a chapter with its own options, 'zero --strategy fsdp'. All
runs have the options COMMON as well. So has one device, the yardstick, except
those about ranks. The runs are kept as build/runs/NAME (`compare` without a
NAME), each under its own text.
"""

import os
import shlex
import sys

import programs
from chapter_names import OTHERS, PROGRAMS, find_chapters, program_of
from completion import program_options
from default_rows import YARDSTICK, Row
from programs import BUILD, die, say
from report_runs import TABLE, page_of, write_report
from run_chapters import (check_name, keep_runs, run_rows, typed_command,
                          uses_gpu)
from spelling import near

EXAMPLE = "./shardbook compare ddp 'zero --strategy fsdp' -- --world-size 8"

# Without a --.
DEFAULTS = ("--world-size 4 --backend sim --model gpt2 --batch 32 --seq 512 "
            "--cluster dgx-a100").split()

# The report of each run is kept, and the table is the only output.
OURS = {"--report", "--format"}
# Runs at the same time would write the same file.
FILES = {"--save", "--logits", "--log", "--trace", "--timeline", "--checkpoint"}

TITLE = "Compared"  # compare.cpp knows it


def name_of(option):
    return option[0].partition("=")[0]


def each_option(words):
    """[["--tp", "2"], ["--check"]]: every option with its values."""
    options = []
    for word in words:
        if word.startswith("--") or not options:
            options.append([])
        options[-1].append(word)
    return options


def read_run(text):
    """The row of a run; its options are its own."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        die(f"compare: {text}: {error}; write a run as in {EXAMPLE}")
    if not words:
        die(f"compare: '{text}': a run begins with a chapter, as in {EXAMPLE}")
    if words[0] in [*PROGRAMS, *OTHERS]:
        die(f"compare: {words[0]}: this program has a training of its own; give "
            "chapters, which can all train the same model")
    options = words[2:] if words[1:2] == ["--"] else words[1:]
    for option in each_option(options):
        if name_of(option) in OURS:
            die(f"compare: {text}: leave out {name_of(option)}: one table of all "
                "runs is printed, and their reports are kept")
    return Row(TITLE, find_chapters(words[:1])[0], " ".join(text.split()),
               options)


def check_common(options):
    for option in each_option(options):
        if name_of(option) in OURS:
            die(f"compare: leave out {name_of(option)}: one table of all runs is "
                "printed, and their reports are kept")
        if name_of(option) in FILES:
            die(f"compare: {' '.join(option)}: all runs would write this file; "
                "give it to one run, inside its quotes")


def read_words(words):
    """The runs with their own options, and the options of all."""
    end = words.index("--") if "--" in words else len(words)
    rows = [read_run(text) for text in words[:end]]
    common = list(words[end + 1:]) if end < len(words) else DEFAULTS
    if not rows:
        die(f"compare: give the runs to compare, as in {EXAMPLE}")
    for k, row in enumerate(rows):
        if any(row.label == other.label for other in rows[:k]):
            die(f"compare: {row.label}: this run is given twice")
    check_common(common)
    return rows, common


def print_targets(name, *words):
    check_name(name)
    rows, common = read_words(words)
    chapters = {YARDSTICK, *(row.chapter for row in rows)}
    needed = [program_of(chapter) for chapter in sorted(chapters)]
    if any(uses_gpu(common + row.options) for row in rows):
        needed.append("gpu_libraries")
    print(TABLE, *needed, sep="\n")


def check_known(rows, common, known):
    """An option of all runs has to be one that all their programs have."""
    for option in each_option(common):
        lacking = [row for row in rows
                   if name_of(option) not in known[row.chapter]]
        if len(lacking) == len(rows):
            names = {name for row in rows for name in known[row.chapter]}
            die(f"compare: {' '.join(option)}: none of these runs has such an "
                f"option{near(name_of(option), sorted(names))}")
        if lacking:
            having = next(row for row in rows if row not in lacking)
            die(f"compare: {' '.join(option)}: {lacking[0].chapter} has no such "
                "option; give it to the runs that have it, inside their quotes: "
                f"'{' '.join([having.label, *option])}'")
    for row in rows:
        names = map(name_of, each_option(row.options))
        if not known[row.chapter].keys() >= set(names):
            # The program explains it, before any other runs
            sys.exit(programs.run(
                [os.path.join(BUILD, program_of(row.chapter)), *row.options],
                environment={"SHARDBOOK_COMMAND": typed_command(row.chapter)}))


def yardstick(rows, common, known):
    """One device with the options of all runs, except those about ranks."""
    options = []
    for option in each_option(common):
        if name_of(option) in known and name_of(option) != "--world-size":
            options += option
    if {"gloo", "nccl"} & {word.partition("=")[2] or word for word in options}:
        options += ["--backend", "threads"]
    has_experts = any("moe" in row.chapter or "expert" in " ".join(row.options)
                      for row in rows)
    label = "one device, no experts" if has_experts else "one device"
    return Row(TITLE, YARDSTICK, label, options)


def run_all(runs, rows, common):
    known = {chapter: program_options(program_of(chapter))
             for chapter in {YARDSTICK, *(row.chapter for row in rows)}}
    check_known(rows, common, known)
    rows = [row._replace(options=common + row.options) for row in rows]
    rows.insert(0, yardstick(rows, common, known[YARDSTICK]))
    run_rows(runs, rows)
    missing = [row.label for k, row in enumerate(rows, 1)
               if not os.path.exists(runs.file(f"{k:02}.json"))]
    if missing:
        say("shardbook: compare: these left no report, and are not in the "
            f"table: {', '.join(missing)}")
        runs.status = runs.status or 2


def compare(name, *words):
    rows, common = read_words(words)
    if "--" not in words:
        say("comparing with -- " + " ".join(DEFAULTS))
    runs, kept, stopped = keep_runs(
        name or "compare", lambda runs: run_all(runs, rows, common), at_least=2)
    status = 0
    if kept:
        status = write_report([kept], page_of(os.path.basename(kept)))
    if stopped:
        raise stopped
    return runs.status or status


if __name__ == "__main__":
    programs.main(print_targets, compare)
