#!/usr/bin/env python3
"""Compares the overview's tables on two pages with what their rows print now.

    python3 tests/docs/readme_tables.py build            compares
    python3 tests/docs/readme_tables.py build --update   writes them again

Their Chinese pages have the same bytes (languages_test.py). Each page shows some groups and some chapters of the overview that ./shardbook run
prints. Their rows run, the program of the tables prints them, and the text must be
that of the page: words to the letter, numbers within one in a hundred (other
processors round elsewhere).
"""

import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "chapters" / "table"))

from chapter_names import find_chapters  # noqa: E402
from default_rows import default_rows  # noqa: E402

PAGES = [ROOT / "chapters" / "running.md",  # all rows of the others
         ROOT / "README.md"]
TABLE = re.compile(r"(?<=^```\n)(?:WHAT IT BUYS|PROOF), [^`]*(?=^```$)",
                   re.MULTILINE)
SKIPPED = 77  # for Meson
RELATIVE = 1e-2
TINY = 1e-3  # differences from one device are rounding


def rows_behind(tables):
    """The rows of chapters/rows.txt that print these tables."""
    buys, proof = tables
    titles = re.findall(r"^(\w[^:\n]*): ", buys, re.MULTILINE)
    numbers = re.findall(r"^(\d\d) ", proof, re.MULTILINE)
    return [row for row in default_rows(find_chapters([]))
            if (row.title in titles
                and (row.star or row.label.startswith("One device")))
            or (not row.title and row.chapter[:2] in numbers)]


def without_sweep(options):
    """A sweep is for the report's picture."""
    at = options.index("--sweep") if "--sweep" in options else len(options)
    return options[:at] + options[at + 2:]


def run_rows(build, folder, rows):
    """Runs each row; returns the names of their reports in this folder."""
    names = {str(row): f"{k:02}.json" for k, row in enumerate(rows)}

    def run(row):
        subprocess.run(
            [f"{build}/chapters/{row.chapter}/ch{row.chapter}", "--report",
             f"{folder}/{names[str(row)]}", *without_sweep(row.options)], check=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"})

    cores = len(os.sched_getaffinity(0))
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        list(pool.map(run, rows))
    return names


def printed_tables(build, folder, names, rows):
    """What the program of the tables prints of these rows."""
    pathlib.Path(folder, "rows.tsv").write_text("".join(
        f"{names[str(row)]}\t{row.title}\t{row.star}{row.label}\t-\n"
        for row in rows), encoding="utf-8")
    text = subprocess.run(
        [f"{build}/chapters/table/shardbook_table", "--overview", folder],
        text=True, stdout=subprocess.PIPE, check=True, encoding="utf-8",
        env={**os.environ, "LC_ALL": "C.UTF-8"}).stdout
    buys, proof = text.split("\n\n")
    # The last line counts the claims of these rows
    return [buys + "\n", proof[:proof.rindex("\n", 0, -1) + 1]]


def same_word(a, b):
    a, b = a.strip("(),"), b.strip("(),")
    try:
        x, y = float(a), float(b)
    except ValueError:
        return a == b
    both_tiny = max(abs(x), abs(y)) < TINY
    return both_tiny or abs(x - y) <= RELATIVE * abs(x)


def difference(shown, printed):
    """The first line that differs, or nothing."""
    shown, printed = shown.splitlines(), printed.splitlines()
    for a, b in zip(shown, printed):
        x, y = a.split(), b.split()
        if len(x) != len(y) or not all(map(same_word, x, y)):
            return f"  {a}\nbut the program prints\n  {b}"
    if len(shown) != len(printed):
        return f"{len(shown)} lines, but the program prints {len(printed)}"
    return ""


def main():
    build, update = sys.argv[1], "--update" in sys.argv
    if "libgloo" not in pathlib.Path(build, "build.ninja").read_text("utf-8"):
        print("skipped: the proofs need a build with Gloo")
        return SKIPPED
    shown = {page: page.read_text("utf-8") for page in PAGES}
    rows = {page: rows_behind(TABLE.findall(shown[page])) for page in PAGES}
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        names = run_rows(build, folder, rows[PAGES[0]])
        for page in PAGES:
            tables = printed_tables(build, folder, names, rows[page])
            if update:
                for path in page, page.with_suffix(".zh-CN.md"):
                    new = iter(tables)
                    path.write_text(TABLE.sub(lambda _: next(new),
                                              path.read_text("utf-8")), "utf-8")
                continue
            for a, b in zip(TABLE.findall(shown[page]), tables):
                wrong = difference(a, b)
                if wrong:
                    failed = True
                    print(f"{page.name}: stale, see --update:\n{wrong}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
