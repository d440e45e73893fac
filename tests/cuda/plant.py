#!/usr/bin/env python3
"""Copies a kernel with one mistake in it.

    plant.py SOURCE OUTPUT OLD NEW

replaces the first OLD by NEW, where both may hold \\n for a new line. It fails
where OLD is not there, so that a kernel that was rewritten gets its mistake
anew.
"""
import sys


def main():
    source, output, old, new = sys.argv[1:]
    old, new = (text.replace("\\n", "\n") for text in (old, new))
    with open(source, encoding="utf-8") as file:
        text = file.read()
    if old not in text:
        sys.exit(f"plant.py: {source} does not hold {old!r}; plant another")
    with open(output, "w", encoding="utf-8") as file:
        file.write(text.replace(old, new, 1))


main()
