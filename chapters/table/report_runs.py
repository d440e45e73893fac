"""Writes the report of runs that were kept: ./shardbook report.

  report_runs.py targets [NAME...]   checks the names, prints what to build
  report_runs.py run [NAME...]       several runs are compared
"""

import os
import sys

import programs
from programs import BUILD, ROOT, die, say
from run_folder import RUNS
from spelling import near

TABLE = os.path.join("chapters", "table", "shardbook_table")


def page_of(name):
    """build/report.html is that of `last`; others have one beside their runs."""
    folder = BUILD if name == "last" else os.path.join(RUNS, name)
    return os.path.join(folder, "report.html")


def links_from(page):
    """Options: where the page finds the book, and the explorer if it is built."""
    def folder_as_seen(folder):
        return os.path.relpath(folder, os.path.dirname(page))
    explorer = os.path.join(BUILD, "explorer")
    has_explorer = os.path.exists(os.path.join(explorer, "index.html"))
    return ["--book", folder_as_seen(ROOT),
            *(["--explorer", folder_as_seen(explorer)] if has_explorer else [])]


def write_report(folders, target, how=()):
    """Writes a page, whole or not at all, and prints the tables.

    `how` has options of the program that prints: --overview, --quiet.
    """
    page = os.path.join(BUILD, ".report-" + os.urandom(6).hex())
    try:
        status = programs.run([os.path.join(BUILD, TABLE), "--html", page,
                               *links_from(target), *how, *folders])
        if status < 2:
            os.chmod(page, 0o644)
            os.replace(page, target)
            say("See it:   " + os.path.relpath(target, ROOT))
    finally:
        if os.path.exists(page):
            os.unlink(page)
    return status


def kept_names():
    """The runs in build/runs; names with a dot belong to unfinished runs."""
    names = os.listdir(RUNS) if os.path.isdir(RUNS) else []
    return sorted(name for name in names if not name.startswith("."))


def kept_folders(names):
    """The folders of the named runs; without names, that of the last run."""
    names = names or ["last"]
    for name in names:
        is_name = not name.startswith(".") and "/" not in name
        if not is_name or not os.path.isdir(os.path.join(RUNS, name)):
            kept = kept_names()
            die(f"report {name}: no runs have that name{near(name, kept)}; " +
                (f"there are: {' '.join(kept)}" if kept else
                 "none are kept yet: ./shardbook run keeps them"))
    return [os.path.join(RUNS, name) for name in names]


def print_targets(*names):
    kept_folders(names)
    print(TABLE)


def report(*names):
    return write_report(kept_folders(names), page_of("last"))


if __name__ == "__main__":
    programs.main(print_targets, report)
