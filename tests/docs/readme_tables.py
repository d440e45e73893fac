#!/usr/bin/env python3
"""Compares the two tables of both READMEs with what their rows print now.

    python3 tests/docs/readme_tables.py build            compares
    python3 tests/docs/readme_tables.py build --update   writes them again

Each README shows some rows of chapters/rows.txt. These rows run, the program of
the tables prints them, and the text must be that of the README: words to the
letter, numbers within one in a hundred (other processors round elsewhere).
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

README = ROOT / "README.md"
PAGES = [README, ROOT / "README.zh-CN.md"]
TABLE = re.compile(r"(?<=^```\n)(?:PROOF|WHAT IT BUYS) [^`]*(?=^```$)",
                   re.MULTILINE)
RELATIVE = 1e-2
TINY = 1e-3  # differences from one device are rounding


def keys_of(table):
    """(title of the group, label, number of ranks) of each row of a table."""
    title, keys = "", []
    lines = table.splitlines()
    is_proof = lines[0].startswith("PROOF")
    for before, line in zip(lines, lines[1:]):
        cells = re.split(r" {2,}", line.strip())
        if is_proof and not line:
            break
        if not is_proof and not before:
            title = line
        elif is_proof or line.startswith("  "):
            keys.append((title, cells[0], int(re.findall(r"\d+", cells[1])[0])))
    return keys


def key_of(row):
    world = dict(zip(row.options, row.options[1:])).get("--world-size", "1")
    return row.title, row.label, int(world)


def printed_tables(build, keys):
    """What the program of the tables prints of these rows."""
    rows = [row for row in default_rows(find_chapters([]))
            if key_of(row) in keys and "gloo" not in row.options]
    missing = set(keys) - set(map(key_of, rows))
    if missing:
        sys.exit(f"no such rows in chapters/rows.txt: {sorted(missing)}")
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{k:02}.json" for k in range(len(rows))]

        def run(name, row):
            subprocess.run(
                [f"{build}/chapters/{row.chapter}/ch{row.chapter}", "--report",
                 f"{folder}/{name}", *row.options], check=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"})

        cores = len(os.sched_getaffinity(0))
        with concurrent.futures.ThreadPoolExecutor(cores) as pool:
            list(pool.map(run, names, rows))
        pathlib.Path(folder, "rows.tsv").write_text("".join(
            f"{name}\t{row.title}\t{row.label}\t-\n"
            for name, row in zip(names, rows)), encoding="utf-8")
        return subprocess.run(
            [f"{build}/chapters/table/shardbook_table", folder], text=True,
            stdout=subprocess.PIPE, check=True, encoding="utf-8",
            env={**os.environ, "LC_ALL": "C.UTF-8"}).stdout


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
    keys = [key for table in TABLE.findall(README.read_text("utf-8"))
            for key in keys_of(table)]
    text = printed_tables(build, keys)
    middle, end = text.index("WHAT IT BUYS"), text.rindex("\n\n")
    tables = [text[:middle].rstrip() + "\n", text[middle:end].rstrip() + "\n"]
    failed = False
    for page in PAGES:
        shown = page.read_text("utf-8")
        if update:
            new = iter(tables)
            page.write_text(TABLE.sub(lambda _: next(new), shown), "utf-8")
            continue
        found = TABLE.findall(shown)
        assert len(found) == 2, f"{page.name}: {len(found)} tables"
        for a, b in zip(found, tables):
            wrong = difference(a, b)
            if wrong:
                failed = True
                print(f"{page.name}: stale, see --update:\n{wrong}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
